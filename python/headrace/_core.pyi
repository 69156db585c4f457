"""The Rust core: slot table, scheduler, step plans, host pages, prefix tree.

Every method may be called from any thread and releases the GIL. All errors are classes of
`headrace.errors`; an argument of the wrong Python type is a `TypeError`, one beyond the range of
its machine integer an `OverflowError`. In a forked child every call raises `ForkedProcess`.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CHUNK_ALIGN",
    "HostPages",
    "Lease",
    "PrefixTree",
    "RequestResult",
    "RequestStatus",
    "SamplingRows",
    "SamplingSpec",
    "Scheduler",
    "SlotAllocator",
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
    """Free pages of the host pool. `total` pages, 1 to 2^31; otherwise `ConfigError`."""

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

    Also of the prefix tree: a match of 32,768 tokens, insert and evict of one page.
    """
