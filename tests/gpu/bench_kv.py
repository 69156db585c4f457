"""Time append, gather and decode attention: `python tests/gpu/bench_kv.py [format ...]`.

Each number is the median of replays of a CUDA graph whose launches go over different slots, so that
the L2 cache holds nothing of the next one; launch gaps inside a graph are part of it. TB/s are the
bytes of the stored KV (attention, gather: plus what gather writes) over that time.
"""

import statistics
import sys

import torch

from headrace.backends.cuda.kv import KVKernels, QKNorm, Rotary
from headrace.kv.formats import KVLayout, parse_kv_format
from headrace.kv.planes import PlanePool
from headrace.layers.rope import RotaryEmbedding

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
FLOOR = 4.165e12  # bytes a second of a device-to-device copy, read and written
SLOTS, CONTEXT = 64, 65_536
LENGTHS, ROWS = (1024, 8192, 16_384, 65_536), (1, 8)
SHAPES = ((256, 4, 6), (128, 8, 4), (128, 8, 2))  # D, KV heads, query heads of each
FORMATS = {
    "bf16": parse_kv_format("auto", model_dtype=BF16),
    "fp8": parse_kv_format("fp8", model_dtype=BF16),
    "fp8b64": parse_kv_format("fp8", fp8_block=64, model_dtype=BF16),
    "int8": parse_kv_format("int8_per_token_head", model_dtype=BF16),
    "int8r": parse_kv_format("int8_per_token_head", int8_rotate=True, model_dtype=BF16),
    "k8v4": parse_kv_format("turboquant_k8v4", model_dtype=BF16),
}


def graph_us(calls, replays=7):
    """Median time of one of `calls`, captured together, in microseconds."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def pool_of(kv_format, head_dim, kv_heads):
    layout = KVLayout(kv_format=kv_format, layers=1, kv_heads=kv_heads, head_dim=head_dim)
    pool = PlanePool.allocate(layout, pages=SLOTS, page_tokens=CONTEXT, device=DEVICE)
    for name, tensor in pool.tensors.items():
        if name.endswith("scale"):
            tensor.fill_(0.01)
        elif tensor.dtype == BF16:
            tensor.normal_()
        else:
            # Random bytes below the NaN of fp8, spread by a multiplicative pattern: fast to make.
            tensor.view(torch.int64).random_()
            tensor.view(torch.uint8).bitwise_and_(0xF7)
    return pool


def attention_rows(kernels, pool, group, length, rows):
    heads, head_dim = pool.layout.kv_heads * group, pool.layout.head_dim
    q = torch.randn((rows, heads, head_dim), device=DEVICE, dtype=BF16)
    out = torch.empty_like(q)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    tables = torch.arange(SLOTS, dtype=torch.int32, device=DEVICE).view(-1, rows, 1)
    return [
        lambda table=table: kernels.attention_decode(0, q, table, lengths, out=out)
        for table in tables
    ]


def append_calls(kernels, pool, group, tokens):
    kv_heads, head_dim = pool.layout.kv_heads, pool.layout.head_dim
    heads = kv_heads * group
    qkv = torch.randn((tokens, heads + 2 * kv_heads, head_dim), device=DEVICE, dtype=BF16)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    out = torch.empty((tokens, heads, head_dim), device=DEVICE, dtype=BF16)
    weight = torch.ones(head_dim, device=DEVICE, dtype=BF16)
    norm = QKNorm(q=weight, k=weight, eps=1e-6, wide=False)
    table = RotaryEmbedding(head_dim, 1e6, CONTEXT, DEVICE)
    rotary = Rotary(cos=table.cos, sin=table.sin)
    offsets = torch.arange(tokens, device=DEVICE)

    def call(slot):
        pages = torch.full((tokens,), slot, device=DEVICE)
        return lambda: kernels.append_fused(
            0, pages, offsets, offsets, q, k, v, q_out=out, norm=norm, rotary=rotary
        )

    return [call(slot) for slot in range(32)]


def gather_calls(kernels, pool, tokens):
    shape = (tokens, pool.layout.kv_heads, pool.layout.head_dim)
    k, v = (torch.empty(shape, device=DEVICE, dtype=BF16) for _ in range(2))
    tables = torch.arange(4, dtype=torch.int32, device=DEVICE).view(-1, 1)
    return [lambda table=table: kernels.gather(0, table, 0, k_out=k, v_out=v) for table in tables]


def main(names):
    print("attention, us (TB/s; x of the floor):", *(f"L={n // 1024}K" for n in LENGTHS))
    others = []
    for head_dim, kv_heads, group in SHAPES:
        for name in names:
            pool = pool_of(FORMATS[name], head_dim, kv_heads)
            kernels = KVKernels(
                pool, query_heads=kv_heads * group, max_rows=max(ROWS), max_context=CONTEXT
            )
            for rows in ROWS:
                cells = []
                for length in LENGTHS:
                    us = graph_us(attention_rows(kernels, pool, group, length, rows))
                    size = rows * length * pool.layout.bytes_per_token
                    rate = size / us / 1e6
                    cells.append(f"{us:6.1f} ({rate:.2f}; {us * 1e-6 * FLOOR / size:.2f})")
                print(f"D{head_dim} H{kv_heads} G{group} {name:6s} B{rows} ", *cells, flush=True)
            appends = [graph_us(append_calls(kernels, pool, group, n)) for n in (1, 8, 4096)]
            us = graph_us(gather_calls(kernels, pool, CONTEXT))
            written = CONTEXT * kv_heads * head_dim * 4
            rate = (CONTEXT * pool.layout.bytes_per_token + written) / us / 1e6
            others.append(
                f"D{head_dim} H{kv_heads} G{group} {name:6s} append fused T=1, 8, 4096: "
                + " ".join(f"{us:.1f}" for us in appends)
                + f" us; gather 64K: {us:.0f} us ({rate:.2f} TB/s)"
            )
            del pool, kernels
            torch.cuda.empty_cache()  # the next pool asks what the device has free
    print("\n".join(others))


if __name__ == "__main__":
    main(sys.argv[1:] or list(FORMATS))
