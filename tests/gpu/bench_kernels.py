"""Time the kernels: `python tests/gpu/bench_kernels.py [KIND ...]`, see `main`.

Each number is the median of replays of a CUDA graph over copies of the weights of at least 400 MB
together, so that the L2 cache does not help. Launch gaps inside a graph are part of it. `append`
has its inputs where a model has them: in L2 as far as they fit, as if just projected.
"""

# ruff: noqa: B023, PERF401 (every lambda is called within its turn of the loop)
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.backends.cuda import fused, kv, prefill
from headrace.backends.cuda.delta import DeltaPrefill, DeltaStep, DeltaWeights
from headrace.backends.cuda.gemm import (
    TILINGS,
    SkinnyGemm,
    Tiling,
)
from headrace.backends.cuda.prefill_attention import PrefillAttention
from headrace.backends.cuda.sample import Argmax
from headrace.backends.cuda.segments import DeviceSegments
from headrace.kv.formats import KVLayout, parse_kv_format
from headrace.kv.planes import PlanePool
from headrace.layers.block_fp8 import BlockFp8Weight, blocks_of
from headrace.layers.rope import RotaryEmbedding
from headrace.models.batch import PrefillSegment
from headrace.models.hybrid_config import LinearAttention

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
ROTATED_BYTES = 400 << 20
CODED = ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (14336, 5120))
DENSE = (
    (248320, 5120), (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16)


# Measured beside those in use.
MORE_TILINGS = (
    Tiling(3, 1, 16, 3), Tiling(1, 3, 8, 4), Tiling(2, 1, 16, 4), Tiling(1, 2, 8, 6),
    Tiling(2, 4, 4, 4), Tiling(1, 1, 16, 8),
)  # fmt: skip


def timed(calls: list[Callable[[], object]], repeats: int = 9) -> float:
    """Microseconds of one call, the calls captured one after the other."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def copies(size_bytes: int) -> int:
    """Copies of a matrix that are enough, at least two; a small one is called more than once."""
    return max(2, -(-ROTATED_BYTES // size_bytes))


def dense(n: int, k: int) -> list[torch.Tensor]:
    return [torch.randn((n, k), device=DEVICE, dtype=BF16) for _ in range(copies(2 * n * k))]


def coded(n: int, k: int) -> list[BlockFp8Weight]:
    return [
        BlockFp8Weight(
            torch.randint(0, 0x7F, (n, k), device=DEVICE, dtype=torch.uint8).view(
                torch.float8_e4m3fn
            ),
            torch.rand((blocks_of(n), blocks_of(k)), device=DEVICE),
        )
        for _ in range(copies(n * k))
    ]


def bench_gemm() -> None:
    gemm, early = SkinnyGemm(DEVICE), SkinnyGemm(DEVICE, early=True)
    print("gemm: us (GB/s of weight bytes) ours, started early | cuBLAS, by rows", *ROWS)
    for shapes, make, itemsize in ((CODED, coded, 1), (DENSE, dense, 2)):
        for n, k in shapes:
            weights = make(n, k)
            size_bytes = n * k * itemsize
            line = [f"{n}x{k} {'W8' if itemsize == 1 else 'W16'}"]
            for rows in ROWS:
                x = torch.randn((rows, k), device=DEVICE, dtype=BF16)
                out = torch.empty((rows, n), device=DEVICE, dtype=BF16)
                us = timed([lambda w=w: gemm.linear(x, w, out=out) for w in weights])
                soon = timed([lambda w=w: early.linear(x, w, out=out) for w in weights])
                cell = f"{us:.1f}, {soon:.1f} ({size_bytes / soon / 1e3:.0f})"
                if itemsize == 2:
                    other = timed([lambda w=w: F.linear(x, w) for w in weights])
                    cell += f" | {other:.1f} ({size_bytes / other / 1e3:.0f})"
                line.append(cell)
            print("; ".join(line), flush=True)
            del weights


def bench_sweep() -> None:
    """Every tiling for every shape, 1 and 16 rows: what the choice in gemm.py is made from."""
    gemm = SkinnyGemm(DEVICE)
    tilings = [*TILINGS, *MORE_TILINGS]
    for shapes, make, itemsize in ((CODED[:4], coded, 1), (DENSE[1:8], dense, 2)):
        for n, k in shapes:
            weights = make(n, k)
            cells = []
            for tiling in tilings:
                times = []
                for rows in (1, 16):
                    x = torch.randn((rows, k), device=DEVICE, dtype=BF16)
                    out = torch.empty((rows, n), device=DEVICE, dtype=BF16)
                    us = timed(
                        [lambda w=w: gemm.linear(x, w, out=out, tiling=tiling) for w in weights], 5
                    )
                    times.append(f"{us:.1f}")
                name = f"{tiling.tiles}{tiling.row_warps}{tiling.k_warps}s{tiling.stages}"
                cells.append(f"{name}:{'/'.join(times)}")
            floor = n * k * itemsize / 4.165e6
            print(f"{n}x{k} floor {floor:.1f}", *cells, flush=True)
            del weights


def delta_weights(sizes: LinearAttention) -> DeltaWeights:
    return DeltaWeights(
        taps=torch.randn((sizes.channels, 4), device=DEVICE),
        a_log=torch.zeros(sizes.value_heads, device=DEVICE),
        dt_bias=torch.zeros(sizes.value_heads, device=DEVICE),
        norm=torch.ones(sizes.value_head_dim, device=DEVICE, dtype=BF16),
        eps=1e-6,
    )


def bench_delta() -> None:
    sizes = LinearAttention(key_heads=16, value_heads=48, key_head_dim=128, value_head_dim=128)
    layers, pool = 8, 17
    state = torch.randn((layers, pool, 48, 128, 128), device=DEVICE) * 0.1
    conv = torch.randn((layers, pool, sizes.channels, 3), device=DEVICE, dtype=BF16)
    weights = delta_weights(sizes)
    step = DeltaStep(sizes, BF16)
    for rows in ROWS:
        projected = torch.randn(
            (rows, sizes.channels + sizes.value_size), device=DEVICE, dtype=BF16
        )
        gates = torch.randn((rows, 96), device=DEVICE, dtype=BF16)
        out = torch.empty((rows, sizes.value_size), device=DEVICE, dtype=BF16)
        calls = []
        for first in range(0, pool - rows + 1, rows):
            slots = torch.arange(first, first + rows, device=DEVICE)
            for layer in range(layers):
                calls.append(
                    lambda s=slots, i=layer: step.step(
                        projected[:, : sizes.channels], projected[:, sizes.channels :],
                        gates[:, :48], gates[:, 48:], weights, conv[i], state[i], s, out=out,
                    )
                )  # fmt: skip
        us = timed(calls)
        moved = rows * 2 * 48 * 128 * 128 * 4
        print(
            f"delta step rows {rows}: {us:.2f} us, {moved / us / 1e3:.0f} GB/s; x48 {48 * us:.0f}"
        )


def bench_prefill(tokens: int = 8192) -> None:
    """Convolution, delta rule and gated norm of a linear layer."""
    sizes = LinearAttention(key_heads=16, value_heads=48, key_head_dim=128, value_head_dim=128)
    kernel = DeltaPrefill(sizes, BF16, DEVICE)
    qkv, z = (
        torch.randn((tokens, width), device=DEVICE, dtype=BF16)
        for width in (sizes.channels, sizes.value_size)
    )
    b, a = torch.randn((tokens, 96), device=DEVICE, dtype=BF16).chunk(2, dim=1)
    weights = delta_weights(sizes)
    mixed, out = torch.randn_like(qkv), torch.empty_like(z)
    values = torch.empty((tokens, 48, 128), device=DEVICE)
    for prompts in (1, 8):
        conv = torch.zeros((prompts, sizes.channels, 3), device=DEVICE, dtype=BF16)
        state = torch.zeros((prompts, 48, 128, 128), device=DEVICE)
        length = tokens // prompts
        segments = DeviceSegments.sent(
            [
                PrefillSegment(
                    table=torch.empty(0, dtype=torch.int32, device=DEVICE),
                    state_slot=slot,
                    start=0,
                    length=length,
                    offset=slot * length,
                )
                for slot in range(prompts)
            ],
            DEVICE,
        )
        calls = {
            "convolution": lambda: prefill.conv_prefill(
                qkv, weights.taps, conv, segments, out=mixed
            ),
            "delta": lambda: kernel.prefill(mixed, b, a, weights, state, segments, out=values),
            "norm": lambda: prefill.gated_norm(values, z, weights.norm, 1e-6, out=out),
        }
        cells = [f"{name} {timed([call] * 3) / 1000:.3f}" for name, call in calls.items()]
        print(f"prefill of {prompts} x {length} tokens, ms:", *cells)


def bench_fused() -> None:
    argmax = Argmax(16, DEVICE)
    for rows in (1, 8):
        x, y = (torch.randn((rows, 5120), device=DEVICE, dtype=BF16) for _ in range(2))
        scale, out = torch.ones(5120, device=DEVICE), torch.empty_like(x)
        gate_up = torch.randn((rows, 34816), device=DEVICE, dtype=BF16)
        logits = torch.randn((rows, 248320), device=DEVICE)
        mlp = torch.empty((rows, 17408), device=DEVICE, dtype=BF16)
        tokens = torch.empty(rows, device=DEVICE, dtype=torch.int32)
        calls = {
            "norm": lambda: fused.rms_norm_wide(x, scale, 1e-6, out=out),
            "add+norm": lambda: fused.rms_norm_wide(x, scale, 1e-6, addend=y, out=out),
            "silu_mul": lambda: fused.silu_mul(gate_up, out=mlp),
            "argmax": lambda: argmax(logits, out=tokens),
        }
        cells = [f"{name} {timed([call] * 64):.2f}" for name, call in calls.items()]
        print(f"fused rows {rows}, us:", *cells)


def bench_append(layers: int = 8) -> None:
    """q in place; GB/s of the vectors read and written. By span: what the choice is made from."""
    for heads, kv_heads, head_dim in ((32, 8, 128), (24, 4, 256)):
        kv_format = parse_kv_format("auto", model_dtype=BF16)
        layout = KVLayout(kv_format=kv_format, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        pool = PlanePool.allocate(layout, pages=1, page_tokens=8192, device=DEVICE)
        kernels = kv.KVKernels(pool, query_heads=heads, max_rows=8, max_context=8192)
        weight = torch.ones(head_dim, device=DEVICE, dtype=BF16)
        norm = kv.QKNorm(q=weight, k=weight, eps=1e-6, wide=False)
        table = RotaryEmbedding(head_dim, 1e6, 8192, DEVICE)
        rotary = kv.Rotary(cos=table.cos, sin=table.sin)
        for tokens in (8, 1024, 8192):
            vectors = heads + 2 * kv_heads
            projected = torch.randn((tokens, vectors, head_dim), device=DEVICE, dtype=BF16)
            q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
            index = torch.arange(tokens, device=DEVICE)
            page = torch.zeros_like(index)
            calls = [
                lambda layer=layer: kernels.append_fused(
                    layer, page, index, index, q, k, v, q_out=q, norm=norm, rotary=rotary
                )
                for layer in range(layers)
            ]
            cells, chosen = [], kv._APPEND_SPAN
            for span in (4, 8, 16) if tokens * vectors > kv._APPEND_WAVE else (1,):
                kv._APPEND_SPAN = span
                us = timed(calls * 4)
                moved = 2 * projected.numel() * projected.element_size()
                cells.append(f"span {span}: {us:.2f} us ({moved / us / 1e3:.0f} GB/s)")
            kv._APPEND_SPAN = chosen
            print(f"append {heads}/{kv_heads} heads D {head_dim}, {tokens} tokens", *cells)


def bench_attention() -> None:
    """Attention of prompts: 8B and 27B shapes, and one with few heads."""
    for heads, kv_heads, head_dim in ((32, 8, 128), (24, 4, 256), (9, 3, 64)):
        for tokens, prompts in ((1024, 1), (1024, 8), (8192, 1), (32768, 1)):
            layout = KVLayout(
                kv_format=parse_kv_format("auto", model_dtype=BF16),
                layers=1,
                kv_heads=kv_heads,
                head_dim=head_dim,
            )
            pool = PlanePool.allocate(layout, pages=prompts, page_tokens=tokens, device=DEVICE)
            q = torch.randn((prompts * tokens, heads, head_dim), device=DEVICE, dtype=BF16)
            for tensor in pool.tensors.values():
                tensor.copy_(torch.randn(tensor.shape, device=DEVICE, dtype=BF16))
            kernels = kv.KVKernels(pool, query_heads=heads, max_rows=1, max_context=tokens)
            attention, out = PrefillAttention(kernels), torch.empty_like(q)
            segments = [
                PrefillSegment(
                    table=torch.tensor([prompt], dtype=torch.int32, device=DEVICE),
                    state_slot=0,
                    start=0,
                    length=tokens,
                    offset=prompt * tokens,
                )
                for prompt in range(prompts)
            ]
            segments = DeviceSegments.sent(segments, q.device)
            us = timed([lambda: attention.attend(0, q, segments, out=out)] * 4)
            flops = 2 * prompts * heads * head_dim * tokens * (tokens + 1)
            print(
                f"attention {heads}/{kv_heads} heads D {head_dim}, {prompts} x {tokens}: "
                f"{us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s",
                flush=True,
            )


def main() -> None:
    torch.manual_seed(0)
    benches = {
        "gemm": bench_gemm, "sweep": bench_sweep, "delta": bench_delta,
        "prefill": bench_prefill, "attention": bench_attention, "fused": bench_fused,
        "append": bench_append,
    }  # fmt: skip
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in sys.argv[1:] or ("gemm", "delta", "prefill", "attention", "fused", "append"):
        benches[name]()


if __name__ == "__main__":
    main()
