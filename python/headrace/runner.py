"""Runs step plans: one forward for all rows, then one sampled token per row that wants one.

Owns nothing but references to the model, the KV cache and, for hybrid models, the state pool. It
decides nothing: whatever a step does is in its plan.
"""

import torch

from headrace._core import SamplingRows, StepPlan
from headrace.kv.slots import SlotKVCache
from headrace.kv.state import StatePool
from headrace.models.batch import ForwardBatch, PrefillSegment
from headrace.models.decoder import DecoderModel
from headrace.sampling import SampleResult, SamplingBatch, sample


class ModelRunner:
    """Executes plans on one model and one KV cache. Calls must not overlap."""

    def __init__(
        self, model: DecoderModel, kv: SlotKVCache, state: StatePool | None = None
    ) -> None:
        self.model = model
        self.kv = kv
        self.state = state

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Compute all rows, writing their KV; return float32 logits `[samples, vocab]`."""
        with torch.inference_mode():
            batch = forward_batch(plan, self.kv.device)
            return self.model.forward(batch, self.kv, self.state)

    def execute(self, plan: StepPlan) -> SampleResult:
        """Compute all rows and sample one token for each row that wants one."""
        logits = self.forward(plan)
        with torch.inference_mode():
            return sample(logits, sampling_batch(plan.sampling))


def forward_batch(plan: StepPlan, device: torch.device) -> ForwardBatch:
    """Turn a plan into the model's input; the arrays are shared on a CPU, copied to a GPU."""
    num_decode = plan.num_decode
    slots = plan.slots.tolist()
    starts = plan.starts.tolist()
    offsets = plan.token_offsets.tolist()
    return ForwardBatch(
        token_ids=torch.from_numpy(plan.token_ids).to(device),
        positions=torch.from_numpy(plan.positions).to(device),
        token_slots=torch.from_numpy(plan.token_slots).to(device),
        num_decode=num_decode,
        decode_slots=slots[:num_decode],
        decode_lengths=[start + 1 for start in starts[:num_decode]],
        segments=[
            PrefillSegment(slots[row], starts[row], offsets[row + 1] - offsets[row], offsets[row])
            for row in range(num_decode, plan.num_rows)
        ],
        sample_index=torch.from_numpy(plan.sample_index).to(device),
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
