"""Every error the engine raises for bad input, lack of room or a failed part.

One base class, so that `except HeadraceError` catches all of them; each class also derives from
the built-in a caller would expect. The Rust core raises these same classes.
"""


class HeadraceError(Exception):
    """Base class of all errors raised by headrace."""


class ConfigError(HeadraceError, ValueError):
    """An option, or a combination of options, that cannot work. Names the field and the limit."""


class InvalidRequest(HeadraceError, ValueError):
    """A request with a bad field. Names the field, the value and what would be accepted."""


class PromptTooLong(InvalidRequest):
    """A prompt that leaves no room for one new token in `max_context`."""


class DuplicateRequest(HeadraceError, ValueError):
    """A request id that is still live, or still holds a slot."""


class UnknownRequest(HeadraceError, KeyError):
    """A request id that is not live and has no stored result."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would quote the message.
        return Exception.__str__(self)


class OutOfPages(HeadraceError, MemoryError):
    """No room in a pool: says how much was needed, free and evictable.

    `item` is the index of the item of a group call that failed.
    """

    needed: int
    free: int
    evictable: int = 0
    item: int | None = None


class PageStateError(HeadraceError, ValueError):
    """A page that is not in the state a call needs; nothing changed.

    `index` is the position in the call of the first bad page (`page`, `start`), `fault` says what
    is wrong with it. A host page has its number in `page` and no more.
    """

    index: int
    page: int
    start: int
    fault: str


class LeaseReleased(HeadraceError, RuntimeError):
    """A lease of the prefix tree, or a store it asked for, that was given back already."""


class QueueFull(HeadraceError):
    """Back-pressure: `max_waiting` requests are already waiting. Submit again later."""


class EngineClosed(HeadraceError, RuntimeError):
    """The engine was closed, or its thread died; carries the reason."""


class StalePlan(HeadraceError, RuntimeError):
    """A commit for a step that is not in flight; nothing changed."""


class ForkedProcess(HeadraceError, RuntimeError):
    """An engine object used in a forked child. Start workers with the `spawn` method."""


class CopyError(HeadraceError, RuntimeError):
    """A copy between host and device failed or did not end in time; what it wrote is not valid.

    `job`, `page`, `plane`, `layer`: what is known of the place, else None. `settled` is False if
    the device may still touch the job's pages: they must not be handed out again.
    """

    job: int
    page: int | None
    plane: str | None
    layer: int | None
    settled: bool


class DeviceError(HeadraceError, RuntimeError):
    """The driver of a GPU refused a call. Names the call and what the driver said."""


class StepTimeout(HeadraceError, TimeoutError):
    """A step on a GPU did not end within `step_timeout_s`.

    It may run still, so its engine runs no more, and no engine is made on that GPU in this process.
    Also raised if an engine cannot be made because another of this process is stuck in the making.
    """


class ModelError(HeadraceError):
    """A model that cannot be loaded: unknown, damaged or not supported. Names the file or key."""


class CheckpointError(ModelError, ValueError):
    """A checkpoint with a missing, unexpected, truncated or mis-shaped tensor."""


class DownloadError(ModelError, OSError):
    """Weights that could not be fetched, or whose checksum is wrong."""


class NonFiniteKV(HeadraceError, FloatingPointError):
    """Checked mode met NaN or infinity in K or V: names layer, row and position."""
