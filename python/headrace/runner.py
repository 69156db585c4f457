"""Runs step plans: one forward for all rows, then one sampled token per row that wants one.

Owns nothing but references to the model, the KV cache and, for hybrid models, the state pool. It
decides nothing: whatever a step does is in its plan.
"""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core import SamplingRows, StepPlan
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.kv.tables import Window
from headrace.models.batch import ForwardBatch, PrefillSegment
from headrace.models.decoder import DecoderModel
from headrace.sampling import SampleResult, SamplingBatch, sample


class ModelRunner:
    """Executes plans on one model and one KV cache. Calls must not overlap."""

    def __init__(self, model: DecoderModel, kv: KVCache, state: StatePool | None = None) -> None:
        self.model = model
        self.kv = kv
        self.state = state

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Compute all rows, writing their KV; return float32 logits `[samples, vocab]`."""
        with torch.inference_mode():
            return self.model.forward(forward_batch(plan, self.kv), self.kv, self.state)

    def execute(self, plan: StepPlan) -> SampleResult:
        """Compute all rows and sample one token for each row that wants one."""
        logits = self.forward(plan)
        with torch.inference_mode():
            return sample(logits, sampling_batch(plan.sampling))


class PlanTables(NamedTuple):
    """Where the KV of a plan's rows lies.

    block_tables: tables of all rows, one after the other. table_offsets: `[rows + 1]`, their
    borders. token_pages: `[tokens]`, base of the HIGH page each token is written to. stream_k0:
    running number of layer 0 among all streamed layers.
    """

    block_tables: NDArray[np.uint32]
    table_offsets: NDArray[np.int64]
    token_pages: NDArray[np.int64]
    stream_k0: int


def tables_of(plan: StepPlan) -> PlanTables:
    """Tables of a plan over fixed slots: a row's slot is its only page."""
    return PlanTables(
        block_tables=plan.slots.astype(np.uint32),
        table_offsets=np.arange(plan.num_rows + 1),
        token_pages=plan.token_slots,
        stream_k0=0,
    )


def forward_batch(plan: StepPlan, kv: KVCache) -> ForwardBatch:
    """Turn a plan into the model's input; the arrays are shared on a CPU, copied to a GPU."""
    paging = tables_of(plan)
    num_decode, device = plan.num_decode, kv.device
    starts = plan.starts.tolist()
    slots = plan.slots.tolist()
    offsets = plan.token_offsets.tolist()
    tables = [
        paging.block_tables[first:last]
        for first, last in itertools.pairwise(paging.table_offsets.tolist())
    ]
    return ForwardBatch(
        token_ids=torch.from_numpy(plan.token_ids).to(device),
        positions=torch.from_numpy(plan.positions).to(device),
        token_pages=torch.from_numpy(paging.token_pages).to(device),
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
        window=Window(paging.stream_k0, kv.width),
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
