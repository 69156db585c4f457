"""Every kernel variant compiles for the GPU it is meant for; needs the compiler, but no GPU."""

import importlib
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import headrace.backends.cuda as package
from headrace.backends.cuda import loader, nvrtc
from headrace.backends.cuda.nvrtc import CudaUnavailable, KernelError, Variant

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
    loader.require_gpu.cache_clear()
    with pytest.raises(CudaUnavailable, match="no CUDA device"):
        loader.load("kv_append.cu", names=["kv_append<BF16, PLAIN, 64>"])
    loader.require_gpu.cache_clear()


def test_importing_the_wrappers_needs_no_cupy():
    modules = ", ".join(f"{package.__name__}.{name}" for name in VARIANTS)
    code = f"import sys, {modules}; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
