"""The steps of an engine, each launched before the tokens of the one before it are read.

In steady decode the device goes from step to step without waiting for the host: while a step runs,
the next one is planned on the assumption that all rows go on, and queued behind it. Then the tokens
of the first are waited for and handed to the caller, as early as without. Where the scheduler
cannot plan ahead, or a plan comes with copies, one step follows the other.

Owns nothing but the plans in flight, at most two. No locks: one thread drives it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from headrace._core import Scheduler, StepPlan
from headrace.engine import Engine
from headrace.errors import HeadraceError
from headrace.runner import Finished, Pending
from headrace.sampling import SampleResult

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """A step that is over: its tokens, or why there are none."""

    plan: StepPlan
    result: SampleResult | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight; without `pending` it could not be launched."""

    plan: StepPlan
    pending: Pending | None = None
    error: Exception | None = None


class Pipeline:
    """Runs plans of one scheduler on one engine.

    in_flight: plans that were not committed or failed when they were yielded, oldest first.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self.in_flight: list[StepPlan] = []
        self._launched: list[_Step] = []
        self._engine = engine
        self._tier = engine.tier
        self._scheduler = scheduler

    def run(self, plan: StepPlan) -> Iterator[Ended]:
        """Run a plan, and the steps that can be planned ahead of one another behind it.

        Each is yielded as it ends, in order, and has to be committed, or failed, before the next is
        asked for. What a launch or a forward raises is yielded; what planning raises is raised.
        """
        step: _Step | None = self._launch(plan, None)
        while step is not None:
            ahead = self._launch_ahead(step)
            yield _wait(step)
            self.in_flight.pop(0)
            self._launched.pop(0)
            step = ahead

    def drain(self) -> None:
        """Wait for what is on the device, if nobody goes on with `run`."""
        for step in self._launched:
            _wait(step)

    def _launch_ahead(self, step: _Step) -> _Step | None:
        if step.pending is None or not step.pending.feeds_next:
            return None
        plan = self._scheduler.plan_ahead(step.plan)
        return None if plan is None else self._launch(plan, step.pending)

    def _launch(self, plan: StepPlan, previous: Pending | None) -> _Step:
        self.in_flight.append(plan)
        try:
            if plan.has_copies:
                pending: Pending = Finished(execute_plan(self._engine, self._scheduler, plan))
            else:
                if previous is None and self._tier is not None:
                    self._engine.check()
                    self._scheduler.start_stores(self._tier.queue)  # see `execute_plan`
                pending = self._engine.launch(plan, previous)
            step = _Step(plan, pending)
        except Exception as error:
            step = _Step(plan, error=error)
        self._launched.append(step)
        return step


def _wait(step: _Step) -> Ended:
    if step.pending is None:
        return Ended(step.plan, error=step.error)
    try:
        return Ended(step.plan, step.pending.wait())
    except Exception as error:
        return Ended(step.plan, error=error)


def execute_plan(engine: Engine, scheduler: Scheduler, plan: StepPlan) -> SampleResult:
    """Run a plan alone, with the copies that belong to it.

    scheduler: the one that made the plan, connected to the engine's copy queue if it has one.
    Raises what the forward raises; copies that are refused count as failed and raise nothing.
    """
    if engine.tier is None:
        return engine.execute(plan)
    engine.check()  # before copies that no forward will follow
    copies = engine.tier.queue
    # What a preemption parks must be under way before its pages are wanted.
    scheduler.start_stores(copies)
    gates = None
    if plan.has_copies:
        try:
            gates = scheduler.start_step(plan, copies)
        except HeadraceError:
            # The rows that needed them are told at the commit, and start again.
            _LOG.warning("the copies of a step were refused", exc_info=True)
    try:
        return engine.execute(plan, gates)
    finally:
        # Also when the forward failed: the queue must not wait for layers that never come.
        if gates is not None:
            gates.release()
            gates.finish()
