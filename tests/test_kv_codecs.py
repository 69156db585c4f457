"""KV codecs equal an independent reference byte for byte."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_reference as reference
from headrace.errors import ConfigError
from headrace.kv.codecs import CODEBOOK, THRESHOLDS, decode, encode, sanitise, up16
from headrace.kv.formats import parse_kv_format
from headrace.kv.rotation import fwht, rotate, sign_vector, sign_words, sqrt_rn, tree_sum, unrotate
from kv_cases import (
    FP8,
    FP8_64,
    HEAD_DIMS,
    INT8,
    INT8_R,
    K8V4,
    QUANTISED,
    distribution,
    every_format,
    every_head_dim,
    quantised,
    special,
)


def bits(scales):
    return [value & 0xFFFF for value in scales.view(torch.int16).flatten().tolist()]


def nibbles(packed):
    return [code for byte in packed.tolist() for code in (byte & 15, byte >> 4)]


def assert_equals_reference(kv_format, x):
    """Codes, scales and decoded values of `x [n, D]` against the scalar implementation."""
    name = kv_format.name
    options = {"fp8_block": kv_format.fp8_block, "int8_rotate": kv_format.int8_rotate}
    for which in "kv":
        codes, scales = encode(kv_format, which, x)
        values = decode(kv_format, which, (codes, scales))
        for row, vector in enumerate(x.float().numpy()):
            expected = reference.encode(name, which, vector, **options)
            assert (codes[row].tolist(), bits(scales[row])) == expected
            decoded = np.array(reference.decode(name, which, *expected))
            assert np.array_equal(values[row].numpy().view(np.int32), decoded.view(np.int32))


def test_rotation_signs_are_the_pinned_ones():
    pinned = {
        64: ("+-+--+--+-+-+---", 36, 0x19B365CF86B1A8C7, 0x95D98D57E5EE914A),
        128: ("-++--+---+-+-+++", 58, 0xC5DC8273142A2BA9, 0x3366CB9F0D63518E),
        256: ("--+-++--+-+-----", 133, 0x9C5A1CBB2DE1A07E, 0x8BB904E428545752),
    }
    masks = {
        64: 0xE9B43E83E5E8EADA,
        128: 0x70F950D17A60812C608176BDD93115D9,
        256: 0x7F3325333469BCEA918457715F6B61794AA40DA4A6083D366796F193EC3BFACB,
    }
    for head_dim, (first, negative, *words) in pinned.items():
        signs = sign_vector(head_dim).tolist()
        assert "".join("+" if sign > 0 else "-" for sign in signs[:16]) == first
        assert signs.count(-1.0) == negative
        assert signs.count(1.0) == head_dim - negative
        assert sign_words(head_dim)[:2].tolist() == words
        assert sum(1 << i for i, sign in enumerate(signs) if sign < 0) == masks[head_dim]
        assert signs == reference.signs(head_dim)
    assert sign_vector(64, seed=1)[:8].tolist() == [-1, 1, 1, -1, 1, -1, -1, 1]
    for seed in (2**64 - 1, 0x123456789ABCDEF0):
        assert sign_words(128, seed).tolist() == reference.splitmix(128, seed)
    for seed in (-1, 2**64, True, 1.0):
        with pytest.raises(ConfigError, match="seed"):
            sign_vector(64, seed)


def test_codebook_is_the_one_of_the_definition():
    assert list(CODEBOOK) == reference.LEVELS
    assert list(THRESHOLDS) == reference.LIMITS


GOLDEN = {
    64: {
        "fp8": ([0x1F25], 11358),
        "block": ([0x1F25], 11358),
        "int8": (0x264D, -46, 352730),
        "rotated": (1.453125, -0.03125),
        "k": (0x295F, [35, -1, -71, -40, 6, -46, 6, -5], -464, 121046),
        "v": (0x290D, [10, 7, 2, 4, 8, 4, 8, 7], "7a424878", 451),
    },
    128: {
        "fp8": ([0x1F25], 22659),
        "block": ([0x1F25, 0x1F00], 22672),
        "int8": (0x264D, 41, 696459),
        "rotated": (float.fromhex("-0x1.3cc8aap-2"), float.fromhex("-0x1.28fc1ep+0")),
        "k": (0x284D, [-9, -35, -30, -4, 16, -8, 36, -29], 825, 373509),
        "v": (0x2915, [7, 5, 5, 7, 9, 7, 10, 5], "5775795a", 1011),
    },
    256: {
        "fp8": ([0x1F25], 45366),
        "block": ([0x1F25, 0x1F00, 0x1F25, 0x1F25], 45379),
        "int8": (0x264D, -160, 1398838),
        "rotated": (2.10546875, -1.30859375),
        "k": (0x29D1, [46, -29, -29, -2, 15, -58, -38, -43], 859, 410325),
        "v": (0x28F1, [12, 5, 5, 7, 9, 2, 4, 4], "5c752944", 1996),
    },
}


@every_head_dim
def test_golden_vectors(head_dim):
    """Section 3.5 of the format definition, every number."""
    golden = GOLDEN[head_dim]
    x = torch.tensor([(((37 * i + 11) % 101) - 50) / 16 for i in range(head_dim)])
    assert x[:4].tolist() == [-2.4375, -0.125, 2.1875, -1.8125]
    x = x.bfloat16()
    for kv_format, name in ((FP8, "fp8"), (FP8_64, "block")):
        codes, scales = encode(kv_format, "v", x)
        assert (bits(scales), int(codes.long().sum())) == golden[name]
        assert codes[:8].tolist() == [251, 217, 122, 248, 105, 125, 243, 114]
    codes, scales = encode(INT8, "k", x)
    assert (*bits(scales), int(codes.long().sum()), int(codes.long().square().sum())) == (
        golden["int8"]
    )
    assert codes[:8].tolist() == [-99, -5, 89, -74, 20, 114, -48, 46]
    assert tuple(rotate(x)[:2].tolist()) == golden["rotated"]
    codes, scales = encode(K8V4, "k", x)
    assert (
        *bits(scales),
        codes[:8].tolist(),
        int(codes.long().sum()),
        int(codes.long().square().sum()),
    ) == golden["k"]
    assert all(
        torch.equal(a, b) for a, b in zip(encode(INT8_R, "v", x), (codes, scales), strict=True)
    )
    packed, scales = encode(K8V4, "v", x)
    unpacked = nibbles(packed)
    assert (*bits(scales), unpacked[:8], bytes(packed[:4].tolist()).hex(), sum(unpacked)) == (
        golden["v"]
    )


EDGES = {
    "0": (0.0, 0.0, (1, [0, 0, 0]), (1, [0, 0, 0]), (1, [0, 0, 0]), (0, [0, 0, 0])),
    "1e-9": (1e-9, 1e-9, (1, [9, 9, 9]), (1, [0, 0, 0]), (1, [0, 0, 0]), (0, [4, 14, 11])),
    "inf": (
        *(math.inf, 1.0, (0x5892, [126, 4, 4]), (0x6008, [127, 0, 0])),
        *((0x5408, [127, 127, 127]), (0x59D1, [11, 11, 11])),
    ),
    "nan": (
        *(math.nan, 1.0, (0x1893, [0, 126, 126]), (0x2009, [0, 127, 127])),
        *((0x254B, [-54, 91, 42]), (0x2548, [3, 14, 11])),
    ),
    "1e6": (
        *(1e6, 1e6, (0x5892, [126, 126, 126]), (0x6008, [127, 127, 127])),
        *((0x650A, [-51, 102, 51]), (0x6566, [4, 14, 11])),
    ),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_golden_edge_cases(edge):
    first, rest, fp8, int8, k, v = edge
    x = torch.full((64,), rest)
    x[0] = first
    for kv_format, which, expected in ((FP8, "k", fp8), (INT8, "k", int8), (K8V4, "k", k)):
        codes, scales = encode(kv_format, which, x)
        assert (*bits(scales), codes[:3].tolist()) == expected
    packed, scales = encode(K8V4, "v", x)
    assert (*bits(scales), nibbles(packed)[:3]) == v


@quantised
@every_head_dim
@pytest.mark.parametrize("kind", ["gauss", "t3", "outlier", "one-hot", "constant"])
def test_bytes_equal_the_reference(kv_format, head_dim, kind):
    """KVD-03: also proves that no scale depends on other vectors."""
    assert_equals_reference(kv_format, distribution(kind, 6, head_dim))


@quantised
@every_head_dim
@pytest.mark.parametrize("kind", ["zero", "not finite", "tiny", "subnormal", "vanishing", "huge"])
def test_bytes_equal_the_reference_at_the_edges(kv_format, head_dim, kind):
    x = special(kind, 3, head_dim)
    assert_equals_reference(kv_format, x)
    for which in "kv":
        assert torch.isfinite(decode(kv_format, which, encode(kv_format, which, x))).all()


@settings(deadline=None)
@given(st.data())
def test_bytes_equal_the_reference_for_any_bits(data):
    head_dim = data.draw(st.sampled_from(HEAD_DIMS))
    kv_format = data.draw(st.sampled_from(QUANTISED))
    raw = data.draw(st.binary(min_size=2 * head_dim, max_size=2 * head_dim))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float16)))
    assert_equals_reference(
        kv_format, torch.frombuffer(bytearray(raw), dtype=dtype).view(1, head_dim)
    )


@settings(deadline=None)
@given(st.data())
def test_bytes_equal_the_reference_for_random_vectors(data):
    kv_format = data.draw(st.sampled_from(QUANTISED))
    kind = data.draw(st.sampled_from(("gauss", "t3", "outlier")))
    seed, head_dim = data.draw(st.integers(0, 2**32)), data.draw(st.sampled_from(HEAD_DIMS))
    scale = 2.0 ** data.draw(st.integers(-40, 16))
    assert_equals_reference(kv_format, distribution(kind, 1, head_dim, seed) * scale)


def test_arithmetic_is_correctly_rounded():
    """What the codecs take from torch, against numpy on any bits; torch's own sqrt would fail."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 0x7F800000, (2, 200_000), dtype=np.uint32).view(np.float32)
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    with np.errstate(over="ignore", divide="ignore"):
        expected = [a + b, a - b, a * b, a / b, np.sqrt(a), a.astype(np.float16).astype(np.float32)]
    results = [x + y, x - y, x * y, x / y, sqrt_rn(x), x.half().float()]
    for result, reference_values in zip(results, expected, strict=True):
        assert np.array_equal(result.numpy(), reference_values)
    # A root that torch 2.11 rounds to the wrong side on a CPU.
    value = torch.tensor([float.fromhex("0x1.5529f4p+10")])
    assert sqrt_rn(value).item() == float.fromhex("0x1.2787acp+5")


def test_up16_is_the_least_half_not_below():
    every = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    assert torch.equal(up16(every).float(), every)
    above = torch.nextafter(every[:-1], torch.tensor(math.inf))
    assert torch.equal(up16(above).float(), every[1:])
    below = torch.nextafter(every, torch.tensor(0.0))
    assert torch.equal(up16(below).float(), every)
    assert bits(up16(torch.tensor([0.0, 1e-45, 65504.0, 65505.0, 3e38]))) == [1, 1] + [0x7BFF] * 3


@settings(deadline=None)
@given(st.floats(0, 2**127, width=32))
def test_up16_equals_the_reference(value):
    assert bits(up16(torch.tensor([value]))) == [reference.up16_bits(value)]


def test_rounding_to_fp8_goes_to_even_and_keeps_the_sign_of_zero():
    # With the largest value 448 the scale is 1 and values reach the rounding as they are.
    table = np.array(reference.E4M3)
    ties = (table[1:] + table[:-1]) / 2
    x = torch.zeros(128)
    x[:126] = torch.from_numpy(ties.astype(np.float32))
    x[126:] = torch.tensor([448.0, -0.0])
    codes, scales = encode(FP8, "k", x)
    assert bits(scales) == [0x3C00]
    assert codes.tolist() == [(i + 1) & ~1 for i in range(126)] + [126, 0x80]


def test_a_value_on_a_threshold_takes_the_lower_code():
    # One number and its negative: u is +-A / sqrt(2 x^2) whatever x is; zeros lie on threshold 0.
    y = torch.zeros(64)
    y[0] = 1.0
    packed, scale = encode(K8V4, "v", unrotate(y))
    codes = nibbles(packed)
    assert codes[0] == 15
    assert set(codes[1:]) == {7}
    assert scale.item() > 0


@pytest.mark.parametrize(
    ("head_dim", "seeds"),
    [
        (64, (943478, 9467, 49647)),
        (128, (942, 5630, 22713)),
        (256, (259275, 470616, 1571, 47756, 78946)),
    ],
)
def test_sums_follow_the_tree(head_dim, seeds):
    """Vectors found by search: another order of the norm or of the fit gives other bytes."""
    words = np.array([reference.splitmix(head_dim, seed) for seed in seeds], dtype=np.uint64)
    x = ((words >> np.uint64(40)).astype(np.float32) - 2**23) / 2**21
    assert_equals_reference(K8V4, torch.from_numpy(x))


@every_head_dim
def test_transforms_equal_the_scalar_ones(head_dim):
    x = distribution("t3", 3, head_dim)
    for row, vector in enumerate(x.numpy()):
        assert fwht(x)[row].tolist() == [float(v) for v in reference.fwht(list(vector))]
        assert rotate(x)[row].tolist() == [float(v) for v in reference.rotate(list(vector))]
        assert tree_sum(x)[row].item() == float(reference.tree(list(vector)))
    i = np.arange(head_dim)
    sylvester = 1 - 2 * (np.bitwise_count(i[:, None] & i) % 2).astype(np.float32)
    assert torch.equal(fwht(torch.eye(head_dim)), torch.from_numpy(sylvester))
    back = unrotate(rotate(x))
    assert ((back - x).norm(dim=-1) <= 2e-6 * x.norm(dim=-1)).all()


@every_format
@every_head_dim
def test_any_leading_shape_and_any_strides_give_the_same_bytes(kv_format, head_dim):
    """What is written depends on the one vector only: not on the batch, not on its memory."""
    x = distribution("t3", 30, head_dim).bfloat16()
    for which in "kv":
        alone = [
            torch.stack(rows)
            for rows in zip(*(encode(kv_format, which, row) for row in x), strict=True)
        ]
        strided = x.view(5, 2, 3, head_dim).transpose(0, 2)
        for batch in (x, x.view(5, 2, 3, head_dim), strided, x.t().contiguous().t()):
            flat = [
                rows.transpose(0, 2) if batch is strided else rows
                for rows in encode(kv_format, which, batch)
            ]
            for rows, expected in zip(flat, alone, strict=True):
                assert torch.equal(rows.reshape(expected.shape), expected)
        for shape in ((0, head_dim), (2, 0, 3, head_dim)):
            rows = encode(kv_format, which, torch.zeros(shape, dtype=torch.bfloat16))
            assert decode(kv_format, which, rows).shape == shape


@quantised
@every_head_dim
def test_decoded_values_are_exact_products(kv_format, head_dim):
    x = torch.cat([distribution("t3", 50, head_dim), special("huge", 3, head_dim)])
    for which in "kv":
        codes, scales = encode(kv_format, which, x)
        values = decode(kv_format, which, (codes, scales)).double()
        if kv_format.name == "fp8_e4m3":
            wide = codes.view(torch.float8_e4m3fn).double()
        elif kv_format is K8V4 and which == "v":
            wide = torch.tensor([[CODEBOOK[code] for code in nibbles(row)] for row in codes])
        else:
            wide = codes.double()
        blocks = scales.double().repeat_interleave(head_dim // scales.shape[-1], dim=-1)
        assert torch.equal(values, wide * blocks)


def test_auto_stores_the_bits_it_is_given():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(-1, 64)
    for dtype in (torch.bfloat16, torch.float16):
        (stored,) = encode(parse_kv_format("auto", model_dtype=dtype), "k", every.view(dtype))
        assert torch.equal(stored.view(torch.int16), every)


def test_sanitise_makes_everything_finite():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -65505.0, -0.0, 1.5])
    expected = [0.0, 65504.0, -65504.0, 65504.0, -65504.0, -0.0, 1.5]
    assert sanitise(x).tolist() == expected
    assert torch.signbit(sanitise(x)).tolist() == [False, False, True, False, True, True, False]
