"""What all layers of one forward pass share, and what may happen between them."""

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.models.batch import ForwardBatch


class Gates(Protocol):
    """Order between a forward pass and copies that fill or empty its layers meanwhile.

    Called on the thread of the forward, around every layer of the model in order; `layer` counts
    linear layers too. What raises here ends the forward.
    """

    def before_layer(self, layer: int) -> None:
        """Return once what the layer reads is there, or is sure to be when its kernels run."""
        ...

    def after_layer(self, layer: int) -> None:
        """Everything the layer reads and writes has been enqueued."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One batch and where its requests keep what they carry from step to step."""

    batch: ForwardBatch
    kv: KVCache
    state: StatePool | None  # None for a dense model
    rotary: tuple[torch.Tensor, torch.Tensor]  # as the backend wants it
