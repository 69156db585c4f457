"""`bench kv`: what each KV format costs and loses, without a model.

Keys, values and queries are gaussian, in the dtype of the model. On a CPU times are those of the
torch reference, which decodes a copy before it attends: compare them with one another, not with
kernels. On a GPU they are those of the kernels, in replays of a graph of many calls.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.backends.cuda.loader import require_gpu
from headrace.bench.env import Value, machine
from headrace.bench.floor import copy_bandwidth, device_median_s
from headrace.bench.output import Report
from headrace.bench.stats import median
from headrace.kv.codecs import rotate_queries, unrotate_outputs
from headrace.kv.formats import AUTO, FP8, INT8, K8V4, KVFormat, KVLayout, positive
from headrace.kv.planes import PlanePool

# Tokens of one append of a prefill: the least piece a prompt is cut into.
CHUNK_TOKENS = 64

_COLUMNS = (
    "kv_dtype",
    "context",
    "bytes_per_token",
    "ratio",
    "append_us_per_token",
    "append_one_us",
    "attention_ms_median",
    "step_ms_floor",
    "floor_ratio",
    "rel_l2",
)
# Calls of a kernel in one graph.
_GRAPH_CALLS = 20


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Of one context: `k, v [context, kv_heads, D]`, `q [kv_heads, group, D]`, exact outputs."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    exact: torch.Tensor


def every_format(model_dtype: torch.dtype = torch.bfloat16) -> list[KVFormat]:
    """All formats with all their options."""
    return [
        KVFormat(name=AUTO, model_dtype=model_dtype),
        KVFormat(name=FP8, model_dtype=model_dtype),
        KVFormat(name=FP8, model_dtype=model_dtype, fp8_block=64),
        KVFormat(name=INT8, model_dtype=model_dtype),
        KVFormat(name=INT8, model_dtype=model_dtype, int8_rotate=True),
        KVFormat(name=K8V4, model_dtype=model_dtype),
    ]


def bench_kv(
    formats: Sequence[KVFormat] | None = None,
    *,
    contexts: Sequence[int] = (1_024, 4_096),
    layers: int = 1,
    kv_heads: int = 4,
    group: int = 4,
    head_dim: int = 128,
    repeat: int = 5,
    seed: int = 0,
    device: str = "cpu",
) -> Report:
    """Measure every format (or those given) as `run` does, with the machine beside the rows.

    Raises
    ------
    CudaUnavailable
        The device is a GPU and there is none that runs the kernels.
    """
    rows = run(
        every_format() if formats is None else formats,
        contexts=contexts,
        layers=layers,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        repeat=repeat,
        seed=seed,
        device=device,
    )
    env: dict[str, Value] = {
        **machine(),
        "device": device,
        "layers": layers,
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": head_dim,
        "repeat": repeat,
        "seed": seed,
        "threads": torch.get_num_threads(),
    }
    return Report(env, rows, _COLUMNS)


@torch.inference_mode()
def run(
    formats: Sequence[KVFormat],
    *,
    contexts: Sequence[int],
    layers: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    repeat: int,
    seed: int,
    device: str = "cpu",
) -> list[dict[str, Value]]:
    """One row per format and context.

    layers: only counted in the bytes; one layer is measured. group: query heads per KV head.
    `rel_l2` is that of the attention output of one token against fp32 attention over the vectors
    before they were stored, `ratio` the bytes against `auto`.

    Raises
    ------
    ConfigError
        A size is not positive, a format cannot store `head_dim`, or the pool does not fit.
    """
    sizes = {"layers": layers, "kv_heads": kv_heads, "group": group, "repeat": repeat}
    for name, value in (*sizes.items(), *(("context", context) for context in contexts)):
        positive(name, value)
    layouts = [
        KVLayout(kv_format=entry, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        for entry in formats
    ]
    bytes_per_s = None
    if device != "cpu":
        require_gpu()
        bytes_per_s = copy_bandwidth(torch.device(device))
    rows = []
    for layout in layouts:
        for context in contexts:
            # The same seed for each format: all of them store the same vectors.
            inputs = _inputs(layout, context, group, seed)
            rows.append(_row(layout, inputs, repeat, device, bytes_per_s))
    return rows


def _inputs(layout: KVLayout, context: int, group: int, seed: int) -> _Inputs:
    generator = torch.Generator().manual_seed(seed)
    dtype = layout.kv_format.model_dtype

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    k = gaussian(context, layout.kv_heads, layout.head_dim)
    v = gaussian(context, layout.kv_heads, layout.head_dim)
    q = gaussian(layout.kv_heads, group, layout.head_dim).float()
    return _Inputs(k, v, q, _attend(q, k.float(), v.float()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Seconds of appending all tokens, of one, and of one attention; and its output."""

    fill_s: float
    append_one_s: float
    attend_s: float
    output: torch.Tensor  # fp32 [kv_heads, group, D]


def _row(
    layout: KVLayout, inputs: _Inputs, repeat: int, device: str, bytes_per_s: float | None
) -> dict[str, Value]:
    context = inputs.k.shape[0]
    single = KVLayout(
        kv_format=layout.kv_format,
        layers=1,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
    )
    pool = PlanePool.allocate(single, pages=1, page_tokens=context, device=device)
    measure = _reference if bytes_per_s is None else _kernels
    measured = measure(pool, inputs, repeat)
    auto = KVFormat(name=AUTO, model_dtype=layout.kv_format.model_dtype)
    floor_s = None if bytes_per_s is None else single.bytes_per_token * context / bytes_per_s
    return {
        "kv_dtype": layout.kv_format.label,
        "model_dtype": str(layout.kv_format.model_dtype).removeprefix("torch."),
        "context": context,
        "bytes_per_token": layout.bytes_per_token,
        "ratio": single.bytes_per_token
        / KVLayout(
            kv_format=auto, layers=1, kv_heads=layout.kv_heads, head_dim=layout.head_dim
        ).bytes_per_token,
        "append_us_per_token": measured.fill_s * 1e6 / context,
        "append_one_us": measured.append_one_s * 1e6,
        "attention_ms_median": measured.attend_s * 1e3,
        "step_ms_floor": None if floor_s is None else floor_s * 1e3,
        "floor_ratio": None if floor_s is None else measured.attend_s / floor_s,
        "rel_l2": float((measured.output - inputs.exact).norm() / inputs.exact.norm()),
    }


def _reference(pool: PlanePool, inputs: _Inputs, repeat: int) -> _Measured:
    context, kv_format = inputs.k.shape[0], pool.layout.kv_format
    positions = torch.arange(context)
    pages = torch.zeros_like(positions)

    def append(start: int, end: int) -> None:
        span = slice(start, end)
        pool.append(0, pages[span], positions[span], inputs.k[span], inputs.v[span])

    def fill() -> None:
        for start in range(0, context, CHUNK_TOKENS):
            append(start, min(start + CHUNK_TOKENS, context))

    def attend() -> torch.Tensor:
        q = rotate_queries(kv_format, inputs.q)
        return unrotate_outputs(kv_format, _attend(q, *pool.read(0, 0, context)))

    return _Measured(
        fill_s=_median_s(fill, repeat),
        append_one_s=_median_s(lambda: append(context - 1, context), repeat),
        attend_s=_median_s(attend, repeat),
        output=attend(),
    )


def _kernels(pool: PlanePool, inputs: _Inputs, repeat: int) -> _Measured:
    from headrace.backends.cuda.kv import KVKernels

    context, device = inputs.k.shape[0], pool.device
    kv_heads, group, head_dim = inputs.q.shape
    heads = kv_heads * group
    kernels = KVKernels(pool, query_heads=heads, max_rows=1, max_context=context)
    k, v = inputs.k.to(device), inputs.v.to(device)
    q = inputs.q.to(device, inputs.k.dtype).view(1, heads, head_dim)
    out = torch.empty_like(q)
    positions = torch.arange(context, device=device)
    pages = torch.zeros_like(positions)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    lengths = torch.full((1,), context, dtype=torch.int32, device=device)

    def append(first: int) -> None:
        span = slice(first, context)
        kernels.append(0, pages[span], positions[span], k[span], v[span])

    def attend() -> None:
        kernels.attention_decode(0, q, table, lengths, out=out)

    fill_s = _replayed_s(lambda: append(0), repeat)
    return _Measured(
        fill_s=fill_s,
        append_one_s=_replayed_s(lambda: append(context - 1), repeat),
        attend_s=_replayed_s(attend, repeat),
        output=out.float().cpu().view(kv_heads, group, head_dim),
    )


def _replayed_s(call: Callable[[], None], repeat: int) -> float:
    """Median seconds of a call in replays of a graph; the data of a small one stays in caches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            call()
    return device_median_s(graph.replay, repeat) / _GRAPH_CALLS


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`q [H, group, D]` over `k, v [context, H, D]` in fp32 -> `[H, group, D]`."""
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    scores = torch.matmul(q, keys) / math.sqrt(q.shape[-1])  # [H, group, context]
    return torch.matmul(torch.softmax(scores, dim=-1), values)


def _median_s(call: Callable[[], object], repeat: int) -> float:
    call()  # touches memory and caches
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    middle = median(samples)
    assert middle is not None, "there is at least one sample"
    return middle
