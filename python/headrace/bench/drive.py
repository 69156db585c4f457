"""One measured run: requests through the scheduler and the engine on the calling thread.

The path is the one that serves users (submit, plan, run, commit), with a clock around each step:
from the commit of the step before, as users see it, to its own. What is counted is what was
computed, not what was asked for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace._core import RequestResult, Scheduler, StepPlan
from headrace.engine import Engine
from headrace.errors import ConfigError
from headrace.pipeline import Pipeline, execute_plan
from headrace.request import SamplingParams
from headrace.sampling import SampleResult

_MS = 1e3
_NS = 1e-9
# Between two looks at whether requests are left that wait for a copy.
_COPY_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its time, and how many rows of each kind it computed.

    device_s: what the device took, by its own clock, where that is measured.
    """

    seconds: float
    num_decode: int
    num_rows: int
    device_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All steps of a run, and how each request ended, in the order of the prompts.

    wall_s: from the first submit to the last commit.
    """

    wall_s: float
    steps: list[Step] = field(default_factory=list)
    results: list[RequestResult] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        """Generated tokens of every request."""
        return [result.token_ids for result in self.results]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(result.prompt_len for result in self.results)

    @property
    def computed_prompt_tokens(self) -> int:
        """Those of them that were computed; the others came from a cache."""
        return sum(result.computed_prompt_tokens for result in self.results)

    @property
    def generated_tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def decode_steps(self) -> list[Step]:
        """Steps of decode rows alone; a step that also prefills counts as prefill."""
        return [step for step in self.steps if step.num_decode == step.num_rows]

    @property
    def decode_s(self) -> float:
        """Time of the decode steps."""
        return sum(step.seconds for step in self.decode_steps)

    @property
    def prefill_s(self) -> float:
        """Time of everything else, submission included."""
        return self.wall_s - self.decode_s

    @property
    def decode_tokens(self) -> int:
        """Tokens that decode steps made."""
        return sum(step.num_decode for step in self.decode_steps)

    def step_ms(self, rows: int) -> list[float]:
        """Milliseconds of the decode steps of exactly so many rows."""
        return [step.seconds * _MS for step in self.decode_steps if step.num_decode == rows]

    def device_ms(self, rows: int) -> list[float]:
        """The same by the clock of the device; empty where it is not measured."""
        steps = [step for step in self.decode_steps if step.num_decode == rows]
        return [step.device_s * _MS for step in steps if step.device_s is not None]

    @property
    def prefill_device_s(self) -> float | None:
        """Time of the device in the steps that are not decode steps."""
        times = [step.device_s for step in self.steps if step.num_decode != step.num_rows]
        return sum(time for time in times if time is not None) if any(times) else None

    @property
    def concurrency(self) -> float:
        """Rows of a step, weighted by its time."""
        busy = sum(step.seconds for step in self.steps)
        return sum(step.seconds * step.num_rows for step in self.steps) / busy if busy else 0.0

    @property
    def ttft_ms(self) -> list[float]:
        """Time to the first token of every request that has one."""
        return [
            (result.first_token_ns - result.submitted_ns) * _NS * _MS
            for result in self.results
            if result.first_token_ns is not None
        ]


def drive(
    engine: Engine,
    prompts: Sequence[NDArray[np.int64]],
    gen_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Run prompts together, `gen_len` greedy tokens each, past any end-of-text token."""
    params = SamplingParams(max_tokens=gen_len, ignore_eos=True)
    engine.runner.timed = True
    scheduler = new_scheduler(engine)
    try:
        start = clock()
        ids = [scheduler.submit(prompt, engine.sampling_spec(params)) for prompt in prompts]
        steps = list(_steps(engine, scheduler, clock))
        wall_s = clock() - start
        results = [scheduler.take_result(request_id) for request_id in ids]
    finally:
        end(engine, scheduler)
    return Run(wall_s=wall_s, steps=steps, results=results)


def new_scheduler(engine: Engine) -> Scheduler:
    """Return a scheduler with an empty cache, connected to the engine's copies."""
    scheduler = engine.make_scheduler()
    if engine.tier is not None:
        scheduler.connect(engine.tier.queue)
    return scheduler


def step(engine: Engine, scheduler: Scheduler, plan: StepPlan) -> None:
    """Do what the engine thread does with a plan, its copies included, one step at a time."""
    _commit(engine, scheduler, plan, execute_plan(engine, scheduler, plan))


def _commit(engine: Engine, scheduler: Scheduler, plan: StepPlan, result: SampleResult) -> None:
    scheduler.commit(plan, result.token_ids)
    if engine.tier is not None:
        scheduler.start_stores(engine.tier.queue)


def end(engine: Engine, scheduler: Scheduler) -> None:
    """Close a scheduler, and wait until no copy reads or writes what the next one will own."""
    scheduler.close()
    if engine.tier is not None:
        engine.tier.queue.drain()


def _steps(engine: Engine, scheduler: Scheduler, clock: Callable[[], float]) -> Iterator[Step]:
    pipeline = Pipeline(engine, scheduler)
    start = clock()
    while (plan := next_plan(scheduler)) is not None:
        for ended in pipeline.run(plan):
            if ended.result is None:
                assert ended.error is not None, "a step has a result or an error"
                raise ended.error
            _commit(engine, scheduler, ended.plan, ended.result)
            start, begun = clock(), start
            rows = ended.plan.num_rows
            yield Step(start - begun, ended.plan.num_decode, rows, engine.runner.device_s)


def next_plan(scheduler: Scheduler) -> StepPlan | None:
    """Next step, or None when no request is left; waits where a copy must end first."""
    while (plan := scheduler.next_plan(0.0)) is None:
        counts = scheduler.stats()
        if not counts["waiting"] and not counts["running"]:
            return None
        plan = scheduler.next_plan(_COPY_WAIT_S)
        if plan is not None:
            return plan
    return plan


def random_prompts(
    engine: Engine, count: int, length: int, *, seed: int
) -> list[NDArray[np.int64]]:
    """Prompts of ordinary tokens; the i-th depends on (seed, length, i) alone.

    Raises `ConfigError` if the vocabulary has no ordinary token.
    """
    config, tokenizer = engine.model_config, engine.tokenizer
    special = {*config.eos_token_ids, config.bos_token_id}
    size = config.vocab_size if tokenizer is None else min(config.vocab_size, tokenizer.vocab_size)
    ordinary = [
        token
        for token in range(size)
        if token not in special and not (tokenizer is not None and tokenizer.is_special(token))
    ]
    if not ordinary:
        raise ConfigError(f"vocab_size={size}: all tokens are special, none is left for prompts")
    choices = np.array(ordinary, dtype=np.int64)
    return [
        np.random.default_rng([seed, length, index]).choice(choices, length)
        for index in range(count)
    ]
