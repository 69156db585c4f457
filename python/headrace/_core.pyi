"""The Rust core: slots, pages, prefix tree, copies, scheduler, step plans.

Every method may be called from any thread and releases the GIL. All errors are classes of
`headrace.errors`; an argument of the wrong Python type is a `TypeError`, one beyond the range of
its machine integer an `OverflowError`. In a forked child every call raises `ForkedProcess`.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict, final, overload

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CopyError

__all__ = [
    "CHUNK_ALIGN",
    "CopyPlanes",
    "CopyQueue",
    "CopyTicket",
    "CpuDevice",
    "CudaDevice",
    "EventWaiter",
    "HostMemory",
    "HostPages",
    "Lease",
    "MemoryConfig",
    "PageAllocator",
    "PrefixTree",
    "Region",
    "RequestResult",
    "RequestStatus",
    "SamplingRows",
    "SamplingSpec",
    "Scheduler",
    "SlotAllocator",
    "StepHandle",
    "StepPlan",
    "StoreWant",
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

_Priority: TypeAlias = Literal["high", "low"]
_Owner: TypeAlias = Literal["request", "tree", "copy"]
_U32: TypeAlias = NDArray[np.uint32]

@final
class PageAllocator:
    """Pool of KV pages: whole raw pages ("high") and windows of their layers ("low").

    A logical page is named by its raw page and its start, the first layer of its window (0 for
    high). Every call is all or nothing; it never waits, evicts or moves a page. Arrays are uint32
    and one-dimensional; anything else is an `InvalidRequest`.

    num_pages: raw pages; num_layers: layers with KV; page_size: tokens, a power of two.
    slot_widths: layers a low page spans, so that a raw page carries `num_layers // slot_widths`
    (at most 64) of them.
    addressing: "flat" if kernels read the start from each block-table entry, "strict" if all low
    pages of a row must have one start.
    cap_high, cap_low: most raw pages a class may own; all of them, and half of them, by default.

    Raises `ConfigError` that names the field, also for num_layers * num_pages > 2^31.
    """

    def __new__(
        cls,
        num_pages: int,
        num_layers: int,
        page_size: int,
        *,
        slot_widths: int = 2,
        addressing: Literal["flat", "strict"] = "flat",
        cap_high: int | None = None,
        cap_low: int | None = None,
    ) -> PageAllocator: ...
    @overload
    def alloc(
        self,
        n: int,
        priority: _Priority,
        preferred_start: int | None = None,
        return_slot_starts: Literal[True] = True,
    ) -> tuple[_U32, _U32]:
        """Take n pages for a request; returns pages and slot_starts, `[n]` each.

        preferred_start: start of the request's first low page; None takes the start with most
        slots. With return_slot_starts=False ("high" only) pages alone are returned.

        Raises `OutOfPages` with `needed` and `free` (what this call could have got), or
        `InvalidRequest` for a start the class does not have.
        """

    @overload
    def alloc(
        self,
        n: int,
        priority: _Priority,
        preferred_start: int | None = None,
        *,
        return_slot_starts: Literal[False],
    ) -> _U32: ...
    def alloc_many(
        self, items: Sequence[tuple[int, int | None]], priority: _Priority
    ) -> list[tuple[_U32, _U32]]:
        """`alloc` for the (n, preferred_start) of each request of a batch, all or nothing.

        They share the slots of the raw pages that the call opens. `OutOfPages` carries `item`.
        """

    def alloc_traced(
        self, items: Sequence[tuple[int, int | None]], priority: _Priority
    ) -> list[tuple[_U32, _U32, NDArray[np.uint8]]]:
        """`alloc_many` that also returns the rule, 1 to 5, that chose each page; for tests.

        1: partial slot with the home start; 2: fresh slot with it; 3: raw page opened; 4: any
        partial slot; 5: any fresh slot.
        """

    def free(
        self, pages: _U32, slot_starts: _U32, epoch: int = 0, *, owner: _Owner = "request"
    ) -> None:
        """Take pages from their owner.

        They can be handed out again once step `epoch` has retired and nobody has them pinned.
        Raises `PageStateError` for the first that is not live, not the owner's or listed twice.
        """

    def transfer(
        self, pages: _U32, slot_starts: _U32, from_owner: _Owner, to_owner: _Owner
    ) -> None:
        """Hand pages to another owner; raises as `free`, and for a pinned page."""

    def pin(self, pages: _U32, slot_starts: _U32) -> None:
        """One more copy job reads these live pages. Raises `PageStateError`."""

    def unpin(self, pages: _U32, slot_starts: _U32) -> None:
        """Undo a `pin`; the last one of a freed page lets it go. Raises `PageStateError`."""

    def retire(self, epoch: int) -> None:
        """Step `epoch` and all before it touch no page any more."""

    def set_cap(self, priority: _Priority, cap: int) -> None:
        """Change how many raw pages a class may own; takes none away. Raises `ConfigError`."""

    def reclaim_plan(self, k: int) -> _U32:
        """Low raw pages to empty so that k become free, `[k]`; changes nothing.

        Fewest live slots first, none that a copy job holds or reads. Raises `OutOfPages`.
        """

    def available(self, priority: _Priority) -> int:
        """Pages one call could get now; under "strict" at the best start."""

    def encode(self, pages: _U32, slot_starts: _U32, priority: _Priority) -> _U32:
        """Block-table entries: page + start * num_pages, bit 31 set for low.

        Raises `PageStateError` for a slot that the class does not have.
        """

    def decode(self, entries: _U32) -> tuple[_U32, _U32, NDArray[np.bool_]]:
        """Pages, slot_starts and is_low of block-table entries; raises as `encode`."""

    def stats(self) -> dict[str, Any]:
        """Counts of one instant.

        `num_pages`, `free` (raw pages), `pinned` (slots), `waste_layers` (of a raw page used as
        low), `retired`, and for `high` and `low` a dict of `cap`, `used` (raw pages), `request`,
        `tree`, `copy`, `pending`, `partial` (slots).
        """

    def dump(self) -> dict[str, Any]:
        """The whole state, canonical and JSON-able; allocators are equal iff their dumps are.

        `free`: ranges [first, end). `pages`: [page, class, live starts, [[start, epoch] pending],
        owners of the live ones, [[start, pins]]], by page.
        """

    @staticmethod
    def restore(dump: dict[str, Any]) -> PageAllocator:
        """An allocator with the state of a dump. Raises `ConfigError` if it is not one."""

    def digest(self) -> int:
        """64 bits of the whole state, the same in every process."""

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
    def token_sources(self) -> NDArray[np.int64]:
        """`[tokens]`: sampled row of the step before whose token is the input, or -1.

        `token_ids` is 0 where one is named: in a plan of `Scheduler.plan_ahead` everywhere, in
        others nowhere.
        """
    @property
    def positions(self) -> NDArray[np.int64]:
        """`[tokens]`."""
    @property
    def token_slots(self) -> NDArray[np.int64]:
        """`[tokens]`."""
    @property
    def block_tables(self) -> NDArray[np.uint32]:
        """Block-table entries of all rows, one after the other; uint32."""
    @property
    def table_offsets(self) -> NDArray[np.int64]:
        """`[rows + 1]`: borders of the rows in `block_tables`."""
    @property
    def token_pages(self) -> NDArray[np.int64]:
        """`[tokens]`: HIGH page (or slot) each token is written to."""
    @property
    def stream_k0(self) -> int:
        """Running number of the first layer that LOW rows stream in this step."""
    @property
    def snapshots(self) -> list[tuple[int, int]]:
        """(state slot, staging slot): states to copy aside after the step."""
    @property
    def has_copies(self) -> bool:
        """Whether `Scheduler.start_step` has anything to hand over."""
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
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that went through a forward; each counts once."""
    @property
    def cached_tokens(self) -> tuple[int, int, int]:
        """Prompt tokens that did not: found on the device, loaded from the host, streamed."""
    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after a preemption or a failed copy."""
    @property
    def preemptions(self) -> int: ...
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
    def phase(self) -> Literal["waiting", "preempted", "prefilling", "decoding", "finished"]: ...
    @property
    def computed(self) -> int:
        """Tokens whose KV is computed."""
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def result(self) -> RequestResult | None: ...

@final
class MemoryConfig:
    """Layout and tiers of the KV memory of a scheduler, which checks them.

    page_size: tokens of a page of the tree, the host tier and the device. num_pages: device pages
    of `num_layers` KV layers; None is fixed slots. slot_widths: layers of a LOW page. low_pages:
    raw pages for LOW pages at most. host_pages, snapshots: room of the host tier; 0 is none.
    staging: state slots from `state_slots` on in which a snapshot waits for its copy. page_bytes:
    KV of a page. preempt_every: test switch, 0 is never. The rest is the cost model of streaming:
    bytes a millisecond of the link, predicted time of a step with HIGH rows, and what LOW rows may
    stream in a step without.
    """

    def __new__(
        cls,
        *,
        page_size: int = 64,
        num_pages: int | None = None,
        num_layers: int = 1,
        slot_widths: int = 2,
        low_pages: int | None = None,
        prefix_cache: bool = False,
        write_policy: str = "write_through",
        host_pages: int = 0,
        hybrid: bool = False,
        snapshots: int = 0,
        staging: int = 0,
        state_slots: int = 0,
        snapshot_interval: int = 4096,
        page_bytes: int = 0,
        admission: str = "estimate",
        admission_ratio: float = 0.5,
        preemption: str = "recompute",
        preempt_every: int = 0,
        load_back_threshold: int = 1,
        link_bytes_per_ms: float = 50e6,
        high_step_ms: float = 5.0,
        row_ms: float = 0.1,
        token_ms: float = 0.02,
        low_step_ms: float = 100.0,
    ) -> MemoryConfig: ...

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
    memory: layout and tiers; None is fixed slots without a cache.
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
        memory: MemoryConfig | None = None,
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

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Step after the one in flight, before its tokens are known; None if it depends on more.

        Only steady decode is planned ahead: as `next_plan` would plan it after the commit, but
        that `token_sources` stand for the tokens, and that requests which the commit of `plan` ends
        have a row that runs for nothing. Both must be given back, `plan` first. Raises `StalePlan`
        unless `plan` is in flight alone.
        """

    def commit(
        self, plan: StepPlan, tokens: NDArray[np.int32], stops: NDArray[np.bool_] | None = None
    ) -> tuple[list[tuple[int, _FinishReason]], NDArray[np.bool_]]:
        """Record the tokens of a step, one per sampled row.

        `stops[i]` ends row i for a stop string. A token outside the vocabulary (-1: logits not
        finite) ends its row with "error". Returns (id, reason) of the requests that ended, and
        per sampled row whether its token was accepted (not if its request ended before). Raises
        `StalePlan` for any but the oldest step in flight, or `InvalidRequest` for a wrong length;
        nothing changes then.
        """

    def fail(self, plan: StepPlan, message: str) -> list[int]:
        """End the rows of a step whose forward failed with "error"; all others go on.

        A step planned ahead of it stays in flight. Raises `StalePlan` as `commit`.
        """

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

    def memory_stats(self) -> dict[str, Any]:
        """Counts of pages, tree, host tier and copies by name, all of one instant."""

    def connect(self, copies: CopyQueue) -> None:
        """Let the queue tell this scheduler how copies ended."""

    def start_step(self, plan: StepPlan, copies: CopyQueue) -> StepHandle | None:
        """Hand the copies of a plan to the queue, once; returns the gates of the step, if any.

        If the queue refuses, the copies count as failed and the error is raised.
        """

    def start_stores(self, copies: CopyQueue) -> int:
        """Hand over copies to the host that have become due; returns how many.

        To be called after every plan and every commit. Those the queue refuses count as failed.
        """

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
class CudaDevice:
    """Copies between registered host memory and the GPU `ordinal`, on streams of its own.

    stream_handle: of the stream the forward runs on, which `owner` keeps alive. cubin, symbol:
    machine code of `copy_gather.cu` and its kernel. thresholds: least mean run lengths in bytes of
    plain copies and of batches (None: never), measured in at most 200 ms if not given and not in
    the folder `cache`, which remembers them by GPU and driver.

    Raises `ConfigError` for a default stream, no NVIDIA driver or no such GPU, `DeviceError` for
    what the driver refuses.
    """

    def __new__(
        cls,
        ordinal: int,
        stream_handle: int,
        cubin: bytes,
        symbol: str,
        *,
        owner: object,
        thresholds: tuple[int, int | None] | None = None,
        cache: str | PathLike[str] | None = None,
    ) -> CudaDevice: ...
    def register(self, memory: HostMemory) -> None:
        """Pin all of it for as long as the device, or a queue over it, lives.

        `ConfigError` if the driver refuses; nothing is pinned then.
        """

    @property
    def thresholds(self) -> tuple[int, int | None]:
        """Those in use."""

    def inject(self, stream: str, nth: int, what: str, *, seconds: float = 0.0) -> None:
        """For tests, as `CpuDevice.inject`; "hang" is a `ConfigError`."""

@final
class EventWaiter:
    """Waits for events of the GPU `ordinal`, each with an end, on any number of threads.

    Raises `ConfigError` for no NVIDIA driver or no such GPU, `DeviceError` for what the driver
    refuses.
    """

    def __new__(cls, ordinal: int) -> EventWaiter: ...
    def wait(self, event_handle: int, timeout: float) -> bool:
        """Whether all before the last record of an event was over within `timeout` seconds.

        Looks at least once; no more with a `timeout` of 0 or less, without end if it is infinite.
        Waits without the GIL, and as `cuEventSynchronize` does at first: it spins. Ctrl-C ends it.

        Raises `DeviceError` for what the driver reports, faults of kernels included; `EngineClosed`
        if the event is not over and `close` was called or the interpreter exits; `ConfigError` for
        a `timeout` of NaN or a handle that is no 64-bit integer; `ForkedProcess` in a forked child.
        """

    def close(self) -> None:
        """End the waits of all threads. Events that are over are still found to be so."""

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
    copy_check: compare a checksum per piece, plane and layer of what is stored and later loaded;
    `ConfigError` on a GPU.
    """

    def __new__(
        cls,
        device: CpuDevice | CudaDevice,
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

_Class: TypeAlias = Literal["high", "low"]
_NodeState: TypeAlias = Literal["full", "low", "host", "loading", "backing"]
_WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back", "none"]

class _Evicted(TypedDict):
    """What the tree gave up; `coming` device pages follow as garbage once they are stored."""

    device: list[int]
    host: list[int]
    snapshots: list[int]
    coming: int

class _Node(TypedDict):
    """A node: tokens `start` and on; `locks` of HIGH leases, LOW leases, jobs, LOW windows."""

    namespace: int
    start: int
    tokens: list[int]
    state: _NodeState
    device: list[int]
    host: list[int]
    priority: _Class
    tick: int
    locks: list[int]
    leaving: bool
    snapshot: int | None

@final
class HostPages:
    """Free pages of the host pool. `total` pages, at most 2^31; otherwise `ConfigError`."""

    def __new__(cls, total: int) -> HostPages: ...
    def alloc(self, n: int) -> list[int] | None:
        """`n` pages, ascending, or None if fewer are free.

        The first run of consecutive pages that is long enough; without one the smallest ids.
        """

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back.

        Raises `PageStateError` with `page` for one that is free, listed twice or not of the pool;
        nothing changes then.
        """

    def free_count(self) -> int:
        """Pages nobody holds."""

    def total(self) -> int:
        """All pages."""

    def dump(self) -> list[tuple[int, int]]:
        """(first page, length) of every free run, ascending."""

    def check(self) -> None:
        """Recount; raises `HeadraceError` that says what does not agree."""

@final
class Lease:
    """A locked match of a `PrefixTree`. Dropping the object releases it too.

    Every method raises `LeaseReleased` once it was released.
    """

    def release(self) -> None:
        """Unlock the path. A second time raises `LeaseReleased`."""

    def device_len(self) -> int:
        """Tokens on device, from the start."""

    def host_len(self) -> int:
        """Tokens after these that are on host, LOW pages or being loaded."""

    def snapshot(self) -> tuple[int, int] | None:
        """(position, slot) of the snapshot the match resumes from."""

@final
class StoreWant:
    """A node to be copied to host, locked until `begin_store` or `drop_store`."""

    @property
    def pages(self) -> list[int]:
        """Its device pages, in path order."""

@final
class PrefixTree:
    """Which KV pages, on device and host, hold which tokens; it decides and never copies.

    `page_size` is a power of two; `hits` belongs to `write_through_selective`. `colliding_hash`
    gives every page the same hash, for tests. Bad values raise `ConfigError`. Calls with a lease
    of another tree raise `InvalidRequest`, with a released one `LeaseReleased`.
    """

    def __new__(
        cls,
        page_size: int = 64,
        *,
        snapshots: bool = False,
        device_tier: bool = True,
        policy: _WritePolicy = "write_through",
        hits: int = 2,
        colliding_hash: bool = False,
    ) -> PrefixTree: ...
    def match_prefix(
        self, namespace: int, tokens: _Tokens, limit: int | None = None, reader: _Class = "high"
    ) -> Lease:
        """Lock the longest usable match.

        A multiple of max(page size, 64), at most `limit`, leaving one token to compute; cut to
        the deepest snapshot if the tree has snapshots.
        """

    def peek(self, namespace: int, tokens: _Tokens, limit: int | None = None) -> tuple[int, int]:
        """Tokens (on device, on host) a match would find; no effect."""

    def shorten(self, lease: Lease, len: int) -> None:
        """Give up the end of a lease so that at most `len` tokens are left."""

    def pages(self, lease: Lease) -> list[tuple[_NodeState, int | None, int | None]]:
        """(state, block-table entry, complete host copy) of every page, root first."""

    def insert(
        self, lease: Lease, tokens: _Tokens, pages: Sequence[int], priority: _Class = "high"
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Publish pages computed after the end of the lease and extend it.

        Returns the pages covered and (index, page given, page of the tree) where the tree had the
        tokens on device already. Covers nothing if the end of the lease is not on device.
        """

    def insert_host(
        self,
        namespace: int,
        tokens: _Tokens,
        first_page: int,
        pages: Sequence[int],
        priority: _Class = "high",
    ) -> list[int]:
        """Publish host pages `first_page` and on of the prefix `tokens`; returns those not taken.

        Raises `InvalidRequest` if `tokens` are not exactly the pages before and those given.
        """

    def extend_host(
        self, lease: Lease, tokens: _Tokens, pages: Sequence[int], priority: _Class = "high"
    ) -> tuple[int, list[int]]:
        """Publish host pages after the end of the lease: (pages covered, pages not taken)."""

    def begin_load(
        self, lease: Lease, pages: Sequence[int]
    ) -> tuple[int, list[tuple[int, int]], list[int]]:
        """Load the first host pages after the device part: (id, [(host, device)], unused pages)."""

    def loadable(self, lease: Lease) -> int:
        """Pages after the device part that are on host and not being loaded."""

    def joined(self, lease: Lease) -> int:
        """Pages after the device part that a load fills now."""

    def end_load(self, id: int, ok: bool) -> list[int]:
        """End a load; returns the device pages of one that failed."""

    def request_store(self, lease: Lease) -> None:
        """Ask for host copies of the whole path, whatever the policy."""

    def next_store(self, max_pages: int) -> StoreWant | None:
        """Next node to copy to host, at most `max_pages` of it."""

    def begin_store(self, want: StoreWant, host: Sequence[int]) -> int:
        """Start a store; with fewer pages than wanted the rest is asked for again."""

    def drop_store(self, want: StoreWant) -> None:
        """Give a store up because the host is full: counted, not asked again before a use."""

    def end_store(self, id: int, ok: bool) -> list[int]:
        """End a store; returns the host pages of one that failed."""

    def demote(self, lease: Lease) -> list[int]:
        """Move what only LOW readers lock, and has a host copy, to host; returns its pages."""

    def window_missing(self, lease: Lease) -> int:
        """Host pages of the path without LOW pages."""

    def give_window(self, lease: Lease, pages: Sequence[int]) -> list[int]:
        """LOW pages for these, in path order, held by the lease; returns those left over."""

    def window_hold(self, lease: Lease) -> bool:
        """Hold the LOW nodes of the path; False for a HIGH reader."""

    def window_release(self, lease: Lease) -> None:
        """Let go of the LOW nodes of the path; the lease stays."""

    def evict_device(self, n: int) -> _Evicted:
        """Give up `n` device pages, or as many as can be."""

    def evict_host(self, n: int) -> _Evicted:
        """Give up `n` host pages, or as many as can be."""

    def evict_snapshot(self, n: int) -> list[int]:
        """Give up the `n` least recently used snapshots, or as many as can be."""

    def evictable_device(self) -> int:
        """Device pages that no one locks."""

    def evictable_host(self) -> int:
        """Host pages that no one locks."""

    def evictable_snapshots(self) -> int:
        """Snapshots that no lease resumes from."""

    def take_garbage(self) -> _Evicted:
        """Everything released by leases and jobs since the last call."""

    def clear(self) -> _Evicted:
        """Remove everything that is not locked."""

    def begin_snapshot(self, lease: Lease, position: int, slot: int) -> int:
        """Start to fill `slot` with the state at `position` of the path.

        Raises `InvalidRequest` for a position that is no multiple of max(page size, 64), is
        outside the path, or has a snapshot already.
        """

    def end_snapshot(self, id: int, ok: bool) -> int | None:
        """Publish a snapshot; returns the slot of one that failed."""

    def has_snapshot(self, lease: Lease, position: int) -> bool:
        """Whether a snapshot is published at `position` of the path."""

    def stats(self) -> dict[str, int]:
        """Counters since construction, and sizes of now."""

    def dump(self) -> list[_Node]:
        """Every node, parents first."""

    def digest(self) -> int:
        """A fixed 64-bit digest of the whole tree."""

    def check(self) -> None:
        """Recount everything; raises `HeadraceError` that says what does not agree."""

    def check_some(self, n: int) -> None:
        """Check the next `n` nodes, round robin."""

def bench_core(*, rows: int = 256, repeat: int = 101) -> dict[str, int]:
    """Median nanoseconds of slot_allocate_free, submit, plan and commit (`rows` decode rows).

    And, a page, of page_alloc_n and page_free_n in calls of n pages.
    Also of the prefix tree: a match of 32,768 tokens, insert and evict of one page.
    """
