"""INT-02, INT-04: products of two sizes beyond 2^31, in every kernel that can meet one.

Only the last rows are looked at: they are what an index of 32 bits loses. They must have the bits
of a call with these rows alone, which the other tests compare with references. Logits stay far
below: only sampled rows have any, at most 256.
"""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kv_setup import build, new_pool
from test_delta_kernels import layer_of, sent
from test_gemm_kernels import SUMS, exact
from test_kv_kernels import kernels_of
from test_prefill_attention import attention_of, segments_of

from headrace.backends.cuda import fused, prefill
from headrace.backends.cuda.delta import DeltaPrefill
from headrace.backends.cuda.gemm import SkinnyGemm
from headrace.backends.cuda.sample import Argmax
from headrace.backends.torch_ops import TorchBackend
from headrace.kv.formats import parse_kv_format

DEVICE = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
LIMIT = 2**31
LAST = 70  # rows that are looked at


@pytest.fixture(autouse=True)
def memory():
    """The tests hold up to 25 GB each."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def random(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_()


def beyond(width):
    """Rows of so many elements, of which the last ones begin beyond the limit."""
    return LIMIT // width + 3 * LAST


def test_kernels_form_the_addresses_of_exact_integers():
    """INT-02: a wrong one ends the process, so it is another one."""
    path = Path(__file__).parent / "probe_offsets.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "geometries" in done.stdout


def test_a_long_convolution():
    channels = 10_240
    x, taps = random(beyond(channels), channels), random(channels, 4, dtype=FP32)
    tokens = len(x)
    state, out = random(3, channels, 3), torch.empty_like(x)
    few, few_state = x[-LAST - 3 :].clone(), torch.zeros_like(state)
    wanted = TorchBackend(DEVICE).conv_prefill(few, taps, few_state, 1, has_initial_state=False)
    prefill.conv_prefill(x, taps, state, sent((1, 0, tokens)), out=out)
    assert torch.equal(out[-LAST:], wanted[3:])
    assert torch.equal(state[1], few_state[1])
    # A segment whose rows, and one whose slot, are beyond the limit.
    out.zero_()
    prefill.conv_prefill(x, taps, state, sent((0, 0, tokens - LAST - 3), (2, 0, LAST + 3)), out=out)
    assert torch.equal(out[-LAST - 3 :], wanted)
    assert torch.equal(state[2], few_state[1])
    del x, out
    pool = torch.empty((beyond(3 * channels), channels, 3), dtype=BF16, device=DEVICE)
    out = torch.empty_like(few)
    prefill.conv_prefill(few, taps, pool, sent((len(pool) - 1, 0, LAST + 3)), out=out)
    assert torch.equal(out, wanted)
    assert torch.equal(pool[-1], few_state[1])


def test_gates_norms_and_codes_of_many_rows():
    width = 8_192
    x = random(beyond(width), width)
    assert x.shape[0] > 2**16, "more rows than an axis of a grid but the first may have"
    tail, weight = x[-LAST:].clone(), random(width)
    assert torch.equal(fused.silu_mul(x)[-LAST:], fused.silu_mul(tail))
    assert torch.equal(fused.rms_norm(x, weight, 1e-6)[-LAST:], fused.rms_norm(tail, weight, 1e-6))
    gates = x.view(x.shape[0], 2, width // 2)[:, :, :128]
    gated = fused.sigmoid_gate(x[:, : 2 * 128], gates)[-LAST:]
    assert torch.equal(gated, fused.sigmoid_gate(tail[:, : 2 * 128], gates[-LAST:]))
    codes, scales = prefill.quantise_rows(x[-LAST:])
    alone, scales_alone = prefill.quantise_rows(tail)
    assert torch.equal(codes.view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scales, scales_alone)
    del x, gates
    heads = random(beyond(width), width // 128, 128, dtype=FP32)
    z, weight = random(beyond(width), width), random(128)
    out = torch.empty_like(z)
    prefill.gated_norm(heads, z, weight, 1e-6, out=out)
    alone = torch.empty_like(z[-LAST:])
    prefill.gated_norm(heads[-LAST:].clone(), z[-LAST:].clone(), weight, 1e-6, out=alone)
    assert torch.equal(out[-LAST:], alone)


def test_an_embedding_table_and_many_tokens():
    width = 1_024
    table = random(beyond(width), width)
    vocab = table.shape[0]
    ids = torch.randint(0, vocab, (2**16 + 5,), device=DEVICE)
    ids[-3:] = torch.tensor([vocab - 1, vocab, -1])
    out = fused.embed(table, ids)
    assert torch.equal(out[:-2], table[ids[:-2]])
    assert not out[-2:].any(), "ids outside the table"


def test_logits_far_apart():
    vocab, stride = 151_936, 2**30
    memory = torch.empty(2 * stride + vocab, dtype=FP32, device=DEVICE)
    logits = memory.as_strided((3, vocab), (stride, 1)).normal_()
    for row, token in enumerate((7, 70_000, vocab - 1)):
        logits[row, token] = 100.0
    assert Argmax(8, DEVICE)(logits).tolist() == [7, 70_000, vocab - 1]


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_matrix_of_more_elements(kind):
    """As a head would be with more tokens or channels; and rows of x that are far apart."""
    dtype = BF16 if kind == "bf16" else FP32
    columns, rows, apart = 4_096, 3, 2**29
    weight = random(-(-beyond(columns) // 16) * 16, columns, dtype=dtype)
    memory = torch.empty((rows - 1) * apart * 2 + columns, dtype=dtype, device=DEVICE)
    x = memory.as_strided((rows, columns), (2 * apart, 1)).normal_()
    out = SkinnyGemm(DEVICE).linear(x, weight, wide=kind == "bf16")
    expected = exact(x, weight[-LAST:])
    error = (out[:, -LAST:].double() - expected).norm() / expected.norm()
    assert error < SUMS
    assert torch.equal(SkinnyGemm(DEVICE).linear(x.contiguous(), weight, wide=kind == "bf16"), out)


def test_keys_and_values_of_a_long_prompt():
    """Gathered for prefill attention: more elements than an index of 32 bits counts."""
    tokens, kv_heads, head_dim = 2**20, 9, 256
    kv_format = parse_kv_format("int8_per_token_head", model_dtype=BF16)
    pool = new_pool(
        kv_format, layers=1, kv_heads=kv_heads, head_dim=head_dim, pages=1, page_tokens=tokens
    )
    for tensor in pool.tensors.values():
        if tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        else:
            tensor.uniform_(0.01, 1)
    pair = torch.empty((2, tokens, kv_heads, head_dim), dtype=BF16, device=DEVICE)
    assert pair[0].numel() > LIMIT
    table = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels_of(pool).gather(0, table, 0, k_out=pair[0], v_out=pair[1])
    for which, out in zip("kv", pair, strict=True):
        for head in (0, kv_heads - 1):
            values = pool.tensors[which][0, 0, -LAST:, head].float()
            values *= pool.tensors[f"{which}_scale"][0, 0, -LAST:, head].float()
            assert torch.equal(out[-LAST:, head], values.to(BF16))


def test_attention_of_a_prompt_with_rows_far_apart():
    """Queries cut out of a projection of any width, and results into one."""
    tokens, apart = 70, 2**25
    case = build(parse_kv_format("auto", model_dtype=BF16), 128, 1, [tokens])
    memory = torch.zeros(tokens * apart, dtype=BF16, device=DEVICE)
    assert memory.numel() > 2**31
    q, out = (memory.as_strided((tokens, 2, 128), (apart, 128, 1), at) for at in (0, 4096))
    q.copy_(random(tokens, 2, 128))
    segments = segments_of(case, [(0, 0, tokens)])[0]
    attention = attention_of(case, 2)
    expected = torch.empty((tokens, 2, 128), dtype=BF16, device=DEVICE)
    attention.attend(case.layer, q.contiguous(), segments, out=expected)
    attention.attend(case.layer, q, segments, out=out)
    assert expected.isfinite().all()
    assert torch.equal(out, expected)


def test_a_linear_layer_with_rows_far_apart():
    """What a delta prefill reads is cut out of one projection, whose rows may be any width."""
    layer = layer_of("small", BF16, rows=1)
    sizes, tokens, apart = layer.sizes, 1_100, 2**21
    memory = random((tokens - 1) * apart + 4_096)
    assert memory.numel() > LIMIT

    def cut(first, width):
        return memory.as_strided((tokens, width), (apart, 1), storage_offset=first)

    inputs = (cut(0, sizes.channels), *(cut(at, sizes.value_heads) for at in (3_000, 3_500)))
    states = torch.zeros_like(layer.state[:4]).view(2, 2, *layer.state.shape[1:])
    kernel = DeltaPrefill(sizes, BF16, DEVICE)
    outs = torch.empty((2, tokens, sizes.value_heads, sizes.value_head_dim), device=DEVICE)
    close = [x.contiguous() for x in inputs]
    # The second segment begins beyond the limit.
    segments = sent((1, 0, tokens - LAST), (0, 64, LAST))
    assert (tokens - LAST) * apart > LIMIT
    for parts, state, out in zip((inputs, close), states, outs, strict=True):
        kernel.prefill(*parts, layer.weights, state, segments, out=out)
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(states[0], states[1])
