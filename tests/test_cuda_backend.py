"""What the CUDA engine does before it meets a GPU: packing, cutting, refusing."""

import ctypes
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from headrace import ConfigError, Engine, EngineConfig, SamplingParams
from headrace._core import CudaDevice, SamplingSpec, build_plan
from headrace.backends.cuda import gemm, loader, many_rows
from headrace.backends.cuda.kernel import Parameters
from headrace.backends.cuda.loader import CudaUnavailable, KernelError, Variant
from headrace.backends.cuda.memory import RESERVE_BYTES, step_bytes
from headrace.backends.cuda.segments import DeviceSegments, nbytes_for
from headrace.backends.cuda.step_arrays import (
    DECODE,
    PROMPT_TOKENS,
    PROMPTS,
    WHOLE,
    StepArrays,
    StepShape,
    prompt_sizes,
    shape_of,
)
from headrace.backends.select import choose_device
from headrace.backends.torch_ops import TorchBackend
from headrace.engine import _tier_bytes_beside
from headrace.kv.formats import AUTO, FP8, KVFormat
from headrace.layers import block_fp8
from headrace.loading.build import load_model
from headrace.loading.resolve import resolve_model
from headrace.models.batch import PrefillSegment, TokenFeed
from headrace.models.known import KNOWN_CONFIGS
from headrace.tiers import HostSizes

SPEC = SamplingSpec()


def packed(shape, extra=0):
    host = np.full(shape.nbytes + extra, 0x55, np.uint8)
    device = torch.from_numpy(host)
    return StepArrays(shape, host, device), host


def decode_plan(rows):
    return build_plan(
        [(10 + i, slot, start, [100 + i], SPEC, [], []) for i, (slot, start) in enumerate(rows)],
        decode=True,
    )


def test_a_decode_plan_is_padded_to_the_width():
    arrays, host = packed(StepShape(tokens=4, decode_rows=4, table_pages=1), extra=8)
    arrays.fill(decode_plan([(7, 30), (2, 0), (5, 63)]), 512, DECODE)
    device = {name: values.tolist() for name, values in arrays.device.items()}
    assert device["token_ids"] == [100, 101, 102, 0]
    assert device["positions"] == [30, 0, 63, 0]
    assert device["token_pages"] == [7, 2, 5, -1]
    assert device["token_offsets"] == [30, 0, 63, -1]
    assert device["state_slots"] == [7, 2, 5, -1]
    assert device["lengths"] == [31, 1, 64, 0]
    assert device["token_sources"] == [-1] * 4
    assert [row[0] for row in device["tables"][:3]] == [7, 2, 5]
    assert device["stream_k0"] == [0]
    assert (host[-8:] == 0x55).all(), "nothing is written beyond the shape"
    # A smaller step after it leaves nothing of the larger one.
    arrays.fill(decode_plan([(3, 1)]), 512, DECODE)
    assert arrays.device["lengths"].tolist() == [2, 0, 0, 0]
    assert arrays.device["token_pages"].tolist() == [3, -1, -1, -1]
    # A step that is fed by the one before it, but for one row.
    ids, sources = np.array([0, 8]), np.array([3, -1])
    arrays.fill(decode_plan([(3, 1), (4, 1)]), 512, DECODE, token_ids=ids, sources=sources)
    assert arrays.device["token_ids"].tolist() == [0, 8, 0, 0]
    assert arrays.device["token_sources"].tolist() == [3, -1, -1, -1]
    arrays.pad()
    assert arrays.device["token_sources"].tolist() == [-1] * 4
    assert arrays.device["token_pages"].tolist() == [-1] * 4
    assert arrays.device["state_slots"].tolist() == [-1] * 4
    assert not arrays.device["lengths"].any()


def segment_records(arrays):
    """Records in the order of the device: (entries of the table, start, tokens, row, slot)."""
    found = []
    tables = arrays.device["segment_tables"]
    for record in arrays.host["segments"].reshape(-1, 4):
        address, (pages, start, tokens, row, slot, padding) = record[0], record[1:].view(np.int32)
        assert padding == 0
        if tokens:
            first = (int(address) - tables.data_ptr()) // 4
            entries = tables[first : first + pages].tolist()
            found.append((entries, *map(int, (start, tokens, row, slot))))
        else:
            assert not record.any(), "what is not used is zero"
    return found


def test_a_prefill_plan_is_packed_exactly():
    rows = [(1, 4, 64, [1, 2, 3], SPEC, [], []), (2, 6, 0, [9, 8], None, [], [])]
    plan = build_plan(rows, decode=False)
    shape = shape_of(plan, WHOLE)
    assert shape == shape_of(plan, PROMPTS)
    assert shape == StepShape(
        tokens=5, decode_rows=0, table_pages=1, samples=1, segments=2, segment_pages=2
    )
    arrays, _ = packed(shape)
    arrays.fill(plan, 512, WHOLE)
    device = {name: values.tolist() for name, values in arrays.device.items()}
    assert device["token_ids"] == [1, 2, 3, 9, 8]
    assert device["positions"] == [64, 65, 66, 0, 1]
    assert device["token_pages"] == [4, 4, 4, 6, 6]
    assert device["sample_index"] == [2]
    assert device["segment_tables"] == [4, 6]
    assert segment_records(arrays) == [([4], 64, 3, 0, 4), ([6], 0, 2, 3, 6)]
    assert arrays.used == shape.nbytes


def test_prompts_of_a_graph_are_padded():
    """What is left of larger prompts is gone, and no more of the tables is sent than is used."""
    shape = StepShape(
        tokens=8, decode_rows=0, table_pages=1, samples=2, segments=2, segment_pages=6
    )
    arrays, _ = packed(shape)
    full = [(1, 4, 64, [1, 2, 3, 4], SPEC, [], []), (2, 6, 0, [9, 8, 7, 6], SPEC, [], [])]
    arrays.fill(build_plan(full, decode=False), 512, PROMPTS)
    assert arrays.device["sample_index"].tolist() == [3, 7]
    arrays.fill(build_plan([(3, 5, 10, [40, 41], SPEC, [], [])], decode=False), 512, PROMPTS)
    device = {name: values.tolist() for name, values in arrays.device.items()}
    assert device["token_ids"] == [40, 41, 0, 0, 0, 0, 0, 0]
    assert device["token_pages"] == [5, 5, *[-1] * 6]
    assert device["token_offsets"] == [10, 11, *[-1] * 6]
    assert device["sample_index"] == [1, 0]
    assert segment_records(arrays) == [([5], 10, 2, 0, 5)]
    assert arrays.used == shape.nbytes - 5 * 4
    arrays.pad()
    assert segment_records(arrays) == []
    assert arrays.used == shape.nbytes


def mixed_plan(engine):
    """Two decode rows, then prompts of 9 and of 20 tokens."""
    scheduler = engine.make_scheduler()
    spec = engine.sampling_spec(SamplingParams(max_tokens=9, ignore_eos=True))
    for length in (70, 3):
        scheduler.submit(np.arange(1, length + 1), spec)
    plan = scheduler.next_plan(0.0)
    scheduler.commit(plan, np.array([5, 6], np.int32))
    for first, length in ((100, 9), (200, 20)):
        scheduler.submit(np.arange(first, first + length), spec)
    return scheduler.next_plan(0.0)


def test_decode_rows_and_prompts_of_a_step_apart(tiny_qwen3):
    """Both parts together are the plan; rows of the prompts count from their own first."""
    config = EngineConfig(model=str(tiny_qwen3.path), max_context=128, max_batch_size=4)
    with Engine(config) as engine:
        plan = mixed_plan(engine)
    assert (plan.num_decode, plan.num_rows) == (2, 4)
    whole, decode, prompts = (packed(shape_of(plan, part))[0] for part in (WHOLE, DECODE, PROMPTS))
    for arrays, part in ((whole, WHOLE), (decode, DECODE), (prompts, PROMPTS)):
        arrays.fill(plan, 128, part)
    for name in ("token_ids", "positions", "token_pages", "token_offsets", "token_sources"):
        parts = [*decode.host[name].tolist(), *prompts.host[name].tolist()]
        assert parts == whole.host[name].tolist(), name
    assert decode.host["token_ids"].tolist() == [5, 6]
    assert decode.host["lengths"].tolist() == [71, 4]
    assert whole.host["sample_index"].tolist() == [0, 1, 10, 30]
    assert decode.host["sample_index"].tolist() == [0, 1]
    assert prompts.host["sample_index"].tolist() == [8, 28]
    assert [record[1:4] for record in segment_records(whole)] == [(0, 20, 11), (0, 9, 2)]
    assert [record[1:4] for record in segment_records(prompts)] == [(0, 20, 9), (0, 9, 0)]
    assert not decode.shape.segments


def test_segments_and_records_have_one_order():
    """What the host takes for the n-th segment of a group is the n-th record."""
    lengths = [3, 64, 1, 200, 64, *range(5, 45)]
    segments, offset = [], 0
    for index, length in enumerate(lengths):
        table = torch.tensor([index], dtype=torch.int32)
        start = 7 * (index % 3)
        segments.append(
            PrefillSegment(table=table, state_slot=index, start=start, length=length, offset=offset)
        )
        offset += length
    sent = DeviceSegments.sent(segments, torch.device("cpu"))
    records = sent.memory.numpy().view(np.int32).reshape(-1, 8)[:, 2:]
    assert sent.memory.nbytes == nbytes_for(len(lengths)) == 64 * 32
    assert [group.count for group in sent.groups] == [32, len(lengths) - 32]
    assert sum(group.tokens for group in sent.groups) == sum(lengths)
    base = sent.memory.data_ptr()
    for group in sent.groups:
        for index, (tokens, end) in enumerate(group.spans):
            pages, start, length, row, slot, padding = records[(group.record(index) - base) // 32]
            assert (length, start + length, pages, padding) == (tokens, end, 1, 0)
            assert (start, length, row) == (
                segments[slot].start,
                segments[slot].length,
                segments[slot].offset,
            )
    assert sorted(records[: len(lengths), 4]) == list(range(len(lengths)))
    assert not records[len(lengths) :].any()
    assert list(sent) == segments


def test_graphs_of_prompts_reach_the_longest_step():
    small = KNOWN_CONFIGS["qwen3-0.6b"]
    assert prompt_sizes(1, small) == prompt_sizes(64, small) == (64,)
    assert prompt_sizes(65, small) == (64, 128)
    assert prompt_sizes(3073, small) == prompt_sizes(100_000, small) == PROMPT_TOKENS


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("smollm2-135m", 4096),
        ("qwen3-0.6b", 4096),
        ("qwen3-1.7b", 2048),
        ("qwen3-4b", 1024),
        ("qwen3-8b", 1024),
        ("qwen3-32b", 1024),
        ("qwen3.5-27b-fp8", 1024),
    ],
)
def test_graphs_of_prompts_end_where_the_device_is_busy_without(name, tokens):
    assert prompt_sizes(100_000, KNOWN_CONFIGS[name])[-1] == tokens


def test_fields_are_aligned_and_apart():
    arrays, host = packed(StepShape(tokens=3, decode_rows=3, table_pages=5, samples=1))
    spans = sorted(
        (values.__array_interface__["data"][0], values.nbytes) for values in arrays.host.values()
    )
    base = host.__array_interface__["data"][0]
    for (start, nbytes), (following, _) in itertools.pairwise(spans):
        assert (start - base) % 16 == 0
        assert start + nbytes <= following


def test_embed_reads_the_tokens_it_is_fed_with():
    """What the kernel of this name does (`tests/gpu`)."""
    backend = TorchBackend()
    table = torch.randn(50, 8)
    ids = torch.tensor([3, 0, 0, 9, 0])
    sources = torch.tensor([-1, 2, 0, -1, 1], dtype=torch.int32)
    feed = TokenFeed(sources, torch.tensor([7, -1, 49], dtype=torch.int32))
    rows = backend.embed(ids, table, feed)
    assert torch.equal(rows[:4], table[[3, 49, 7, 9]])
    assert not rows[4].any()
    assert torch.equal(backend.embed(ids, table), table[ids])


@pytest.mark.parametrize("sizes", [many_rows.SIZES, (1024,), (256, 1024, 4096)])
def test_blocks_cover_all_rows(sizes):
    for rows in (1, 63, 64, 65, 100, 600, 1000, 1024, 1100, 8192, 20_001):
        blocks = many_rows.cut(rows, sizes)
        assert sum(used for _, used in blocks) == rows
        assert all(size in sizes and 0 < used <= size for size, used in blocks)
        assert all(size == used for size, used in blocks[:-1])
    assert many_rows.cut(0, sizes) == []


def test_sizes_with_other_bits_are_left_out(monkeypatch):
    """Another order from 4096 rows on, other bits at some places, others with a residual."""

    def product(x, weight, residual):
        out = x.double() @ weight.double().T
        rows = torch.arange(len(x))[:, None]
        out = out + (len(x) >= 4096) + (len(x) == 256) * (rows > 128)
        return out if residual is None else residual + out + (len(x) == 512)

    monkeypatch.setattr(many_rows, "_product", product)
    weight = torch.randint(-8, 8, (8, 32)).float()  # exact in any order
    assert many_rows.ManyRows(fixed=True).probe(weight) == (64, 128, 1024, 2048)
    assert many_rows.ManyRows(fixed=False).probe(weight) == many_rows.SIZES


def test_parameters_are_where_the_driver_is_told():
    """Structs at multiples of 128 bytes, everything else as its own eight bytes."""
    maps = [bytes(range(128)), bytes(reversed(range(128)))]
    first = [maps[0], 2**47 + 3, np.float32(0.1), maps[1], -1, 7]
    last = [maps[1], 5, np.float32(-2.5), maps[0], 2**62, 0]
    parameters = Parameters(first)
    for args in (first, last):
        parameters.write(args)
        for arg, address in zip(args, parameters.addresses, strict=True):
            if isinstance(arg, bytes):
                assert address % 128 == 0
                assert ctypes.string_at(address, 128) == arg
            elif isinstance(arg, int):
                assert ctypes.c_int64.from_address(address).value == arg
            else:
                assert ctypes.c_float.from_address(address).value == arg
    for wrong in (last[:-1], [last[0][:-1], *last[1:]], [*last[:-1], 0.5]):
        with pytest.raises(KernelError):
            parameters.write(wrong)


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("codes", [False, True])
def test_a_matrix_is_cut_so_that_it_fits(codes, silu_mul):
    for rows in (16, 96, 1024, 4096, 5120, 6144, 16384, 34816, 151936):
        for columns in (64, 1024, 4096, 17408):
            epilogue = gemm.Epilogue.SILU_MUL if silu_mul else gemm.Epilogue.NONE
            product = gemm.Product(rows, columns, codes, epilogue)
            tiling = product.tiling(2, 132)
            assert product.fits(tiling, 2, 132)
            if tiling.k_split > 1:
                # Every cluster has one group, all run at once, and each half has a step.
                assert -(-rows // tiling.rows) * tiling.k_split <= 132
                assert columns * (1 if codes else 2) > tiling.k_warps * 64


def test_a_narrow_matrix_is_shared_and_a_small_one_leaves_room():
    assert gemm.Product(5120, 17408, codes=True).tiling(2, 132).k_split == 2
    gate_up = gemm.Product(6144, 1024, epilogue=gemm.Epilogue.SILU_MUL)
    for product in (gemm.Product(4096, 1024), gate_up, gemm.Product(1024, 3072)):
        rows, tiling = product.matrix_rows, product.tiling(2, 132)
        assert -(-rows // tiling.rows) * tiling.k_split <= 66


@pytest.mark.parametrize("fixed", [False, True])
def test_blocks_are_added_to_the_residual_in_its_own_memory(fixed):
    weight = torch.randint(-8, 8, (8, 32)).float()
    x, residual = torch.randint(-8, 8, (2300, 32)).float(), torch.randint(-8, 8, (2300, 8)).float()
    expected = residual + x @ weight.T  # exact in any order
    out = many_rows.ManyRows(fixed=fixed).linear(x, weight, residual)
    assert out.data_ptr() == residual.data_ptr()
    assert torch.equal(out, expected)


def test_quantise_takes_the_largest_value_of_each_block():
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    weight[:128, :128] = 0
    coded = block_fp8.quantise(weight)
    assert coded.codes.shape == (300, 200)
    for i, j in ((0, 0), (0, 1), (1, 0), (2, 1)):
        block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        largest = (weight[block].abs().amax() / 448).bfloat16().float()
        scale = largest if largest > 0 else torch.tensor(1.0)
        assert coded.scales[i, j] == scale
        codes = (weight[block] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(coded.codes[block].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_without_a_gpu_the_error_says_what_is_missing(monkeypatch, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device='{device}': no CUDA device"):
        Engine(EngineConfig(model="smollm2-135m", load_format="dummy", device=device))


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs, the second of which cannot run the kernels and is current; what was asked."""
    asked = []
    capabilities = [(9, 0), (8, 0), (9, 0)]

    def capability(index):
        asked.append(index)
        return capabilities[index]

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "current_device": lambda: 1,
        "get_device_capability": capability,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    monkeypatch.setattr("headrace.backends.cuda.loader._cupy", lambda: asked.append("cupy"))
    loader._require.cache_clear()
    yield asked
    loader._require.cache_clear()


def test_each_gpu_is_checked_by_its_own_index_and_once(gpus):
    for _ in range(2):
        for index in (0, 2):
            loader.require_gpu(torch.device("cuda", index))
    assert gpus == [0, "cupy", 2, "cupy"]
    refused = r"compute capability 8\.0 of cuda:1: the kernels are built for 9\.0"
    for device in (torch.device("cuda", 1), torch.device("cuda"), None):
        with pytest.raises(CudaUnavailable, match=refused):
            loader.require_gpu(device)
    with pytest.raises(CudaUnavailable, match="no device cuda:3: accepted is cuda:0 to cuda:2"):
        loader.require_gpu(torch.device("cuda", 3))
    with pytest.raises(CudaUnavailable, match=refused):
        loader.load_variant(Variant(file="sample.cu", names=("argmax",)))


def test_an_engine_is_refused_by_the_gpu_it_is_for(gpus):
    def chosen(device):
        return choose_device(EngineConfig(model="smollm2-135m", device=device))

    for name, index in {"auto": 0, "cuda": 0, "cuda:0": 0, "cuda:2": 2}.items():
        assert chosen(name) == torch.device("cuda", index)
    with pytest.raises(ConfigError, match=r"device='cuda:1': compute capability 8\.0 of cuda:1"):
        chosen("cuda:1")
    with pytest.raises(ConfigError, match="device='cuda:3': no device cuda:3: accepted is cuda:0"):
        chosen("cuda:3")
    assert "cupy" in gpus


def test_auto_is_the_first_gpu_that_can_run_the_kernels(gpus, monkeypatch):
    def chosen():
        loader._require.cache_clear()
        return choose_device(EngineConfig(model="smollm2-135m"))

    capabilities = {0: (8, 0), 1: (8, 0), 2: (9, 0)}
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.__getitem__)
    assert chosen() == torch.device("cuda", 2)
    capabilities[2] = (8, 6)
    assert chosen() == torch.device("cpu")


def test_a_step_may_take_longer_than_its_copies(monkeypatch):
    """Else a step that waits for a copy that is stuck would count as stuck, and end the engine."""
    monkeypatch.setattr("headrace.backends.select.require_gpu", lambda _device: None)

    def chosen(device="cuda", host_bytes=1, **options):
        options |= {"device": device, "host_bytes": host_bytes}
        return choose_device(EngineConfig(model="smollm2-135m", **options)).type

    assert chosen() == "cuda"
    assert chosen(step_timeout_s=60.5) == "cuda"
    for options in ({"step_timeout_s": 60}, {"copy_timeout_s": 150.0}):
        with pytest.raises(ConfigError, match=r"step_timeout_s=\d+ with copy_timeout_s=\d+: acc"):
            chosen(**options)
        assert chosen("cpu", **options) == "cpu"
        assert chosen(host_bytes=0, **options) == "cuda"


def test_without_cupy_the_error_says_what_to_install(gpus, monkeypatch):
    def missing():
        raise CudaUnavailable("no CuPy (x): install the extra headrace[cuda] (cupy-cuda13x)")

    monkeypatch.setattr("headrace.backends.cuda.loader._cupy", missing)
    config = EngineConfig(model="smollm2-135m", device="cuda:2")
    with pytest.raises(ConfigError, match=r"device='cuda:2': no CuPy .* headrace\[cuda\]"):
        choose_device(config)
    assert choose_device(EngineConfig(model="smollm2-135m")) == torch.device("cpu")


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_copies_on_a_default_stream_are_refused_before_the_driver_is_looked_for(handle):
    with pytest.raises(ConfigError, match=f"stream = {handle}: the handle of a stream"):
        CudaDevice(0, handle, b"", "copy_gather", owner=None)


def test_copies_without_a_driver_say_what_is_missing():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(ConfigError, match="NVIDIA driver"):
            CudaDevice(0, 77, b"", "copy_gather", owner=None)
    else:
        pytest.skip("this machine has the driver")


@pytest.mark.parametrize("name", ["copy_check", "link_bytes_per_s"])
def test_what_only_copies_of_a_cpu_have_is_refused_on_a_gpu(monkeypatch, name):
    monkeypatch.setattr("headrace.backends.select.require_gpu", lambda _device: None)
    options = {name: True if name == "copy_check" else 10**9}
    with pytest.raises(ConfigError, match=name):
        choose_device(EngineConfig(model="smollm2-135m", device="cuda", host_bytes=1, **options))


def test_auto_is_the_cpu_without_a_gpu(monkeypatch, tiny_qwen3):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with Engine(EngineConfig(model=str(tiny_qwen3.path), max_context=64)) as engine:
        assert engine.capabilities.device == "cpu"
        assert not engine.capabilities.deterministic


def test_importing_the_engine_needs_neither_gguf_nor_cupy():
    code = "import sys, headrace.engine; sys.exit('gguf' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dummy_weights_of_a_known_configuration_are_seeded():
    source = resolve_model("smollm2-135m", load_format="dummy")
    one, other = (load_model(source, load_format="dummy", seed=seed).model for seed in (0, 0))
    assert torch.equal(one._embedding, other._embedding)


def test_steps_on_a_gpu_are_counted_before_pools_are_made():
    """HST-18: scratch (kv_formats.md section 5), KV of a gathered prompt, arrays of a graph."""
    options = {
        "max_context": 65_536,
        "page_tokens": 64,
        "max_batch_tokens": 512,
        "token_workspace": 1_000,
        "itemsize": 2,
    }
    dense = KNOWN_CONFIGS["qwen3-8b"]
    codes, plain = (KVFormat(name=name, model_dtype=torch.bfloat16) for name in (FP8, AUTO))
    found = step_bytes(dense, codes, slots=8, **options)
    attention = 8 * 8 * (65_536 // 512) * 4 * (128 + 2) * 4
    gathered = 2 * 65_536 * 8 * 128 * 2
    table = 8 * (65_536 // 64) * 4
    logits = 8 * 151_936 * 4
    counted = RESERVE_BYTES + attention + gathered + table + logits
    # Graphs of 512 tokens, of four prompts.
    counted += 512 * 1_000 + (table + logits) // 2
    assert 0 < found - counted < 2_000
    # Seven slots are served by the graph of eight rows.
    assert step_bytes(dense, codes, slots=7, **options) == found
    # KV that is no code is read where it lies, by graphs of eight prompts.
    more = (table + logits) // 2
    assert step_bytes(dense, plain, slots=8, **options) == found - gathered + more
    exact = KVFormat(name=AUTO, model_dtype=torch.float32)
    assert step_bytes(dense, exact, slots=8, **options) == found - 512 * 1_000 - more
    hybrid = KNOWN_CONFIGS["qwen3.5-27b"]
    more = options | {"max_batch_tokens": 1024}
    mixer = (2 * 10_240 + 2 * 6_144) * 2 + 6_144 * 4
    for kv_format, graphs in ((codes, 1), (plain, 1), (exact, 0)):
        grown = step_bytes(hybrid, kv_format, slots=8, **more)
        grown -= step_bytes(hybrid, kv_format, slots=8, **options)
        assert grown == 512 * (mixer + graphs * (mixer + 1_000))


def test_a_host_tier_takes_nothing_of_the_memory_of_a_gpu():
    sizes = HostSizes(pages=1, snapshots=0, nbytes=2**40)
    assert _tier_bytes_beside(torch.device("cuda:0"), sizes) == 0
    assert _tier_bytes_beside(torch.device("cpu"), sizes) == 2**40
    assert _tier_bytes_beside(torch.device("cpu"), None) == 0


def test_pools_are_refused_where_steps_would_not_fit_beside_them(tiny_qwen3, monkeypatch):
    """HST-18: what steps take is kept free; the error names both, and nothing is allocated."""
    config = EngineConfig(model=str(tiny_qwen3.path), max_context=64, max_batch_size=2)
    with Engine(config) as engine:
        pools = engine.kv.bytes_total
    steps = 1_000_000
    monkeypatch.setattr(Engine, "_step_bytes", lambda *_: steps)
    monkeypatch.setattr("headrace.engine.available_bytes", lambda _device: pools + steps)
    with Engine(config) as engine:
        assert engine.step_bytes == steps
    monkeypatch.setattr("headrace.engine.available_bytes", lambda _device: pools + steps - 1)
    monkeypatch.setattr("headrace.engine.KVCache", None)
    words = f"need {pools:,} bytes .* {pools - 1:,} are free beside 1,000,000"
    with pytest.raises(ConfigError, match=words):
        Engine(config)
