"""`bench batch`: prefill and decode rates of b equal requests at once.

One process measures one engine configuration (BEN-04): all rows (pp, tg, b) of a report run on one
engine, sized for the largest, and its slots are in the report. To compare configurations, such as
two dtypes or thread counts, start one process each.

Rows take turns, so that a busy moment of the machine does not hit one row only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.bench.drive import Run, drive, random_prompts
from headrace.bench.env import Value, describe
from headrace.bench.floor import Floor
from headrace.bench.output import Report
from headrace.bench.stats import median, percentile, rate
from headrace.config import CHUNK_TOKENS, MAX_BATCH_TOKENS, EngineConfig
from headrace.engine import Engine
from headrace.errors import ConfigError
from headrace.plan import read_model_config

Drive: TypeAlias = Callable[[Engine, Sequence[NDArray[np.int64]], int], Run]

# A rate from fewer tokens a request is noise (BEN-03).
LEAST_NEW_TOKENS = 16

_COLUMNS = (
    "pp",
    "tg",
    "b",
    "n_kv",
    "t_pp_s",
    "s_pp_tps",
    "prefill_ms_floor",
    "prefill_floor_ratio",
    "t_tg_s",
    "s_tg_tps",
    "t_s",
    "s_tps",
    "step_ms_median",
    "step_ms_p95",
    "device_ms_median",
    "step_ms_floor",
    "floor_ratio",
    "speedup_vs_b1",
    "parity",
    "valid",
)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one row measures: `batch` prompts of `prompt_len` tokens, `gen_len` new tokens each."""

    prompt_len: int
    gen_len: int
    batch: int

    @property
    def context(self) -> int:
        """Tokens of prompt and answer of one request."""
        return self.prompt_len + self.gen_len


def make_shapes(
    prompt_lens: Sequence[int], gen_lens: Sequence[int], batches: Sequence[int]
) -> list[Shape]:
    """All combinations, the batch varying fastest."""
    return [Shape(pp, tg, b) for pp in prompt_lens for tg in gen_lens for b in batches]


def room(shapes: Sequence[Shape]) -> dict[str, int]:
    """Engine options that hold every shape, for those the caller does not set.

    All prompts of a run fit one step, so that no request decodes while others still prefill.
    """
    prompt_tokens = max(shape.batch * shape.prompt_len for shape in shapes)
    chunks = -(-prompt_tokens // CHUNK_TOKENS)
    return {
        "max_batch_size": max(shape.batch for shape in shapes),
        "max_context": max(shape.context for shape in shapes),
        "max_batch_tokens": min(chunks * CHUNK_TOKENS, MAX_BATCH_TOKENS),
    }


def bench_batch(
    config: EngineConfig,
    shapes: Sequence[Shape],
    *,
    repeat: int = 3,
    warmup: int = 1,
    drive: Drive = drive,
    on_run: Callable[[int], None] = lambda total: None,
) -> Report:
    """Measure every shape and compare its tokens with those of each request alone.

    drive: does one run; another one can be given to test what is made of its results. on_run is
    called after every run with the number of all runs.

    Raises
    ------
    ConfigError
        A shape does not fit the model or the options; raised before any weight is loaded.
    """
    check_room(config, shapes)
    with Engine(config) as engine:
        prompts = {
            length: random_prompts(
                engine,
                max(shape.batch for shape in shapes if shape.prompt_len == length),
                length,
                seed=config.seed,
            )
            for length in {shape.prompt_len for shape in shapes}
        }
        total = len(shapes) * (warmup + repeat) + sum(len(group) for group in prompts.values())

        def measured(group: Sequence[NDArray[np.int64]], gen_len: int) -> Run:
            run = drive(engine, group, gen_len)
            on_run(total)
            return run

        runs: dict[Shape, list[Run]] = {shape: [] for shape in shapes}
        for _ in range(warmup + repeat):
            for shape, done in runs.items():
                group = prompts[shape.prompt_len][: shape.batch]
                done.append(measured(group, shape.gen_len))
        # Greedy tokens of a shorter answer are a prefix of those of a longer one.
        alone = {
            length: [
                measured([prompt], max(s.gen_len for s in shapes if s.prompt_len == length)).tokens[
                    0
                ]
                for prompt in group
            ]
            for length, group in prompts.items()
        }
        rows = [
            make_row(shape, done[warmup:], alone[shape.prompt_len]) for shape, done in runs.items()
        ]
        add_speedups(rows)
        floor = Floor.of(engine)
        for shape, row in zip(runs, rows, strict=True):
            add_floor(row, shape, floor)
        env = describe(engine)
        env["copy_gb_per_s"] = None if floor is None else floor.bytes_per_s / 1e9
        env["product_tflops"] = None if floor is None else floor.flops_per_s / 1e12
        env["graph_replays"] = engine.runner.replays
        env["prompt_replays"] = engine.runner.prompt_replays
        return Report(env, rows, _COLUMNS)


def check_room(config: EngineConfig, shapes: Sequence[Shape]) -> None:
    """Raise `ConfigError` if a shape is beyond the model's context, the options', or the slots."""
    limit = read_model_config(config.model).max_position
    option = f"{config.model} was made for at most {limit}"
    if config.max_context is not None and config.max_context < limit:
        limit, option = config.max_context, f"max_context is {config.max_context}"
    for shape in shapes:
        if shape.context > limit:
            raise ConfigError(
                f"prompt-len {shape.prompt_len} + gen-len {shape.gen_len} = {shape.context} "
                f"tokens: {option}"
            )
        if shape.batch > config.max_batch_size:
            raise ConfigError(f"batch {shape.batch}: max_batch_size is {config.max_batch_size}")


def make_row(shape: Shape, runs: Sequence[Run], alone: Sequence[Sequence[int]]) -> dict[str, Value]:
    """Medians over the runs of one shape. `alone` are the tokens of each request by itself."""
    prefill_s = median([run.prefill_s for run in runs])
    decode_s = median([run.decode_s for run in runs])
    wall_s = median([run.wall_s for run in runs])
    step_ms = [sample for run in runs for sample in run.step_ms(shape.batch)]
    device_ms = [sample for run in runs for sample in run.device_ms(shape.batch)]
    last = runs[-1]
    reason = _invalid_reason(shape, runs)
    expected = [list(tokens[: shape.gen_len]) for tokens in alone[: shape.batch]]
    return {
        "pp": last.prompt_tokens // shape.batch,
        "tg": last.generated_tokens // shape.batch,
        "b": shape.batch,
        "n_kv": last.prompt_tokens + last.generated_tokens,
        "t_pp_s": prefill_s,
        "s_pp_tps": rate(last.computed_prompt_tokens, prefill_s),
        "t_tg_s": decode_s,
        "s_tg_tps": rate(last.decode_tokens, decode_s),
        "t_s": wall_s,
        "s_tps": rate(last.prompt_tokens + last.generated_tokens, wall_s),
        "step_ms_median": median(step_ms),
        "step_ms_p95": percentile(step_ms, 95),
        "step_ms_min": min(step_ms, default=None),
        "step_samples": len(step_ms),
        "device_ms_median": median(device_ms),
        "prefill_device_s": median(
            [run.prefill_device_s for run in runs if run.prefill_device_s is not None]
        ),
        "step_ms_floor": None,
        "floor_ratio": None,
        "prefill_ms_floor": None,
        "prefill_floor_ratio": None,
        "speedup_vs_b1": None,
        "concurrency": median([run.concurrency for run in runs]),
        "concurrency_asked": shape.batch,
        "cached_tokens": last.prompt_tokens - last.computed_prompt_tokens,
        "repeat": len(runs),
        "parity": all(run.tokens == expected for run in runs),
        "valid": reason is None,
        "reason": reason,
    }


def add_speedups(rows: Sequence[dict[str, Value]]) -> None:
    """Set `speedup_vs_b1` in every row whose lone request was measured too."""
    lone = {(row["pp"], row["tg"]): row["s_tg_tps"] for row in rows if row["b"] == 1}
    for row in rows:
        base, own = lone.get((row["pp"], row["tg"])), row["s_tg_tps"]
        if isinstance(base, float) and isinstance(own, float):
            row["speedup_vs_b1"] = own / base


def add_floor(row: dict[str, Value], shape: Shape, floor: Floor | None) -> None:
    """Set the least time of a decode step and of the prompts, and how far off the real ones are.

    A decode step is judged at the mean context of all of them.
    """
    if floor is None:
        return
    least = floor.step_ms(shape.batch, shape.prompt_len + shape.gen_len / 2)
    row["step_ms_floor"] = least
    step = row["step_ms_median"]
    row["floor_ratio"] = step / least if isinstance(step, float) else None
    least = floor.prefill_ms(shape.batch, shape.prompt_len)
    row["prefill_ms_floor"] = least
    prefill_s = row["t_pp_s"]
    row["prefill_floor_ratio"] = prefill_s * 1e3 / least if isinstance(prefill_s, float) else None


def _invalid_reason(shape: Shape, runs: Sequence[Run]) -> str | None:
    for run in runs:
        for result in run.results:
            real = (result.prompt_len, len(result.token_ids))
            if result.finish_reason != "length" or real != (shape.prompt_len, shape.gen_len):
                return (
                    f"a request ended by {result.finish_reason} after {real[0]} + {real[1]} "
                    f"tokens, asked were {shape.prompt_len} + {shape.gen_len}"
                )
    if shape.gen_len < LEAST_NEW_TOKENS:
        return f"a decode rate needs {LEAST_NEW_TOKENS} new tokens, here are {shape.gen_len}"
    return None
