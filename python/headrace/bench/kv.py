"""`bench kv`: what each KV format costs and loses in the reference code, without a model.

Keys, values and queries are gaussian, in the dtype of the model. Times are those of the torch
reference, which decodes a copy before it attends: compare them with one another, not with kernels.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.bench.env import Value, machine
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
    "rel_l2",
)


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
) -> Report:
    """Measure every format (or those given) as `run` does, with the machine beside the rows."""
    rows = run(
        every_format() if formats is None else formats,
        contexts=contexts,
        layers=layers,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        repeat=repeat,
        seed=seed,
    )
    env: dict[str, Value] = {
        **machine(),
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
) -> list[dict[str, Value]]:
    """One row per format and context, on the CPU.

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
    rows = []
    for layout in layouts:
        for context in contexts:
            # The same seed for each format: all of them store the same vectors.
            inputs = _inputs(layout, context, group, seed)
            rows.append(_row(layout, inputs, repeat))
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


def _row(layout: KVLayout, inputs: _Inputs, repeat: int) -> dict[str, Value]:
    context = inputs.k.shape[0]
    single = KVLayout(
        kv_format=layout.kv_format,
        layers=1,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
    )
    pool = PlanePool.allocate(single, pages=1, page_tokens=context)
    positions = torch.arange(context)
    pages = torch.zeros_like(positions)

    def append(start: int, end: int) -> None:
        span = slice(start, end)
        pool.append(0, pages[span], positions[span], inputs.k[span], inputs.v[span])

    def fill() -> None:
        for start in range(0, context, CHUNK_TOKENS):
            append(start, min(start + CHUNK_TOKENS, context))

    def attend() -> torch.Tensor:
        q = rotate_queries(layout.kv_format, inputs.q)
        return unrotate_outputs(layout.kv_format, _attend(q, *pool.read(0, 0, context)))

    auto = KVFormat(name=AUTO, model_dtype=layout.kv_format.model_dtype)
    fill_s = _median_s(fill, repeat)
    return {
        "kv_dtype": layout.kv_format.label,
        "model_dtype": str(layout.kv_format.model_dtype).removeprefix("torch."),
        "context": context,
        "bytes_per_token": layout.bytes_per_token,
        "ratio": single.bytes_per_token
        / KVLayout(
            kv_format=auto, layers=1, kv_heads=layout.kv_heads, head_dim=layout.head_dim
        ).bytes_per_token,
        "append_us_per_token": fill_s * 1e6 / context,
        "append_one_us": _median_s(lambda: append(context - 1, context), repeat) * 1e6,
        "attention_ms_median": _median_s(attend, repeat) * 1e3,
        "rel_l2": float((attend() - inputs.exact).norm() / inputs.exact.norm()),
    }


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
