"""The reference backend in readable torch: runs on any device and is what kernels are tested with.

Rates quoted here: two cores with AVX-512, fp32, the linears of a 135 M model, torch 2.11.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from headrace.backends.base import PREFILL_TILE
from headrace.kv.slots import SlotKVCache

# Rows of one product in deterministic mode. A product of fixed shape has bits that depend on
# neither the number of rows in the step nor the place of a row; a plain product does not.
LINEAR_TILE = 16

# torch splits pointwise work between threads above this many elements (at::internal::GRAIN_SIZE),
# at places that depend on the total; vectorised and scalar tails of exp may then differ in bits.
_POINTWISE_GRAIN = 32_768


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

    def pack_linear(self, weight: torch.Tensor) -> torch.Tensor:
        """Reorder a weight for oneDNN on a CPU that has it; elsewhere return it as it is.

        All linears of one step, plain / packed: 51 / 25 ms at 1 row, 68 / 21 ms at 4, 62 / 25 ms
        at 8. Packed without a row-count hint: a hint of 1 or 8 is 2-3x slower at 16 rows.
        """
        if not _onednn_takes(weight):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return packed

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x [rows, in]` times `weight [out, in]` (plain or packed) -> `[rows, out]`."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, weight.shape[0]))
        if not self.deterministic:
            return _product(x, weight)
        padding = -rows % LINEAR_TILE
        if padding:
            x = torch.cat((x, x.new_zeros((padding, x.shape[1]))))
        tiles = [_product(tile, weight) for tile in torch.split(x, LINEAR_TILE)]
        return torch.cat(tiles)[:rows] if len(tiles) > 1 else tiles[0][:rows]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last axis: fp32 statistics, cast, then weight."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).to(x.dtype) * weight

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[rows, 2 * n]` -> `silu(gate) * up`, `[rows, n]`."""
        if not self.deterministic:
            return _silu_mul(gate_up)
        # Blocks below the grain run on one thread, so a row is vectorised the same way anywhere.
        rows = max(1, _POINTWISE_GRAIN * 2 // gate_up.shape[1])
        return torch.cat([_silu_mul(block) for block in torch.split(gate_up, rows)])

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
        """Write the new keys and values of all tokens of the step for one layer."""
        pool_k[layer].index_put_((slots, positions), k)
        pool_v[layer].index_put_((slots, positions), v)

    def prefill_mask(self, max_start: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[64, max_start + 64]`: zeros, and a causal triangle in the last 64.

        A tile that starts at absolute position s uses the columns from `max_start - s` on.
        """
        mask = torch.zeros((PREFILL_TILE, max_start + PREFILL_TILE), dtype=dtype)
        triangle = torch.full((PREFILL_TILE, PREFILL_TILE), float("-inf"), dtype=dtype)
        mask[:, max_start:] = triangle.triu_(1)
        return mask.to(self.device)

    def attention_prefill(
        self,
        q: torch.Tensor,
        layer: int,
        kv: SlotKVCache,
        slot: int,
        start: int,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Causal attention in tiles of query rows, each against the KV up to its own end.

        The tiles stand at absolute multiples of 64, so cuts there are invisible in the bits. They
        are also faster than one masked call (512 tokens: 3.4 against 4.9 ms a layer), because no
        tile looks at keys beyond its end.
        """
        end = start + q.shape[0]
        max_start = mask.shape[1] - PREFILL_TILE
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        queries = q.transpose(0, 1).unsqueeze(0)  # [1, Hq, n, D]
        for tile_start in range(start - start % PREFILL_TILE, end, PREFILL_TILE):
            tile_end = min(tile_start + PREFILL_TILE, end)
            first = max(tile_start, start)
            k, v = kv.view(layer, slot, tile_end)
            rows = slice(first - start, tile_end - start)
            tile = F.scaled_dot_product_attention(
                queries[:, :, rows],
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                attn_mask=mask[
                    first - tile_start : tile_end - tile_start,
                    max_start - tile_start : max_start - tile_start + tile_end,
                ],
                enable_gqa=True,
            )
            out[rows] = tile[0].transpose(0, 1)
        return out

    def attention_decode(
        self,
        q: torch.Tensor,
        layer: int,
        kv: SlotKVCache,
        slots: Sequence[int],
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """One row at a time against a view of its own KV, so stale memory is never read.

        The query heads of a group are passed as rows of one KV head: 15 us a row at 32 tokens and
        22 at 128, against 18 and 28 with the grouped-query flag (9 heads over 3).
        """
        rows, heads, head_dim = q.shape
        kv_heads = kv.k.shape[3]
        grouped = q.view(rows, 1, kv_heads, heads // kv_heads, head_dim)
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            k, v = kv.view(layer, slot, length)
            attended = F.scaled_dot_product_attention(
                grouped[row], k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
            )
            out[row] = attended.view(heads, head_dim)
        return out


def _onednn_takes(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if weight.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return out
    return F.linear(x, weight)


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
