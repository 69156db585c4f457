"""`bench loadback`: what a prompt costs cold, and when its KV is already somewhere.

A prompt is served again and again on one engine: cold, with its prefix on the device, with its
prefix in host memory alone (after other prompts have taken the device), and as a LOW request that
streams it (after another LOW request, with which its pages leave the device). Each repeat has a
prompt of its own. A request runs alone, through the path that serves
users; copies and gates are counted by the queue that does them.

How the times of a row are measured, all up to the first token:

- `step_ms`: plan, forward and commit of the steps, on this thread;
- `gate_wait_ms`: the part of it spent at the layer gates, summed over the layers;
- `compute_ms`: `step_ms - gate_wait_ms`;
- `load_ms`: time in which a copy to the device was in flight, as the copy worker saw it; states
  and windows of a hybrid's LOW request are two streams, whose times are added;
- `overlap`: `(load_ms + compute_ms - step_ms) / load_ms`, the part of the copies that the forward
  did not wait for. That copies slow the forward down is not in it: compare `compute_ms` with that
  of the device hit.

On a GPU the gates wait for copies to be enqueued and the stream of the forward waits for them to
end, which no clock here sees. `overlap` is found from the steps then: `(load_ms + step_ms of the
device hit - step_ms) / load_ms`, as both rows compute the same tokens; with slots there is none.

For the steps after that, `decode_bound_ms` is what a window of two layers allows: the larger of
load and compute for every KV layer, and the smaller once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core import RequestResult, Scheduler
from headrace.bench.drive import Run, Step, end, new_scheduler, next_plan, random_prompts, step
from headrace.bench.env import Value, describe
from headrace.bench.output import Report
from headrace.bench.stats import median
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.errors import ConfigError
from headrace.kv.cache import kv_layout
from headrace.kv.formats import parse_kv_format
from headrace.plan import read_model_config
from headrace.request import SamplingParams

_MS = 1e3
_NS_MS = 1e-6
_GB = 1e9
# Pages beyond those of the prompt and its answer: the tail of a LOW request, and one of slack.
_SPARE_PAGES = 3
# A copy within memory, or to the GPU, to be set beside those of a tier that imitates no link.
_LINK_BYTES = 64 * 2**20
_LINK_TRIES = 5
_H2D = ("load", "window")
# The counter that must hold what is cached, by row.
_SOURCES = {"cold": None, "device": "device", "host": "host", "low": "streamed"}
_COLUMNS = (
    "source",
    "ttft_ms_median",
    "computed_tokens",
    "cached_device",
    "cached_host",
    "cached_streamed",
    "h2d_bytes",
    "load_ms",
    "h2d_gb_s",
    "link_gb_s",
    "gate_wait_ms",
    "overlap",
    "decode_ms_median",
    "parity",
    "valid",
)


@dataclass(slots=True)
class _Copies:
    """What the queue has counted between two moments."""

    bytes: dict[str, int] = field(default_factory=lambda: {"load": 0, "window": 0, "store": 0})
    busy_ms: dict[str, float] = field(
        default_factory=lambda: {"load": 0.0, "window": 0.0, "store": 0.0}
    )
    gate_ms: list[float] = field(default_factory=list)

    @classmethod
    def between(cls, before: dict[str, Any], after: dict[str, Any]) -> "_Copies":
        names = ("load", "window", "store")
        waits = zip(before["gate_wait_ns"], after["gate_wait_ns"], strict=True)
        return cls(
            {name: after[name]["bytes"] - before[name]["bytes"] for name in names},
            {name: (after[name]["busy_ns"] - before[name]["busy_ns"]) * _NS_MS for name in names},
            [(now - then) * _NS_MS for then, now in waits],
        )

    @property
    def h2d_bytes(self) -> int:
        return sum(self.bytes[name] for name in _H2D)

    @property
    def load_ms(self) -> float:
        return sum(self.busy_ms[name] for name in _H2D)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request: its steps and result, and the copies up to its first token, after it, in all."""

    run: Run
    first_steps: int
    first: _Copies
    rest: _Copies
    whole: _Copies

    @property
    def result(self) -> RequestResult:
        """How it ended."""
        return self.run.results[0]

    @property
    def step_ms(self) -> float:
        """Time of the steps up to the first token."""
        return sum(step.seconds for step in self.run.steps[: self.first_steps]) * _MS

    @property
    def decode_ms(self) -> list[float]:
        """Times of the steps after it."""
        return [step.seconds * _MS for step in self.run.steps[self.first_steps :]]


def sources(config: EngineConfig) -> list[str]:
    """Rows of a report: a slot is private and holds nothing for others, and does not stream."""
    return list(_SOURCES) if config.kv_layout == "paged" else ["cold", "host"]


def room(config: EngineConfig, prompt_len: int, gen_len: int) -> dict[str, object]:
    """Engine options that make all sources happen, for those the caller does not set.

    config: what the caller sets; only its model, layout and page size are looked at.

    Raises
    ------
    ConfigError
        The prompt is not longer than a page, the answer shorter than two tokens, or the request is
        beyond the model's context.
    """
    page = config.page_size
    if prompt_len <= page:
        raise ConfigError(
            f"prompt {prompt_len}: accepted is more than page_size, which is {page}: one token at "
            "least is always computed"
        )
    if gen_len < 2:
        raise ConfigError(f"gen-len {gen_len}: accepted is 2 or more, for a step that streams")
    model = read_model_config(config.model)
    if prompt_len + gen_len > model.max_position:
        raise ConfigError(
            f"prompt {prompt_len} + gen-len {gen_len} = {prompt_len + gen_len} tokens: "
            f"{config.model} was made for at most {model.max_position}"
        )
    pages = -(-(prompt_len + gen_len) // page) + _SPARE_PAGES
    interval = -(-prompt_len // page) * page
    # The widest that KV and states can be; beside a CPU what is never written is never resident.
    widest = parse_kv_format("auto", model_dtype=torch.float32)
    unit = interval * kv_layout(model, widest).bytes_per_token + model.state_bytes_per_slot(4)
    # The prompt, what takes the device from it, the tails of LOW requests, and some slack.
    options: dict[str, object] = {
        "max_context": prompt_len + gen_len,
        "snapshot_interval": interval,
        "host_bytes": (_fillers(pages, prompt_len, page) + 3) * unit,
    }
    if config.kv_layout == "paged":
        options |= {"num_pages": pages, "low_pages": pages - 2}
    return options


def bench_loadback(
    config: EngineConfig,
    *,
    prompt_len: int = 1024,
    gen_len: int = 16,
    repeat: int = 3,
    warmup: int = 1,
    on_run: Callable[[int], None] = lambda total: None,
) -> Report:
    """Measure the prompt from every source; a row is the median of the repeats.

    Parity: the tokens of every run are those of the cold one of its prompt. A row is not valid if
    the prefix did not come from where the row says.

    Raises
    ------
    ConfigError
        The request does not fit the options, or there is no host tier or no prefix cache.
    """
    _check(config, prompt_len, gen_len)
    asked = sources(config)
    served: dict[str, list[Served]] = {source: [] for source in asked}
    with Engine(config) as engine:
        paged = config.kv_layout == "paged"
        fillers = _fillers(engine.kv.pages, prompt_len, config.page_size) if paged else 0
        total = warmup + repeat
        prompts = random_prompts(engine, total + fillers, prompt_len, seed=config.seed)
        others = prompts[total:]
        scheduler = new_scheduler(engine)
        try:
            for prompt in prompts[:total]:
                for source in asked:
                    _prepare(engine, scheduler, source, prompt, others)
                    priority = "low" if source == "low" else "high"
                    one = serve(engine, scheduler, prompt, gen_len, priority=priority)
                    served[source].append(one)
                    on_run(total * len(asked))
        finally:
            end(engine, scheduler)
        env = describe(engine)
        layers = engine.model_config.kv_layers
    expected = [one.result.token_ids for one in served["cold"]]
    link = _link(config, env["device"])
    rows = [
        _row(
            source,
            done[warmup:],
            link,
            layers,
            parity=[one.result.token_ids for one in done] == expected,
        )
        for source, done in served.items()
    ]
    if str(env["device"]).startswith("cuda"):
        _overlap_by_steps(rows)
    return Report(env, rows, _COLUMNS)


def _overlap_by_steps(rows: Sequence[dict[str, Value]]) -> None:
    """Replace `overlap` by what the steps say, in rows that load what another has resident."""
    resident = next((row["step_ms"] for row in rows if row["source"] == "device"), None)
    for row in rows:
        load_ms, step_ms, row["overlap"] = row["load_ms"], row["step_ms"], None
        if isinstance(load_ms, float) and load_ms and isinstance(resident, float):
            assert isinstance(step_ms, float), "every row has steps"
            row["overlap"] = (load_ms + resident - step_ms) / load_ms


def serve(
    engine: Engine,
    scheduler: Scheduler,
    prompt: NDArray[np.int64],
    gen_len: int,
    *,
    priority: str = "high",
) -> Served:
    """Run one greedy request to its end, and all stores it caused."""
    assert engine.tier is not None, "checked by the caller"
    queue = engine.tier.queue
    spec = engine.sampling_spec(SamplingParams(max_tokens=gen_len, ignore_eos=True))
    before = queue.stats()
    start = time.perf_counter()
    request_id = scheduler.submit(prompt, spec, priority=priority)
    steps: list[Step] = []
    first: tuple[int, dict[str, Any]] | None = None
    step_start = start
    while (plan := next_plan(scheduler)) is not None:
        step(engine, scheduler, plan)
        now = time.perf_counter()
        steps.append(Step(now - step_start, plan.num_decode, plan.num_rows))
        if first is None and len(plan.sample_rows):
            # The copies to the device that belong to a step are over when the step is.
            first = len(steps), queue.stats()
        step_start = time.perf_counter()
    wall_s = time.perf_counter() - start
    queue.drain()
    after = queue.stats()
    count, middle = first or (len(steps), after)
    return Served(
        run=Run(wall_s=wall_s, steps=steps, results=[scheduler.take_result(request_id)]),
        first_steps=count,
        first=_Copies.between(before, middle),
        rest=_Copies.between(middle, after),
        whole=_Copies.between(before, after),
    )


def _prepare(
    engine: Engine,
    scheduler: Scheduler,
    source: str,
    prompt: NDArray[np.int64],
    others: Sequence[NDArray[np.int64]],
) -> None:
    """Bring a prompt that was just served to where a row wants it."""
    if source == "host":
        for other in others:
            serve(engine, scheduler, other, 1)
    if source == "low":
        # The pages that only LOW requests read leave the device with the first of them, in the step
        # after the one that completes the last page.
        serve(engine, scheduler, prompt, 2, priority="low")


def _fillers(pages: int, prompt_len: int, page_size: int) -> int:
    """Other prompts of this length that take all pages of the device, and one more."""
    return -(-pages // (prompt_len // page_size)) + 1


def _check(config: EngineConfig, prompt_len: int, gen_len: int) -> None:
    if not config.host_bytes or config.prefix_cache == "off" or config.write_policy == "none":
        raise ConfigError(
            f"host_bytes={config.host_bytes}, prefix_cache={config.prefix_cache!r}, write_policy="
            f"{config.write_policy!r}: there is nothing to load back without a host tier"
        )
    context = prompt_len + gen_len
    if config.max_context is not None and context > config.max_context:
        raise ConfigError(
            f"prompt {prompt_len} + gen-len {gen_len} = {context} tokens: max_context is "
            f"{config.max_context}"
        )


def _link(config: EngineConfig, device: Value) -> tuple[float, str]:
    """Rate of the link in GB/s, and where it comes from."""
    if config.link_bytes_per_s:
        return config.link_bytes_per_s / _GB, "imitated"
    if str(device).startswith("cuda"):
        return _gpu_link(str(device))
    source = np.ones(_LINK_BYTES, np.uint8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(_LINK_TRIES):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return _LINK_BYTES / best / _GB, "memcpy of 64 MiB, best of 5"


def _gpu_link(device: str) -> tuple[float, str]:
    source = torch.ones(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    best = float("inf")
    for _ in range(_LINK_TRIES):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return _LINK_BYTES / best / _GB, "copy of 64 MiB from pinned memory, best of 5"


def _row(
    source: str, runs: Sequence[Served], link: tuple[float, str], layers: int, *, parity: bool
) -> dict[str, Value]:
    last = runs[-1]
    result = last.result
    device, host, streamed = result.cached_tokens
    load_ms = median([run.first.load_ms for run in runs])
    gate_ms = median([sum(run.first.gate_ms) for run in runs])
    step_ms = median([run.step_ms for run in runs])
    reason = _invalid_reason(source, runs)
    return {
        "source": source,
        "pp": result.prompt_len,
        "tg": len(result.token_ids),
        "ttft_ms_median": median([sample for run in runs for sample in run.run.ttft_ms]),
        "ttft_ms_min": min((sample for run in runs for sample in run.run.ttft_ms), default=None),
        "computed_tokens": result.computed_prompt_tokens,
        "cached_device": device,
        "cached_host": host,
        "cached_streamed": streamed,
        "h2d_bytes": last.first.h2d_bytes,
        "d2h_bytes": last.whole.bytes["store"],
        "load_ms": load_ms,
        "h2d_gb_s": _gb_s([(run.first.h2d_bytes, run.first.load_ms) for run in runs]),
        "d2h_gb_s": _gb_s([(run.whole.bytes["store"], run.whole.busy_ms["store"]) for run in runs]),
        "link_gb_s": link[0],
        "link": link[1],
        "step_ms": step_ms,
        "compute_ms": median([run.step_ms - sum(run.first.gate_ms) for run in runs]),
        "gate_wait_ms": gate_ms,
        "stall_ms_by_layer": _by_layer([run.first.gate_ms for run in runs]),
        "overlap": median(
            [
                (run.first.load_ms - sum(run.first.gate_ms)) / run.first.load_ms
                for run in runs
                if run.first.load_ms
            ]
        ),
        **_decode(runs, layers),
        "concurrency": median([run.run.concurrency for run in runs]),
        "concurrency_asked": 1,
        "repeat": len(runs),
        "parity": parity,
        "valid": reason is None,
        "reason": reason,
    }


def _decode(runs: Sequence[Served], layers: int) -> dict[str, Value]:
    """Steps after the first token: only a LOW request copies anything to the device there."""
    times = [sample for run in runs for sample in run.decode_ms]
    steps = len(times)
    columns: dict[str, Value] = {
        "decode_ms_median": median(times),
        "decode_ms_min": min(times, default=None),
        "decode_h2d_bytes": None,
        "decode_load_ms": None,
        "decode_gate_wait_ms": None,
        "decode_bound_ms": None,
    }
    moved = sum(run.rest.h2d_bytes for run in runs)
    if steps and moved:
        load = sum(run.rest.load_ms for run in runs) / steps
        gate = sum(sum(run.rest.gate_ms) for run in runs) / steps
        compute = sum(times) / steps - gate
        columns |= {
            "decode_h2d_bytes": moved // steps,
            "decode_load_ms": load,
            "decode_gate_wait_ms": gate,
            "decode_bound_ms": max(load, compute) + min(load, compute) / layers,
        }
    return columns


def _by_layer(runs: Sequence[Sequence[float]]) -> str:
    """Median milliseconds at the gate of every model layer, first layer first."""
    return " ".join(f"{median(waits) or 0.0:.3f}" for waits in zip(*runs, strict=True))


def _gb_s(samples: Sequence[tuple[int, float]]) -> float | None:
    return median([moved / _GB / (ms / _MS) for moved, ms in samples if moved and ms])


def _invalid_reason(source: str, runs: Sequence[Served]) -> str | None:
    for run in runs:
        result = run.result
        if result.finish_reason != "length":
            return f"a request ended by {result.finish_reason}: {result.message}"
        cached = dict(zip(("device", "host", "streamed"), result.cached_tokens, strict=True))
        if sum(cached.values()) + result.computed_prompt_tokens != result.prompt_len:
            return (
                f"{cached} cached and {result.computed_prompt_tokens} computed tokens are not the "
                f"{result.prompt_len} of the prompt"
            )
        if any((tokens > 0) != (name == _SOURCES[source]) for name, tokens in cached.items()):
            return f"cached tokens of row {source}: {cached}"
    return None
