"""What all layers of one forward pass share."""

from dataclasses import dataclass

import torch

from headrace.kv.slots import SlotKVCache
from headrace.kv.state import StatePool
from headrace.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Step:
    """One batch and where its requests keep what they carry from step to step."""

    batch: ForwardBatch
    kv: SlotKVCache
    state: StatePool | None  # None for a dense model
    cos: torch.Tensor  # [T, 1, R/2]
    sin: torch.Tensor
    mask: torch.Tensor | None  # None without prefill segments
