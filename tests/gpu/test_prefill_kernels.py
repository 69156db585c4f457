"""What a prompt needs beside products, and the products themselves, against float64 and torch."""

import pytest
import torch
from test_delta_kernels import sent

from headrace.backends.cuda import fused, many_rows, prefill
from headrace.backends.cuda_ops import CudaBackend
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError
from headrace.layers.block_fp8 import quantise

DEVICE = torch.device("cuda")
TORCH = TorchBackend(DEVICE)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def noise(*shape, dtype=FP32, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 31, 64, 65, 300])
@pytest.mark.parametrize("initial", [False, True])
def test_convolution_has_the_bits_of_torch(dtype, tokens, initial):
    channels, start = 1032, 5 if initial else 0
    x = noise(tokens, channels + 96, dtype=dtype)[:, :channels]  # strided
    taps = noise(channels, 4, seed=1)
    ours = noise(3, channels, 3, dtype=dtype, seed=2)
    if not initial:
        ours[1] = torch.nan
    theirs = ours.clone()
    expected = TORCH.conv_prefill(x, taps, theirs, 1, has_initial_state=initial)
    out = torch.empty_like(expected)
    prefill.conv_prefill(x, taps, ours, sent((1, start, tokens)), out=out)
    assert torch.equal(out, expected)
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[[0, 2]], theirs[[0, 2]])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_convolutions_of_many_segments(dtype):
    """More than a launch has; rows between and slots of nobody keep what they have."""
    channels, count, first = 264, 45, 3
    spans = [
        (count - slot, (0, 1, 2, 70)[slot % 4], (1, 2, 3, 32, 33, 70, 100)[slot % 7])
        for slot in range(count)
    ]
    segments = sent(*spans, first=first)
    tokens = segments[-1].offset + segments[-1].length
    x = noise(tokens + 2, channels + 8, dtype=dtype)[:, :channels]
    x[:first], x[tokens:] = torch.nan, torch.nan
    taps = noise(channels, 4, seed=1)
    ours = noise(count + 2, channels, 3, dtype=dtype, seed=2)
    theirs = ours.clone()
    out = torch.full((tokens + 2, channels), 3.0, dtype=dtype, device=DEVICE)
    expected = out.clone()
    for segment in segments:
        rows, slot = slice(segment.offset, segment.offset + segment.length), segment.state_slot
        expected[rows] = TORCH.conv_prefill(
            x[rows], taps, theirs, slot, has_initial_state=segment.start > 0
        )
        if not segment.start:
            ours[slot] = torch.nan
    prefill.conv_prefill(x, taps, ours, segments, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(ours, theirs)


def test_what_the_convolution_does_not_have_is_refused():
    x, taps, state = noise(4, 64, dtype=BF16), noise(64, 4), noise(2, 64, 3, dtype=BF16)
    segments, out = sent((1, 0, 4)), torch.empty_like(x)
    with pytest.raises(ConfigError, match="x is"):
        prefill.conv_prefill(x[:, :60], taps, state, segments, out=out)
    with pytest.raises(ConfigError, match="state"):
        prefill.conv_prefill(x, taps, state[:, :, :2], segments, out=out)
    with pytest.raises(ConfigError, match="out"):
        prefill.conv_prefill(x, taps, state, segments, out=out[:3])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_gated_norm(dtype, width):
    x, z = noise(77, 6, width), noise(77, 6 * width + 40, dtype=dtype, seed=1)
    z = z[:, : 6 * width]
    weight = noise(width, dtype=dtype, seed=2)
    out = torch.full((77, 6 * width), 3.0, dtype=dtype, device=DEVICE)
    prefill.gated_norm(x, z, weight, 1e-6, out=out)
    bound = {BF16: 2e-3, FP16: 3e-4, FP32: 1e-6}[dtype]
    expected = TORCH.gated_rms_norm(x, z.unflatten(1, (6, width)), weight, 1e-6)
    assert relative(out, expected.flatten(1)) < bound
    few = torch.full_like(out, 3.0)
    prefill.gated_norm(x[5:9], z[5:9], weight, 1e-6, out=few[5:9])
    assert torch.equal(few[5:9], out[5:9])
    assert (few[:5] == 3.0).all()
    assert (few[9:] == 3.0).all()
    with pytest.raises(ConfigError, match="gated norm"):
        prefill.gated_norm(x, z, weight, 1e-6, out=out[1:])


def test_rows_are_quantised_by_groups():
    x = noise(9, 1024, dtype=BF16) * noise(9, 1, dtype=BF16, seed=1).exp()
    x[3, :128] = 0
    codes, scales = prefill.quantise_rows(x)
    assert scales.stride() == (1, 9)
    groups = x.float().view(9, 8, 128)
    largest = groups.abs().amax(-1)
    # A tensor divisor: dividing by a number becomes a product with its reciprocal on a GPU.
    wanted = largest / torch.full_like(largest, 448)
    assert torch.equal(scales, torch.where(largest > 0, wanted, 1.0))
    expected = (groups / scales.unsqueeze(-1)).view(9, 1024).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    x[2, 5] = torch.nan
    others = [0, 1, 3, 4, 5, 6, 7, 8]
    again = prefill.quantise_rows(x)[0]
    assert torch.equal(again[others].view(torch.uint8), codes[others].view(torch.uint8))
    assert again[2, :128].float().isnan().any()
    with pytest.raises(ConfigError, match="quantise"):
        prefill.quantise_rows(noise(2, 100, dtype=BF16))


@pytest.mark.parametrize("columns", [128, 1024, 2048 + 384])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_codes_have_the_bits_of_divisions(dtype, columns):
    """Also for zeros of both signs, tiny and infinite values, and groups of one of them."""
    x = noise(37, columns, dtype=dtype) * noise(37, 1, seed=1).exp().to(dtype)
    tiny = torch.finfo(dtype).tiny
    x[:, 3::7], x[:, 5::11] = -0.0, 0.0
    x[5, 0], x[6, 1] = torch.inf, -torch.inf
    x[7], x[8], x[9] = 3 * tiny, -0.0, torch.nan
    x[10] *= torch.finfo(dtype).max / 64
    codes, scales = prefill.quantise_rows(x)
    groups = x.float().view(37, -1, 128)
    largest = groups.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)
    wanted = torch.where(largest > 0, largest / torch.full_like(largest, 448), 1.0)
    assert torch.equal(scales, wanted)
    quotients = (groups / wanted.unsqueeze(-1)).view(37, columns)
    finite = quotients.isfinite()
    expected = quotients.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes.view(torch.uint8)[finite], expected[finite])
    assert codes.float()[quotients.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (3, 2048), (66, 2048 + 640)])
def test_codes_of_a_gated_product_are_those_of_the_separate_steps(dtype, rows, columns):
    gate_up = (3 * noise(rows, 2 * columns + 64, dtype=dtype))[:, : 2 * columns]  # strided
    gate_up[rows - 1, :128] = 0
    codes, scales = prefill.quantise_rows(fused.silu_mul(gate_up))
    ours, our_scales = prefill.quantise_silu_mul(gate_up)
    assert torch.equal(ours.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(our_scales, scales)


@pytest.mark.parametrize("kind", ["dense", "codes", "odd codes"])
def test_gated_products_of_many_rows_have_the_bits_of_two_steps(kind):
    rows, columns = (1024, 1024) if kind != "odd codes" else (208, 320)
    dense = noise(rows, columns, seed=1) * columns**-0.5
    weight = dense.to(BF16) if kind == "dense" else quantise(dense)
    products = many_rows.ManyRows(fixed=True)
    gate_up = noise(1500, 2 * columns, dtype=BF16)
    expected = products.linear(fused.silu_mul(gate_up), weight)
    assert torch.equal(products.linear(gate_up, weight, gated=True), expected)


@pytest.mark.parametrize("kind", ["dense", "codes", "odd codes"])
def test_products_of_many_rows(kind):
    rows, columns = (1024, 1024) if kind != "odd codes" else (208, 320)
    dense = noise(rows, columns, seed=1) * columns**-0.5
    weight = dense.to(BF16) if kind == "dense" else quantise(dense)
    exact = weight.double() if kind == "dense" else weight.dequantise().double()
    products = many_rows.ManyRows(fixed=True)
    x = noise(1500, columns, dtype=BF16)
    out = products.linear(x, weight)
    limit = 0.04 if kind == "codes" else 4e-3
    assert relative(out, x.double() @ exact.T) < limit
    for first, last in ((0, 1), (64, 128), (3, 700), (1024, 1500), (0, 1500)):
        assert torch.equal(products.linear(x[first:last], weight), out[first:last])
    poisoned = x.clone()
    poisoned[100:] = torch.nan
    assert torch.equal(products.linear(poisoned, weight)[:100], out[:100])
    residual = noise(1500, rows, dtype=BF16, seed=2)
    added = products.linear(x, weight, residual.clone())
    assert relative(added, residual.double() + x.double() @ exact.T) < limit
    for first, last in ((0, 1), (3, 700), (1024, 1500)):
        part = products.linear(x[first:last], weight, residual[first:last].clone())
        assert torch.equal(part, added[first:last])


@pytest.mark.parametrize(("rows", "columns"), [(1024, 1024), (5120, 17408)])
def test_products_of_codes_are_those_of_what_they_stand_for(rows, columns):
    """In float64, of the same codes and scales: what is left is the rounding to bf16, and the sums
    of the tensor cores, which keep some 14 bits between two scales."""
    weight = quantise(noise(rows, columns, seed=1))
    codes, scales = prefill.quantise_rows(noise(300, columns, dtype=BF16))
    x = codes.double().unflatten(1, (-1, prefill.GROUP)) * scales.double().unsqueeze(-1)
    expected = x.flatten(1) @ weight.dequantise().double().T
    assert relative(many_rows.product_of_codes(codes, scales, weight, BF16), expected) < 4e-3


def test_an_mlp_of_codes_has_the_bits_of_its_parts():
    backend = CudaBackend(DEVICE)
    gate_up, down = (quantise(noise(rows, 1024, seed=rows) / 32) for rows in (2048, 1024))
    x, residual = noise(300, 1024, dtype=BF16), noise(300, 1024, dtype=BF16, seed=1)
    separate = fused.silu_mul(backend.linear(x, gate_up))
    expected = backend.linear(separate, down, residual=residual.clone())
    out = backend.mlp(x, gate_up, down, decode_rows=0, residual=residual.clone())
    assert torch.equal(out, expected)
    # Beside decode rows the gate has a launch of its own; prompts keep their bits.
    mixed = backend.mlp(x, gate_up, down, decode_rows=3, residual=residual.clone())
    assert torch.equal(mixed[3:], expected[3:])
    assert relative(mixed[:3], expected[:3]) < 0.1


def test_which_sizes_of_a_block_have_the_same_bits(capsys):
    """Prints what the library gives for the shapes of 8B and 27B; 1024 is always there."""
    for name, n, k, coded in (
        ("8b qkv", 6144, 4096, False),
        ("8b o", 4096, 4096, False),
        ("8b gate up", 24576, 4096, False),
        ("8b down", 4096, 12288, False),
        ("0.6b o", 1024, 2048, False),
        ("0.6b down", 1024, 3072, False),
        ("27b gate up", 34816, 5120, True),
        ("27b down", 5120, 17408, True),
        ("27b o", 5120, 6144, True),
    ):
        dense = noise(n, k, dtype=BF16)
        sizes = many_rows.ManyRows(fixed=True).probe(quantise(dense) if coded else dense)
        with capsys.disabled():
            print(f"\n{name} [{n}, {k}]: {sizes}", end="")
        assert 1024 in sizes
