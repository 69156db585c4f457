"""Runs step plans on a GPU by replaying captured graphs, and launch by launch what none fits.

Owns the staging memory of the plans' arrays, one graph a decode width, graphs for prompts of some
sizes, and what the graphs write: logits and tokens. A graph goes from the embedding to the token;
its addresses are fixed, so what differs from step to step is data in the staging memory. Decode
rows and prompts of a step run apart where they share no product anyway, which fixes their bits. A
step that was planned ahead finds its input in the tokens that the step before has left on the
device, so that it is queued while that one runs and the device goes from one to the other.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core import StepPlan, decode_width
from headrace.backends.cuda.capture import captured
from headrace.backends.cuda.deadline import StepWaits
from headrace.backends.cuda.sample import Argmax
from headrace.backends.cuda.segments import DeviceSegments
from headrace.backends.cuda.step_arrays import (
    DECODE,
    PADDING,
    PROMPTS,
    WHOLE,
    Part,
    StepArrays,
    StepShape,
    prompt_sizes,
    shape_of,
)
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
    """Decode rows of one width, or prompts of one size."""

    graph: torch.cuda.CUDAGraph
    arrays: StepArrays


@dataclass(frozen=True, slots=True)
class _Forward:
    """Where a forward leaves the logits of the sampled rows.

    decoded: rows of the decode graphs' logits, whose greedy tokens are at the same places. others:
    logits of the samples after these; chosen: whether the device has their greedy tokens, too.
    """

    decoded: NDArray[np.int64]
    others: torch.Tensor | None
    chosen: bool


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

    max_rows: most decode rows of a step. max_context: most tokens of a row. max_tokens: most tokens
    of a step. graphs: capture a graph for every decode width, now. graph_prompts: and for so many
    prompts, of some sizes together. step_timeout_s: most seconds from the wait for a step to its
    end.

    Work goes to a stream of its own, `stream`, which copies to and from the pools are ordered
    against; it is behind what the caller's stream was given, and that one behind it.
    """

    stream: torch.cuda.Stream
    _logits: torch.Tensor  # of the last replay of decode rows, in its first rows
    _prompt_logits: torch.Tensor  # of prompts, likewise

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        state: StatePool | None,
        *,
        max_rows: int,
        max_context: int,
        max_tokens: int,
        graphs: bool,
        graph_prompts: int,
        step_timeout_s: float,
    ) -> None:
        super().__init__(model, kv, state)
        self._device = kv.device
        self.waits = StepWaits.of(kv.device, step_timeout_s)
        self.stream = _take_stream(kv.device)
        weakref.finalize(self, _give_stream_back, kv.device, self.stream, self.waits)
        self._widths = sorted({decode_width(rows) for rows in range(1, max_rows + 1)})
        widest = self._widths[-1]
        self._max_context = max_context
        self._table_pages = -(-max_context // kv.page_tokens)
        with torch.cuda.device(self._device):
            self._sampled = _event()
            self._staging = _Staging(_FIRST_STAGING_BYTES, self._device, self.waits)
            nbytes = self._decode_shape(widest).nbytes
            self._graph_staging = _Staging(nbytes, self._device, self.waits)
            self._argmax = Argmax(widest, self._device)
            # First those that decode graphs make, then those of other samples.
            self._tokens = torch.zeros(2 * widest, dtype=torch.int32, device=self._device)
            self._tokens_of: _Launched | None = None
            # Two are in use where steps run ahead.
            self._tickets = [_Ticket(2 * widest), _Ticket(2 * widest)]
            self._graphs: dict[int, _Captured] = {}
            self._prompt_graphs: dict[int, _Captured] = {}
            self._graph_prompts = graph_prompts
            # Elsewhere decode rows share the products of prompts.
            self._splits = model.backend.deterministic and model.dtype != torch.float32
            if graphs:
                # On the stream of the steps, as libraries keep a workspace for every stream.
                with torch.inference_mode(), self._own_stream():
                    self._capture_decode()
                    if self._graph_prompts:
                        self._capture_prompts(prompt_sizes(max_tokens, model.config))
        self.replays = self.prompt_replays = 0
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
            logits = self._logits_of(self._forward(plan, gates, token_ids, None))
            if gates is None and self._graphs:
                logits = logits.clone()  # the next replay writes there again
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
            ticket = self._tickets.pop() if self._tickets else _Ticket(len(self._tokens))
            if self.timed:
                ticket.start.record()
            made, result = self._forward(plan, gates, token_ids, sources), None
            rows = self._places(made)
            if not self._choose(made, options):
                result = self._sample(self._logits_of(made), options)
            else:
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

    def _forward(
        self,
        plan: StepPlan,
        gates: Gates | None,
        token_ids: NDArray[np.int64],
        sources: NDArray[np.int64] | None,
    ) -> _Forward:
        """Enqueue the forward of all rows, and the copies of states that the plan asks for.

        sources: rows of the device's tokens that go before the token ids, -1 for none.
        """
        self._tokens_of = None  # until it is known whose they are
        graph = self._graphs.get(plan.decode_width) if plan.num_decode and gates is None else None
        prompts = None
        if plan.num_rows > plan.num_decode:
            prompts = None if gates is not None else self._prompt_graph(plan)
            if prompts is None and not self._splits:
                graph = None
        part = WHOLE if graph is None else PROMPTS
        assert sources is None or graph is not None, "a plan made ahead is one of decode rows alone"
        decoded, others = np.empty(0, np.int64), None
        if graph is not None:
            self._replay(graph, self._graph_staging, plan, DECODE, token_ids, sources)
            decoded = DECODE.samples(plan)
        if prompts is not None:
            assert part is PROMPTS or not plan.num_decode, "no decode row is left"
            self._replay(prompts, self._prompt_staging, plan, PROMPTS, token_ids, None)
            others = self._prompt_logits[: len(plan.sample_index) - len(decoded)]
            self.prompt_replays += 1
        elif part is WHOLE or plan.num_rows > plan.num_decode:
            others = self._eager(plan, part, gates, token_ids)
        else:
            self.replays += 1
        for slot, staging in plan.snapshots:
            assert self.state is not None, "only hybrid models have snapshots"
            self.state.copy_slot(slot, staging)
        return _Forward(decoded, others, chosen=prompts is not None)

    def _prompt_graph(self, plan: StepPlan) -> _Captured | None:
        """The smallest graph that all prompts of a plan fit, if there is one."""
        if plan.num_rows - plan.num_decode > self._graph_prompts:
            return None
        tokens = len(plan.token_ids) - plan.num_decode
        size = next((size for size in self._prompt_graphs if size >= tokens), None)
        return None if size is None else self._prompt_graphs[size]

    def _replay(
        self,
        graph: _Captured,
        staging: "_Staging",
        plan: StepPlan,
        part: Part,
        token_ids: NDArray[np.int64],
        sources: NDArray[np.int64] | None,
    ) -> None:
        staging.wait()
        graph.arrays.fill(plan, self.kv.page_tokens, part, token_ids=token_ids, sources=sources)
        staging.send(graph.arrays)
        graph.graph.replay()

    def _places(self, made: _Forward) -> NDArray[np.int64]:
        """Where the device's tokens have those of the samples."""
        if made.others is None:
            return made.decoded
        first = self._widths[-1]
        return np.concatenate((made.decoded, np.arange(first, first + len(made.others))))

    def _logits_of(self, made: _Forward) -> torch.Tensor:
        """Logits of all samples in order, which the next forward may overwrite."""
        if made.others is not None and not len(made.decoded):
            return made.others
        samples = len(made.decoded)
        if bool((made.decoded == np.arange(samples)).all()):
            logits = self._logits[:samples]
        else:
            # Pageable memory is read at once where it is this little (`UPLOAD_BYTES`).
            index = torch.from_numpy(made.decoded).to(self._device, non_blocking=True)
            logits = self._logits[index]
        return logits if made.others is None else torch.cat((logits, made.others))

    def _choose(self, made: _Forward, options: SamplingBatch) -> bool:
        """Have the tokens of all samples in `_places`; false if more is asked for."""
        others = made.others
        if _greedy(options):
            if others is not None and not made.chosen:
                first = self._widths[-1]
                self._argmax(others, out=self._tokens[first : first + len(others)])
            return True
        samples = len(made.decoded)
        plain = others is None and bool((made.decoded == np.arange(samples)).all())
        if not plain or bool((options.logprobs >= 0).any()):
            return False
        self._before_choice(options)
        self._tokens[:samples].copy_(choose(self._logits[:samples], options))
        return True

    def _eager(
        self, plan: StepPlan, part: Part, gates: Gates | None, token_ids: NDArray[np.int64]
    ) -> torch.Tensor:
        shape = shape_of(plan, part)
        self._staging.wait()
        if shape.nbytes > self._staging.nbytes:
            self._staging = _Staging(2 * shape.nbytes, self._device, self.waits)
        arrays = self._staging.arrays(shape)
        arrays.fill(plan, self.kv.page_tokens, part, token_ids=token_ids)
        self._staging.send(arrays)
        return self.model.forward(self._batch(plan, part, arrays), self.kv, self.state, gates)

    def _batch(self, plan: StepPlan, part: Part, arrays: StepArrays) -> ForwardBatch:
        rows, device, before = plan.num_decode, arrays.device, part.tokens(plan).start
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
                offset=offsets[row] - before,
            )
            for row, table in enumerate(tables, start=rows)
        ]
        on_device = DeviceSegments(segments, device["segments"])
        return self._forward_batch(arrays, on_device, device["sample_index"])

    def _forward_batch(
        self,
        arrays: StepArrays,
        segments: Sequence[PrefillSegment],
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

    def _capture_decode(self) -> None:
        """One graph a width, all of padding; widest first, so that the others fit its memory.

        All leave their logits where the widest has them, which thereby needs no copy.
        """
        self._graph_pool = torch.cuda.graph_pool_handle()
        for width in reversed(self._widths):
            arrays = self._padded(self._graph_staging, self._decode_shape(width))
            feed = TokenFeed(arrays.device["token_sources"], self._tokens)
            batch = self._forward_batch(arrays, (), None, feed)
            widest = width == self._widths[-1]
            logits = None if widest else self._logits[:width]
            graph, made = self._capture(batch, self._tokens[:width], logits)
            if widest:
                self._logits = made
            self._graphs[width] = _Captured(graph, arrays)

    def _capture_prompts(self, sizes: Sequence[int]) -> None:
        """The same for prompts, of as many tokens as a step may have.

        Where their logits are, decode graphs may have had something else: those come first in a
        step.
        """
        largest = sizes[-1]
        nbytes = self._prompt_shape(largest).nbytes
        self._prompt_staging = _Staging(nbytes, self._device, self.waits)
        prompts, first = self._graph_prompts, self._widths[-1]
        tokens = self._tokens[first : first + prompts]
        for size in reversed(sizes):
            arrays = self._padded(self._prompt_staging, self._prompt_shape(size))
            device = arrays.device
            segments = DeviceSegments.captured(size, prompts, self._max_context, device["segments"])
            batch = self._forward_batch(arrays, segments, device["sample_index"])
            logits = None if size == largest else self._prompt_logits
            graph, made = self._capture(batch, tokens, logits)
            if size == largest:
                self._prompt_logits = made
            self._prompt_graphs[size] = _Captured(graph, arrays)
        self._prompt_graphs = dict(sorted(self._prompt_graphs.items()))

    def _padded(self, staging: "_Staging", shape: StepShape) -> StepArrays:
        """Arrays of padding alone, sent."""
        arrays = staging.arrays(shape)
        staging.wait()
        arrays.pad()
        staging.send(arrays)
        return arrays

    def _capture(
        self, batch: ForwardBatch, tokens: torch.Tensor, logits: torch.Tensor | None
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph that leaves greedy tokens, and the logits that it leaves.

        logits: where to put them, if not in memory of their own.
        """

        def run() -> torch.Tensor:
            # Decode rows: what they were fed is read by now.
            made = self.model.forward(batch, self.kv, self.state)
            self._argmax(made, out=tokens)
            return made

        run()  # loads kernels, which a capture does not allow
        self._end()  # torch waits for the GPU, too, but without an end
        with captured(self._graph_pool, self.stream) as graph:
            made = run()
            if logits is not None:
                logits.copy_(made)
        return graph, made if logits is None else logits

    def _decode_shape(self, width: int) -> StepShape:
        return StepShape(tokens=width, decode_rows=width, table_pages=self._table_pages)

    def _prompt_shape(self, tokens: int) -> StepShape:
        prompts = self._graph_prompts
        return StepShape(
            tokens=tokens,
            decode_rows=0,
            table_pages=1,
            samples=prompts,  # one each, at most
            segments=prompts,
            segment_pages=prompts * self._table_pages,
        )


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
        used = arrays.used
        self._memory[:used].copy_(self._pinned[:used], non_blocking=True)
        self._copied.record()
