"""Runs step plans: one forward for all rows, then one sampled token per row that wants one.

Owns nothing but references to the model, the KV cache and, for hybrid models, the state pool. It
decides nothing: whatever a step does is in its plan. A step is launched, and its tokens are waited
for; one that was planned ahead is launched in between, and takes its input from the step before.
"""

import itertools
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core import SamplingRows, StepPlan
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.kv.tables import Window
from headrace.models.batch import ForwardBatch, PrefillSegment, TokenFeed
from headrace.models.decoder import DecoderModel
from headrace.models.step import Gates
from headrace.sampling import SampleResult, SamplingBatch, sample


class Pending(Protocol):
    """A step that was launched.

    feeds_next: whether a step planned ahead of its tokens may be launched now.
    """

    feeds_next: bool

    def wait(self) -> SampleResult:
        """Return its tokens once they are there. Raises what the device raises; may be repeated."""
        ...


class Finished:
    """A step that has ended already."""

    def __init__(self, result: SampleResult, *, feeds_next: bool = False) -> None:
        self.feeds_next = feeds_next
        self._result = result

    def wait(self) -> SampleResult:
        """Return its tokens."""
        return self._result


class ModelRunner:
    """Executes plans on one model and one KV cache. Calls must not overlap.

    timed: whether `device_s` is measured. device_s: seconds the device took for the last plan that
    was waited for, None where nobody measures that. replays: steps of decode rows alone that were
    replays of a graph; prompt_replays: steps whose prompts were. runs_ahead: whether it gains by a
    plan that was made ahead of its input tokens; a CPU, where a launch is the whole step, does not.
    ahead_steps: steps that were launched so.
    """

    timed = False
    device_s: float | None = None
    replays = prompt_replays = 0
    runs_ahead = False
    ahead_steps = 0

    def __init__(self, model: DecoderModel, kv: KVCache, state: StatePool | None = None) -> None:
        self.model = model
        self.kv = kv
        self.state = state

    @property
    def gave_up(self) -> bool:
        """Whether a wait for the device ended early: work of this runner may still run."""
        return False

    def check(self) -> None:
        """Raise why steps are refused from now on, if they are; comes before a step's copies."""

    def end_waits(self) -> None:
        """End the waits of all threads for the device, if they can be ended.

        Later steps are refused then. Callable from any thread.
        """

    def forward(
        self,
        plan: StepPlan,
        gates: Gates | None = None,
        tokens: NDArray[np.int32] | None = None,
    ) -> torch.Tensor:
        """Compute all rows, writing their KV; return float32 logits `[samples, vocab]`.

        gates: of the copies the plan came with. tokens: of the step before, for the rows of a plan
        that was made ahead.
        """
        with torch.inference_mode():
            batch = forward_batch(plan, self.kv, tokens)
            logits = self.model.forward(batch, self.kv, self.state, gates)
            for slot, staging in plan.snapshots:
                assert self.state is not None, "only hybrid models have snapshots"
                self.state.copy_slot(slot, staging)
            return logits

    def sample(self, logits: torch.Tensor, options: SamplingBatch) -> SampleResult:
        """Choose tokens of logits that `forward` gave, and wait for them."""
        with torch.inference_mode():
            return sample(logits, options)

    def execute(self, plan: StepPlan, gates: Gates | None = None) -> SampleResult:
        """Compute all rows and sample one token for each row that wants one."""
        return self.launch(plan, gates).wait()

    def launch(
        self, plan: StepPlan, gates: Gates | None = None, previous: Pending | None = None
    ) -> Pending:
        """Start what `execute` does.

        previous: the step before, for a plan that was made ahead of its tokens.
        """
        if not plan.num_rows:  # a step of copies alone
            return Finished(SampleResult(token_ids=np.empty(0, np.int32)))
        if previous is None:
            logits = self.forward(plan, gates)
        else:
            logits = self.forward(plan, gates, previous.wait().token_ids)
            self.ahead_steps += 1
        result = self.sample(logits, sampling_batch(plan.sampling))
        return Finished(result, feeds_next=self.runs_ahead)


def forward_batch(
    plan: StepPlan, kv: KVCache, tokens: NDArray[np.int32] | None = None
) -> ForwardBatch:
    """Turn a plan into the model's input; the arrays are shared on a CPU, copied to a GPU.

    tokens: of the step before, for a plan that was made ahead of them.
    """
    num_decode, device = plan.num_decode, kv.device
    starts = plan.starts.tolist()
    slots = plan.slots.tolist()
    offsets = plan.token_offsets.tolist()
    tables = [
        plan.block_tables[first:last]
        for first, last in itertools.pairwise(plan.table_offsets.tolist())
    ]
    return ForwardBatch(
        token_ids=torch.from_numpy(plan.token_ids).to(device),
        positions=torch.from_numpy(plan.positions).to(device),
        token_pages=torch.from_numpy(plan.token_pages).to(device),
        token_offsets=torch.from_numpy(plan.positions % kv.page_tokens).to(device),
        num_decode=num_decode,
        tables=tables[:num_decode],
        decode_lengths=[start + 1 for start in starts[:num_decode]],
        state_slots=torch.from_numpy(plan.slots[:num_decode]).to(device),
        segments=[
            PrefillSegment(
                table=tables[row],
                state_slot=slots[row],
                start=starts[row],
                length=offsets[row + 1] - offsets[row],
                offset=offsets[row],
            )
            for row in range(num_decode, plan.num_rows)
        ],
        sample_index=torch.from_numpy(plan.sample_index).to(device),
        window=Window(plan.stream_k0, kv.width),
        feed=None
        if tokens is None
        else TokenFeed(
            torch.from_numpy(plan.token_sources.astype(np.int32)).to(device),
            torch.from_numpy(tokens).to(device),
        ),
    )


def sampling_batch(rows: SamplingRows) -> SamplingBatch:
    """Sampling options of a plan as the sampler takes them, without a copy."""
    return SamplingBatch(
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        repetition=rows.repetition_penalty,
        presence=rows.presence_penalty,
        frequency=rows.frequency_penalty,
        uniform=rows.uniform,
        logprobs=rows.logprobs,
        history_tokens=rows.history_tokens,
        history_offsets=rows.history_offsets,
        history_prompt_lens=rows.history_prompt_lens,
        banned_tokens=rows.banned_tokens,
        banned_offsets=rows.banned_offsets,
    )
