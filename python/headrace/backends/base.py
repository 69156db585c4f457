"""Every operation a forward pass needs beyond plain torch, by name.

A backend is bound to one device. It says here what it can do; a combination it cannot do is
refused at construction, never in the middle of a step.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from headrace.kv.slots import SlotKVCache

# Prefill attention works on tiles of query rows aligned at absolute multiples of this number, so
# that a cut of the prompt there changes no bits.
PREFILL_TILE = 64


class Backend(Protocol):
    """Operations of the forward pass. T = tokens of the step, B = decode rows.

    deterministic: the bits of a row depend on nothing but its own request.
    supported_dtypes: dtypes the weights and the KV may have.
    """

    name: str
    device: torch.device
    deterministic: bool
    supported_dtypes: frozenset[torch.dtype]

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight `[out, in]` in the storage `linear` reads fastest; called once."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x [rows, in]` times a packed weight -> `[rows, out]`, accumulated in fp32."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last axis in fp32, cast to the dtype of x, then multiply by the weight."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[rows, 2 * n]` (gate, then up) -> `silu(gate) * up` `[rows, n]`."""
        ...

    def kv_append(
        self,
        pool_k: torch.Tensor,
        pool_v: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write `k, v [T, kv_heads, head_dim]` at (layer, slots[t], positions[t])."""
        ...

    def prefill_mask(self, max_start: int, dtype: torch.dtype) -> torch.Tensor:
        """Mask shared by all segments and layers of a step; pass it to `attention_prefill`.

        max_start: largest tile start of the step (absolute position).
        """
        ...

    def attention_prefill(
        self,
        q: torch.Tensor,
        layer: int,
        kv: SlotKVCache,
        slot: int,
        start: int,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention of n new tokens at positions start..start+n-1, already appended.

        q and result: `[n, heads, head_dim]`.
        """
        ...

    def attention_decode(
        self,
        q: torch.Tensor,
        layer: int,
        kv: SlotKVCache,
        slots: Sequence[int],
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """Attention of one new token a row against the first `lengths[b]` tokens of its slot.

        q and result: `[B, heads, head_dim]`. Never reads beyond a row's own length.
        """
        ...
