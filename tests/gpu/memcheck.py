"""One call of every kernel family on small arrays, for the sanitizer:

PYTHONPATH=python:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py

Without torch's cache every tensor is an allocation of its own, so that a byte beyond its end is
found. Values are not looked at, the tests do that. Names of families as arguments run these alone.
"""

import sys
import time

import torch
from kv_setup import DEVICE, build, noise, run_decode
from test_delta_kernels import backend_of, layer_of, placed, prompt_of, sent, step_of
from test_gemm_kernels import CODES, input_dtype, weight_of
from test_kv_kernels import ALL_FORMATS, FORMATS, fused_inputs, kernels_of, norm_of
from test_prefill_attention import attention_of, segments_of

from headrace.backends.cuda import fused, prefill, prefill_attention
from headrace.backends.cuda.delta import DeltaPrefill
from headrace.backends.cuda.gemm import SkinnyGemm
from headrace.backends.cuda.kv import Rotary
from headrace.backends.cuda.sample import Argmax
from headrace.layers.rope import RotaryEmbedding

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def linear():
    """Products of bf16, fp16, fp32 and codes: ragged edges, one and two column tiles."""
    for early in (False, True):
        gemm = SkinnyGemm(DEVICE, early=early)
        for kind in (BF16, FP16, FP32, CODES):
            weight = weight_of(kind, 208, 320)
            for rows in (1, 9):
                x = noise(rows, 320, dtype=input_dtype(kind))
                gemm.linear(x, weight)
                if kind != FP32:
                    gemm.linear(x, weight, wide=True)
                    gemm.linear(x, weight, residual=noise(rows, 208, dtype=x.dtype))
                    gemm.linear(x, weight_of(kind, 224, 320), silu_mul=True)


def small():
    """Norms, gates, embedding, greedy choice."""
    for dtype in (BF16, FP16, FP32):
        x, weight, scale = noise(3, 576, dtype=dtype), noise(576, dtype=dtype), noise(576)
        torch.cuda.synchronize()  # norms read weights before what is ahead of them ends
        fused.rms_norm(x, weight, 1e-6)
        fused.rms_norm_wide(x, scale, 1e-6)
        fused.silu_mul(x)
        fused.sigmoid_gate(x, noise(3, 9, 64, dtype=dtype))
        fused.embed(noise(50, 576, dtype=dtype), torch.tensor([0, 49, -1, 50], device=DEVICE))
    Argmax(2, DEVICE)(noise(2, 1001))


def prompts():
    """Convolution, gated norm, quantised rows."""
    for dtype in (BF16, FP16, FP32):
        x, taps = noise(37, 1032, dtype=dtype), noise(1032, 4)
        state, out = noise(3, 1032, 3, dtype=dtype), torch.empty_like(x)
        prefill.conv_prefill(x, taps, state, sent((2, 0, 2), (0, 5, 35)), out=out)
        z = noise(5, 6 * 64, dtype=dtype)
        prefill.gated_norm(
            noise(5, 6, 64), z, noise(64, dtype=dtype), 1e-6, out=torch.empty_like(z)
        )
        prefill.quantise_rows(noise(5, 384, dtype=dtype))


def delta():
    """Step with padding rows, and prompts that start inside of a chunk, alone and together."""
    for name in ("27b", "small"):
        layer = layer_of(name, BF16)
        slots = [3, -1, 6, 11, 0, 2, -1, 7]
        layer.run(step_of(layer, BF16), slice(None), slots, layer.conv, layer.state)
        layer.run(step_of(layer, BF16), slice(0, 1), [5], layer.conv, layer.state)
        prompt = prompt_of(name, BF16, 150)
        kernel = DeltaPrefill(prompt.sizes, BF16, DEVICE, max_chunks=2)
        for start in (0, 37):
            prompt.run(kernel, prompt.state, (1, start, 150))
        layer = layer_of(name, BF16, rows=210)
        segments = placed((11, 37, 150), (0, 0, 1), (5, 64, 57), first=2)
        out = torch.empty_like(layer.z.contiguous())
        layer.mix(backend_of(layer, BF16, 2), segments, layer.conv, layer.state, out)


def kv():
    """Append, decode attention and gather of every format, in pages and LOW windows."""
    for kv_format in ALL_FORMATS:
        for head_dim in (64, 128, 256):
            case = build(kv_format, head_dim, 2, [1, 100, 0, 300], "windows")
            kernels = case.kernels(6)
            q = noise(4, 6, head_dim, dtype=kv_format.model_dtype)
            run_decode(case, kernels, q)
            pages = torch.tensor([0, -1, 1], device=DEVICE)
            offsets = torch.tensor([47, 3, 0], device=DEVICE)
            x = noise(3, 2, head_dim, dtype=kv_format.model_dtype)
            kernels.append(4, pages, offsets, x, x)
            out = torch.empty((2, 250, 2, head_dim), dtype=kv_format.model_dtype, device=DEVICE)
            kernels.gather(case.layer, case.table[3], 45, k_out=out[0], v_out=out[1], low=case.low)
    for kv_format in FORMATS:
        q, k, v = fused_inputs(128, 6, 2, 5, gated=True)
        case = build(kv_format, 128, 2, [300, 40], "slots")
        table = RotaryEmbedding(64, 1e6, 300, DEVICE)
        places = torch.tensor([0, 1, -1, 0, 1], device=DEVICE)
        positions = torch.tensor([299, 39, 2**40, 0, 1], device=DEVICE)
        kernels_of(case.pool, group=3).append_fused(
            0,
            places,
            positions,
            positions,
            q,
            k,
            v,
            q_out=q,
            norm=norm_of(128, wide=False),
            rotary=Rotary(cos=table.cos, sin=table.sin),
        )


def long_append():
    """The form of append for many tokens: ragged runs of heads, padding rows."""
    for kv_format in ALL_FORMATS:
        tokens = 1001
        q, k, v = fused_inputs(64, 9, 3, tokens, gated=True, dtype=kv_format.model_dtype)
        case = build(kv_format, 64, 3, [tokens], "slots")
        table = RotaryEmbedding(64, 1e6, tokens, DEVICE)
        positions = torch.arange(tokens, device=DEVICE)
        places = torch.where(positions % 7 == 0, -1, 0)
        kernels_of(case.pool, group=3).append_fused(
            0,
            places,
            positions,
            positions,
            q,
            k,
            v,
            q_out=torch.empty_like(q),
            norm=None,
            rotary=Rotary(cos=table.cos, sin=table.sin),
        )


def prompt_attention():
    """Attention of several prompts at once, in units of both sizes, and over codes."""
    for kv_format in ALL_FORMATS:
        if kv_format.model_dtype == FP32:
            continue
        for head_dim, layout in ((64, "slots"), (128, "pages"), (256, "windows")):
            case = build(kv_format, head_dim, 2, [1, 100, 300], layout)
            segments, tokens = segments_of(case, [(2, 70, 300), (0, 0, 1), (1, 3, 100)])
            q = noise(tokens, 6, head_dim, dtype=kv_format.model_dtype)
            out = torch.empty_like(q)
            attention = attention_of(case, 6)
            for units_each in (0, 2**20):
                prefill_attention._UNITS_EACH = units_each
                attention.attend(case.layer, q, segments, out=out, low=case.low)


FAMILIES = {
    call.__name__: call
    for call in (linear, small, prompts, delta, kv, long_append, prompt_attention)
}


def main() -> int:
    """Run the families that are named, or all; one line each."""
    for name in sys.argv[1:] or FAMILIES:
        start = time.perf_counter()
        FAMILIES[name]()
        torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
