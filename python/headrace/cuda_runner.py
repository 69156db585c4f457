"""Runs step plans on a GPU: decode steps by replaying captured graphs, all others launch by launch.

Owns the staging memory of the plans' arrays, one graph a decode width, and what the graphs write:
logits and tokens. A graph goes from the embedding to the token; its addresses are fixed, so
what differs from step to step is data in the staging memory. A step that was planned ahead finds
its input in the tokens that the step before has left on the device, so that it is queued while that
one runs and the device goes from one to the other.

Invariants: the host side of the staging memory is written only after the last copy out of it has
ended; a padding row has page and slot -1 and length 0, and touches nothing; the tokens on the
device are those of the step `_tokens_of`, if there is one. Every wait for a step has an end
(`StepWaits`); a launch itself waits without one where the driver's queue is full. No locks: calls
must not overlap, but for `end_waits` and the `wait` of a launched step, which only gives a ticket
back (a list takes one and gives one under the GIL).
"""

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core import StepPlan, decode_width
from headrace.backends.cuda.deadline import StepWaits
from headrace.backends.cuda.sample import Argmax
from headrace.backends.cuda.step_arrays import PADDING, StepArrays, StepShape, shape_of
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.kv.tables import Window
from headrace.models.batch import ForwardBatch, PrefillSegment, TokenFeed
from headrace.models.decoder import DecoderModel
from headrace.models.step import Gates
from headrace.runner import Finished, ModelRunner, Pending, sampling_batch
from headrace.sampling import UPLOAD_BYTES, SampleResult, SamplingBatch, choose, sample

_FIRST_STAGING_BYTES = 1 << 20  # it grows with the steps


@dataclass(frozen=True, slots=True)
class _Captured:
    """A decode step of one width."""

    graph: torch.cuda.CUDAGraph
    arrays: StepArrays


class _Ticket:
    """What brings the tokens of a step to the host, and tells that they are there.

    start: recorded before a step that is timed.
    """

    def __init__(self, rows: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int32, pin_memory=True)
        self.start, self.end = _event(), _event()


class _Launched:
    """A step on the stream.

    rows: place of each sampled row in the device's tokens. result: if it is known already.
    """

    def __init__(
        self,
        runner: "CudaRunner",
        ticket: _Ticket,
        rows: NDArray[np.int64],
        result: SampleResult | None,
    ) -> None:
        self.rows = rows
        self.feeds_next = runner.runs_ahead and result is None
        self._timed = runner.timed
        # Let go at the end: the runner keeps the latest step, and must not keep itself.
        self._open: tuple[CudaRunner, _Ticket] | None = (runner, ticket)
        self._result = result

    def wait(self) -> SampleResult:
        """Wait for the end of this step alone; return its tokens. Raises as `StepWaits.wait`."""
        if self._open is not None:
            runner, ticket = self._open
            runner.waits.wait(ticket.end)
            if self._result is None:
                self._result = SampleResult.of(ticket.tokens.numpy()[self.rows])
            if self._timed:
                runner.device_s = ticket.start.elapsed_time(ticket.end) * 1e-3
            runner.give_back(ticket)
            self._open = None
        assert self._result is not None, "it has ended"
        return self._result


class CudaRunner(ModelRunner):
    """Executes plans on one GPU.

    max_rows: most decode rows of a step. max_context: most tokens of a row. graphs: capture a graph
    for every decode width, now. step_timeout_s: most seconds from the wait for a step to its end.

    Work goes to a stream of its own, `stream`, which copies to and from the pools are ordered
    against; it is behind what the caller's stream was given, and that one behind it.
    """

    stream: torch.cuda.Stream
    _logits: torch.Tensor  # of the last replay, in its first rows

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        state: StatePool | None,
        *,
        max_rows: int,
        max_context: int,
        graphs: bool,
        step_timeout_s: float,
    ) -> None:
        super().__init__(model, kv, state)
        self._device = kv.device
        self.waits = StepWaits.of(kv.device, step_timeout_s)
        self.stream = _take_stream(kv.device)
        weakref.finalize(self, _give_stream_back, kv.device, self.stream, self.waits)
        self._widths = sorted({decode_width(rows) for rows in range(1, max_rows + 1)})
        widest = self._widths[-1]
        self._table_pages = -(-max_context // kv.page_tokens)
        with torch.cuda.device(self._device):
            self._sampled = _event()
            self._staging = _Staging(_FIRST_STAGING_BYTES, self._device, self.waits)
            nbytes = self._decode_shape(widest).nbytes
            self._graph_staging = _Staging(nbytes, self._device, self.waits)
            self._argmax = Argmax(widest, self._device)
            self._tokens = torch.zeros(widest, dtype=torch.int32, device=self._device)
            self._tokens_of: _Launched | None = None
            # Two are in use where steps run ahead.
            self._tickets = [_Ticket(widest), _Ticket(widest)]
            self._graphs: dict[int, _Captured] = {}
            if graphs:
                with torch.inference_mode():
                    self._capture()
        self.replays = 0
        self.runs_ahead = graphs

    @property
    def gave_up(self) -> bool:
        """Whether a wait for the device ended early: work of this runner may still run."""
        return self.waits.gave_up

    def check(self) -> None:
        """Raise `StepTimeout` or `EngineClosed` if steps are refused from now on."""
        self.waits.check()

    def end_waits(self) -> None:
        """End the waits of all threads; later steps are refused. Callable from any thread."""
        self.waits.close()

    def forward(
        self,
        plan: StepPlan,
        gates: Gates | None = None,
        tokens: NDArray[np.int32] | None = None,
    ) -> torch.Tensor:
        """Compute all rows, writing their KV; return float32 logits `[samples, vocab]`.

        Raises as `StepWaits.wait`.
        """
        self.waits.check()
        token_ids = plan.token_ids if tokens is None else _filled_in(plan, tokens)
        with torch.inference_mode(), self._own_stream() as caller:
            if self._replay(plan, gates, token_ids):
                logits = self._sampled_logits(plan).clone()  # the next step writes there again
            else:
                logits = self._eager(plan, gates, token_ids)
            logits.record_stream(caller)
            return logits

    def sample(self, logits: torch.Tensor, options: SamplingBatch) -> SampleResult:
        """Choose tokens of logits that the caller's stream has, and wait for them.

        Raises as `StepWaits.wait`.
        """
        self.waits.check()
        # Nobody else enqueues on the runner's own stream, between the end of a wait and the read.
        with torch.inference_mode(), self._own_stream():
            return self._sample(logits, options)

    def _sample(self, logits: torch.Tensor, options: SamplingBatch) -> SampleResult:
        self._before_choice(options)
        return sample(logits, options, self._end)

    def _before_choice(self, options: SamplingBatch) -> None:
        """Wait for the forward, if to send the options would do so without an end."""
        if max(options.history_tokens.nbytes, options.banned_tokens.nbytes) > UPLOAD_BYTES:
            self._end()

    def _end(self) -> None:
        """Wait for what the current stream was given, so that reading from it does not wait."""
        self._sampled.record(torch.cuda.current_stream(self._device))
        self.waits.wait(self._sampled)

    def launch(
        self, plan: StepPlan, gates: Gates | None = None, previous: Pending | None = None
    ) -> Pending:
        """Queue a step on `stream`.

        A step whose tokens are made on the device brings them to the host in one copy, for which
        `wait` waits and for nothing else; its place is taken by the next at once. Every other one
        is over when this returns. Raises as `StepWaits.wait`.
        """
        if not plan.num_rows:
            return Finished(SampleResult(token_ids=np.empty(0, np.int32)))
        self.waits.check()
        options = sampling_batch(plan.sampling)
        token_ids, sources = plan.token_ids, None
        if previous is not None:
            self.ahead_steps += 1
            if previous is self._tokens_of:
                sources = _rows_of(plan, self._tokens_of)
            else:  # a step of somebody else has run in between
                token_ids = _filled_in(plan, previous.wait().token_ids)
        with torch.inference_mode(), self._own_stream():
            ticket = self._tickets.pop() if self._tickets else _Ticket(self._widths[-1])
            if self.timed:
                ticket.start.record()
            result, rows = None, plan.sample_index
            if not self._replay(plan, gates, token_ids, sources):
                assert sources is None, "a plan made ahead is one of decode rows alone"
                logits = self._eager(plan, gates, token_ids)
                if _greedy(options) and len(rows) <= len(self._tokens):
                    rows = np.arange(len(rows))
                    self._argmax(logits, out=self._tokens[: len(rows)])
                else:
                    result = self._sample(logits, options)
            elif not self._leave_tokens(plan, options):
                result = self._sample(self._sampled_logits(plan), options)
            if result is None:
                used = 1 + int(rows.max(initial=-1))
                ticket.tokens[:used].copy_(self._tokens[:used], non_blocking=True)
            ticket.end.record()
        launched = _Launched(self, ticket, rows, result)
        self._tokens_of = launched if result is None else None
        return launched

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream]:
        """Enqueue on `stream`, after what the caller's stream has and before what it gets."""
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self.stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self.stream):
                    yield caller
            finally:
                caller.wait_stream(self.stream)

    def give_back(self, ticket: _Ticket) -> None:
        """Take a ticket back whose step has ended."""
        self._tickets.append(ticket)

    def _replay(
        self,
        plan: StepPlan,
        gates: Gates | None,
        token_ids: NDArray[np.int64],
        sources: NDArray[np.int64] | None = None,
    ) -> bool:
        """Run a step of decode rows alone by its graph, if there is one.

        sources: rows of the device's tokens that go before the token ids, -1 for none.
        """
        if gates is not None or plan.num_decode != plan.num_rows or plan.snapshots:
            return False
        captured = self._graphs.get(plan.decode_width)
        if captured is None:
            return False
        self._graph_staging.wait()
        captured.arrays.fill(plan, self.kv.page_tokens, token_ids=token_ids, sources=sources)
        self._graph_staging.send(captured.arrays)
        self._tokens_of = None  # until it is known whose they are
        captured.graph.replay()
        self.replays += 1
        return True

    def _sampled_logits(self, plan: StepPlan) -> torch.Tensor:
        samples = len(plan.sample_index)
        if samples == plan.num_decode:
            return self._logits[:samples]
        # Pageable memory is read at once where it is this little (`UPLOAD_BYTES`).
        index = torch.from_numpy(plan.sample_index).to(self._device, non_blocking=True)
        return self._logits[index]

    def _leave_tokens(self, plan: StepPlan, options: SamplingBatch) -> bool:
        """Have the tokens of a replayed step in the device's tokens; false if more is asked for."""
        if _greedy(options):
            return True  # the graph put them there
        samples = len(plan.sample_index)
        if samples != plan.num_decode or bool((options.logprobs >= 0).any()):
            return False
        self._before_choice(options)
        self._tokens[:samples].copy_(choose(self._logits[:samples], options))
        return True

    def _eager(
        self, plan: StepPlan, gates: Gates | None, token_ids: NDArray[np.int64]
    ) -> torch.Tensor:
        shape = shape_of(plan)
        self._staging.wait()
        if shape.nbytes > self._staging.nbytes:
            self._staging = _Staging(2 * shape.nbytes, self._device, self.waits)
        arrays = self._staging.arrays(shape)
        arrays.fill(plan, self.kv.page_tokens, token_ids=token_ids)
        self._staging.send(arrays)
        logits = self.model.forward(self._batch(plan, arrays), self.kv, self.state, gates)
        for slot, staging in plan.snapshots:
            assert self.state is not None, "only hybrid models have snapshots"
            self.state.copy_slot(slot, staging)
        return logits

    def _batch(self, plan: StepPlan, arrays: StepArrays) -> ForwardBatch:
        rows, device = plan.num_decode, arrays.device
        starts, slots = plan.starts.tolist(), plan.slots.tolist()
        offsets, borders = plan.token_offsets.tolist(), plan.table_offsets.tolist()
        first = borders[rows]
        tables = [
            device["segment_tables"][begin - first : end - first]
            for begin, end in itertools.pairwise(borders[rows:])
        ]
        segments = [
            PrefillSegment(
                table=table,
                state_slot=slots[row],
                start=starts[row],
                length=offsets[row + 1] - offsets[row],
                offset=offsets[row],
            )
            for row, table in enumerate(tables, start=rows)
        ]
        return self._forward_batch(arrays, segments, device["sample_index"])

    def _forward_batch(
        self,
        arrays: StepArrays,
        segments: list[PrefillSegment],
        sample_index: torch.Tensor | None,
        feed: TokenFeed | None = None,
    ) -> ForwardBatch:
        device = arrays.device
        return ForwardBatch(
            token_ids=device["token_ids"],
            positions=device["positions"],
            token_pages=device["token_pages"],
            token_offsets=device["token_offsets"],
            num_decode=arrays.shape.decode_rows,
            tables=device["tables"],
            decode_lengths=device["lengths"],
            state_slots=device["state_slots"],
            segments=segments,
            sample_index=sample_index,
            window=Window(device["stream_k0"], self.kv.width),
            feed=feed,
        )

    def _capture(self) -> None:
        """One graph a width, all of padding; widest first, so that the others fit its memory.

        All leave their logits where the widest has them, which thereby needs no copy.
        """
        pool = torch.cuda.graph_pool_handle()
        for width in reversed(self._widths):
            arrays = self._graph_staging.arrays(self._decode_shape(width))
            self._graph_staging.wait()
            arrays.pad()
            self._graph_staging.send(arrays)
            feed = TokenFeed(arrays.device["token_sources"], self._tokens)
            batch = self._forward_batch(arrays, [], None, feed)
            self._decode(batch, width)  # loads kernels, which a capture does not allow
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._decode(batch, width)
                if width == self._widths[-1]:
                    self._logits = logits
                else:
                    self._logits[:width].copy_(logits)
            self._graphs[width] = _Captured(graph, arrays)

    def _decode_shape(self, width: int) -> StepShape:
        return StepShape(tokens=width, decode_rows=width, table_pages=self._table_pages)

    def _decode(self, batch: ForwardBatch, width: int) -> torch.Tensor:
        """From the embedding to the greedy token, which takes the place of what it was fed."""
        logits = self.model.forward(batch, self.kv, self.state)
        self._argmax(logits, out=self._tokens[:width])
        return logits


# Streams of runners that are gone, by device: libraries keep memory for every stream they meet.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    try:
        return _idle_streams[device].pop()
    except IndexError:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's


def _give_stream_back(device: torch.device, stream: torch.cuda.Stream, waits: StepWaits) -> None:
    """Keep a stream for the next runner, unless something may run on it for ever."""
    if not waits.gave_up:
        _idle_streams[device].append(stream)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def _filled_in(plan: StepPlan, tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Token ids of a plan that was made ahead of the `tokens` of the step before."""
    named = plan.token_sources
    return np.where(named >= 0, tokens[named], plan.token_ids)


def _rows_of(plan: StepPlan, previous: _Launched) -> NDArray[np.int64]:
    """Rows of the device's tokens that a plan made ahead of `previous` takes; -1 for none."""
    named = plan.token_sources
    return np.where(named >= 0, previous.rows[named], PADDING)


def _greedy(options: SamplingBatch) -> bool:
    """Whether the highest logit of every row is all that is asked for."""
    special = options.random_rows | options.edited_rows | (options.logprobs >= 0)
    return not special.any()


class _Staging:
    """Memory of the arrays of steps on both sides, and the copy between them."""

    def __init__(self, nbytes: int, device: torch.device, waits: StepWaits) -> None:
        self.nbytes = nbytes
        self._waits = waits
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._copied = _event()

    def arrays(self, shape: StepShape) -> StepArrays:
        """Views of a shape that fits."""
        return StepArrays(shape, self._pinned.numpy(), self._memory)

    def wait(self) -> None:
        """Return once the host side may be written again. Raises as `StepWaits.wait`."""
        self._waits.wait(self._copied)

    def send(self, arrays: StepArrays) -> None:
        """Copy what was filled in to the device, on the current stream."""
        used = arrays.shape.nbytes
        self._memory[:used].copy_(self._pinned[:used], non_blocking=True)
        self._copied.record()
