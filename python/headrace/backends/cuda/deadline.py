"""The wait of the host for a GPU, which has an end.

Owns the time limit and whether it was passed. A step that has not ended may still write to pages
and staging memory, and a GPU cannot be made to let it go: from then on every wait and every step of
the engine is refused, so that nothing of it is handed to the device again. No locks: calls must not
overlap.
"""

from typing import Protocol

import torch

from headrace._core import EventWaiter
from headrace.errors import StepTimeout


class Waiter(Protocol):
    """What `EventWaiter` does."""

    def wait(self, event_handle: int, timeout: float) -> bool:
        """Whether an event was over within `timeout` seconds."""
        ...


class StepWaits:
    """Waits for events of one device, each for at most `timeout_s` seconds.

    `torch.cuda.Event.synchronize` cannot be ended, and a loop over `query` in Python would either
    sleep, on the critical path of every step, or take the GIL from the threads that submit and
    serve some hundred thousand times a second. The core's wait spins without the GIL, as
    `synchronize` does, and comes back.
    """

    def __init__(self, waiter: Waiter, timeout_s: float) -> None:
        self._waiter = waiter
        self._timeout_s = timeout_s
        self._stuck = False

    @classmethod
    def of(cls, device: torch.device, timeout_s: float) -> "StepWaits":
        """Waits for a GPU with an index."""
        assert device.index is not None, "resolved by the engine"
        return cls(EventWaiter(device.index), timeout_s)

    def check(self) -> None:
        """Raise `StepTimeout` if a wait has ended without its event."""
        if self._stuck:
            raise StepTimeout(
                f"a step has not ended within step_timeout_s={self._timeout_s:g} and may still run "
                "on the GPU: this engine runs no more; start over in a new process"
            )

    def wait(self, event: torch.cuda.Event) -> None:
        """Return once what was before the last record of an event is over.

        Raises
        ------
        StepTimeout
            It is not, in this wait or in one before.
        DeviceError
            The device reports a fault.
        """
        handle: int = event.cuda_event
        # An event that was never recorded has no handle. After a timeout a look is enough.
        timeout_s = 0.0 if self._stuck else self._timeout_s
        if handle and not self._waiter.wait(handle, timeout_s):
            self._stuck = True
            self.check()
