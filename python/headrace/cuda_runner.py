"""Runs step plans on a GPU: decode steps by replaying captured graphs, all others launch by launch.

Owns the staging memory of the plans' arrays, one graph a decode width, and what the graphs write:
logits and greedy tokens. A graph goes from the embedding to the token; its addresses are fixed, so
what differs from step to step is data in the staging memory. Invariants: the host side of the
staging memory is written only after the last copy out of it has ended; a padding row has page and
slot -1 and length 0, and touches nothing. No locks: calls must not overlap.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from headrace._core import StepPlan, decode_width
from headrace.backends.cuda.sample import Argmax
from headrace.backends.cuda.step_arrays import StepArrays, StepShape, shape_of
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.kv.tables import Window
from headrace.models.batch import ForwardBatch, PrefillSegment
from headrace.models.decoder import DecoderModel
from headrace.models.step import Gates
from headrace.runner import ModelRunner, sampling_batch
from headrace.sampling import SampleResult, SamplingBatch, sample

_FIRST_STAGING_BYTES = 1 << 20  # it grows with the steps


@dataclass(frozen=True, slots=True)
class _Captured:
    """A decode step of one width."""

    graph: torch.cuda.CUDAGraph
    arrays: StepArrays


class CudaRunner(ModelRunner):
    """Executes plans on one GPU.

    max_rows: most decode rows of a step. max_context: most tokens of a row. graphs: capture a graph
    for every decode width, now.

    Work goes to a stream of its own, `stream`, which copies to and from the pools are ordered
    against; it is behind what the caller's stream was given, and the caller's stream behind it.
    """

    stream: torch.cuda.Stream

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        state: StatePool | None,
        *,
        max_rows: int,
        max_context: int,
        graphs: bool,
    ) -> None:
        super().__init__(model, kv, state)
        self._device = kv.device
        self.stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]  # torch's
        self._widths = sorted({decode_width(rows) for rows in range(1, max_rows + 1)})
        widest = self._widths[-1]
        self._table_pages = -(-max_context // kv.page_tokens)
        with torch.cuda.device(self._device):
            self._staging = _Staging(_FIRST_STAGING_BYTES, self._device)
            self._graph_staging = _Staging(self._decode_shape(widest).nbytes, self._device)
            self._argmax = Argmax(widest, self._device)
            self._tokens = torch.zeros(widest, dtype=torch.int32, device=self._device)
            self._tokens_host = torch.zeros(widest, dtype=torch.int32, pin_memory=True)
            self._logits = torch.zeros(
                (widest, model.config.vocab_size), dtype=torch.float32, device=self._device
            )
            self._events = (_event(), _event())
            self._graphs: dict[int, _Captured] = {}
            if graphs:
                with torch.inference_mode():
                    self._capture()
        self.replays = 0

    def forward(self, plan: StepPlan, gates: Gates | None = None) -> torch.Tensor:
        """Compute all rows, writing their KV; return float32 logits `[samples, vocab]`."""
        with torch.inference_mode(), self._own_stream() as caller:
            if self._replay(plan, gates):
                logits = self._sampled_logits(plan).clone()  # the next step writes there again
            else:
                logits = self._eager(plan, gates)
            logits.record_stream(caller)
            return logits

    def execute(self, plan: StepPlan, gates: Gates | None = None) -> SampleResult:
        """Compute all rows and sample one token for each row that wants one.

        A greedy decode step brings its tokens to the host in one copy, and waits for nothing else.
        """
        if not plan.num_rows:
            return SampleResult(token_ids=np.empty(0, np.int32))
        options = sampling_batch(plan.sampling)
        with torch.inference_mode(), self._own_stream():
            if self.timed:
                self._events[0].record()
            if not self._replay(plan, gates):
                result = sample(self._eager(plan, gates), options)
            elif _greedy(options):
                result = self._greedy_tokens(plan)
            else:
                result = sample(self._sampled_logits(plan), options)
            if self.timed:
                self._events[1].record()
                self._events[1].synchronize()
                self.device_s = self._events[0].elapsed_time(self._events[1]) * 1e-3
        return result

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

    def _replay(self, plan: StepPlan, gates: Gates | None) -> bool:
        """Run a step of decode rows alone by its graph, if there is one."""
        if gates is not None or plan.num_decode != plan.num_rows or plan.snapshots:
            return False
        captured = self._graphs.get(plan.decode_width)
        if captured is None:
            return False
        self._graph_staging.wait()
        captured.arrays.fill(plan, self.kv.page_tokens)
        self._graph_staging.send(captured.arrays)
        captured.graph.replay()
        self.replays += 1
        return True

    def _sampled_logits(self, plan: StepPlan) -> torch.Tensor:
        samples = len(plan.sample_index)
        if samples == plan.num_decode:
            return self._logits[:samples]
        return self._logits[torch.from_numpy(plan.sample_index).to(self._device)]

    def _greedy_tokens(self, plan: StepPlan) -> SampleResult:
        rows = plan.num_decode
        self._tokens_host[:rows].copy_(self._tokens[:rows], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        token_ids = self._tokens_host.numpy()[plan.sample_index]
        return SampleResult(
            token_ids=token_ids,
            logprobs=[None] * len(token_ids),
            bad_rows=tuple(np.flatnonzero(token_ids < 0).tolist()),
        )

    def _eager(self, plan: StepPlan, gates: Gates | None) -> torch.Tensor:
        shape = shape_of(plan)
        self._staging.wait()
        if shape.nbytes > self._staging.nbytes:
            self._staging = _Staging(2 * shape.nbytes, self._device)
        arrays = self._staging.arrays(shape)
        arrays.fill(plan, self.kv.page_tokens)
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
        )

    def _capture(self) -> None:
        """One graph a width, all of padding; widest first, so that the others fit its memory."""
        pool = torch.cuda.graph_pool_handle()
        for width in reversed(self._widths):
            arrays = self._graph_staging.arrays(self._decode_shape(width))
            self._graph_staging.wait()
            arrays.pad()
            self._graph_staging.send(arrays)
            batch = self._forward_batch(arrays, [], None)
            self._decode(batch, width)  # loads kernels, which a capture does not allow
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._decode(batch, width)
            self._graphs[width] = _Captured(graph, arrays)

    def _decode_shape(self, width: int) -> StepShape:
        return StepShape(tokens=width, decode_rows=width, table_pages=self._table_pages)

    def _decode(self, batch: ForwardBatch, width: int) -> None:
        """From the embedding to the greedy token."""
        logits = self.model.forward(batch, self.kv, self.state)
        self._argmax(logits, out=self._tokens[:width])
        self._logits[:width].copy_(logits)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def _greedy(options: SamplingBatch) -> bool:
    """Whether the highest logit of every row is all that is asked for."""
    special = options.random_rows | options.edited_rows | (options.logprobs >= 0)
    return not special.any()


class _Staging:
    """Memory of the arrays of steps on both sides, and the copy between them."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._copied = _event()

    def arrays(self, shape: StepShape) -> StepArrays:
        """Views of a shape that fits."""
        return StepArrays(shape, self._pinned.numpy(), self._memory)

    def wait(self) -> None:
        """Return once the host side may be written again."""
        self._copied.synchronize()

    def send(self, arrays: StepArrays) -> None:
        """Copy what was filled in to the device, on the current stream."""
        used = arrays.shape.nbytes
        self._memory[:used].copy_(self._pinned[:used], non_blocking=True)
        self._copied.record()
