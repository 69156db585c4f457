"""The Rust core: slot table, scheduler, step plans.

Every method may be called from any thread and releases the GIL. All errors are classes of
`headrace.errors`; an argument of the wrong Python type is a `TypeError`, one beyond the range of
its machine integer an `OverflowError`. In a forked child every call raises `ForkedProcess`.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CopyError

__all__ = [
    "CHUNK_ALIGN",
    "CopyPlanes",
    "CopyQueue",
    "CopyTicket",
    "CpuDevice",
    "HostMemory",
    "Region",
    "RequestResult",
    "RequestStatus",
    "SamplingRows",
    "SamplingSpec",
    "Scheduler",
    "SlotAllocator",
    "StepHandle",
    "StepPlan",
    "__version__",
    "bench_core",
    "build_plan",
    "decode_width",
]

__version__: str
CHUNK_ALIGN: int
"""Prefill is cut at multiples of this in absolute position."""

_Tokens: TypeAlias = NDArray[np.int64] | Sequence[int]
_FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

@final
class SlotAllocator:
    """Table request id -> slot: injective, smallest free slot first.

    A `Scheduler` over the same table has its own view of it: its request ids and epochs are its
    own, and neither side can free or fence the other's slots.

    `total` slots, 1 to 2^20; otherwise `ConfigError`.
    """

    def __new__(cls, total: int) -> SlotAllocator: ...
    def allocate(self, request_id: int) -> int:
        """Give the request the smallest free slot.

        Raises `DuplicateRequest` if it holds one (freed behind a fence counts), `OutOfPages` with
        `needed` and `free` if none is free; nothing changes then.
        """

    def free(self, request_id: int, fence: int | None = None) -> int:
        """Take the slot from the request and return its index.

        With `fence` it can be allocated again only once that step was retired. Raises
        `UnknownRequest` if the request has no slot in use; nothing changes then.
        """

    def retire(self, epoch: int) -> None:
        """Step `epoch` and all before it touch no slot any more."""

    def resize(self, total: int) -> None:
        """Change the number of slots. `ConfigError` if a slot that would go is not free."""

    def slot_of(self, request_id: int) -> int | None:
        """Slot the request has in use."""

    def grant_of(self, request_id: int) -> tuple[int, int] | None:
        """Slot the request has in use and its generation, which every allocation raises."""

    def stats(self) -> dict[str, int]:
        """Counts `free`, `in_use`, `finishing`, `total`, all of one instant."""

    def dump(self) -> list[tuple[int, int, int | None, int | None]]:
        """(slot, generation, request id, fence) of every slot."""

    def check(self) -> None:
        """Recount every invariant; raises `HeadraceError` that says what does not agree."""

@final
class SamplingSpec:
    """How the scheduler samples and ends one request; checked at submit.

    temperature 0 is greedy; top_k 0 is off. `stop_token_ids` hold the
    end-of-sequence token too, unless it is to be ignored.
    """

    def __new__(
        cls,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        logprobs: int | None = None,
        max_tokens: int = 128,
        min_tokens: int = 0,
        stop_token_ids: _Tokens | None = None,
    ) -> SamplingSpec: ...
    def validate(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` that names the first field out of range."""

    def finish_reason(
        self, prompt_len: int, generated: _Tokens, *, max_context: int
    ) -> _FinishReason | None:
        """Whether the newest of the generated tokens is the last one, by the scheduler's rule."""

@final
class SamplingRows:
    """Sampling options of a plan's sampled rows, one entry each; offsets have one more."""

    @property
    def temperature(self) -> NDArray[np.float32]: ...
    @property
    def top_k(self) -> NDArray[np.int32]: ...
    @property
    def top_p(self) -> NDArray[np.float32]: ...
    @property
    def min_p(self) -> NDArray[np.float32]: ...
    @property
    def repetition_penalty(self) -> NDArray[np.float32]: ...
    @property
    def presence_penalty(self) -> NDArray[np.float32]: ...
    @property
    def frequency_penalty(self) -> NDArray[np.float32]: ...
    @property
    def uniform(self) -> NDArray[np.float64]:
        """The draw of each row in [0, 1): a function of (seed, index of the token)."""
    @property
    def logprobs(self) -> NDArray[np.int32]: ...
    @property
    def history_tokens(self) -> NDArray[np.int64]:
        """Prompt then generated tokens of the rows with penalties."""
    @property
    def history_offsets(self) -> NDArray[np.int64]: ...
    @property
    def history_prompt_lens(self) -> NDArray[np.int64]: ...
    @property
    def banned_tokens(self) -> NDArray[np.int64]:
        """Tokens that may not be chosen."""
    @property
    def banned_offsets(self) -> NDArray[np.int64]: ...

@final
class StepPlan:
    """One step: `num_decode` decode rows of one token, then prefill segments.

    Arrays are int64 unless said; `[rows]`, `[tokens]` and `[samples]` are their lengths.
    """

    @property
    def epoch(self) -> int: ...
    @property
    def num_decode(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def decode_width(self) -> int:
        """`num_decode` padded to 1, 2, 4, 8, then multiples of 8."""
    @property
    def request_ids(self) -> NDArray[np.uint64]:
        """`[rows]`, uint64."""
    @property
    def slots(self) -> NDArray[np.int64]:
        """`[rows]`."""
    @property
    def starts(self) -> NDArray[np.int64]:
        """`[rows]`: tokens already in the slot."""
    @property
    def token_offsets(self) -> NDArray[np.int64]:
        """`[rows + 1]`: borders of the rows in the token arrays."""
    @property
    def token_ids(self) -> NDArray[np.int64]:
        """`[tokens]`."""
    @property
    def positions(self) -> NDArray[np.int64]:
        """`[tokens]`."""
    @property
    def token_slots(self) -> NDArray[np.int64]:
        """`[tokens]`."""
    @property
    def sample_rows(self) -> NDArray[np.int64]:
        """`[samples]`: rows whose next token is wanted."""
    @property
    def sample_index(self) -> NDArray[np.int64]:
        """`[samples]`: index of their last token in the token arrays."""
    @property
    def sampling(self) -> SamplingRows: ...

def build_plan(
    rows: Sequence[tuple[int, int, int, _Tokens, SamplingSpec | None, _Tokens, _Tokens]],
    *,
    decode: bool,
) -> StepPlan:
    """Build a plan outside the scheduler (epoch 0).

    rows: (request_id, slot, start, tokens, sampling, prompt, generated) each; a row without
    sampling is not sampled. Raises
    `InvalidRequest` for a row without tokens or a decode row of more than one.
    """

def decode_width(rows: int) -> int:
    """Width of a decode forward for `rows` rows: 0, 1, 2, 4, 8, then multiples of 8."""

@final
class RequestResult:
    """How a request ended. Times are monotonic nanoseconds; None if it never came to that."""

    @property
    def request_id(self) -> int: ...
    @property
    def token_ids(self) -> list[int]:
        """Generated tokens, the stop token included."""
    @property
    def finish_reason(self) -> _FinishReason: ...
    @property
    def message(self) -> str | None: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def computed_prompt_tokens(self) -> int: ...
    @property
    def submitted_ns(self) -> int: ...
    @property
    def first_planned_ns(self) -> int | None: ...
    @property
    def first_token_ns(self) -> int | None: ...
    @property
    def finished_ns(self) -> int | None: ...

@final
class RequestStatus:
    """Where a request stands."""

    @property
    def phase(self) -> Literal["waiting", "prefilling", "decoding", "finished"]: ...
    @property
    def computed(self) -> int:
        """Tokens whose KV is computed."""
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def result(self) -> RequestResult | None: ...

@final
class Scheduler:
    """Life cycle of every request, from `submit` to exactly one result.

    Order of service is strictly by arrival under "fcfs" (a request that does not fit blocks those
    behind it, by design), by (priority, arrival) under "priority".

    slots: table that gives every running request its slot.
    max_context: prompt plus generated tokens of one request.
    max_batch_tokens: prefill tokens of a step, a multiple of 64; decode rows come on top.
    max_waiting: queue limit, `QueueFull` beyond it.
    max_results: results kept for `poll` and `wait`; the oldest goes first.
    """

    def __new__(
        cls,
        slots: SlotAllocator,
        *,
        max_context: int,
        vocab_size: int,
        max_batch_tokens: int = 512,
        max_waiting: int = 4096,
        max_results: int = 16384,
        policy: str = "fcfs",
    ) -> Scheduler: ...
    def submit(
        self,
        prompt: _Tokens,
        sampling: SamplingSpec,
        *,
        request_id: int | None = None,
        priority: str = "high",
    ) -> int:
        """Queue a request and return its id; never waits for the engine.

        Without an id it gets one that is neither live nor stored. Raises `InvalidRequest`,
        `PromptTooLong`, `DuplicateRequest`, `QueueFull` or `EngineClosed`; nothing is kept then.
        """

    def next_plan(self, timeout: float | None = None) -> StepPlan | None:
        """Next step, or None after `timeout` seconds. Ctrl-C ends the wait.

        A plan must be given back by `commit` or `fail` before there is another. Raises
        `EngineClosed`.
        """

    def commit(
        self, plan: StepPlan, tokens: NDArray[np.int32], stops: NDArray[np.bool_] | None = None
    ) -> tuple[list[tuple[int, _FinishReason]], NDArray[np.bool_]]:
        """Record the tokens of a step, one per sampled row.

        `stops[i]` ends row i for a stop string. A token outside the vocabulary (-1: logits not
        finite) ends its row with "error". Returns (id, reason) of the requests that ended, and
        per sampled row whether its token was accepted (not if aborted meanwhile). Raises
        `StalePlan`, or `InvalidRequest` for a wrong length; nothing changes then.
        """

    def fail(self, plan: StepPlan, message: str) -> list[int]:
        """End the rows of a step whose forward failed with "error"; all others go on."""

    def abort(self, request_id: int) -> bool:
        """End a live request in whatever state; False if the id is not live."""

    def poll(self, request_id: int) -> RequestStatus:
        """Where a request stands. Raises `UnknownRequest`."""

    def wait(self, request_id: int, timeout: float | None = None) -> RequestResult | None:
        """Result of a request, or None after `timeout` seconds. Raises `UnknownRequest`."""

    def take_result(self, request_id: int) -> RequestResult:
        """Remove and return a stored result. Raises `UnknownRequest`."""

    def close(self, reason: str = "closed by its owner", *, error: bool = False) -> None:
        """End every live request ("abort", or "error") and refuse new ones. Idempotent."""

    @property
    def closed(self) -> bool: ...
    def stats(self) -> dict[str, int]:
        """Gauges and counters, all of one instant."""

    def check(self) -> None:
        """Recount every invariant; raises `HeadraceError` that says what does not agree."""

@final
class Region:
    """A range of addresses that keeps its owner (a tensor, usually) alive.

    The caller states that `owner` keeps `nbytes` writable bytes at `data_ptr`: host memory, or of
    the GPU with index `cuda`. Copies read and write there without asking again.
    """

    def __new__(
        cls, data_ptr: int, nbytes: int, owner: object, *, cuda: int | None = None
    ) -> Region: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class HostMemory:
    """One anonymous mapping of exactly `nbytes` bytes, zero, and resident only where used.

    `touch_threads` > 0 makes all of it resident at once. Raises `ConfigError` for 0 bytes,
    `OutOfPages` (`needed`, `free` in bytes) if the machine or the control group of the process has
    less; nothing is mapped then. It is unmapped with its last region, array and running copy.
    """

    def __new__(cls, nbytes: int, *, touch_threads: int = 0) -> HostMemory: ...
    @property
    def nbytes(self) -> int: ...
    def region(self, offset: int = 0, nbytes: int | None = None) -> Region:
        """Part of it, to the end by default. Raises `ConfigError` beyond the end."""

    def array(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """The same as a writable view."""

_Plane: TypeAlias = tuple[str, int, int, int, Region, Region]

@final
class CopyPlanes:
    """Every tensor that a page or a snapshot consists of, with its memory on both sides.

    model_layers: "kv" or "state" for every layer of the model.
    kv_planes: (name, bytes per token, layer stride, page stride, device region, host region) each;
    strides are those of the device tensor `[L, pages, page_tokens, bytes]` in bytes, the host side
    is `[L, host_pages, host_page_tokens, bytes]`, contiguous.
    host_page_tokens: `page_tokens` by default; smaller in slot mode.
    state_planes: (name, bytes per slot, layer stride, slot stride, device region, host region)
    each; device `[Ls, slots, bytes]`, host `[Ls, snapshots, bytes]`.

    Raises `ConfigError` that names the plane: a size that is zero or leaves 64 bits, strides that
    overlap, a region that is too small.
    """

    def __new__(
        cls,
        model_layers: Sequence[str],
        *,
        pages: int = 0,
        page_tokens: int = 0,
        host_pages: int = 0,
        host_page_tokens: int | None = None,
        kv_planes: Sequence[_Plane] = ...,
        slots: int = 0,
        snapshots: int = 0,
        state_planes: Sequence[_Plane] = ...,
    ) -> CopyPlanes: ...
    @property
    def names(self) -> list[str]:
        """Names of the planes, KV planes first."""
    @property
    def kv_layers(self) -> int: ...

@final
class CpuDevice:
    """Copies by memcpy on a thread per stream.

    `bandwidth` caps either direction, in bytes per second, to imitate a link. Raises `ConfigError`
    for 0.
    """

    def __new__(cls, bandwidth: int | None = None) -> CpuDevice: ...
    def inject(self, stream: str, nth: int, what: str, *, seconds: float = 0.0) -> None:
        """For tests: make a copy fail, hang or start late.

        The `nth` copy (0: the next) that starts on "load", "window" or "store" gets "fail", "hang"
        or "delay" (by `seconds`). Raises `InvalidRequest` for other names.
        """

@final
class CopyTicket:
    """A point of the forward behind which a store may start."""

@final
class CopyQueue:
    """Copies between host and device, ordered by recorded tickets, done by a thread of its own.

    Pieces of KV are uint32 `[pieces, 4]`: device page (flat base), first token in it, host page,
    tokens. Pieces of state are uint32 `[pieces, 2]`: device slot, snapshot slot. Job ids are the
    caller's, unique among the jobs that live. Every job has exactly one outcome.

    deadline: seconds that a copy may take; waits at gates may take twice that.
    max_jobs: jobs that may live; `QueueFull` beyond it.
    max_outcomes: outcomes kept for `poll`; the oldest goes first.
    copy_check: compare a checksum per piece, plane and layer of what is stored and later loaded.
    """

    def __new__(
        cls,
        device: CpuDevice,
        planes: CopyPlanes,
        *,
        deadline: float = 30.0,
        max_jobs: int = 1024,
        max_outcomes: int = 16384,
        copy_check: bool = False,
    ) -> CopyQueue: ...
    def start_step(
        self,
        loads: Sequence[tuple[int, NDArray[np.uint32], NDArray[np.uint32] | None]] = ...,
        window: tuple[int, NDArray[np.uint32], int, int] | None = None,
    ) -> StepHandle:
        """Hand over the loads of a step and return its gates; planning is left to the worker.

        loads: (job, KV pieces, state pieces or None) each. window: (job, LOW pieces, running index
        of the step's first KV layer, width). Raises `InvalidRequest` (a page, slot or width that
        is none, destinations that overlap, an id that lives, an index that goes back), `QueueFull`
        or `EngineClosed`; nothing is taken then.
        """

    def record(self) -> CopyTicket:
        """A ticket behind everything the forward has enqueued."""

    def submit_store(
        self,
        job: int,
        kv: NDArray[np.uint32],
        state: NDArray[np.uint32] | None = None,
        *,
        after: CopyTicket | None = None,
    ) -> None:
        """Queue a copy to the host that starts only behind `after` (now, if None).

        Raises as `start_step`.
        """

    def cancel(self, job: int) -> bool:
        """End a job that the device knows nothing of yet with "cancelled"; False otherwise."""

    def drain(self, deadline: float | None = None) -> None:
        """Wait for every job to be over; `CopyError` that names one that is not in time."""

    def shutdown(self, deadline: float | None = None) -> None:
        """Take no more jobs, let the others end in time, fail the rest. Idempotent."""

    def poll(
        self,
    ) -> list[tuple[int, Literal["done", "failed", "cancelled"], CopyError | None]]:
        """Take the outcomes since the last call: (job, outcome, the error of a failed one)."""

    def stats(self) -> dict[str, Any]:
        """Counters of one instant; `load`, `window` and `store` are dicts of their own."""

@final
class StepHandle:
    """The gates of one step. Dropping it releases what it holds."""

    def before_layer(self, model_layer: int) -> None:
        """Wait until what the layer reads is there; that of a failed job counts as there.

        Raises `InvalidRequest` for no layer of the model, `CopyError` at twice the deadline of the
        queue, `EngineClosed` after a shutdown.
        """

    def after_layer(self, model_layer: int) -> None:
        """The layer has been read: its window buffer may be refilled."""

    def finish(self) -> list[int]:
        """Release everything, wait for the step's jobs, return the ids of those that failed."""

    def release(self) -> None:
        """Release every buffer without waiting."""

def bench_core(*, rows: int = 256, repeat: int = 101) -> dict[str, int]:
    """Median nanoseconds of slot_allocate_free, submit, plan and commit (`rows` decode rows)."""
