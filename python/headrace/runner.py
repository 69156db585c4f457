"""Runs step plans: one forward for all rows, then one sampled token per row that wants one.

Owns nothing but references to the model, the KV cache and, for hybrid models, the state pool. It
decides nothing: whatever a step does is in its plan.
"""

import itertools

import numpy as np
import torch

from headrace._core import SamplingRows, StepPlan
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.kv.tables import Window
from headrace.models.batch import ForwardBatch, PrefillSegment
from headrace.models.decoder import DecoderModel
from headrace.models.step import Gates
from headrace.sampling import SampleResult, SamplingBatch, sample


class ModelRunner:
    """Executes plans on one model and one KV cache. Calls must not overlap.

    timed: whether `device_s` is measured. device_s: seconds the device took for the last plan that
    was executed, None where nobody measures that. replays: steps that were replays of a graph.
    """

    timed = False
    device_s: float | None = None
    replays = 0

    def __init__(self, model: DecoderModel, kv: KVCache, state: StatePool | None = None) -> None:
        self.model = model
        self.kv = kv
        self.state = state

    def forward(self, plan: StepPlan, gates: Gates | None = None) -> torch.Tensor:
        """Compute all rows, writing their KV; return float32 logits `[samples, vocab]`.

        gates: of the copies the plan came with.
        """
        with torch.inference_mode():
            batch = forward_batch(plan, self.kv)
            logits = self.model.forward(batch, self.kv, self.state, gates)
            for slot, staging in plan.snapshots:
                assert self.state is not None, "only hybrid models have snapshots"
                self.state.copy_slot(slot, staging)
            return logits

    def execute(self, plan: StepPlan, gates: Gates | None = None) -> SampleResult:
        """Compute all rows and sample one token for each row that wants one."""
        if not plan.num_rows:  # a step of copies alone
            return SampleResult(token_ids=np.empty(0, np.int32))
        logits = self.forward(plan, gates)
        with torch.inference_mode():
            return sample(logits, sampling_batch(plan.sampling))


def forward_batch(plan: StepPlan, kv: KVCache) -> ForwardBatch:
    """Turn a plan into the model's input; the arrays are shared on a CPU, copied to a GPU."""
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
