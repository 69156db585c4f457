"""Matrix products, norms, gates and the greedy choice against float64, and in bits."""

import pytest
import torch
import torch.nn.functional as F

from headrace.backends.cuda import fused
from headrace.backends.cuda.gemm import TILINGS, SkinnyGemm
from headrace.backends.cuda.sample import Argmax
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError
from headrace.layers.block_fp8 import BlockFp8Weight, blocks_of

DEVICE = torch.device("cuda")
TORCH = TorchBackend(DEVICE)
BF16, FP16, FP32, CODES = torch.bfloat16, torch.float16, torch.float32, "codes"
# Half a unit in the last place of the smallest mantissa; an element may be off by twice that.
ROUNDING = {BF16: 2.0**-9, FP16: 2.0**-12, FP32: 2.0**-20}
# fp32 sums of up to 17408 products; tensor cores truncate when they align summands.
SUMS = 1e-5
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16)


@pytest.fixture(scope="module", params=[False, True], ids=["in_order", "early"])
def gemm(request):
    return SkinnyGemm(DEVICE, early=request.param)


def noise(*shape, dtype=FP32, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def weight_of(kind, n, k, seed=1):
    if kind != CODES:
        return noise(n, k, dtype=kind, seed=seed) * k**-0.5
    codes = (noise(n, k, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = noise(blocks_of(n), blocks_of(k), seed=seed + 1).exp() * 0.01 * k**-0.5
    return BlockFp8Weight(codes, scales)


def exact(x, weight):
    if isinstance(weight, BlockFp8Weight):
        scales = weight.scales.double()
        n, k = weight.shape
        scales = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        weight = weight.codes.float().double() * scales
    return x.double() @ weight.double().T


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def input_dtype(kind):
    return BF16 if kind == CODES else kind


SHAPES = [(16, 64), (48, 192), (96, 5120), (272, 576), (1024, 2048), (4096, 1024), (1552, 8704)]


@pytest.mark.parametrize("kind", [BF16, FP16, FP32, CODES])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_against_float64(gemm, kind, n, k):
    weight = weight_of(kind, n, k)
    for rows in (1, 8, 16, 37):
        x = noise(rows, k, dtype=input_dtype(kind), seed=rows)
        out = gemm.linear(
            x, weight, out=torch.full((rows, n), torch.nan, device=DEVICE).to(x.dtype)
        )
        expected = exact(x, weight)
        assert relative(out, expected) < 2 * ROUNDING[x.dtype]
        if kind != FP32:
            assert relative(gemm.linear(x, weight, wide=True), expected) < SUMS


@pytest.mark.parametrize("kind", [BF16, FP16, CODES])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"rows{tiling.rows}")
def test_every_tiling_of_products_large_and_ragged(gemm, kind, tiling):
    for n, k in ((5120, 6144), (1040, 17408), (208, 704)):
        weight = weight_of(kind, n, k)
        x = noise(16, k, dtype=input_dtype(kind))
        out = gemm.linear(x, weight, wide=True, tiling=tiling)
        assert relative(out, exact(x, weight)) < SUMS
        assert torch.equal(gemm.linear(x[3:8], weight, wide=True, tiling=tiling), out[3:8])


def test_every_code_is_exact(gemm):
    """One code a column, one column a row: the product is the value of the code."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[0x7F] = codes[0xFF] = 0  # NaN
    weight = BlockFp8Weight(
        codes.repeat(16, 1).view(torch.float8_e4m3fn),
        torch.tensor([[0.75, 3.0]], device=DEVICE),
    )
    x = torch.eye(256, device=DEVICE, dtype=BF16) * 0.375
    out = gemm.linear(x, weight, wide=True)  # [256, 16]
    scales = weight.scales.repeat_interleave(128, 1)[0]
    expected = weight.codes.float()[0] * scales * 0.375
    assert torch.equal(out, expected[:, None].expand(256, 16))


@pytest.mark.parametrize("kind", [BF16, FP16, FP32, CODES])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (4096, 1024), (5120, 6144)])
def test_a_row_depends_on_itself_alone(gemm, kind, n, k):
    weight = weight_of(kind, n, k)
    dtype = input_dtype(kind)
    x = noise(16, k, dtype=dtype)
    expected = gemm.linear(x, weight)
    for rows in ROWS:
        assert torch.equal(gemm.linear(x[:rows], weight), expected[:rows])
        assert torch.equal(gemm.linear(x[16 - rows :], weight), expected[16 - rows :])
    order = torch.randperm(16, device=DEVICE)
    assert torch.equal(gemm.linear(x[order], weight), expected[order])
    poisoned = torch.full_like(x, torch.nan)
    poisoned[[1, 11]] = x[[1, 11]]
    poisoned[4] = torch.inf
    out = gemm.linear(poisoned, weight)
    assert torch.equal(out[[1, 11]], expected[[1, 11]])
    assert out[[0, 2, 15]].isnan().all()
    strided = torch.full((16, 2 * k), torch.nan, dtype=dtype, device=DEVICE)
    strided[:, :k] = x
    assert torch.equal(gemm.linear(strided[:, :k], weight), expected)


@pytest.mark.parametrize("kind", [BF16, FP16, CODES])
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: f"rows{tiling.rows}")
def test_fused_epilogues_have_the_bits_of_separate_operations(gemm, kind, tiling):
    dtype = input_dtype(kind)
    weight = weight_of(kind, 1280, 1024)
    for rows in (1, 8, 13):
        x, residual = noise(rows, 1024, dtype=dtype), noise(rows, 1280, dtype=dtype, seed=5)
        product = gemm.linear(x, weight, tiling=tiling)
        added = gemm.linear(x, weight, residual=residual, tiling=tiling)
        assert torch.equal(added, residual + product)
        if tiling.tiles % 2 or tiling.k_split > 1:
            with pytest.raises(ConfigError, match="does not fit"):
                gemm.linear(x, weight, silu_mul=True, tiling=tiling)
        else:
            gated = gemm.linear(x, weight, silu_mul=True, tiling=tiling)
            assert torch.equal(gated, fused.silu_mul(product))
        assert torch.equal(fused.silu_mul(product), TORCH.silu_mul(product))


def test_a_captured_product_equals_an_eager_one(gemm):
    for kind in (BF16, CODES):
        weight = weight_of(kind, 1024, 2048)
        x, other = noise(5, 2048, dtype=BF16), noise(5, 2048, dtype=BF16, seed=9)
        expected = [gemm.linear(rows, weight) for rows in (x, other)]
        buffer, out = x.clone(), torch.empty((5, 1024), dtype=BF16, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gemm.linear(buffer, weight, out=out)
        for rows, wanted in zip((x, other), expected, strict=True):
            buffer.copy_(rows)
            graph.replay()
            assert torch.equal(out, wanted)


def test_a_chain_of_early_products_reads_what_was_written_before_it():
    """Each product is the input of the next, and only it: a stale read shows in the bits."""
    weights = [weight_of(CODES if i % 2 else BF16, 1024, 1024, seed=i) for i in range(6)]
    x = noise(3, 1024, dtype=BF16)
    buffers = torch.empty((len(weights) + 1, 3, 1024), dtype=BF16, device=DEVICE)
    results = []
    for early in (False, True):
        gemm = SkinnyGemm(DEVICE, early=early)
        buffers.fill_(torch.nan)
        torch.cuda.synchronize()  # the other stream is not behind this one
        graph = torch.cuda.CUDAGraph()
        for capture in (False, True):
            with torch.cuda.graph(graph) if capture else torch.cuda.stream(torch.cuda.Stream()):
                buffers[0].copy_(x)
                for i, weight in enumerate(weights):
                    gemm.linear(buffers[i], weight, out=buffers[i + 1])
            torch.cuda.synchronize()
        for _ in range(20):
            buffers[1:].fill_(torch.nan)
            graph.replay()
        results.append(buffers.clone())
    assert torch.equal(results[0], results[1])
    assert results[0].isfinite().all()


def test_a_product_beside_another_ends_after_it():
    """Large products whose small companions have the same input; what follows reads both."""
    pairs = [(weight_of(CODES, 8192, 1024, seed=i), weight_of(BF16, 96, 1024, seed=9 + i))
             for i in range(6)]  # fmt: skip
    norm = torch.ones(1024, device=DEVICE, dtype=BF16)
    x = noise(20, 1024, dtype=BF16)
    torch.cuda.synchronize()  # the other stream is not behind this one
    results = []
    for early in (False, True):
        gemm = SkinnyGemm(DEVICE, early=early)
        for capture in (False, True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph) if capture else torch.cuda.stream(torch.cuda.Stream()):
                rows, seen = x * 1, []
                for large, small in pairs:
                    a = gemm.linear(rows, large)
                    b = gemm.linear(rows, small, same_input=True)
                    rows = fused.rms_norm(a[:, 7168:], norm, 1e-6)
                    seen += [rows, fused.silu_mul(b)]
            for _ in range(10 if capture else 0):
                for tensor in seen:
                    tensor.fill_(torch.nan)
                graph.replay()
            torch.cuda.synchronize()
            results.append([tensor.clone() for tensor in seen])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    assert all(tensor.isfinite().all() for tensor in results[0])


def test_shapes_that_no_kernel_has_are_refused(gemm):
    x = noise(2, 64, dtype=BF16)
    for weight in (noise(8, 64, dtype=BF16), noise(16, 64, dtype=FP16), noise(16, 64)):
        with pytest.raises(ConfigError, match="linear"):
            gemm.linear(x, weight)
    with pytest.raises(ConfigError, match="columns"):
        gemm.linear(noise(2, 96, dtype=BF16), noise(16, 96, dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [64, 576, 1024, 5120, 12288])
def test_norms(dtype, width):
    x, addend = 3 * noise(9, width, dtype=dtype), noise(9, width, dtype=dtype, seed=1)
    weight, scale = noise(width, dtype=dtype, seed=2), noise(width, seed=3)
    total = x + addend
    for ours, theirs, by in (
        (fused.rms_norm, TORCH.rms_norm, weight),
        (fused.rms_norm_wide, TORCH.rms_norm_wide, scale),
    ):
        wide = x.double()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * by.double()
        out = ours(x, by, 1e-6)
        # Two roundings where the norm is cast before the weight.
        assert relative(out, normed) < 2 * ROUNDING[dtype]
        assert relative(out, theirs(x, by, 1e-6)) < ROUNDING[dtype] / 4 + 1e-6
        kept = torch.full_like(x, torch.nan)
        added = ours(x, by, 1e-6, addend=addend, total=kept)
        assert torch.equal(kept, total)
        assert torch.equal(added, ours(total, by, 1e-6))
        for row in (0, 8):
            assert torch.equal(ours(x[row : row + 1], by, 1e-6)[0], out[row])
        in_place = x.clone()
        assert torch.equal(ours(in_place, by, 1e-6, addend=addend), added)
        assert torch.equal(in_place, total)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gates_and_embedding(dtype):
    projected = noise(5, 6, 2, 64, dtype=dtype)
    x, gate = noise(5, 384, dtype=dtype, seed=1), projected[:, :, 1]
    expected = TORCH.sigmoid_gate(x, gate.reshape(5, 384))
    assert torch.equal(fused.sigmoid_gate(x, gate), expected)
    gate_up = 4 * noise(7, 2 * 1536, dtype=dtype)
    assert torch.equal(fused.silu_mul(gate_up), TORCH.silu_mul(gate_up))
    table, ids = noise(99, 576, dtype=dtype), torch.tensor([98, 0, 3, 3], device=DEVICE)
    assert torch.equal(fused.embed(table, ids), F.embedding(ids, table))
    assert not fused.embed(table, torch.tensor([-1, 99], device=DEVICE)).any()


@pytest.mark.parametrize("vocab", [1, 33, 512, 151_936])
def test_argmax(vocab):
    argmax = Argmax(16, DEVICE)
    logits = noise(11, vocab)
    for _ in range(2):  # the scratch is zero again
        assert torch.equal(argmax(logits).long(), logits.argmax(-1))
    logits[0] = 0.0
    logits[0, vocab // 2] = -0.0
    logits[1] = -torch.inf
    logits[2, vocab - 1] = torch.nan
    logits[3, vocab // 2] = torch.inf
    logits[4, vocab // 3 :] = 7.5
    logits[5] = -torch.inf
    logits[5, vocab - 1] = -3.0e38
    tokens = argmax(logits).tolist()
    assert tokens[:6] == [0, -1, -1, -1, vocab // 3, vocab - 1]
    assert torch.equal(argmax(logits[6:]).long(), logits[6:].argmax(-1))
