"""Operations of the linear layers against fp64, and the bits they promise."""

import pytest
import torch
import torch.nn.functional as F

from headrace.backends.base import DeltaWeights
from headrace.backends.torch_ops import TorchBackend
from headrace.models.batch import PrefillSegment
from tiny_models import relative

EXACT = TorchBackend("cpu", deterministic=True)


def delta_inputs(count, key_heads, value_heads, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = noise(count, key_heads, 32), noise(count, key_heads, 32)
    v = noise(count, value_heads, 16)
    g = -noise(count, value_heads).exp()
    beta = noise(count, value_heads).sigmoid()
    state = noise(3, value_heads, 16, 32)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def recurrence(q, k, v, g, beta, state):
    """The rule as it is defined, token by token, in the dtype it is given."""
    group = v.shape[1] // k.shape[1]
    outputs = []
    for t in range(len(q)):
        row = []
        for head in range(v.shape[1]):
            q_t, k_t = q[t, head // group], k[t, head // group]
            q_t = q_t / (q_t.dot(q_t) + 1e-6).sqrt() / q_t.shape[0] ** 0.5
            k_t = k_t / (k_t.dot(k_t) + 1e-6).sqrt()
            state[head] *= g[t, head].exp()
            u = beta[t, head] * (v[t, head] - state[head] @ k_t)
            state[head] += torch.outer(u, k_t)
            row.append(state[head] @ q_t)
        outputs.append(torch.stack(row))
    return torch.stack(outputs), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("count", "start"), [(1, 0), (2, 64), (63, 0), (64, 128), (65, 0), (150, 37)]
)
@pytest.mark.parametrize("initial", [False, True])
def test_chunked_delta_rule_equals_the_recurrence(dtype, tolerance, count, start, initial):
    q, k, v, g, beta, state = delta_inputs(count, 2, 6, torch.float64)
    before = state[1].clone() if initial else torch.zeros_like(state[1])
    expected, after = recurrence(q, k, v, g, beta, before)
    if not initial:
        state[1] = torch.nan  # by flag, not by trust
    rows = [x.to(dtype) for x in (q, k, v, g, beta)]
    chunked, stepped = (state.to(dtype, copy=True) for _ in range(2))
    out = EXACT.gated_delta_prefill(*rows, chunked, 1, start, has_initial_state=initial)
    assert relative(out, expected) < tolerance
    assert relative(chunked[1], after) < tolerance
    if not initial:
        stepped[1] = 0.0
    for t in range(count):
        token = [x[t : t + 1] for x in rows]
        out = EXACT.gated_delta_step(*token, stepped, torch.tensor([1]))
        assert relative(out[0], expected[t]) < tolerance * 10  # a single row, not a norm of many
    assert relative(stepped[1], after) < tolerance
    assert torch.equal(chunked[[0, 2]], state.to(dtype)[[0, 2]])


def test_strong_decay_neither_overflows_nor_divides():
    q, k, v, g, beta, state = delta_inputs(130, 1, 2, torch.float32)
    expected, after = recurrence(
        *(x.double() for x in (q, k, v, 200 * g, beta)), state[0].double().clone()
    )
    out = EXACT.gated_delta_prefill(q, k, v, 200 * g, beta, state, 0, 0, has_initial_state=True)
    assert relative(out, expected) < 1e-5
    assert relative(state[0], after) < 1e-5


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_of_many_rows_equal_steps_of_one(deterministic):
    backend = TorchBackend("cpu", deterministic=deterministic)
    q, k, v, g, beta, _ = delta_inputs(5, 2, 4, torch.float32)
    pool = torch.randn((8, 4, 16, 32), generator=torch.Generator().manual_seed(1))
    together, alone = pool.clone(), pool.clone()
    slots = torch.tensor([6, -1, 0, 3, -1])
    out = backend.gated_delta_step(q, k, v, g, beta, together, slots)
    for row, slot in enumerate(slots.tolist()):
        one = [x[row : row + 1] for x in (q, k, v, g, beta)]
        single = backend.gated_delta_step(*one, alone, slots[row : row + 1])
        torch.testing.assert_close(out[row], single[0], rtol=1e-6, atol=1e-6)
        assert slot >= 0 or not out[row].any()
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(together[[1, 2, 4, 5, 7]], pool[[1, 2, 4, 5, 7]])


def test_blocks_stand_at_absolute_multiples_of_64():
    """Wherever a run starts, cuts at multiples of 64 are invisible in the bits."""
    q, k, v, g, beta, state = delta_inputs(150, 2, 4, torch.float32)
    whole, parts = state.clone(), state.clone()
    rows = (q, k, v, g, beta)
    expected = EXACT.gated_delta_prefill(*rows, whole, 2, 37, has_initial_state=True)
    runs = []
    for start, end in ((37, 64), (64, 128), (128, 187)):
        run = [x[start - 37 : end - 37] for x in rows]
        runs.append(EXACT.gated_delta_prefill(*run, parts, 2, start, has_initial_state=True))
    assert torch.equal(torch.cat(runs), expected)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("second", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 70])
def test_convolution_has_no_edge_between_runs(count, second):
    """Two runs of any length, then steps: the bits of one run over all, and the right values."""
    generator = torch.Generator().manual_seed(count)
    edge = count + second
    x = torch.randn((edge + 2, 96), generator=generator)
    taps = torch.randn((96, 4), generator=generator)
    whole, parts = torch.full((2, 96, 3), torch.nan), torch.full((2, 96, 3), torch.nan)
    expected = EXACT.conv_prefill(x, taps, whole, 1, has_initial_state=False)
    runs = [
        EXACT.conv_prefill(x[:count], taps, parts, 1, has_initial_state=False),
        EXACT.conv_prefill(x[count:edge], taps, parts, 1, has_initial_state=True),
        EXACT.conv_step(x[edge : edge + 1], taps, parts, torch.tensor([1])),
        EXACT.conv_step(x[edge + 1 :], taps, parts, torch.tensor([1])),
    ]
    assert torch.equal(torch.cat(runs), expected)
    assert torch.equal(parts[1], whole[1])
    assert parts[0].isnan().all()
    padded = F.pad(x.double().T.unsqueeze(0), (3, 0))
    exact = F.silu(F.conv1d(padded, taps.double().unsqueeze(1), groups=96))[0].T
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [3, 12, 48, 96])
def test_pointwise_operations_are_row_invariant(width):
    generator = torch.Generator().manual_seed(width)
    b, a = torch.randn((2, 300, 2 * width), generator=generator)[:, :, ::2].unbind()  # strided
    a_log, dt_bias = torch.randn((2, width), generator=generator)
    beta, g = EXACT.delta_gates(b, a, a_log, dt_bias)
    gated = EXACT.sigmoid_gate(a, b)
    for first, count in ((0, 1), (1, 2), (130, 64), (299, 1), (17, 283)):
        rows = slice(first, first + count)
        one = EXACT.delta_gates(b[rows], a[rows], a_log, dt_bias)
        assert torch.equal(one[0], beta[rows])
        assert torch.equal(one[1], g[rows])
        assert torch.equal(EXACT.sigmoid_gate(a[rows], b[rows]), gated[rows])
    exact = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    torch.testing.assert_close(g.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_of_a_layer_are_its_operations_one_after_the_other(dtype, deterministic):
    """Rows and slots of no segment, and what a prompt from its beginning finds, are not touched."""
    backend = TorchBackend("cpu", deterministic=deterministic)
    generator = torch.Generator().manual_seed(5)

    def noise(*shape, to=dtype):
        return torch.randn(shape, generator=generator).to(to)

    spans, first = [(3, 37, 70), (0, 0, 1), (4, 64, 3), (1, 0, 130)], 2
    tokens = first + sum(length for _, _, length in spans) + 3
    sizes, channels, value_size = (2, 4, 32, 16), 2 * 64 + 64, 64
    qkv, z = noise(tokens, channels + value_size).split([channels, value_size], dim=1)
    b, a = noise(tokens, 2 * sizes[1]).chunk(2, dim=1)
    weights = DeltaWeights(
        taps=noise(channels, 4, to=torch.float32),
        a_log=noise(sizes[1], to=torch.float32),
        dt_bias=noise(sizes[1], to=torch.float32),
        norm=noise(sizes[3]),
        eps=1e-6,
    )
    conv, state = noise(5, channels, 3), noise(5, sizes[1], sizes[3], sizes[2], to=torch.float32)
    segments, expected = [], torch.full((tokens, value_size), 3.0, dtype=dtype)
    out, offset = expected.clone(), first
    their_conv, their_state = conv.clone(), state.clone()
    for slot, start, length in spans:
        segments.append(
            PrefillSegment(table=[], state_slot=slot, start=start, length=length, offset=offset)
        )
        rows, initial = slice(offset, offset + length), start > 0
        if not initial:
            conv[slot], state[slot] = torch.nan, torch.nan
        beta, g = backend.delta_gates(b[rows], a[rows], weights.a_log, weights.dt_bias)
        mixed = backend.conv_prefill(
            qkv[rows], weights.taps, their_conv, slot, has_initial_state=initial
        )
        q, k, v = mixed.split([64, 64, value_size], dim=1)
        heads = (q.reshape(length, 2, 32), k.reshape(length, 2, 32), v.reshape(length, 4, 16))
        values = backend.gated_delta_prefill(
            *heads, g, beta, their_state, slot, start, has_initial_state=initial
        )
        normed = backend.gated_rms_norm(values, z[rows].view(values.shape), weights.norm, 1e-6)
        expected[rows] = normed.reshape(length, value_size)
        offset += length
    backend.delta_mix_prefill(qkv, z, b, a, weights, conv, state, segments, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(conv, their_conv)
    assert torch.equal(state, their_state)
    rows, slots = slice(0, first), torch.tensor([2, -1])
    stepped = backend.delta_mix_step(
        qkv[rows], z[rows], b[rows], a[rows], weights, conv, state, slots, out=out[rows]
    )
    again = backend.delta_mix_step(
        qkv[rows], z[rows], b[rows], a[rows], weights, their_conv, their_state, slots
    )
    assert stepped.data_ptr() == out.data_ptr()
    assert torch.equal(out[rows], again)
    assert torch.equal(out[first:], expected[first:])
