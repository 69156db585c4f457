"""KV kernels on the device: bytes against the reference codecs, attention against float64."""

import math

import pytest
import torch
from kv_setup import (
    DEVICE,
    NOWHERE,
    build,
    exact_attention,
    new_pool,
    noise,
    run_decode,
    stored,
)

from headrace.backends.cuda import kv as kv_module
from headrace.backends.cuda.kv import KVKernels, QKNorm, Rotary, max_splits, slot_table
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError
from headrace.kv.codecs import unrotate_outputs
from headrace.kv.formats import KVFormat, KVLayout, parse_kv_format
from headrace.kv.planes import PlanePool
from headrace.layers import rope
from headrace.layers.rope import RotaryEmbedding
from kv_cases import FORMATS, HEAD_DIMS, distribution, every_format, every_head_dim, special

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INPUTS = (
    *((kind, distribution) for kind in ("gauss", "t3", "outlier", "one-hot", "constant")),
    *((kind, special) for kind in ("zero", "not finite", "tiny", "subnormal", "vanishing", "huge")),
)
PLAIN = tuple(parse_kv_format("auto", model_dtype=dtype) for dtype in (FP32, FP16, BF16))
ALL_FORMATS = (*PLAIN, *FORMATS[1:])
all_formats = pytest.mark.parametrize(
    "kv_format", ALL_FORMATS, ids=lambda entry: f"{entry.label} {entry.model_dtype}"
)
# Attention against float64 over the stored values, every dtype (KV format notes, section 7).
REL_L2, MAX_ELEMENT = 1e-3, 2e-3


def with_dtype(kv_format, dtype):
    return parse_kv_format(
        kv_format.name,
        model_dtype=dtype,
        fp8_block=kv_format.fp8_block,
        int8_rotate=kv_format.int8_rotate,
    )


def kernels_of(pool, group=1, max_context=None):
    return KVKernels(
        pool,
        query_heads=group * pool.layout.kv_heads,
        max_rows=8,
        max_context=max_context or pool.page_tokens,
    )


def checksums(pool):
    return [int(t.view(torch.uint8).to(torch.int64).sum()) for t in pool.tensors.values()]


def same_bits(ours, other):
    return torch.equal(ours.view(torch.uint8), other.view(torch.uint8))


# ---- append ------------------------------------------------------------------------------------


@pytest.fixture(params=["one vector a warp", "spans"])
def append_form(request, monkeypatch):
    """Both forms of the kernel, for any number of tokens."""
    wave = 0 if request.param == "spans" else 2**32
    monkeypatch.setattr(kv_module, "_APPEND_WAVE", wave)


@every_head_dim
@every_format
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_append_writes_the_bytes_of_the_reference(kv_format, head_dim, dtype, append_form):
    kv_format = with_dtype(kv_format, dtype)
    kv_heads, rows = 3, 48
    x = torch.cat([make(kind, rows, head_dim) for kind, make in INPUTS]).to(dtype)
    x = x.view(-1, kv_heads, head_dim)
    tokens = x.shape[0]
    pool = new_pool(
        kv_format, layers=2, kv_heads=kv_heads, head_dim=head_dim, pages=tokens, page_tokens=5
    )
    pool.fill_poison()
    layout = pool.layout
    expected = PlanePool.allocate(layout, pages=tokens, page_tokens=5)
    expected.fill_poison()
    pages = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    offsets = torch.arange(tokens) % 5
    expected.append(1, pages, offsets, x, x.flip(0))
    on_device = x.to(DEVICE)
    index = torch.int32 if head_dim == 128 else torch.int64
    kernels_of(pool).append(
        1, pages.to(DEVICE, index), offsets.to(DEVICE, index), on_device, on_device.flip(0)
    )
    for name, tensor in expected.tensors.items():
        ours = pool.tensors[name].cpu().view(torch.uint8)
        assert torch.equal(ours, tensor.view(torch.uint8)), name


@every_head_dim
@every_format
def test_append_of_many_tokens_writes_the_bytes_of_the_reference(kv_format, head_dim):
    """Strided views, and padding rows in the middle."""
    kv_heads, tokens, page_tokens = 3, 1401, 7
    assert tokens * 2 * kv_heads > kv_module._APPEND_WAVE
    pool = new_pool(
        kv_format,
        layers=2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=202,
        page_tokens=page_tokens,
    )
    pool.fill_poison()
    expected = PlanePool.allocate(pool.layout, pages=202, page_tokens=page_tokens)
    expected.fill_poison()
    _, k, v = fused_inputs(head_dim, 6, kv_heads, tokens, gated=True)
    cells = torch.randperm(202 * page_tokens, generator=torch.Generator().manual_seed(1))[:tokens]
    pages, offsets = cells // page_tokens, cells % page_tokens
    pages[::9] = -1
    offsets[4::31] = page_tokens
    live = (pages >= 0) & (offsets < page_tokens)
    expected.append(1, pages[live], offsets[live], k.cpu()[live], v.cpu()[live])
    kernels_of(pool).append(1, pages.to(DEVICE), offsets.to(DEVICE), k, v)
    for name, tensor in expected.tensors.items():
        assert same_bits(pool.tensors[name].cpu(), tensor), name


@every_format
def test_rows_that_are_padding_or_out_of_range_write_nothing(kv_format, append_form):
    """GRF-03."""
    pool = new_pool(kv_format, layers=2, kv_heads=2, head_dim=128, pages=4, page_tokens=32)
    pool.fill_poison()
    before = checksums(pool)
    pages = torch.tensor([-1, 4, 2, 2, -(2**40), 2**40], device=DEVICE)
    offsets = torch.tensor([3, 3, -1, 32, 0, 0], device=DEVICE)
    x = noise(6, 2, 128, dtype=BF16)
    kernels = kernels_of(pool)
    kernels.append(0, pages, offsets, x, x)
    assert checksums(pool) == before
    kernels.append(0, pages.clamp(0, 3), offsets.clamp(0, 31), x, x)
    assert checksums(pool) != before


def norm_of(head_dim, wide, dtype=BF16):
    q, k = (1 + 0.1 * noise(head_dim, seed=seed) for seed in (5, 6))
    if not wide:
        q, k = q.to(dtype), k.to(dtype)
    return QKNorm(q=q, k=k, eps=1e-6, wide=wide)


def fused_inputs(head_dim, heads, kv_heads, tokens, gated, dtype=BF16):
    """Views of one projection, as an attention layer has them."""
    per_head = 2 if gated else 1
    width = (heads * per_head + 2 * kv_heads) * head_dim
    projected = noise(tokens, width, seed=9, dtype=dtype)
    q = projected[:, : heads * per_head * head_dim]
    q = q.view(tokens, heads, per_head * head_dim)[:, :, :head_dim]
    kv = projected[:, heads * per_head * head_dim :].view(tokens, 2 * kv_heads, head_dim)
    return q, kv[:, :kv_heads], kv[:, kv_heads:]


@every_head_dim
@pytest.mark.parametrize("wide", [False, True, None])
@pytest.mark.parametrize("fraction", [0, 0.25, 1])
def test_fused_append_norms_turns_and_encodes(head_dim, wide, fraction, append_form):
    heads, kv_heads, tokens = 6, 2, 21
    q, k, v = fused_inputs(head_dim, heads, kv_heads, tokens, gated=head_dim == 256)
    norm = None if wide is None else norm_of(head_dim, wide)
    table = RotaryEmbedding(int(head_dim * fraction), 1e6, 4096, DEVICE) if fraction else None
    rotary = Rotary(cos=table.cos, sin=table.sin) if table else None
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE)
    backend = TorchBackend(DEVICE)
    expected = []
    for x, weight in ((q, norm and norm.q), (k, norm and norm.k)):
        y = x
        if norm:
            y = (backend.rms_norm_wide if norm.wide else backend.rms_norm)(x, weight, norm.eps)
        expected.append(rope.apply(y, *table.at(positions)) if table else y)

    results = {}
    for kv_format in FORMATS:
        pool = new_pool(
            kv_format,
            layers=1,
            kv_heads=kv_heads,
            head_dim=head_dim,
            pages=tokens,
            page_tokens=1,
        )
        out = torch.full((tokens, heads, head_dim), torch.nan, dtype=BF16, device=DEVICE)
        pages = torch.arange(tokens, device=DEVICE)
        kernels_of(pool, group=3).append_fused(
            0,
            pages,
            torch.zeros_like(pages),
            positions,
            q,
            k,
            v,
            q_out=out,
            norm=norm,
            rotary=rotary,
        )
        results[kv_format.label] = (pool, out)
    pool, out = results["auto"]
    k_auto = pool.tensors["k"][0, :, 0]
    for ours, reference in ((out, expected[0]), (k_auto, expected[1])):
        # The sum of squares has another order: a bf16 rounding may go the other way, and before
        # the rotation once more.
        torch.testing.assert_close(ours.float(), reference.float(), rtol=2.0**-6, atol=2.0**-7)
        if norm is None:
            assert torch.equal(ours, reference)
        assert (ours == reference).float().mean() > 0.97
    assert torch.equal(pool.tensors["v"][0, :, 0], v)
    # Codes are those of exactly these rounded keys.
    for kv_format in FORMATS[1:]:
        quantised, q_out = results[kv_format.label]
        assert torch.equal(q_out, out)
        wanted = PlanePool.allocate(quantised.layout, pages=tokens, page_tokens=1)
        pages = torch.arange(tokens)
        wanted.append(0, pages, torch.zeros_like(pages), k_auto.cpu(), v.cpu())
        for name, tensor in wanted.tensors.items():
            assert torch.equal(quantised.tensors[name].cpu(), tensor), (kv_format.label, name)


@pytest.mark.parametrize(("dtype", "exponent"), [(BF16, -130), (FP16, -18)])
def test_norms_with_results_below_the_normal_numbers(dtype, exponent, append_form):
    kv_format = KVFormat(name="auto", model_dtype=dtype)
    q, k, v = fused_inputs(128, 6, 2, 21, gated=False, dtype=dtype)
    pages = torch.arange(21, device=DEVICE)
    pool = new_pool(kv_format, layers=1, kv_heads=2, head_dim=128, pages=21, page_tokens=1)
    outs = []
    for weight in (torch.ones(128, device=DEVICE), noise(128, seed=5) * 2.0**exponent):
        weight = weight.to(dtype)
        outs.append(torch.empty_like(q, memory_format=torch.contiguous_format))
        kernels_of(pool, group=3).append_fused(
            0,
            pages,
            torch.zeros_like(pages),
            pages,
            q,
            k,
            v,
            q_out=outs[-1],
            norm=QKNorm(q=weight, k=weight, eps=1e-6, wide=False),
            rotary=None,
        )
    expected = (outs[0].cpu().float() * weight.cpu().float()).to(dtype)
    sizes = expected.float().abs()
    assert ((sizes > 0) & (sizes < torch.finfo(dtype).tiny)).any()
    assert torch.equal(outs[1].cpu(), expected)


@pytest.mark.parametrize("heads", [(9, 3), (24, 4), (32, 8), (12, 2), (5, 1)], ids=str)
@every_head_dim
@all_formats
def test_bits_of_an_append_depend_neither_on_the_form_nor_on_other_tokens(
    kv_format, head_dim, heads, monkeypatch
):
    """Spans of heads, one vector a warp, and a few tokens of a prompt as a decode step has them."""
    (query_heads, kv_heads), dtype = heads, kv_format.model_dtype
    vectors = query_heads + 2 * kv_heads
    tokens = (kv_module._APPEND_WAVE // vectors + 100) | 1
    gated, partly = kv_heads == 4, kv_heads in (2, 4)
    q, k, v = fused_inputs(head_dim, query_heads, kv_heads, tokens, gated, dtype)
    places = torch.randperm(tokens, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    places[5::17] = -1
    positions = torch.arange(tokens, device=DEVICE)
    positions[places < 0] = 2**40
    table = RotaryEmbedding(head_dim // (2 if partly else 1), 1e6, tokens, DEVICE)
    layout = KVLayout(kv_format=kv_format, layers=1, kv_heads=kv_heads, head_dim=head_dim)

    def run(norm, *, span=None, some=None):
        """q and the pool after one call for all tokens, or for some; span: 1, or of a warp."""
        chosen = slice(None) if some is None else some
        pages = places[chosen]
        pool = PlanePool.allocate(layout, pages=tokens, page_tokens=1, device=DEVICE)
        pool.fill_poison()
        out = torch.full((len(pages), query_heads, head_dim), -7.0, dtype=dtype, device=DEVICE)
        kernels = kernels_of(pool, group=query_heads // kv_heads)
        with monkeypatch.context() as patch:
            if span is not None:
                patch.setattr(kv_module, "_APPEND_WAVE", 2**32 if span == 1 else 0)
                patch.setattr(kv_module, "_APPEND_SPAN", span)
            kernels.append_fused(
                0,
                pages,
                torch.zeros_like(pages),
                positions[chosen],
                q[chosen],
                k[chosen],
                v[chosen],
                q_out=out,
                norm=norm,
                rotary=Rotary(cos=table.cos, sin=table.sin),
            )
        return out, pool

    some = torch.tensor([1, 5, 100, 101, tokens - 1], device=DEVICE)
    assert len(some) * vectors <= kv_module._APPEND_WAVE < tokens * vectors
    for wide in (False, True, None):
        norm = None if wide is None else norm_of(head_dim, wide, dtype)
        expected, wanted = run(norm, span=1)
        assert (expected[5] == -7).all()
        assert (expected[places >= 0] != -7).any(-1).all()
        for span in (None, 4, 8, 16):
            out, pool = run(norm, span=span)
            assert same_bits(out, expected), (span, wide)
            for name, tensor in wanted.tensors.items():
                assert same_bits(pool.tensors[name], tensor), (name, span, wide)
        few, pool = run(norm, some=some)
        assert same_bits(few, expected[some]), wide
        written = places[some][places[some] >= 0]
        for name, tensor in wanted.tensors.items():
            assert same_bits(pool.tensors[name][0, written], tensor[0, written]), (name, wide)


def test_fused_append_in_place_leaves_padding_rows_alone(append_form):
    q, k, v = fused_inputs(128, 4, 2, 8, gated=False)
    pool = new_pool(FORMATS[0], layers=1, kv_heads=2, head_dim=128, pages=8, page_tokens=16)
    pages = torch.arange(8, device=DEVICE)
    pages[3] = -1
    before = q.clone()
    positions = torch.where(pages < 0, 2**40, pages)  # a padding row's position means nothing
    table = RotaryEmbedding(128, 1e4, 64, DEVICE)
    kernels_of(pool, group=2).append_fused(
        0,
        pages,
        torch.zeros_like(pages),
        positions,
        q,
        k,
        v,
        q_out=q,
        norm=None,
        rotary=Rotary(cos=table.cos, sin=table.sin),
    )
    live = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(q[3], before[3])
    assert torch.equal(q[live], rope.apply(before[live], *table.at(positions[live])))


def test_a_rotary_width_that_lanes_cannot_exchange_is_refused():
    q, k, v = fused_inputs(256, 4, 2, 1, gated=False)
    pool = new_pool(FORMATS[0], layers=1, kv_heads=2, head_dim=256, pages=1, page_tokens=16)
    table = RotaryEmbedding(40, 1e4, 64, DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ConfigError, match="rotary_dim=40"):
        kernels_of(pool, group=2).append_fused(
            0,
            zero,
            zero,
            zero,
            q,
            k,
            v,
            q_out=q,
            norm=None,
            rotary=Rotary(cos=table.cos, sin=table.sin),
        )


# ---- decode attention --------------------------------------------------------------------------


def check_accuracy(case, q, out):
    kv_format = case.pool.layout.kv_format
    for row, length in enumerate(case.lengths.tolist()):
        if length == 0:
            assert torch.equal(out[row], torch.zeros_like(out[row]))
            continue
        k, v = (stored(kv_format, which, x[row]) for which, x in (("k", case.k), ("v", case.v)))
        reference = exact_attention(kv_format, q[row], k, v)
        error = out[row].double() - reference
        rel = (error.norm(dim=-1) / reference.norm(dim=-1)).max()
        assert rel <= REL_L2, (row, length, float(rel))
        assert error.abs().max() <= MAX_ELEMENT * v.abs().max(), (row, length)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8])
@every_head_dim
@all_formats
def test_decode_equals_float64_in_every_layout(kv_format, head_dim, group):
    kv_heads = 3 if group == 3 else 2
    lengths = [1, 17, 0, 128, 1000, 2500]
    # fp32 queries and outputs with values of the model dtype: no rounding of the result.
    q = noise(len(lengths), kv_heads * group, head_dim, seed=3, dtype=kv_format.model_dtype)
    q = q.float()
    outputs = []
    for layout in ("slots", "pages", "windows"):
        case = build(kv_format, head_dim, kv_heads, lengths, layout)
        outputs.append(run_decode(case, case.kernels(kv_heads * group), q))
        if layout == "slots":
            check_accuracy(case, q, outputs[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@every_head_dim
@all_formats
def test_decode_of_long_rows_merges_many_splits(kv_format, head_dim):
    lengths = [8192, 8193, 32768, 32769, 70001]
    q = noise(len(lengths), 3, head_dim, seed=4, dtype=kv_format.model_dtype).float() * 2
    case = build(kv_format, head_dim, 1, lengths, "pages")
    kernels = case.kernels(3)
    out = run_decode(case, kernels, q)
    check_accuracy(case, q, out)
    # The work counter is back at zero, and scratch left by one call does not reach the next.
    for _ in range(3):
        assert torch.equal(run_decode(case, kernels, q), out)


@all_formats
def test_decode_survives_extreme_scales(kv_format):
    for scale in (1e-3, 300.0):
        case = build(kv_format, 128, 2, [5, 300], "slots", scale=scale)
        q = (noise(2, 8, 128, seed=5) / scale).to(kv_format.model_dtype).float()
        check_accuracy(case, q, run_decode(case, case.kernels(8), q))


@all_formats
def test_vectors_of_zeros_decode_to_zeros(kv_format):
    case = build(kv_format, 64, 2, [40], "slots", scale=0.0)
    q = noise(1, 4, 64, dtype=kv_format.model_dtype).float()
    out = run_decode(case, case.kernels(4), q)
    assert torch.equal(out, torch.zeros_like(out))


@all_formats
def test_long_sums_of_one_value_stay_that_value(kv_format):
    length, head_dim = 131_072, 128
    pool = new_pool(kv_format, layers=1, kv_heads=1, head_dim=head_dim, pages=1, page_tokens=length)
    x = (noise(1, 1, head_dim, seed=8) * 3).to(kv_format.model_dtype)
    index = torch.arange(length, device=DEVICE)
    kernels = kernels_of(pool, group=4)
    kernels.append(0, torch.zeros_like(index), index, *(x.expand(length, 1, -1),) * 2)
    q = noise(1, 4, head_dim, seed=9).to(kv_format.model_dtype).float()
    out = torch.empty_like(q)
    table = slot_table(torch.zeros(1, dtype=torch.int64, device=DEVICE))
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    kernels.attention_decode(0, q, table, lengths, out=out)
    v = unrotate_outputs(kv_format, stored(kv_format, "v", x[0])).float()
    assert (out[0] - v).norm() <= 1e-3 * v.expand(4, -1).norm()


@every_head_dim
@all_formats
def test_a_result_in_the_model_dtype_is_the_rounded_fp32_result(kv_format, head_dim):
    case = build(kv_format, head_dim, 2, [3, 700], "pages")
    q = noise(2, 8, head_dim, seed=6, dtype=kv_format.model_dtype)
    kernels = case.kernels(8)
    wide = run_decode(case, kernels, q.float())
    assert torch.equal(run_decode(case, kernels, q), wide.to(q.dtype))


@all_formats
def test_bits_of_a_row_do_not_depend_on_its_neighbours(kv_format):
    lengths = [9000, 64, 1, 513, 2048, 0, 8192, 100]
    case = build(kv_format, 128, 2, lengths, "windows")
    kernels = case.kernels(8)
    q = noise(8, 8, 128, seed=7, dtype=kv_format.model_dtype).float()
    alone = [run_decode(case, kernels, q[row : row + 1], [row])[0] for row in range(8)]
    for count in range(1, 9):
        rows = [(5 * i + count) % 8 for i in range(count)]
        poisoned = q[rows].clone()
        poisoned[::3] = torch.nan  # neighbours whose result is NaN
        out = run_decode(case, kernels, poisoned, rows)
        for place, row in enumerate(rows):
            if place % 3:
                assert torch.equal(out[place], alone[row]), (count, row)


@all_formats
def test_padding_rows_read_nothing_and_change_nothing(kv_format):
    """GRF-01, GRF-03: for decode attention alone."""
    case = build(kv_format, 256, 1, [300, 40], "slots")
    kernels = KVKernels(case.pool, query_heads=6, max_rows=8, max_context=300)
    q = noise(8, 6, 256, seed=2, dtype=kv_format.model_dtype).float()
    expected = run_decode(case, kernels, q[:2])
    before = checksums(case.pool)
    q[2:] = torch.nan
    case.table = torch.cat((case.table, torch.full((6, 1), NOWHERE, device=DEVICE).int()))
    case.lengths = torch.cat((case.lengths, torch.zeros(6, device=DEVICE).int()))
    out = run_decode(case, kernels, q)
    assert torch.equal(out[:2], expected)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert checksums(case.pool) == before


@all_formats
def test_a_captured_graph_equals_eager_for_every_length(kv_format):
    kv_heads, heads, head_dim, tokens, context = 2, 6, 128, 4, 700
    pool = new_pool(
        kv_format, layers=2, kv_heads=kv_heads, head_dim=head_dim, pages=5, page_tokens=context
    )
    pool.fill_poison()
    kernels = KVKernels(pool, query_heads=heads, max_rows=tokens, max_context=context)
    table = RotaryEmbedding(head_dim, 1e6, context, DEVICE)
    rotary = Rotary(cos=table.cos, sin=table.sin)
    dtype = kv_format.model_dtype
    qkv = torch.empty((tokens, heads + 2 * kv_heads, head_dim), dtype=dtype, device=DEVICE)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    slots = torch.tensor([3, 0, 4, -1], device=DEVICE)
    positions = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    lengths = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    turned, out = torch.empty_like(q), torch.empty_like(q)

    def step():
        for layer in range(2):
            kernels.append_fused(
                layer, slots, positions, positions, q, k, v, q_out=turned, norm=None, rotary=rotary
            )
            kernels.attention_decode(layer, turned, slot_table(slots), lengths, out=out)

    def fill(position):
        qkv.copy_(noise(*qkv.shape, seed=position).to(dtype))
        positions.fill_(position)
        lengths.copy_(torch.where(slots >= 0, position + 1, 0))

    fill(0)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for position in range(1, context, 37):
        for filled in range(max(position - 37, 0), position):
            positions.fill_(filled)
            kernels.append(0, slots, positions, k, v)
            kernels.append(1, slots, positions, k, v)
        fill(position)
        step()
        eager = out.clone()
        planes = checksums(pool)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)
        assert torch.isfinite(out).all()
        assert checksums(pool) == planes


# ---- gather ------------------------------------------------------------------------------------


@every_head_dim
@all_formats
def test_gather_gives_what_is_stored(kv_format, head_dim):
    case = build(kv_format, head_dim, 3, [333], "windows")
    kernels = case.kernels(3)
    first, count = 45, 250
    outs = (kv_format.model_dtype,) if not kv_format.quantised else (FP32, BF16, FP16)
    for dtype in outs:
        for restore in (True, False):
            k = torch.empty((count, 3, head_dim), dtype=dtype, device=DEVICE)
            v = torch.empty_like(k)
            kernels.gather(
                case.layer, case.table[0], first, k_out=k, v_out=v, restore=restore, low=case.low
            )
            for which, x, ours in (("k", case.k, k), ("v", case.v, v)):
                wanted = stored(kv_format, which, x[0][first : first + count])
                if restore:
                    wanted = unrotate_outputs(kv_format, wanted)
                assert torch.equal(ours, wanted.to(dtype)), (which, dtype, restore)


# ---- guards ------------------------------------------------------------------------------------

GUARD, GUARD_BYTES = 0xA5, 4096


def guarded_pool(layout, pages, page_tokens):
    """Planes in one piece of memory, each between guard bytes; and a mask of these."""
    sizes = [
        math.prod(layout.plane_shape(plane, pages, page_tokens)) * plane.dtype.itemsize
        for plane in layout.planes
    ]
    step = [-(-size // 256) * 256 + GUARD_BYTES for size in sizes]
    memory = torch.full((sum(step) + GUARD_BYTES,), GUARD, dtype=torch.uint8, device=DEVICE)
    guard = torch.ones_like(memory, dtype=torch.bool)
    tensors, start = {}, GUARD_BYTES
    for plane, size, width in zip(layout.planes, sizes, step, strict=True):
        guard[start : start + size] = False
        shape = layout.plane_shape(plane, pages, page_tokens)
        tensors[plane.name] = memory[start : start + size].view(plane.dtype).view(shape)
        start += width
    pool = PlanePool(layout, tensors, pages=pages, page_tokens=page_tokens)
    return memory, guard, pool


@every_head_dim
@every_format
def test_random_traffic_keeps_guards_and_foreign_rows(kv_format, head_dim):
    """KVD-05: appends, pages given away and pages copied in, attention and gather in between."""
    pages, page_tokens, kv_heads, layers = 6, 32, 3, 2
    layout = KVLayout(kv_format=kv_format, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    memory, guard, pool = guarded_pool(layout, pages, page_tokens)
    model = PlanePool.allocate(layout, pages=pages, page_tokens=page_tokens)
    saved = PlanePool.allocate(layout, pages=pages, page_tokens=page_tokens)
    for one in (pool, model, saved):
        one.fill_poison()
    kernels = kernels_of(pool, group=2, max_context=pages * page_tokens)
    generator = torch.Generator().manual_seed(head_dim)

    def below(limit, count=1):
        return torch.randint(0, limit, (count,), generator=generator)

    table = torch.randperm(pages, generator=generator).to(DEVICE, torch.int32).view(1, pages)
    for round_ in range(40):
        layer, kind = int(below(layers)), round_ % 4
        page, other = (int(below(pages)) for _ in range(2))
        if kind < 2:
            cells = torch.randperm(pages * page_tokens, generator=generator)[: int(below(30)) + 1]
            where, offsets = cells // page_tokens, cells % page_tokens
            k, v = (noise(len(cells), kv_heads, head_dim, seed=s, dtype=BF16) for s in (1, 2))
            kernels.append(layer, where.to(DEVICE), offsets.to(DEVICE), k, v)
            model.append(layer, where, offsets, k.cpu(), v.cpu())
        elif kind == 2:  # evicted: saved, and somebody else's poison comes instead
            for name, tensor in model.tensors.items():
                saved.tensors[name][:, other] = tensor[:, page]
                for owner in (tensor, pool.tensors[name]):
                    owner[:, page].view(torch.uint8).fill_(0xFF)
        else:  # loaded
            for name, tensor in model.tensors.items():
                tensor[:, page] = saved.tensors[name][:, other]
                pool.tensors[name][:, page] = saved.tensors[name][:, other].to(DEVICE)
        length = int(below(pages * page_tokens)) + 1
        q = noise(1, 2 * kv_heads, head_dim, seed=round_)
        kernels.attention_decode(
            layer,
            q,
            table,
            torch.tensor([length], dtype=torch.int32, device=DEVICE),
            out=torch.empty_like(q),
        )
        pair = torch.empty((2, length, kv_heads, head_dim), dtype=BF16, device=DEVICE)
        kernels.gather(layer, table[0], 0, k_out=pair[0], v_out=pair[1])
    assert (memory[guard] == GUARD).all()
    for name, tensor in model.tensors.items():
        ours = pool.tensors[name].cpu().view(torch.uint8)
        assert torch.equal(ours, tensor.view(torch.uint8)), name


def test_planes_with_gaps_are_refused():
    """KVD-05: the kernels know no other strides than those of a contiguous plane."""
    layout = KVLayout(kv_format=FORMATS[0], layers=1, kv_heads=2, head_dim=64)
    wide = torch.empty((1, 2, 16, 2, 96), dtype=BF16, device=DEVICE)[..., :64]
    pool = PlanePool(layout, {"k": wide, "v": wide.clone()}, pages=2, page_tokens=16)
    with pytest.raises(ConfigError, match="KV plane k is not contiguous"):
        kernels_of(pool)


# ---- addresses beyond 32 bits ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "slots"),
    [("int8_per_token_head", 2, 9), ("auto", 1, 9), ("int8_per_token_head", 2, 8)],
    ids=["int8", "bf16", "int8 8 slots"],
)
def test_pools_of_more_than_2_31_elements(name, layers, slots):
    """INT-01."""
    kv_format = parse_kv_format(name, model_dtype=BF16)
    context, kv_heads, head_dim = 262_144, 4, 256
    far = slots - 1
    pool = new_pool(
        kv_format,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=slots,
        page_tokens=context,
    )
    assert pool.tensors["k"].numel() > 2**31
    pool.fill_poison()
    places = [(slot, row) for slot in sorted({0, 7, far}) for row in (0, context - 1)]
    pages, offsets = (torch.tensor(x) for x in zip(*places, strict=True))
    kernels = kernels_of(pool, group=6, max_context=context)
    x = noise(len(places), kv_heads, head_dim, seed=1, dtype=BF16)
    small = PlanePool.allocate(pool.layout, pages=len(places), page_tokens=1)
    small.append(0, torch.arange(len(places)), torch.zeros(len(places)).long(), x.cpu(), x.cpu())
    for layer in range(layers):
        kernels.append(layer, pages.to(DEVICE), offsets.to(DEVICE), x, x)
    poison = 0
    for name_, tensor in pool.tensors.items():
        for layer in range(layers):
            rows = tensor[layer, pages.to(DEVICE), offsets.to(DEVICE)].cpu()
            assert torch.equal(rows, small.tensors[name_][0, :, 0]), (name_, layer)
        # Nothing else was written: a token of poison in all rows but these.
        tokens = tensor.view(torch.uint8).flatten(0, 2)
        poison += int((tokens[:, 0, 0] != 0xFF).sum())
        for slot, row in places:
            for near in (row - 1, row + 1):
                if 0 <= near < context:
                    neighbour = tensor[layers - 1, slot, near].view(torch.uint8)
                    assert (neighbour == 0xFF).all()
    assert poison <= len(places) * layers * len(pool.tensors)

    # A whole context at the far end of the pool.
    layer = layers - 1
    for name_, tensor in pool.tensors.items():
        rows = tensor[layer, far]
        if rows.dtype == FP16:
            rows.copy_(noise(*rows.shape, seed=2).abs() * 0.01)
        elif rows.dtype == torch.int8:
            rows.random_(-127, 128)
        else:
            rows.normal_()
        del name_
    q = noise(2, 24, head_dim, seed=3, dtype=BF16).float()
    out = torch.empty_like(q)
    table = slot_table(torch.tensor([far, -1], device=DEVICE))
    lengths = torch.tensor([context, 0], dtype=torch.int32, device=DEVICE)
    kernels.attention_decode(layer, q, table, lengths, out=out)
    for head in range(kv_heads):
        k, v = (
            side[:, head : head + 1]
            for side in (
                pool_read(pool, kv_format, "k", layer, far, head),
                pool_read(pool, kv_format, "v", layer, far, head),
            )
        )
        ours = out[0, 6 * head : 6 * head + 6].double()
        reference = exact_attention(kv_format, q[0, 6 * head : 6 * head + 6], k, v)
        rel = (ours - reference).norm() / reference.norm()
        assert rel <= REL_L2, float(rel)

    # The same data in the first layer's first slot, and elsewhere, has the same bits.
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    for other_layer, slot in ((0, 0), (layer, 0), (layer, 7)):
        for tensor in pool.tensors.values():
            if (other_layer, slot) != (layer, far):
                tensor[other_layer, slot].copy_(tensor[layer, far])
        again = torch.empty_like(q)
        table = slot_table(torch.tensor([slot, -1], device=DEVICE))
        kernels.attention_decode(other_layer, q, table, lengths, out=again)
        assert torch.equal(again, out), (other_layer, slot)


def pool_read(pool, kv_format, which, layer, page, head):
    """Stored values `[tokens, kv_heads, D]` of one page with only `head` filled in."""
    names = ("k", "k_scale") if which == "k" else ("v", "v_scale")
    rows = [pool.tensors[name][layer, page, :, head] for name in names if name in pool.tensors]
    values = rows[0].float()
    if len(rows) > 1:
        values = values * rows[1].float()
    return values.unsqueeze(1).expand(-1, pool.layout.kv_heads, -1)


# ---- limits ------------------------------------------------------------------------------------


def test_sizes_the_kernels_do_not_have_are_refused():
    """INT-01: at construction, before any address is formed."""
    pool = new_pool(FORMATS[0], layers=1, kv_heads=2, head_dim=64, pages=1, page_tokens=16)
    for heads, context in ((18, 16), (3, 16), (2, 2**20 + 1)):
        with pytest.raises(ConfigError):
            KVKernels(pool, query_heads=heads, max_rows=1, max_context=context)
    kernels = kernels_of(pool)
    odd = new_pool(FORMATS[0], layers=1, kv_heads=2, head_dim=64, pages=2, page_tokens=20)
    q = noise(1, 2, 64, dtype=BF16)
    lengths = torch.ones(1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros((1, 2), dtype=torch.int32, device=DEVICE)
    with pytest.raises(ConfigError, match="page_tokens=20"):
        kernels_of(odd).attention_decode(0, q, table, lengths, out=q.clone())
    with pytest.raises(ConfigError, match="aligned"):
        kernels.append(
            0, lengths.long(), lengths.long(), *(noise(129, dtype=BF16)[1:].view(1, 2, 64),) * 2
        )


def test_every_split_count_fits_the_scratch():
    assert max_splits(1_048_576) == 2048
    assert [max_splits(n) for n in (1, 128, 129, 8193, 40_000)] == [1, 1, 2, 64, 128]
    assert set(HEAD_DIMS) == {64, 128, 256}
    layout = KVLayout(kv_format=FORMATS[0], layers=1, kv_heads=1, head_dim=96)
    pool = PlanePool.allocate(layout, pages=1, page_tokens=16, device=DEVICE)
    with pytest.raises(ConfigError, match="head_dim=96"):
        kernels_of(pool)
