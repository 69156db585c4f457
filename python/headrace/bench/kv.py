"""`bench kv`: what each KV format costs and loses, without a model.

Keys, values and queries are gaussian, in the dtype of the model. On a CPU times are those of the
torch reference, which decodes a copy before it attends: compare them with one another, not with
kernels. On a GPU they are those of the kernels, in replays of a graph of calls, each on another
page of more memory than the caches hold; by the clock of the device and by that of the host, which
waits for the end of a replay.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.backends.cuda.capture import captured
from headrace.backends.cuda.loader import require_gpu
from headrace.bench.env import Value, machine
from headrace.bench.floor import copy_bandwidth, timed_s
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
    "append_device_us_per_token",
    "append_us_floor",
    "append_floor_ratio",
    "append_one_us",
    "append_one_device_us",
    "attention_ms_median",
    "attention_device_ms_median",
    "step_ms_floor",
    "floor_ratio",
    "rel_l2",
    "parity",
)
# Calls of a kernel in one graph, and how much memory they go through: more than caches hold, unless
# that were more pages.
_GRAPH_CALLS = 20
_ROTATED_BYTES = 400 << 20
_MOST_PAGES = 512
# Relative L2 of a kernel's output against fp32 attention over what is stored: the bound of the
# format notes, and the rounding of the output to 8 bits.
_PARITY = 1e-3 + 2.0**-8


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
    bytes_per_s = None
    if device != "cpu":
        require_gpu(torch.device(device))
        bytes_per_s = copy_bandwidth(torch.device(device))
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
        bytes_per_s=bytes_per_s,
    )
    env: dict[str, Value] = {
        **machine(),
        "device": device,
        "device_name": None if device == "cpu" else torch.cuda.get_device_name(device),
        "copy_gb_per_s": None if bytes_per_s is None else bytes_per_s / 1e9,
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
    device: str,
    bytes_per_s: float | None,
) -> list[dict[str, Value]]:
    """One row per format and context.

    layers: only counted in the bytes; one layer is measured. group: query heads per KV head.
    bytes_per_s: of a copy on a GPU, None on a CPU.
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


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds of a call by the clock of the host, and by that of a GPU."""

    wall_s: float
    device_s: float | None = None

    def over(self, least_s: float | None) -> float | None:
        """How many times the least a GPU took."""
        return None if self.device_s is None or not least_s else self.device_s / least_s

    def device(self, scale: float) -> float | None:
        """Time of the device in a unit of `1 / scale` seconds."""
        return None if self.device_s is None else self.device_s * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Times of appending all tokens, of one, and of one attention; its output, and if it is right.

    `parity` is None where the reference itself was measured.
    """

    fill: _Time
    append_one: _Time
    attend: _Time
    output: torch.Tensor  # fp32 [kv_heads, group, D]
    parity: bool | None = None


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
    pages = 1
    if bytes_per_s is not None:
        pages = min(-(-_ROTATED_BYTES // single.bytes_per_page(context)), _MOST_PAGES)
    pool = PlanePool.allocate(single, pages=pages, page_tokens=context, device=device)
    measure = _reference if bytes_per_s is None else _kernels
    measured = measure(pool, inputs, repeat)
    auto = KVFormat(name=AUTO, model_dtype=layout.kv_format.model_dtype)
    # Attention reads what appends of all tokens write; what these read is not counted.
    floor_s = None if bytes_per_s is None else single.bytes_per_token * context / bytes_per_s
    fill, one, attend = measured.fill, measured.append_one, measured.attend
    return {
        "kv_dtype": layout.kv_format.label,
        "model_dtype": str(layout.kv_format.model_dtype).removeprefix("torch."),
        "context": context,
        "bytes_per_token": layout.bytes_per_token,
        "ratio": single.bytes_per_token
        / KVLayout(
            kv_format=auto, layers=1, kv_heads=layout.kv_heads, head_dim=layout.head_dim
        ).bytes_per_token,
        "append_us_per_token": fill.wall_s * 1e6 / context,
        "append_device_us_per_token": fill.device(1e6 / context),
        "append_us_floor": None if floor_s is None else floor_s * 1e6 / context,
        "append_floor_ratio": fill.over(floor_s),
        "append_one_us": one.wall_s * 1e6,
        "append_one_device_us": one.device(1e6),
        "attention_ms_median": attend.wall_s * 1e3,
        "attention_device_ms_median": attend.device(1e3),
        "step_ms_floor": None if floor_s is None else floor_s * 1e3,
        "floor_ratio": attend.over(floor_s),
        "rel_l2": _relative(measured.output, inputs.exact),
        "parity": measured.parity,
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
        fill=_Time(_median_s(fill, repeat)),
        append_one=_Time(_median_s(lambda: append(context - 1, context), repeat)),
        attend=_Time(_median_s(attend, repeat)),
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
    positions = torch.arange(context, dtype=torch.int32, device=device)
    tables = torch.arange(pool.pages, dtype=torch.int32, device=device).view(-1, 1)
    pages = tables.expand(-1, context).contiguous()
    lengths = torch.full((1,), context, dtype=torch.int32, device=device)

    def append(page: int, first: int) -> None:
        span = slice(first, context)
        kernels.append(0, pages[page, span], positions[span], k[span], v[span])

    def attend(page: int) -> None:
        kernels.attention_decode(0, q, tables[page : page + 1], lengths, out=out)

    calls = max(_GRAPH_CALLS, pool.pages)
    fill = _replayed(lambda call: append(call % pool.pages, 0), calls, repeat)
    append_one = _replayed(lambda call: append(call % pool.pages, context - 1), calls, repeat)
    attended = _replayed(lambda call: attend(call % pool.pages), calls, repeat)
    output = out.float().view(kv_heads, group, head_dim)
    # The last call was on this page.
    stored = pool.read(0, (calls - 1) % pool.pages, context)
    expected = _attend(rotate_queries(pool.layout.kv_format, q[0].float()).view_as(output), *stored)
    expected = unrotate_outputs(pool.layout.kv_format, expected)
    return _Measured(
        fill=fill,
        append_one=append_one,
        attend=attended,
        output=output.cpu(),
        parity=_relative(output, expected) < _PARITY,
    )


def _replayed(run_call: Callable[[int], None], calls: int, repeat: int) -> _Time:
    """Time of one of the calls `0..calls-1` in replays of a graph of all of them."""
    run_call(0)
    torch.cuda.synchronize()
    with captured() as graph:
        for call in range(calls):
            run_call(call)
    device_s, wall_s = timed_s(graph.replay, repeat)
    return _Time(wall_s / calls, device_s / calls)


def _relative(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).norm() / expected.norm())


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
