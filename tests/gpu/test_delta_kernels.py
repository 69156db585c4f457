"""The linear layers on the device against float64 and the torch backend, and in bits."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from headrace.backends.cuda.delta import DeltaPrefill, DeltaStep, DeltaWeights
from headrace.backends.cuda.segments import GROUP, GROUP_BYTES, DeviceSegments
from headrace.backends.cuda_ops import CudaBackend
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError
from headrace.models.batch import PrefillSegment
from headrace.models.hybrid_config import LinearAttention

DEVICE = torch.device("cuda")
TORCH = TorchBackend(DEVICE)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
# Half a unit in the last place: of the norm before the gate and of the result.
OUTPUT = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 1e-5}
# For bf16, T, P and what is multiplied with them keep 16 bits; each rounding is at most 2^-18.
PREFILL = {BF16: 2.0**-16, FP16: 1e-5, FP32: 1e-5}
# Of a few rows: both results are rounded, and the norm of a head may be of a small difference.
MIXED = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 1e-4}
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

    def mix(self, backend, segments, conv, state, out, rows=slice(None)):
        inputs = (self.qkv[rows], self.z[rows], self.b[rows], self.a[rows], self.weights)
        backend.delta_mix_prefill(*inputs, conv, state, segments, out=out)


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


def placed(*spans, first=0):
    """Segments (slot, start, tokens), one after the other from a row on."""
    segments, offset = [], first
    for slot, start, tokens in spans:
        segments.append(
            PrefillSegment(
                table=torch.empty(0, dtype=torch.int32, device=DEVICE),
                state_slot=slot,
                start=start,
                length=tokens,
                offset=offset,
            )
        )
        offset += tokens
    return segments


def sent(*spans, first=0):
    return DeviceSegments.sent(placed(*spans, first=first), DEVICE)


@dataclass
class Prompt:
    """What the delta rule is given; `mixed` as the convolution leaves it."""

    sizes: LinearAttention
    weights: DeltaWeights
    mixed: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    state: torch.Tensor

    @property
    def heads(self):
        """Views of q, k, v by heads."""
        sizes = self.sizes
        q, k, v = self.mixed.split([sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
        return (
            q.unflatten(1, (sizes.key_heads, -1)),
            k.unflatten(1, (sizes.key_heads, -1)),
            v.unflatten(1, (sizes.value_heads, -1)),
        )

    def run(self, kernel, state, *spans, rows=slice(None)):
        """Segments from the first of these rows on; what is not written is NaN."""
        mixed, b, a = (x[rows] for x in (self.mixed, self.b, self.a))
        shape = (len(mixed), self.sizes.value_heads, self.sizes.value_head_dim)
        out = torch.full(shape, torch.nan, device=DEVICE)
        kernel.prefill(mixed, b, a, self.weights, state, sent(*spans), out=out)
        return out

    def exact(self, slot, start):
        """All rows as one segment, in float64."""
        state = self.state.double()
        beta = self.b.double().sigmoid()
        rate = -self.weights.a_log.double().exp()
        g = rate * F.softplus(self.a.double() + self.weights.dt_bias)
        out = TORCH.gated_delta_prefill(
            *(x.double() for x in self.heads),
            g,
            beta,
            state,
            slot,
            start,
            has_initial_state=start > 0,
        )
        return out, state


def prompt_of(name, dtype, tokens, slots=2):
    """Strided rows, as the projection of gates gives them."""
    layer = layer_of(name, dtype, rows=tokens, slots=slots)
    mixed = layer.qkv.contiguous()
    return Prompt(layer.sizes, layer.weights, mixed, layer.b, layer.a, layer.state)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", ["27b", "one", "mixed", "small", "wide"])
@pytest.mark.parametrize(
    ("tokens", "start"),
    [(1, 0), (1, 64), (63, 64), (64, 0), (64, 1), (65, 0), (150, 37), (700, 5), (700, 0)],
)
def test_prefill_against_float64(name, dtype, tokens, start):
    """Gates and delta rule."""
    prompt = prompt_of(name, dtype, tokens)
    expected, exact = prompt.exact(1, start)
    state = prompt.state.clone()
    if not start:
        state[1] = torch.nan  # by position, not by trust
    kernel = DeltaPrefill(prompt.sizes, dtype, DEVICE, max_chunks=4)
    out = prompt.run(kernel, state, (1, start, tokens))
    assert relative(out, expected) < PREFILL[dtype]
    assert relative(state, exact) < PREFILL[dtype]
    assert torch.equal(state[0], prompt.state[0])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gates_of_a_prompt_against_float64(dtype):
    """Both sides of the threshold of softplus. Keys of zero leave the state but for its decay."""
    prompt = prompt_of("27b", dtype, 1)
    heads = prompt.sizes.value_heads
    values = torch.linspace(-30, 30, heads, device=DEVICE)
    prompt.a[0], prompt.b[0] = values, values
    prompt.weights.a_log.fill_(-2.0)
    kernel = DeltaPrefill(prompt.sizes, dtype, DEVICE)
    prompt.mixed.zero_()
    state = prompt.state.clone()
    prompt.run(kernel, state, (1, 64, 1))
    decay = F.softplus(prompt.a[0].double() + prompt.weights.dt_bias)
    decay = (-prompt.weights.a_log.double().exp() * decay).exp()
    ratio = state[1].double() / prompt.state[1].double()
    assert float((ratio / decay[:, None, None] - 1).abs().max()) < 4e-6
    # One key and values of one, written to a state of zeros.
    _, k, v = prompt.heads
    k[..., 0], v[:] = 8.0, 1.0
    prompt.run(kernel, state, (1, 0, 1))
    written = state[1, :, :, 0].double() / prompt.b[0].double().sigmoid()[:, None]
    assert float((written - 1).abs().max()) < 2 * PREFILL[dtype]
    assert not state[1, :, :, 1:].any()


@pytest.mark.parametrize("decay", [1e-3, 50.0])
def test_prefill_with_slow_and_strong_decay(decay):
    prompt = prompt_of("mixed", BF16, 600)
    prompt.weights.a_log.add_(torch.tensor(decay).log())
    expected, exact = prompt.exact(1, 64)
    out = prompt.run(DeltaPrefill(prompt.sizes, BF16, DEVICE), prompt.state, (1, 64, 600))
    assert relative(out, expected) < 1e-4
    assert relative(prompt.state[1], exact[1]) < 1e-4


def test_cuts_of_a_prompt_at_multiples_of_64_are_invisible():
    prompt = prompt_of("27b", BF16, 421)
    whole, parts = prompt.state.clone(), prompt.state.clone()
    kernel = DeltaPrefill(prompt.sizes, BF16, DEVICE, max_chunks=3)
    other = DeltaPrefill(prompt.sizes, BF16, DEVICE, max_chunks=16)
    expected = prompt.run(kernel, whole, (1, 27, 421))
    runs = []
    for start, end in ((27, 64), (64, 256), (256, 448)):
        rows = slice(start - 27, end - 27)
        runs.append(prompt.run(other, parts, (1, start, end - start), rows=rows))
    assert torch.equal(torch.cat(runs), expected)
    assert torch.equal(parts, whole)
    assert torch.equal(whole[0], prompt.state[0])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_prefill_of_a_head_depends_on_itself_alone(dtype):
    prompt = prompt_of("27b", dtype, 150)
    sizes, state = prompt.sizes, prompt.state.clone()
    kernel = DeltaPrefill(sizes, dtype, DEVICE, max_chunks=2)
    expected = prompt.run(kernel, state, (1, 37, 150))
    # The first key head with its values, and one value head of the last.
    q, k, v = prompt.heads
    group = sizes.value_heads // sizes.key_heads
    for x, heads in ((q, 1), (k, 1), (v, group), (prompt.a, group), (prompt.b, group)):
        x[:, :heads] = torch.nan
    v[:, -1] = torch.nan
    prompt.state[1, :group], prompt.state[1, -1] = torch.nan, torch.nan
    out = prompt.run(kernel, prompt.state, (1, 37, 150))
    assert torch.equal(out[:, group:-1], expected[:, group:-1])
    assert torch.equal(prompt.state[1, group:-1], state[1, group:-1])
    assert out[:, :group].isnan().all()
    assert out[:, -1].isnan().all()


def test_prefill_of_keys_that_hardly_differ():
    """Hardly any decay and strong writes: the inverse of a chunk is far from the identity."""
    prompt = prompt_of("one", BF16, 256)
    q, k, _ = prompt.heads
    common = prompt.state[0, 0, :1]
    for x in (q, k):
        x.copy_(common + 0.3 * x.float())
    prompt.weights.a_log.sub_(9.0)
    prompt.b.copy_(7.0 + prompt.b.abs())
    expected, exact = prompt.exact(1, 64)
    out = prompt.run(DeltaPrefill(prompt.sizes, BF16, DEVICE), prompt.state, (1, 64, 256))
    assert relative(out, expected) < 2e-4  # the output is a small difference
    assert relative(prompt.state[1], exact[1]) < 2e-5


def test_what_the_prefill_kernels_do_not_have_is_refused():
    prompt = prompt_of("one", BF16, 3)
    kernel, good = DeltaPrefill(prompt.sizes, BF16, DEVICE), prompt.mixed
    shifted = torch.zeros(3, good.shape[1] + 8, dtype=BF16, device=DEVICE)[:, 4:-4]
    for mixed, what in ((shifted, "16 bytes"), (good.float(), "qkv"), (good[:, 8:], "qkv")):
        prompt.mixed = mixed
        with pytest.raises(ConfigError, match=what):
            prompt.run(kernel, prompt.state, (1, 0, 3))
    prompt.mixed = good
    for state in (prompt.state.half(), prompt.state[:, :, 1:]):
        with pytest.raises(ConfigError, match="state"):
            prompt.run(kernel, state, (1, 0, 3))
    prompt.b = prompt.b.contiguous()
    with pytest.raises(ConfigError, match="row strides"):
        prompt.run(kernel, prompt.state, (1, 0, 3))


def backend_of(layer, dtype, max_chunks=32):
    backend = CudaBackend(DEVICE)
    prefill = DeltaPrefill(layer.sizes, dtype, DEVICE, max_chunks=max_chunks)
    backend._delta = (DeltaStep(layer.sizes, dtype), prefill)
    return backend


LENGTHS = (1, 3, 63, 64, 65, 200, 31, 130)
STARTS = (0, 37, 64, 100, 0, 1, 127)


def spans_of(count):
    """Prompts of every length from every start, in slots that do not follow one another."""
    return [
        ((7 * i + 3) % (count + 5), STARTS[i % len(STARTS)], LENGTHS[i % len(LENGTHS)])
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("name", "count", "max_chunks"),
    [("27b", 8, 32), ("27b", 17, 3), ("mixed", 70, 32), ("small", 40, 5), ("wide", 33, 1)],
)
def test_every_prompt_of_a_step_has_the_bits_it_has_alone(name, dtype, count, max_chunks):
    """More than a launch has segments, more chunks than a pass; rows and slots of others stay."""
    spans, first, after = spans_of(count), 5, 7
    assert len({slot for slot, _, _ in spans}) == count
    tokens = sum(length for _, _, length in spans)
    layer = layer_of(name, dtype, rows=first + tokens + after, slots=count + 5)
    for x in (layer.qkv, layer.z, layer.b, layer.a):
        x[:first], x[first + tokens :] = torch.nan, torch.nan
    backend = backend_of(layer, dtype, max_chunks)
    segments = placed(*spans, first=first)
    assert count <= GROUP or len(DeviceSegments.sent(segments, DEVICE).groups) > 1
    out = torch.full((len(layer.qkv), layer.sizes.value_size), 3.0, dtype=dtype, device=DEVICE)
    conv, state = layer.conv.clone(), layer.state.clone()
    for slot, start, _ in spans:
        if not start:
            conv[slot], state[slot] = torch.nan, torch.nan
    layer.mix(backend, segments, conv, state, out)
    assert (out[:first] == 3.0).all()
    assert (out[first + tokens :] == 3.0).all()
    others = sorted(set(range(count + 5)) - {slot for slot, _, _ in spans})
    assert torch.equal(conv[others], layer.conv[others])
    assert torch.equal(state[others], layer.state[others])

    one_by_one = backend_of(layer, dtype)
    alone_conv, alone_state = layer.conv.clone(), layer.state.clone()
    theirs_conv, theirs_state = layer.conv.clone(), layer.state.clone()
    theirs = torch.empty_like(out)
    layer.mix(TORCH, segments, theirs_conv, theirs_state, theirs)
    for span, segment in zip(spans, segments, strict=True):
        rows = slice(segment.offset, segment.offset + segment.length)
        single = torch.empty_like(out[rows])
        layer.mix(one_by_one, placed(span), alone_conv, alone_state, single, rows)
        assert torch.equal(out[rows], single), span
        assert relative(single, theirs[rows]) < MIXED[dtype], span
    assert torch.equal(conv, alone_conv)
    assert torch.equal(state, alone_state)
    assert torch.equal(conv, theirs_conv)
    assert relative(state, theirs_state) < PREFILL[dtype]


@pytest.mark.parametrize("max_chunks", [32, 5])
def test_a_captured_step_serves_any_prompts_that_fit(max_chunks):
    """Among them eight that fill it, with almost the most chunks there may be, and none at all."""
    tokens, count = 1024, 8
    layer = layer_of("27b", BF16, rows=tokens, slots=12)
    backend = backend_of(layer, BF16, max_chunks)
    memory = torch.zeros(GROUP_BYTES, dtype=torch.uint8, device=DEVICE)
    room = DeviceSegments.captured(tokens, count, 4096, memory)
    conv, state = layer.conv.clone(), layer.state.clone()
    out = torch.empty((tokens, layer.sizes.value_size), dtype=BF16, device=DEVICE)
    layer.mix(backend, room, conv, state, out)  # loads kernels; there are no segments
    assert torch.equal(conv, layer.conv)
    assert torch.equal(state, layer.state)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        layer.mix(backend, room, conv, state, out)
    steps = (
        [(3, 100, 200), (7, 0, 65)],
        [(slot, 63, 130) for slot in range(7)] + [(7, 63, 114)],
        [(11, 5, 1024)],
        [],
        [(2, 0, 1), (9, 64, 64), (4, 37, 3)],
    )
    eager = backend_of(layer, BF16)
    for spans in steps:
        segments = placed(*spans)
        wanted_conv, wanted_state = layer.conv.clone(), layer.state.clone()
        wanted = torch.empty_like(out)
        if spans:
            layer.mix(eager, segments, wanted_conv, wanted_state, wanted)
        sent = DeviceSegments.sent(segments, DEVICE).memory
        memory.zero_()[: len(sent)].copy_(sent)
        conv.copy_(layer.conv)
        state.copy_(layer.state)
        graph.replay()
        used = sum(length for _, _, length in spans)
        assert torch.equal(out[:used], wanted[:used]), spans
        assert torch.equal(conv, wanted_conv), spans
        assert torch.equal(state, wanted_state), spans
