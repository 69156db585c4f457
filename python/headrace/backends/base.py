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

    def gated_rms_norm(
        self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Norm of `x [T, Hv, dv]` fp32, cast to the dtype of z, times `weight * silu(z)` in fp32.

        z: `[T, Hv, dv]`; the result has its dtype.
        """
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
    ) -> torch.Tensor:
        """A linear layer between its projections, one token a row: `[B, Hv * dv]`.

        `conv_step`, `delta_gates`, `gated_delta_step` and `gated_rms_norm` after one another.
        """
        ...

    def delta_gates(
        self, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write strength `beta = sigmoid(b)` and log decay `g = -exp(a_log) softplus(a + dt_bias)`.

        b, a: `[T, Hv]`; a_log, dt_bias: fp32 `[Hv]`. Both results are fp32 `[T, Hv]`.
        """
        ...

    def conv_prefill(
        self,
        x: torch.Tensor,
        taps: torch.Tensor,
        state: torch.Tensor,
        slot: int,
        *,
        has_initial_state: bool,
    ) -> torch.Tensor:
        """Causal depthwise convolution of width 4, then silu, over n new tokens of one slot.

        x: `[n, channels]`; taps: fp32 `[channels, 4]`, the last for the token itself; state: one
        layer of the pool, `[slots, channels, 3]`, the three inputs before x, left as the last three
        inputs. Without an initial state these are zeros and the memory is not read.
        """
        ...

    def conv_step(
        self, x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """One token a row: `x [B, channels]`, `slots [B]` int64, no slot twice.

        The bits of a row are those `conv_prefill` gives for the same token.
        """
        ...

    def gated_delta_prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slot: int,
        start: int,
        *,
        has_initial_state: bool,
    ) -> torch.Tensor:
        """Gated delta rule over n new tokens at positions start..start+n-1, in blocks of 64.

        q, k: `[n, Hk, dk]` as the convolution gives them; their L2 norm and the scale of q are part
        of this operation. v: `[n, Hv, dv]`; g, beta: `[n, Hv]`; state: one layer of the pool,
        `[slots, Hv, dv, dk]`, read if there is an initial state and written. Value head i reads key
        head `i // (Hv / Hk)`. Returns `[n, Hv, dv]` in the dtype of the state.

        Blocks stand at absolute multiples of 64: a cut of the prompt there changes no bits.
        """
        ...

    def gated_delta_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """One token a row, shapes as above with B for n; `slots [B]` int64, no slot twice."""
        ...
