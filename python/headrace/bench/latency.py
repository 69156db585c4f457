"""`bench latency`: what room for a batch costs a request that is alone.

Two engines with the same weights, one with a single slot and one with several, serve the same
request in turns within one process, so that both see the same state of the machine. That there are
two is in the report (BEN-04).
"""

from collections.abc import Callable
from dataclasses import replace

from headrace.bench.batch import Drive, Shape, check_room
from headrace.bench.batch import room as batch_room
from headrace.bench.drive import Run, drive, random_prompts
from headrace.bench.env import Value, describe
from headrace.bench.floor import Floor
from headrace.bench.output import Report
from headrace.bench.stats import median, percentile
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.errors import ConfigError

DEFAULT_SLOTS = 8
# The most that a step of a lone request may take with several slots, in steps with one.
CLAIMED_RATIO = 1.05


def room(prompt_len: int, gen_len: int) -> dict[str, int]:
    """Engine options for the larger engine, for those the caller does not set."""
    options = batch_room([Shape(prompt_len, gen_len, 1)])
    return {**options, "max_batch_size": DEFAULT_SLOTS}


def bench_latency(
    config: EngineConfig,
    *,
    prompt_len: int = 128,
    gen_len: int = 64,
    repeat: int = 5,
    warmup: int = 1,
    drive: Drive = drive,
    on_run: Callable[[int], None] = lambda total: None,
) -> Report:
    """Measure a lone request on both engines in turns.

    `lone_ratio` is the median over the rounds of (step with several slots / step with one).

    Raises
    ------
    ConfigError
        The request does not fit, or `max_batch_size` is 1, so that there is nothing to compare.
    """
    if config.max_batch_size < 2:
        raise ConfigError("max_batch_size=1: accepted here is 2 or more, to be compared with 1")
    check_room(config, [Shape(prompt_len, gen_len, 1)])
    with Engine(replace(config, max_batch_size=1)) as single, Engine(config) as several:
        [prompt] = random_prompts(single, 1, prompt_len, seed=config.seed)
        runs: dict[int, list[Run]] = {1: [], config.max_batch_size: []}
        engines = [(1, single), (config.max_batch_size, several)]
        for round_ in range(warmup + repeat):
            # Each goes first in every other round: what the first leaves in caches helps both.
            for slots, engine in engines[:: 1 if round_ % 2 == 0 else -1]:
                runs[slots].append(drive(engine, [prompt], gen_len))
                on_run(2 * (warmup + repeat))
        env = describe(several, engines_in_process=2)
        floor = Floor.of(several)
        env["copy_gb_per_s"] = None if floor is None else floor.bytes_per_s / 1e9
    expected = runs[1][0].tokens
    rows = [
        _row(slots, done[warmup:], parity=all(run.tokens == expected for run in done))
        for slots, done in runs.items()
    ]
    least = None if floor is None else floor.step_ms(1, prompt_len + gen_len / 2)
    for row in rows:
        step = row["step_ms_median"]
        row["step_ms_floor"] = least
        row["floor_ratio"] = step / least if least and isinstance(step, float) else None
    rows[1] |= _comparison(*(done[warmup:] for done in runs.values()))
    columns = tuple(rows[1])
    return Report(env, [{name: row.get(name) for name in columns} for row in rows], columns)


def _row(slots: int, runs: list[Run], *, parity: bool) -> dict[str, Value]:
    step_ms = [sample for run in runs for sample in run.step_ms(1)]
    ttft_ms = [sample for run in runs for sample in run.ttft_ms]
    return {
        "max_batch_size": slots,
        "pp": runs[-1].prompt_tokens,
        "tg": runs[-1].generated_tokens,
        "ttft_ms_median": median(ttft_ms),
        "ttft_ms_min": min(ttft_ms, default=None),
        "step_ms_median": median(step_ms),
        "step_ms_p95": percentile(step_ms, 95),
        "step_ms_min": min(step_ms, default=None),
        "step_samples": len(step_ms),
        "device_ms_median": median([sample for run in runs for sample in run.device_ms(1)]),
        "concurrency": median([run.concurrency for run in runs]),
        "concurrency_asked": 1,
        "parity": parity,
    }


def _comparison(single: list[Run], several: list[Run]) -> dict[str, Value]:
    pairs = [
        (median(one.step_ms(1)), median(many.step_ms(1)))
        for one, many in zip(single, several, strict=True)
    ]
    ratio = median([many / one for one, many in pairs if one and many])
    floors = [
        min(sample for run in runs for sample in run.step_ms(1)) for runs in (single, several)
    ]
    return {
        "lone_ratio": ratio,
        "lone_ratio_of_minima": floors[1] / floors[0],
        "lone_ratio_claimed": CLAIMED_RATIO,
        "claim_holds": None if ratio is None else ratio <= CLAIMED_RATIO,
    }
