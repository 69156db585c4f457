"""Attention of prompts against float64: layouts, formats, cuts, several requests of one launch."""

import itertools
import math

import pytest
import torch
from kv_setup import DEVICE, build, noise, stored

from headrace.backends.cuda import prefill_attention
from headrace.backends.cuda.kv import KVKernels
from headrace.backends.cuda.prefill_attention import PrefillAttention
from headrace.errors import ConfigError
from headrace.kv.codecs import rotate_queries, unrotate_outputs
from headrace.kv.formats import AUTO, FP8, INT8, K8V4, KVFormat
from headrace.models.batch import PrefillSegment

BF16, FP16 = torch.bfloat16, torch.float16
# Relative L2 of a row against float64 over the stored vectors: weights and results are rounded to
# the model dtype, 2^-9 and 2^-12 at most, each.
BOUND = {BF16: 4e-3, FP16: 5e-4}


def exact(kv_format, q, k, v, start):
    """Float64 causal attention of `q [n, heads, D]` at positions from `start`, over `k, v`."""
    tokens, heads, head_dim = q.shape
    k, v = (stored(kv_format, which, x[: start + tokens]) for which, x in (("k", k), ("v", v)))
    group = heads // k.shape[1]
    queries = rotate_queries(kv_format, q.float()).double()
    hidden = torch.arange(start + tokens, device=DEVICE)[None] > torch.arange(
        start, start + tokens, device=DEVICE
    ).unsqueeze(1)
    out = torch.empty(q.shape, dtype=torch.float64, device=DEVICE)
    for head in range(heads):
        scores = queries[:, head] @ k[:, head // group].double().T / math.sqrt(head_dim)
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        out[:, head] = weights @ v[:, head // group].double()
    return unrotate_outputs(kv_format, out.float()).double() if kv_format.rotated else out


def error(actual, expected):
    """Largest relative L2 of a row, over all its heads."""
    difference = (actual.double() - expected).flatten(1).norm(dim=1)
    return float((difference / expected.flatten(1).norm(dim=1)).max())


def attention_of(case, query_heads):
    return PrefillAttention(case.kernels(query_heads))


def segments_of(case, spans):
    """Segments (row of the case, first token, end), one after the other in the batch."""
    offset, segments = 0, []
    for row, start, end in spans:
        segments.append(
            PrefillSegment(
                table=case.table[row], state_slot=0, start=start, length=end - start, offset=offset
            )
        )
        offset += end - start
    return segments, offset


@pytest.mark.parametrize("layout", ["slots", "pages", "windows"])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"),
    [(64, 3, 3), (64, 2, 8), (128, 8, 4), (128, 2, 1), (128, 1, 6), (256, 4, 6), (256, 2, 2)],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_layout_and_group(dtype, head_dim, kv_heads, group, layout):
    """Whole prompts, continued ones and single tokens, on both sides of every tile edge."""
    kv_format = KVFormat(name=AUTO, model_dtype=dtype)
    lengths = [1, 63, 64, 65, 127, 129, 200, 577]
    case = build(kv_format, head_dim, kv_heads, lengths, layout)
    spans = [(row, 0, length) for row, length in enumerate(lengths)]
    spans += [(7, 300, 577), (6, 199, 200), (5, 64, 129), (7, 1, 2)]
    segments, tokens = segments_of(case, spans)
    q = noise(tokens, kv_heads * group, head_dim, seed=9, dtype=dtype)
    out = torch.full_like(q, math.nan)
    attention_of(case, kv_heads * group).attend(case.layer, q, segments, out=out, low=case.low)
    for (row, start, end), segment in zip(spans, segments, strict=True):
        rows = slice(segment.offset, segment.offset + segment.length)
        expected = exact(kv_format, q[rows], case.k[row], case.v[row], start)
        assert error(out[rows], expected) < BOUND[dtype], (row, start, end)


@pytest.mark.parametrize("layout", ["slots", "pages"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "kv_format",
    [
        KVFormat(name=FP8, model_dtype=BF16),
        KVFormat(name=FP8, model_dtype=FP16, fp8_block=64),
        KVFormat(name=INT8, model_dtype=BF16),
        KVFormat(name=INT8, model_dtype=BF16, int8_rotate=True),
        KVFormat(name=K8V4, model_dtype=BF16),
    ],
    ids=lambda f: f.label,
)
def test_codes_are_decoded_first(kv_format, head_dim, layout):
    lengths = [70, 333]
    case = build(kv_format, head_dim, 2, lengths, layout)
    spans = [(0, 0, 70), (1, 130, 333)]
    segments, tokens = segments_of(case, spans)
    dtype = kv_format.model_dtype
    q = noise(tokens, 6, head_dim, seed=5, dtype=dtype)
    out = torch.full_like(q, math.nan)
    attention_of(case, 6).attend(case.layer, q, segments, out=out)
    for (row, start, _), segment in zip(spans, segments, strict=True):
        rows = slice(segment.offset, segment.offset + segment.length)
        expected = exact(kv_format, q[rows], case.k[row], case.v[row], start)
        # The workspace is rounded to the model dtype once more.
        assert error(out[rows], expected) < 2 * BOUND[dtype]


@pytest.mark.parametrize("layout", ["slots", "pages", "windows"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_cut_and_no_neighbour_shows_in_the_bits(head_dim, layout):
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    length, heads = 900, 6
    case = build(kv_format, head_dim, 2, [length, 400], layout)
    attention = attention_of(case, heads)
    q = noise(length, heads, head_dim, seed=3, dtype=BF16)
    whole = torch.full_like(q, math.nan)
    attention.attend(case.layer, q, segments_of(case, [(0, 0, length)])[0], out=whole, low=case.low)
    assert whole.isfinite().all()
    for cuts in ((0, 1, 2, 900), (0, 64, 128, 640, 900), (0, 63, 191, 450, 899, 900)):
        spans = [(0, start, end) for start, end in itertools.pairwise(cuts)]
        # In one launch, with another request between.
        segments, tokens = segments_of(case, [*spans[:1], (1, 17, 400), *spans[1:]])
        rows = [*range(cuts[1]), *[0] * 383, *range(cuts[1], length)]
        mixed = torch.full((tokens, heads, head_dim), math.nan, dtype=BF16, device=DEVICE)
        attention.attend(case.layer, q[rows], segments, out=mixed, low=case.low)
        assert torch.equal(torch.cat((mixed[: cuts[1]], mixed[cuts[1] + 383 :])), whole)
        # One launch each.
        for start, end in itertools.pairwise(cuts):
            segments, tokens = segments_of(case, [(0, start, end)])
            part = torch.full((tokens, heads, head_dim), math.nan, dtype=BF16, device=DEVICE)
            attention.attend(case.layer, q[start:end], segments, out=part, low=case.low)
            assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_strided_queries_and_rows_that_are_not_of_a_segment(head_dim):
    """Queries as a view of a projection; rows of `out` outside the segments stay as they were."""
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    case = build(kv_format, head_dim, 2, [150])
    projected = noise(160, 12, head_dim, seed=1, dtype=BF16)
    q = projected[:, 2:10:2]
    segment = PrefillSegment(table=case.table[0], state_slot=0, start=0, length=150, offset=7)
    out = torch.full((160, 4, head_dim), 7.0, dtype=BF16, device=DEVICE)
    attention = attention_of(case, 4)
    attention.attend(case.layer, q, [segment], out=out)
    expected = exact(kv_format, q[7:157], case.k[0], case.v[0], 0)
    assert error(out[7:157], expected) < BOUND[BF16]
    assert (out[:7] == 7).all()
    assert (out[157:] == 7).all()
    with pytest.raises(ConfigError, match="q is"):
        attention.attend(case.layer, projected.float()[:, :4], [segment], out=out)


def test_more_segments_than_a_launch_has():
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    lengths = [3 * row + 1 for row in range(70)]
    case = build(kv_format, 128, 1, lengths, "pages")
    segments, tokens = segments_of(case, [(row, 0, length) for row, length in enumerate(lengths)])
    q = noise(tokens, 2, 128, dtype=BF16)
    out = torch.full_like(q, math.nan)
    attention = attention_of(case, 2)
    for _ in range(3):  # the count of drawn units is back at zero
        attention.attend(case.layer, q, segments, out=out.fill_(math.nan))
        for segment, k, v in zip(segments, case.k, case.v, strict=True):
            rows = slice(segment.offset, segment.offset + segment.length)
            assert error(out[rows], exact(kv_format, q[rows], k, v, 0)) < BOUND[BF16]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_size_of_a_unit_does_not_show_in_the_bits(head_dim, monkeypatch):
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    case = build(kv_format, head_dim, 2, [900, 130, 65], "pages")
    attention = attention_of(case, 8)
    segments, tokens = segments_of(case, [(1, 0, 130), (0, 200, 900), (2, 0, 65)])
    q = noise(tokens, 8, head_dim, seed=3, dtype=BF16)
    outs = []
    for units_each, tiles in ((0, 3), (2**20, 2)):
        monkeypatch.setattr(prefill_attention, "_UNITS_EACH", units_each)
        assert attention._tiles(1) == tiles
        outs.append(torch.full_like(q, math.nan))
        attention.attend(case.layer, q, segments, out=outs[-1])
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_keys_and_values_that_are_not_finite(head_dim, value):
    """Keys never reach rows before them, values those of earlier blocks of 64."""
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    case = build(kv_format, head_dim, 2, [300])
    attention = attention_of(case, 4)
    q = noise(300, 4, head_dim, seed=3, dtype=BF16)
    segments = segments_of(case, [(0, 0, 300)])[0]
    before, out = torch.empty_like(q), torch.empty_like(q)
    attention.attend(case.layer, q, segments, out=before)
    for name, clean in (("k", 150), ("v", 128)):
        plane = case.pool.tensors[name].flatten(0, 1)
        row = (case.layer * case.pool.pages + int(case.table[0, 0]), 150)
        kept = plane[row].clone()
        plane[row] = value
        attention.attend(case.layer, q, segments, out=out)
        plane[row] = kept
        assert torch.equal(out[:clean], before[:clean])
        assert not out[150:].isfinite().all(-1).any(), name


def test_large_scores_and_queries_that_are_not_finite():
    """One weight of one, and a NaN that reaches no other row."""
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    case = build(kv_format, 128, 1, [300], scale=30.0)
    q = noise(300, 2, 128, dtype=BF16) * 30
    segments = segments_of(case, [(0, 0, 300)])[0]
    out = torch.empty_like(q)
    attention = attention_of(case, 2)
    attention.attend(case.layer, q, segments, out=out)
    assert error(out, exact(kv_format, q, case.k[0], case.v[0], 0)) < BOUND[BF16]
    before = out.clone()
    q[200] = math.nan
    attention.attend(case.layer, q, segments, out=out)
    assert torch.equal(out[:200], before[:200])
    assert torch.equal(out[201:], before[201:])
    assert out[200].isnan().all()


def test_the_end_of_a_long_context():
    """A long context: 70,000 tokens, of which the last 65 are new."""
    kv_format = KVFormat(name=AUTO, model_dtype=BF16)
    length, new = 70_000, 65
    case = build(kv_format, 128, 1, [length], "slots")
    kernels = KVKernels(case.pool, query_heads=2, max_rows=1, max_context=length)
    segments, _ = segments_of(case, [(0, length - new, length)])
    q = noise(new, 2, 128, dtype=BF16)
    out = torch.empty_like(q)
    PrefillAttention(kernels).attend(case.layer, q, segments, out=out)
    expected = exact(kv_format, q, case.k[0], case.v[0], length - new)
    assert error(out, expected) < BOUND[BF16]
