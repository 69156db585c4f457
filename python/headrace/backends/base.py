"""Every operation a forward pass needs beyond plain torch, by name.

A backend is bound to one device. It says here what it can do; a combination it cannot do is
refused at construction, never in the middle of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from headrace.kv.cache import KVCache
from headrace.kv.tables import Table, Window
from headrace.layers.block_fp8 import BlockFp8Weight
from headrace.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from headrace.layers.norm import Norm
    from headrace.models.batch import ForwardBatch, PrefillSegment, TokenFeed
    from headrace.models.config import ModelConfig

# Prefill attention works on tiles of query rows aligned at absolute multiples of this number, so
# that a cut of the prompt there changes no bits.
PREFILL_TILE = 64

# A matrix `[out, in]` as a checkpoint holds it.
Weight = torch.Tensor | BlockFp8Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """What one linear layer has besides its projections.

    taps: fp32 `[channels, 4]`, oldest input first; a_log, dt_bias: fp32 `[Hv]`; norm: `[dv]` in the
    model dtype.
    """

    taps: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


class Backend(Protocol):
    """Operations of the forward pass. T = tokens of the step, B = decode rows.

    Hk, Hv = key and value heads of a linear layer, dk, dv = their widths. A row of length 0, with a
    negative slot and page, is padding: no operation reads or writes anything for it, and its result
    is zero. Tables and windows: `headrace.kv.tables`.

    deterministic: the bits of a row depend on nothing but its own request.
    """

    name: str
    device: torch.device
    deterministic: bool

    def check_model(self, config: "ModelConfig", dtype: torch.dtype) -> None:
        """Refuse a model, or a dtype of it, that this backend cannot run.

        Raises
        ------
        ConfigError
            Names what it does not have.
        """
        ...

    def embed(
        self, ids: torch.Tensor, table: torch.Tensor, feed: "TokenFeed | None" = None
    ) -> torch.Tensor:
        """Rows `ids [T]` int64 of `table [vocab, hidden]`; a feed replaces ids it has a source for.

        Zeros for a token of the feed that is -1.
        """
        ...

    def pack_linear(self, weight: Weight) -> Weight:
        """Return a weight `[out, in]` in the storage `linear` reads fastest; called once."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        *,
        decode_rows: int = 0,
        residual: torch.Tensor | None = None,
        wide: bool = False,
        same_input: bool = False,
    ) -> torch.Tensor:
        """`x [rows, in]` times a packed weight -> `[rows, out]`, accumulated in fp32.

        decode_rows: leading rows that have the bits of a step of decode rows alone. residual:
        `[rows, out]`, added; its memory may be used for the result. wide: an fp32 result.
        same_input: x is that of the product called last, so that both may run at once.
        """
        ...

    def mlp(
        self,
        x: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        decode_rows: int,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """`residual + down(silu(gate) * up)` `[rows, hidden]` with gate and up in one weight.

        The product of gate and up is rounded, `silu_mul` as it says. decode_rows, residual: as in
        `linear`.
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last axis in fp32, cast to the dtype of x, then multiply by the weight."""
        ...

    def rms_norm_wide(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last axis and multiply by `scale [width]` in fp32, then cast once."""
        ...

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x [T, n] * sigmoid(gate)` in fp32, cast once; gate: as x, or `[T, heads, n / heads]`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[rows, 2 * n]` (gate, then up) -> `silu(gate) * up` `[rows, n]`."""
        ...

    def rotary(
        self, rope: RotaryEmbedding, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of a step, shared by its layers; pass them to `rotate_append`."""
        ...

    def rotate_append(
        self,
        layer: int,
        kv: KVCache,
        batch: "ForwardBatch",
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        norms: "tuple[Norm, Norm] | None",
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Norm and turn `q [T, heads, head_dim]` and k, append k and v; returns q.

        norms: of q and of k. The memory of q may be used for the result.
        """
        ...

    def kv_append(
        self,
        layer: int,
        kv: KVCache,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store `k, v [T, kv_heads, head_dim]` in row `offsets[t]` of HIGH page `pages[t]`."""
        ...

    def attention_prefill(
        self,
        q: torch.Tensor,
        layer: int,
        kv: KVCache,
        segments: "Sequence[PrefillSegment]",
        window: Window,
        *,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of the new tokens of each segment, already appended.

        q, out: `[T, heads, head_dim]`; rows `segment.offset` to `+ segment.length` of q give those
        of out, all others are left alone. Never reads KV beyond the last token of a segment.
        """
        ...

    def attention_decode(
        self,
        q: torch.Tensor,
        layer: int,
        kv: KVCache,
        tables: Sequence[Table] | torch.Tensor,
        lengths: Sequence[int] | torch.Tensor,
        window: Window,
    ) -> torch.Tensor:
        """Attention of one new token a row against the first `lengths[b]` tokens of its table.

        q and result: `[B, heads, head_dim]`. Never reads beyond a row's own length.
        """
        ...

    def delta_mix_step(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: DeltaWeights,
        conv: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A linear layer between its projections, one token a row: `[B, Hv * dv]`.

        Causal depthwise convolution of width 4 and silu over q, k, v; write strength and decay from
        b and a; gated delta rule; RMS norm with the gate z. qkv: `[B, channels]`; z: `[B, Hv *
        dv]`; b, a: `[B, Hv]`. conv, state: one layer of the pool, `[slots, channels, 3]` and
        `[slots, Hv, dv, dk]`, read and written; slots: int64 `[B]`, no slot twice. out: where the
        result is wanted.
        """
        ...

    def delta_mix_prefill(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: DeltaWeights,
        conv: torch.Tensor,
        state: torch.Tensor,
        segments: "Sequence[PrefillSegment]",
        *,
        out: torch.Tensor,
    ) -> None:
        """The same over the new tokens of each segment, in blocks of 64; shapes with T for B.

        Rows `segment.offset` to `+ segment.length` give those of out, `[T, Hv * dv]` contiguous;
        all others are left alone. Segments follow one another without gaps, no slot twice. One that
        starts at 0 starts from zeros, and what its slot holds is not read.

        Blocks stand at absolute multiples of 64: a cut of the prompt there changes no bits.
        """
        ...
