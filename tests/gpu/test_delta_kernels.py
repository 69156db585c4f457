"""The linear layers on the device against float64 and the torch backend, and in bits."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from headrace.backends.cuda.delta import DeltaPrefill, DeltaStep, DeltaWeights
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError
from headrace.models.hybrid_config import LinearAttention

DEVICE = torch.device("cuda")
TORCH = TorchBackend(DEVICE)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
# Half a unit in the last place: of the norm before the gate and of the result.
OUTPUT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 1e-5}
# For bf16, T, P and what is multiplied with them keep 16 bits; each rounding is at most 2^-18.
PREFILL = {BF16: 2.0**-16, FP16: 1e-5, FP32: 1e-5}
SIZES = {
    "27b": (16, 48, 128, 128),
    "one": (1, 1, 128, 128),
    "mixed": (2, 4, 64, 32),
    "small": (3, 6, 32, 64),
    "wide": (1, 8, 128, 64),
}


@dataclass
class Layer:
    sizes: LinearAttention
    weights: DeltaWeights
    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    conv: torch.Tensor
    state: torch.Tensor

    def run(self, step, rows, slots, conv, state):
        return step.step(
            self.qkv[rows],
            self.z[rows],
            self.b[rows],
            self.a[rows],
            self.weights,
            conv,
            state,
            torch.tensor(slots, device=DEVICE),
        )


def layer_of(name, dtype, rows=8, slots=12):
    sizes = LinearAttention(
        **dict(zip(LinearAttention.__dataclass_fields__, SIZES[name], strict=True))
    )
    generator = torch.Generator(DEVICE).manual_seed(7)

    def noise(*shape, to=dtype):
        return torch.randn(shape, generator=generator, device=DEVICE).to(to)

    # Strided, as the two fused projections give them.
    projected = noise(rows, sizes.channels + sizes.value_size)
    gates = noise(rows, 2 * sizes.value_heads)
    weights = DeltaWeights(
        taps=noise(sizes.channels, 4, to=FP32),
        a_log=noise(sizes.value_heads, to=FP32),
        dt_bias=noise(sizes.value_heads, to=FP32),
        norm=noise(sizes.value_head_dim),
        eps=EPS,
    )
    return Layer(
        sizes,
        weights,
        projected[:, : sizes.channels],
        projected[:, sizes.channels :],
        gates[:, : sizes.value_heads],
        gates[:, sizes.value_heads :],
        noise(slots, sizes.channels, 3),
        noise(slots, sizes.value_heads, sizes.value_head_dim, sizes.key_head_dim, to=FP32),
    )


def step_of(layer, dtype):
    return DeltaStep(layer.sizes, dtype)


def reference(layer, slots):
    """Convolution as the torch backend rounds it, everything after it in float64."""
    sizes, weights = layer.sizes, layer.weights
    slots = torch.tensor(slots, device=DEVICE)
    conv, state = layer.conv.clone(), layer.state.double()
    mixed = TORCH.conv_step(layer.qkv, weights.taps, conv, slots).double()
    q, k, v = mixed.split([sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
    group = sizes.value_heads // sizes.key_heads
    rows = len(slots)
    q = q.view(rows, sizes.key_heads, -1).repeat_interleave(group, 1)
    k = k.view(rows, sizes.key_heads, -1).repeat_interleave(group, 1)
    v = v.view(rows, sizes.value_heads, -1)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * sizes.key_head_dim**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    beta = layer.b.double().sigmoid().unsqueeze(-1)
    rate = -weights.a_log.double().exp()
    decay = (rate * F.softplus(layer.a.double() + weights.dt_bias)).exp()
    s = state[slots] * decay[..., None, None]
    u = beta * (v - (s @ k.unsqueeze(-1)).squeeze(-1))
    s = s + u.unsqueeze(-1) * k.unsqueeze(-2)
    state[slots] = s
    o = (s @ q.unsqueeze(-1)).squeeze(-1)
    normed = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt()
    gate = F.silu(layer.z.double()).view(o.shape)
    return (normed * weights.norm.double() * gate).flatten(1), conv, state


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", SIZES)
def test_step_against_float64(name, dtype):
    layer = layer_of(name, dtype)
    slots = [5, 11, 0, 7, 1, 2, 10, 4]
    expected, conv_after, state_after = reference(layer, slots)
    conv, state = layer.conv.clone(), layer.state.clone()
    out = layer.run(step_of(layer, dtype), slice(None), slots, conv, state)
    assert torch.equal(conv, conv_after)
    assert relative(state, state_after) < 1e-6
    assert relative(out, expected) < OUTPUT[dtype]
    for row in range(8):
        assert relative(state[slots[row]], state_after[slots[row]]) < 2e-6


@pytest.mark.parametrize("name", ["27b", "mixed"])
def test_many_steps_stay_close(name):
    layer = layer_of(name, BF16)
    slots = list(range(8))
    step, conv, state = step_of(layer, BF16), layer.conv.clone(), layer.state.clone()
    for _ in range(16):
        expected, layer.conv, exact = reference(layer, slots)
        out = layer.run(step, slice(None), slots, conv, state)
        layer.state = exact
        assert relative(out, expected) < OUTPUT[BF16]
    assert relative(state[:8], exact[:8]) < 2e-6
    assert torch.equal(conv, layer.conv)


@pytest.mark.parametrize("name", ["27b", "small"])
def test_a_row_depends_on_itself_alone(name):
    layer = layer_of(name, BF16)
    slots = [5, 11, 0, 7, 1, 2, 10, 4]
    step = step_of(layer, BF16)
    conv, state = layer.conv.clone(), layer.state.clone()
    out = layer.run(step, slice(None), slots, conv, state)
    for row, slot in enumerate(slots):
        # Everything that is not its own is poison.
        alone_conv, alone_state = layer.conv.clone(), layer.state.clone()
        others = [other for other in range(12) if other != slot]
        alone_conv[others], alone_state[others] = torch.nan, torch.nan
        one = layer.run(step, slice(row, row + 1), [slot], alone_conv, alone_state)
        assert torch.equal(one[0], out[row])
        assert torch.equal(alone_conv[slot], conv[slot])
        assert torch.equal(alone_state[slot], state[slot])
    poisoned = layer_of(name, BF16)
    poisoned.qkv[3], poisoned.z[3], poisoned.b[3], poisoned.a[3] = (torch.nan,) * 4
    conv_nan, state_nan = layer.conv.clone(), layer.state.clone()
    with_nan = poisoned.run(step, slice(None), slots, conv_nan, state_nan)
    rest = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(with_nan[rest], out[rest])
    assert torch.equal(state_nan[[slots[row] for row in rest]], state[[slots[r] for r in rest]])
    assert with_nan[3].isnan().all()


def test_padding_rows_touch_nothing():
    """GRF-01, GRF-03: a negative slot."""
    layer = layer_of("27b", BF16)
    step = step_of(layer, BF16)
    live = [3, -1, 6, -1, -1, 2, -1, -7]
    conv, state = layer.conv.clone(), layer.state.clone()
    out = layer.run(step, slice(None), live, conv, state)
    whole_conv, whole_state = layer.conv.clone(), layer.state.clone()
    whole = layer.run(step, slice(None), [3, 0, 6, 1, 4, 2, 5, 7], whole_conv, whole_state)
    for row, slot in enumerate(live):
        if slot < 0:
            assert not out[row].any()
        else:
            assert torch.equal(out[row], whole[row])
            assert torch.equal(state[slot], whole_state[slot])
            assert torch.equal(conv[slot], whole_conv[slot])
    untouched = [slot for slot in range(12) if slot not in live]
    assert torch.equal(conv[untouched], layer.conv[untouched])
    assert torch.equal(state[untouched], layer.state[untouched])


def test_a_captured_step_equals_an_eager_one():
    layer = layer_of("27b", BF16)
    step = step_of(layer, BF16)
    eager_conv, eager_state = layer.conv.clone(), layer.state.clone()
    slots = torch.tensor([2, -1, 9, 4, 0, 1, 3, 5], device=DEVICE)
    expected = [
        layer.run(step, slice(None), slots.tolist(), eager_conv, eager_state) for _ in range(3)
    ]
    conv, state = layer.conv.clone(), layer.state.clone()
    inputs = (layer.qkv, layer.z, layer.b, layer.a, layer.weights, conv, state, slots)
    out = torch.empty_like(expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.step(*inputs, out=out)
    for wanted in expected:
        graph.replay()
        assert torch.equal(out, wanted)
    assert torch.equal(conv, eager_conv)
    assert torch.equal(state, eager_state)


def test_what_the_kernel_does_not_have_is_refused():
    layer = layer_of("one", BF16)
    step = step_of(layer, BF16)
    with pytest.raises(ConfigError, match="slots"):
        layer.run(step, slice(None), [0], layer.conv, layer.state)
    with pytest.raises(ConfigError, match="state"):
        layer.run(step, slice(0, 1), [0], layer.conv, layer.state.half())
    with pytest.raises(ConfigError, match="head widths"):
        DeltaStep(
            LinearAttention(key_heads=1, value_heads=1, key_head_dim=48, value_head_dim=128),
            BF16,
        )


def prompt_of(name, dtype, tokens):
    sizes = layer_of(name, dtype, rows=1).sizes
    generator = torch.Generator(DEVICE).manual_seed(tokens)

    def noise(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    mixed = noise(tokens, sizes.channels).to(dtype)  # strided, as the convolution leaves it
    q, k, v = mixed.split([sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
    q, k = (x.unflatten(1, (sizes.key_heads, sizes.key_head_dim)) for x in (q, k))
    v = v.unflatten(1, (sizes.value_heads, sizes.value_head_dim))
    g = -noise(tokens, sizes.value_heads).exp()
    beta = noise(tokens, sizes.value_heads).sigmoid()
    state = noise(2, sizes.value_heads, sizes.value_head_dim, sizes.key_head_dim)
    return sizes, (q, k, v, g, beta), state


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", ["27b", "one", "mixed", "small", "wide"])
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (63, 64), (64, 0), (150, 37), (700, 5)])
@pytest.mark.parametrize("initial", [False, True])
def test_prefill_against_float64(name, dtype, tokens, start, initial):
    sizes, inputs, state = prompt_of(name, dtype, tokens)
    exact = state.double()
    expected = TORCH.gated_delta_prefill(
        *(x.double() for x in inputs), exact, 1, start, has_initial_state=initial
    )
    if not initial:
        state[1] = torch.nan  # by flag, not by trust
    kernel = DeltaPrefill(sizes, dtype, DEVICE, max_chunks=4)
    out = kernel.prefill(*inputs, state[1], start, has_initial_state=initial)
    assert relative(out, expected) < PREFILL[dtype]
    assert relative(state, exact) < PREFILL[dtype]


@pytest.mark.parametrize("decay", [1e-3, 50.0])
def test_prefill_with_slow_and_strong_decay(decay):
    sizes, (q, k, v, g, beta), state = prompt_of("mixed", BF16, 600)
    g = g * decay
    exact = state.double()
    inputs = (q, k, v, g, beta)
    expected = TORCH.gated_delta_prefill(
        *(x.double() for x in inputs), exact, 1, 0, has_initial_state=True
    )
    kernel = DeltaPrefill(sizes, BF16, DEVICE)
    out = kernel.prefill(*inputs, state[1], 0, has_initial_state=True)
    assert relative(out, expected) < 1e-4
    assert relative(state[1], exact[1]) < 1e-4


def test_cuts_of_a_prompt_at_multiples_of_64_are_invisible():
    sizes, inputs, state = prompt_of("27b", BF16, 421)
    whole, parts = state.clone(), state.clone()
    kernel = DeltaPrefill(sizes, BF16, DEVICE, max_chunks=3)
    other = DeltaPrefill(sizes, BF16, DEVICE, max_chunks=16)
    expected = kernel.prefill(*inputs, whole[1], 27, has_initial_state=True)
    runs = []
    for start, end in ((27, 64), (64, 256), (256, 448)):
        run = [x[start - 27 : end - 27] for x in inputs]
        runs.append(other.prefill(*run, parts[1], start, has_initial_state=True))
    assert torch.equal(torch.cat(runs), expected)
    assert torch.equal(parts, whole)
    assert torch.equal(whole[0], state[0])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_prefill_of_a_head_depends_on_itself_alone(dtype):
    sizes, inputs, state = prompt_of("27b", dtype, 150)
    kernel = DeltaPrefill(sizes, dtype, DEVICE, max_chunks=2)
    expected_state = state.clone()
    expected = kernel.prefill(*inputs, expected_state[1], 37, has_initial_state=True)
    # The first key head with its values, and one value head of the last.
    q, k, v, g, beta = (x.clone() for x in inputs)
    group = sizes.value_heads // sizes.key_heads
    for x, heads in ((q, 1), (k, 1), (v, group), (g, group), (beta, group)):
        x[:, :heads] = torch.nan
    v[:, -1] = torch.nan
    state[1, :group], state[1, -1] = torch.nan, torch.nan
    out = kernel.prefill(q, k, v, g, beta, state[1], 37, has_initial_state=True)
    assert torch.equal(out[:, group:-1], expected[:, group:-1])
    assert torch.equal(state[1, group:-1], expected_state[1, group:-1])
    assert out[:, :group].isnan().all()
    assert out[:, -1].isnan().all()


def test_prefill_of_keys_that_hardly_differ():
    """Hardly any decay and strong writes: the inverse of a chunk is far from the identity."""
    sizes, (q, k, v, g, beta), state = prompt_of("one", BF16, 256)
    common = state[0, 0, :1]
    q, k = ((common + 0.3 * x.float()).to(BF16) for x in (q, k))
    inputs = (q, k, v, g * 1e-4, 1 - 1e-3 * beta)
    exact = state.double()
    expected = TORCH.gated_delta_prefill(
        *(x.double() for x in inputs), exact, 1, 0, has_initial_state=True
    )
    out = DeltaPrefill(sizes, BF16, DEVICE).prefill(*inputs, state[1], 0, has_initial_state=True)
    assert relative(out, expected) < 2e-4  # the output is a small difference
    assert relative(state[1], exact[1]) < 2e-5


def test_rows_between_multiples_of_16_bytes_are_refused():
    sizes, inputs, state = prompt_of("one", BF16, 3)
    size = sizes.key_head_dim
    shifted = torch.zeros(3, 1, size + 8, dtype=BF16, device=DEVICE)[..., 4 : size + 4]
    with pytest.raises(ConfigError, match="16 bytes"):
        DeltaPrefill(sizes, BF16, DEVICE).prefill(
            shifted, shifted, *inputs[2:], state[1], 0, has_initial_state=False
        )
