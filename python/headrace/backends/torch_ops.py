"""The reference backend in readable torch: runs on any device and is what kernels are tested with.

Rates quoted here: two cores with AVX-512, fp32, the linears of a 135 M model, torch 2.11.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.backends.base import PREFILL_TILE, DeltaWeights, Weight
from headrace.backends.torch_delta import DeltaInputs, conv_window, delta_chunks, delta_step
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.kv.tables import Table, Window
from headrace.layers import rope as rotation
from headrace.layers.block_fp8 import BlockFp8Weight
from headrace.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from headrace.layers.norm import Norm
    from headrace.models.batch import ForwardBatch, PrefillSegment, TokenFeed
    from headrace.models.config import ModelConfig

# Rows of one product in deterministic mode. A product of fixed shape has bits that depend on
# neither the number of rows in the step nor the place of a row; a plain product does not.
LINEAR_TILE = 16

# torch splits pointwise work between threads above this many elements (at::internal::GRAIN_SIZE),
# at places that depend on the total; vectorised and scalar tails of exp may then differ in bits.
_POINTWISE_GRAIN = 32_768
# Elements of two vector registers: what is left of a run beyond a multiple of it is scalar code.
_POINTWISE_UNIT = 64


class TileMask:
    """Additive causal masks of tiles of 64 queries; made once, and anew where a prompt is longer.

    Owns `[64, longest + 64]` by dtype: zeros, and a causal triangle in the last 64 columns. The
    tile at absolute position s uses the columns from `longest - s` on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._masks: dict[torch.dtype, torch.Tensor] = {}

    def rows(self, first: int, end: int, dtype: torch.dtype, *, last: int) -> torch.Tensor:
        """Mask `[end - first, end]` of queries at these positions, which lie in one tile.

        last: of the positions that will be asked for, so that the mask grows once.
        """
        start = first - first % PREFILL_TILE
        mask = self._masks.get(dtype)
        if mask is None or mask.shape[1] <= last:
            mask = self._masks[dtype] = self._made(last - last % PREFILL_TILE, dtype)
        column = mask.shape[1] - PREFILL_TILE - start
        return mask[first - start : end - start, column : column + end]

    def _made(self, longest: int, dtype: torch.dtype) -> torch.Tensor:
        tile = (PREFILL_TILE, PREFILL_TILE)
        triangle = torch.full(tile, float("-inf"), dtype=dtype, device=self._device).triu_(1)
        zeros = torch.zeros((PREFILL_TILE, longest), dtype=dtype, device=self._device)
        return torch.cat((zeros, triangle), 1)


class TorchBackend:
    """All operations of `Backend` for one device.

    deterministic: run linears in row tiles of 16 so that a row's bits never depend on its
    neighbours. The linears of one row then take 32 ms instead of 25.
    """

    name = "torch"
    supported_dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def __init__(self, device: torch.device | str = "cpu", deterministic: bool = False) -> None:
        self.device = torch.device(device)
        self.deterministic = deterministic
        self.tile_mask = TileMask(self.device)

    def check_model(self, config: "ModelConfig", dtype: torch.dtype) -> None:
        """Refuse dtypes that no model has."""
        if dtype not in self.supported_dtypes:
            supported = ", ".join(sorted(str(entry) for entry in self.supported_dtypes))
            raise ConfigError(f"dtype {dtype} is not supported by {self.name}; use {supported}")

    def embed(
        self, ids: torch.Tensor, table: torch.Tensor, feed: "TokenFeed | None" = None
    ) -> torch.Tensor:
        """Rows of the table."""
        if feed is None:
            return F.embedding(ids, table)
        fed = feed.tokens[feed.sources.clamp(min=0).long()].long()
        ids = torch.where(feed.sources >= 0, fed, ids)
        rows = F.embedding(ids.clamp(min=0), table)
        return torch.where(ids[:, None] >= 0, rows, 0)

    def pack_linear(self, weight: Weight) -> Weight:
        """Reorder a weight for oneDNN on a CPU that has it; elsewhere return it as it is.

        All linears of one step, plain / packed: 51 / 25 ms at 1 row, 68 / 21 ms at 4, 62 / 25 ms
        at 8. Packed without a row-count hint: a hint of 1 or 8 is 2-3x slower at 16 rows.
        Codes stay codes: they are there to save memory, and a dense copy would take it back.
        """
        if isinstance(weight, BlockFp8Weight) or not _onednn_takes(weight):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return packed

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
        """`x [rows, in]` times `weight [out, in]` (plain, packed or codes) -> `[rows, out]`.

        All rows are computed alike, so `decode_rows` decides nothing.
        """
        out = self._linear(x, weight)
        if residual is not None:
            out = residual + out
        return out.float() if wide else out

    def mlp(
        self,
        x: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        decode_rows: int,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """The three operations after one another."""
        product = self.silu_mul(self._linear(x, gate_up))
        return self.linear(product, down, decode_rows=decode_rows, residual=residual)

    def _linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, weight.shape[0]))
        if isinstance(weight, BlockFp8Weight):
            weight = weight.dequantise(x.dtype)
        if not self.deterministic:
            return _product(x, weight)
        padding = -rows % LINEAR_TILE
        if padding:
            x = torch.cat((x, x.new_zeros((padding, x.shape[1]))))
        tiles = [_product(tile, weight) for tile in torch.split(x, LINEAR_TILE)]
        return torch.cat(tiles)[:rows] if len(tiles) > 1 else tiles[0][:rows]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last axis: fp32 statistics, cast, then weight."""
        return _normalised(x.float(), eps).to(x.dtype) * weight

    def rms_norm_wide(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last axis, all of it in fp32."""
        return (_normalised(x.float(), eps) * scale).to(x.dtype)

    def gated_rms_norm(
        self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Norm of `x [T, Hv, dv]` fp32, cast to the dtype of z, times `weight * silu(z)` in fp32.

        z: `[T, Hv, dv]`; the result has its dtype.
        """
        gate = self._pointwise(F.silu, z.flatten(1).float()).view(z.shape)
        normed = _normalised(x, eps).to(z.dtype)
        return (normed.float() * weight.float() * gate).to(z.dtype)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x * sigmoid(gate)` in fp32."""
        gate = gate.reshape(x.shape).float()
        return (x.float() * self._pointwise(torch.sigmoid, gate)).to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[rows, 2 * n]` -> `silu(gate) * up`, `[rows, n]`."""
        if not self.deterministic:
            return _silu_mul(gate_up)
        # Blocks below the grain run on one thread, so a row is vectorised the same way anywhere.
        rows = max(1, _POINTWISE_GRAIN * 2 // gate_up.shape[1])
        return torch.cat([_silu_mul(block) for block in torch.split(gate_up, rows)])

    def rotary(
        self, rope: RotaryEmbedding, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of the tokens, `[T, 1, R/2]`."""
        return rope.at(positions)

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
        """Norms, rotary embedding and append, one after the other."""
        if norms is not None:
            q, k = norms[0].forward(q), norms[1].forward(k)
        q, k = rotation.apply(q, *rotary), rotation.apply(k, *rotary)
        self.kv_append(layer, kv, batch.token_pages, batch.token_offsets, k, v)
        return q

    def kv_append(
        self,
        layer: int,
        kv: KVCache,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write the new keys and values of all tokens of the step for one layer."""
        live = pages >= 0
        if not live.all():
            pages, offsets, k, v = pages[live], offsets[live], k[live], v[live]
        kv.append(layer, pages, offsets, k, v)

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
        """One segment after the other."""
        for segment in segments:
            rows = slice(segment.offset, segment.offset + segment.length)
            # Its KV, decoded or gathered, ends with the call.
            _tiled_attention(
                q[rows],
                kv,
                *kv.view(layer, segment.table, segment.start + segment.length, window),
                segment.start,
                self.tile_mask,
                out=out[rows],
            )

    def attention_decode(
        self,
        q: torch.Tensor,
        layer: int,
        kv: KVCache,
        tables: Sequence[Table] | torch.Tensor,
        lengths: Sequence[int] | torch.Tensor,
        window: Window,
    ) -> torch.Tensor:
        """One row at a time against a view of its own KV, so stale memory is never read.

        The query heads of a group are passed as rows of one KV head: 15 us a row at 32 tokens and
        22 at 128, against 18 and 28 with the grouped-query flag (9 heads over 3).
        """
        rows, heads, head_dim = q.shape
        kv_heads = kv.kv_heads
        grouped = kv.queries(q).view(rows, 1, kv_heads, heads // kv_heads, head_dim)
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            if not length:
                out[row] = 0.0
                continue
            k, v = kv.view(layer, table, length, window)
            attended = F.scaled_dot_product_attention(
                grouped[row], k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
            )
            out[row] = kv.outputs(attended.view(heads, head_dim))
        return out

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
        """The four operations of a linear layer after one another."""
        beta, g = self.delta_gates(b, a, weights.a_log, weights.dt_bias)
        mixed = self.conv_step(qkv, weights.taps, conv, slots)
        values = self.gated_delta_step(*_heads(mixed, state), g, beta, state, slots)
        normed = self.gated_rms_norm(values, z.reshape(values.shape), weights.norm, weights.eps)
        normed = normed.flatten(1)
        return normed if out is None else out.copy_(normed)

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
        """The four operations after one another, for one segment after the other."""
        for segment in segments:
            rows = slice(segment.offset, segment.offset + segment.length)
            slot, initial = segment.state_slot, segment.start > 0
            beta, g = self.delta_gates(b[rows], a[rows], weights.a_log, weights.dt_bias)
            mixed = self.conv_prefill(
                qkv[rows], weights.taps, conv, slot, has_initial_state=initial
            )
            values = self.gated_delta_prefill(
                *_heads(mixed, state),
                g,
                beta,
                state,
                slot,
                segment.start,
                has_initial_state=initial,
            )
            gate = z[rows].view(values.shape)
            out[rows] = self.gated_rms_norm(values, gate, weights.norm, weights.eps).flatten(1)

    def delta_gates(
        self, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write strength `beta = sigmoid(b)` and log decay `g = -exp(a_log) softplus(a + dt_bias)`.

        b, a: `[T, Hv]`; a_log, dt_bias: fp32 `[Hv]`. Both results are fp32 `[T, Hv]`.
        """
        beta = self._pointwise(torch.sigmoid, b.float())
        return beta, -a_log.exp() * self._pointwise(F.softplus, a.float() + dt_bias)

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
        width = state.shape[2]
        history = state[slot].T if has_initial_state else x.new_zeros((width, x.shape[1]))
        out = self._pointwise(F.silu, conv_window(history, x, taps)).to(x.dtype)
        # A run shorter than the window leaves some of the inputs before it in the state.
        state[slot] = torch.cat((history, x[-width:]))[-width:].T
        return out

    def conv_step(
        self, x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """One token a row: `x [B, channels]`, `slots [B]` int64, no slot twice.

        The bits of a row are those `conv_prefill` gives for the same token.
        """
        live = slots >= 0
        tokens, slots = x[live], slots[live]
        history = state[slots].mT  # [B, 3, channels]
        out = torch.zeros_like(x)
        window = conv_window(history, tokens.unsqueeze(1), taps).squeeze(1)
        out[live] = self._pointwise(F.silu, window).to(x.dtype)
        state[slots] = torch.cat((history[:, 1:], tokens.unsqueeze(1)), dim=1).mT
        return out

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
        """
        before = state[slot] if has_initial_state else torch.zeros_like(state[slot])
        out, after = delta_chunks(DeltaInputs(q, k, v, g, beta), before, start)
        state[slot] = after
        return out

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
        """One token a row, shapes as above with B for n; `slots [B]` int64, no slot twice.

        All rows at once, or one at a time in deterministic mode: its products have one shape.
        """
        live = slots >= 0
        inputs = DeltaInputs(q[live], k[live], v[live], g[live], beta[live])
        slots = slots[live]
        out = torch.zeros(v.shape, dtype=state.dtype, device=v.device)
        size = 1 if self.deterministic else max(1, slots.shape[0])
        parts = []
        for first in range(0, slots.shape[0], size):
            rows = slots[first : first + size]
            part, state[rows] = delta_step(inputs.rows(first, first + size), state[rows])
            parts.append(part)
        if parts:
            out[live] = torch.cat(parts)
        return out

    def _pointwise(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Apply a function with an exponential in it to `x [rows, width]`, fp32.

        Deterministic: in blocks of whole vectors below the grain, so that every element is computed
        by the same vector code wherever its row stands.
        """
        if not self.deterministic:
            return function(x)
        rows, width = x.shape
        x = x.contiguous()  # a strided run would be cut into other vectors
        unit = _POINTWISE_UNIT // math.gcd(width, _POINTWISE_UNIT)  # rows of whole vectors
        if rows % unit:
            x = F.pad(x, (0, 0, 0, -rows % unit))
        block = max(1, _POINTWISE_GRAIN // (width * unit)) * unit
        return torch.cat([function(part) for part in torch.split(x, block)])[:rows]


def _heads(
    mixed: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split `mixed [n, channels]` into q, k `[n, Hk, dk]` and v `[n, Hv, dv]`."""
    value_heads, value_dim, key_dim = state.shape[1:]
    value_size = value_heads * value_dim
    key_size = (mixed.shape[1] - value_size) // 2
    q, k, v = torch.split(mixed, [key_size, key_size, value_size], dim=1)
    keys = (len(mixed), key_size // key_dim, key_dim)
    return q.reshape(keys), k.reshape(keys), v.reshape(len(mixed), value_heads, value_dim)


def _onednn_takes(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return out
    return F.linear(x, weight)


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _tiled_attention(
    q: torch.Tensor,
    kv: KVCache,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    mask: TileMask,
    *,
    out: torch.Tensor,
) -> None:
    """Causal attention in tiles of query rows, each against the KV up to its own end.

    The tiles stand at absolute multiples of 64, so cuts there are invisible in the bits. They are
    also faster than one masked call (512 tokens: 3.4 against 4.9 ms a layer), because no tile looks
    at keys beyond its end. Pages are gathered and codes decoded once for all tiles.
    """
    end = start + q.shape[0]
    queries = kv.queries(q).transpose(0, 1).unsqueeze(0)  # [1, Hq, n, D]
    for tile_start in range(start - start % PREFILL_TILE, end, PREFILL_TILE):
        tile_end = min(tile_start + PREFILL_TILE, end)
        first = max(tile_start, start)
        k, v = keys[:tile_end], values[:tile_end]
        rows = slice(first - start, tile_end - start)
        tile = F.scaled_dot_product_attention(
            queries[:, :, rows],
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=mask.rows(first, tile_end, queries.dtype, last=end - 1),
            enable_gqa=True,
        )
        out[rows] = kv.outputs(tile[0].transpose(0, 1))
