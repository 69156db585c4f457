"""The wait of the host for a GPU, which has an end.

Owns the time limit, whether a wait of an engine ended without its event, and for each GPU of this
process the events that were given up. A step that has not ended may still write to pages and
staging memory, and a GPU cannot be made to let it go. So from then on, and once the engine closes
its waits:

- `check` raises. It comes before the copies, the arrays and the kernels of a step, so that none of
  these is started in pages of the step that is stuck, which the scheduler has back by then. Stores
  after a commit may still be started: they are of a step that has ended.
- `wait` only looks. For an event that is over it returns, so that what has ended can still be
  handed out; for every other one it raises.
- What was enqueued before stays behind the step, in the order of its stream. The ticket of the step
  is not used again, nor is its stream given to another engine.

Waits may overlap with one another and with a launch: who launched a step waits for it outside of
the engine's lock. The flags are only ever set, and a wait touches nothing else. A launch that was
checked before such a wait ended is queued behind the stuck step, and ends like it for its waiter.
The events that were given up change under the GIL alone.
"""

from collections import defaultdict
from typing import Protocol

import torch

from headrace._core import EventWaiter
from headrace.errors import EngineClosed, StepTimeout

# Events that were not over when their wait ended, by GPU. Kept here, as they end with their owners.
_given_up: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)
# What a step that was cut off may still take before another engine is refused, in seconds.
_PATIENCE_S = 1.0


def check_gpu(device: torch.device) -> None:
    """Return once the steps of this process that were given up on a GPU are over.

    Raises
    ------
    StepTimeout
        One is not, after a second. To make an engine there would wait for it without an end.
    DeviceError
        The device reports a fault.
    """
    assert device.index is not None, "resolved by the engine"
    events = _given_up[device.index]
    while events:
        if not EventWaiter(device.index).wait(events[-1].cuda_event, _PATIENCE_S):
            raise StepTimeout(
                f"a step of an earlier engine was given up and may still run on {device}: try "
                "again later, or start over in a new process"
            )
        events.pop()


class Waiter(Protocol):
    """What `EventWaiter` does."""

    def wait(self, event_handle: int, timeout: float) -> bool:
        """Whether an event was over within `timeout` seconds."""
        ...

    def close(self) -> None:
        """Have waits raise `EngineClosed` for events that are not over."""
        ...


class StepWaits:
    """Waits for events of the GPU `index`, each for at most `timeout_s` seconds.

    gave_up: whether one ended without its event, so that work of the engine may still run.

    `torch.cuda.Event.synchronize` cannot be ended, and a loop over `query` in Python would either
    sleep, on the critical path of every step, or keep taking the GIL from the threads that submit
    and serve. The core's wait spins without the GIL, as `synchronize` does, and comes back.
    """

    def __init__(self, waiter: Waiter, timeout_s: float, index: int) -> None:
        self.gave_up = False
        self._waiter = waiter
        self._timeout_s = timeout_s
        self._index = index
        self._stuck = False
        self._closed = False

    @classmethod
    def of(cls, device: torch.device, timeout_s: float) -> "StepWaits":
        """Waits for a GPU with an index."""
        assert device.index is not None, "resolved by the engine"
        return cls(EventWaiter(device.index), timeout_s, device.index)

    def check(self) -> None:
        """Raise `StepTimeout` if a wait has passed the limit, `EngineClosed` after `close`."""
        if self._stuck:
            raise StepTimeout(
                f"a step has not ended within step_timeout_s={self._timeout_s:g} and may still run "
                "on the GPU: this engine runs no more; start over in a new process"
            )
        if self._closed:
            raise EngineClosed("engine is closed: closed by its owner")

    def close(self) -> None:
        """End all waits, of other threads too. Callable from any thread, at any time."""
        self._closed = True
        self._waiter.close()

    def wait(self, event: torch.cuda.Event) -> None:
        """Return once what was before the last record of an event is over.

        Raises
        ------
        StepTimeout
            It is not, and this wait or one before has passed the limit.
        EngineClosed
            It is not, and `close` was called or the interpreter exits.
        DeviceError
            The device reports a fault.
        """
        handle: int = event.cuda_event
        if not handle:
            return  # never recorded
        # After a timeout a look is enough.
        timeout_s = 0.0 if self._stuck else self._timeout_s
        try:
            over = self._waiter.wait(handle, timeout_s)
        except BaseException:  # closed, a fault, or Ctrl-C: nobody knows when it is over
            self._give_up(event)
            if self._stuck:
                self.check()
            raise
        if not over:
            self._give_up(event)
            self._stuck = True
            self.check()

    def _give_up(self, event: torch.cuda.Event) -> None:
        self.gave_up = True
        _given_up[self._index].append(event)
