"""Every kernel variant compiles for the GPU it is meant for; needs the compiler, but no GPU."""

import importlib
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import headrace.backends.cuda as package
from headrace.backends.cuda import delta, gemm, loader, nvrtc
from headrace.backends.cuda.gemm import Epilogue, Product, variant_of
from headrace.backends.cuda.nvrtc import CudaUnavailable, KernelError, Variant
from headrace.layers.block_fp8 import BlockFp8Weight, blocks_of
from headrace.models.decoder import DecoderModel
from headrace.models.known import KNOWN_CONFIGS
from headrace.models.quantization import FP8_BLOCK
from headrace.models.tensors import expected_tensors, may_be_fp8
from tiny_models import make_batch

ELF = b"\x7fELF"


def registry():
    """Variants by module: every module of the package that exports `VARIANTS`."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    return {
        name: module.VARIANTS for name, module in modules.items() if hasattr(module, "VARIANTS")
    }


VARIANTS = registry()


@pytest.mark.parametrize("module", VARIANTS)
@pytest.mark.timeout(900)
def test_every_variant_compiles(module):
    # The compiler works outside of the GIL. Programs of one file go together.
    with ThreadPoolExecutor(2) as threads:
        compiled = list(threads.map(nvrtc.compile_variant, VARIANTS[module]))
    assert compiled
    for variant, result in zip(VARIANTS[module], compiled, strict=True):
        assert result.cubin.startswith(ELF)
        assert set(result.symbols) == set(variant.names)
        # The log of a clean program is empty: warnings count.
        assert not result.log.strip(), result.log


def test_every_kernel_file_is_in_the_registry():
    named = {variant.file for variants in VARIANTS.values() for variant in variants}
    assert named == {path.name for path in nvrtc.source_folder().glob("*.cu")}


class Asked:
    """A backend that computes nothing, and notes what the CUDA backend would ask the compiler."""

    name, device, deterministic = "asked", torch.device("meta"), True

    def __init__(self, config):
        self.config, self.products = config, set()
        self.shapes = expected_tensors(config)

    def get(self, name):
        """Stand in for a checkpoint, too."""
        shape = self.shapes[name]
        if self.config.weight_format != FP8_BLOCK or not may_be_fp8(name, shape):
            return torch.empty(shape, device="meta")
        blocks = [blocks_of(extent) for extent in shape]
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        return BlockFp8Weight(codes, torch.empty(blocks, device="meta"))

    def check_model(self, config, dtype):
        pass

    def pack_linear(self, weight):
        return weight

    def linear(self, x, weight, *, decode_rows, residual=None, wide=False, same_input=False):
        assert decode_rows == x.shape[0]
        assert x.shape[1] == weight.shape[1]
        epilogue = Epilogue.NONE if residual is None else Epilogue.RESIDUAL
        return self._product(x, weight, epilogue, wide, same_input)

    def mlp(self, x, gate_up, down, *, decode_rows, residual):
        product = self._product(x, gate_up, Epilogue.SILU_MUL, False)[:, : gate_up.shape[0] // 2]
        return self.linear(product, down, decode_rows=decode_rows, residual=residual)

    def _product(self, x, weight, epilogue, wide, same_input=False):
        codes = isinstance(weight, BlockFp8Weight)
        self.products.add(Product(*weight.shape, codes, epilogue, wide, same_input))
        return x.new_empty(x.shape[0], weight.shape[0])

    def embed(self, ids, table, feed):
        return table.new_empty(len(ids), table.shape[1])

    def rms_norm(self, x, weight, eps):
        return x

    rms_norm_wide = rms_norm

    def sigmoid_gate(self, x, gate):
        return x

    def rotary(self, rope, positions):
        return rope, positions

    def rotate_append(self, layer, kv, batch, q, *rest):
        return q

    def attention_decode(self, q, *rest):
        return q.contiguous()

    def delta_mix_step(self, qkv, z, *rest, out):
        return z


@pytest.mark.parametrize("name", KNOWN_CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_product_of_a_known_model_is_in_the_registry(name, dtype):
    """A decode step of the whole model, without memory."""
    config = KNOWN_CONFIGS[name]
    asked = Asked(config)
    model = DecoderModel(config, asked, dtype, asked)
    state = SimpleNamespace(conv=[None] * config.num_layers, recurrent=[None] * config.num_layers)
    model.forward(make_batch(decode=[(1, 0, 5), (2, 1, 7)]), None, state)
    assert asked.products == gemm.products_of(config)
    if config.weight_format == FP8_BLOCK and dtype != torch.bfloat16:
        return  # refused at construction
    for product in asked.products:
        for rows in range(1, gemm.MAX_ROWS + 1):
            assert variant_of(product, rows, dtype, 132).source in gemm.VARIANTS, product


@pytest.mark.parametrize("name", [name for name, c in KNOWN_CONFIGS.items() if c.linear])
def test_every_linear_layer_of_a_known_model_is_in_the_registry(name):
    sizes = KNOWN_CONFIGS[name].linear
    for dtype in gemm.ELEMENTS:
        step = delta.DeltaStep(sizes, dtype)
        prefill = delta.DeltaPrefill(sizes, dtype, torch.device("meta"))
        kernels = (step._few, step._many, prefill._kernel)
        assert {kernel.source for kernel in kernels} <= set(delta.VARIANTS)


def test_no_program_is_listed_twice():
    for variants in VARIANTS.values():
        assert len(set(variants)) == len(variants)


def test_a_refused_program_carries_the_log_of_the_compiler(tmp_path, monkeypatch):
    (tmp_path / "bad.cu").write_text('#include "part.cuh"\n__global__ void f() { return 1 }\n')
    (tmp_path / "part.cuh").write_text("// nothing\n")
    monkeypatch.setattr(nvrtc, "source_folder", lambda: tmp_path)
    # The line counts in its own file, not in the text with headers put in.
    with pytest.raises(KernelError, match=r"bad\.cu\(2\): error"):
        nvrtc.compile_variant(Variant(file="bad.cu", names=("f",)))
    with pytest.raises(KernelError, match=r"none\.cu"):
        nvrtc.read_source("none.cu")


def test_code_is_compiled_once_and_again_when_a_header_changes(tmp_path, monkeypatch):
    sources, cache = tmp_path / "cuda", tmp_path / "cache"
    sources.mkdir()
    (sources / "k.cu").write_text(
        '#include "n.cuh"\ntemplate <int N> __global__ void k(int* o) { *o = N + M; }\n'
    )
    (sources / "n.cuh").write_text("#pragma once\nconstexpr int M = 1;\n")
    monkeypatch.setattr(nvrtc, "source_folder", lambda: sources)
    variant = Variant(file="k.cu", names=("k<1>", "k<2>"))
    compiled = []

    def counted(variant, source):
        compiled.append(variant)
        return nvrtc.compile_variant(variant, source)

    monkeypatch.setattr(loader, "compile_variant", counted)
    first = loader.cached_cubin(variant, cache)
    assert loader.cached_cubin(variant, cache) == first
    assert len(compiled) == 1
    assert set(first[1]) == {"k<1>", "k<2>"}
    assert first[1]["k<1>"].encode() in first[0].read_bytes()
    (sources / "n.cuh").write_text("#pragma once\nconstexpr int M = 2;\n")
    assert loader.cached_cubin(variant, cache)[0] != first[0]
    assert len(compiled) == 2


def test_without_a_gpu_loading_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CudaUnavailable, match="no CUDA device"):
        loader.load_variant(next(iter(VARIANTS.values()))[0])


def test_importing_the_wrappers_needs_no_cupy():
    modules = ", ".join(f"{package.__name__}.{name}" for name in VARIANTS)
    code = f"import sys, {modules}; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
