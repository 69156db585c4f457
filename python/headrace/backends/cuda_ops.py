"""The CUDA backend: the kernels of `cuda/` and library products, bound to one GPU.

What it has is said in `check_model`, `pack_linear` and `attach`, all called at construction. Owns
the scratch of its kernels, one stream's worth; no locks: one step at a time.

Decode rows go through kernels whose order of additions depends on the matrix alone, prompts through
library products in fixed blocks (`many_rows`). A step that has both makes each product twice, so
that a row never sees its neighbours.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from headrace.backends.base import PREFILL_TILE, DeltaWeights, Weight
from headrace.backends.cuda import fused, prefill
from headrace.backends.cuda.delta import DeltaPrefill, DeltaStep
from headrace.backends.cuda.gemm import ELEMENTS, MAX_ROWS, SkinnyGemm
from headrace.backends.cuda.kv import HEAD_DIMS, MAX_GROUP, KVKernels, LowWindow, QKNorm, Rotary
from headrace.backends.cuda.loader import require_gpu
from headrace.backends.cuda.many_rows import ManyRows
from headrace.backends.cuda.prefill_attention import PrefillAttention
from headrace.backends.cuda.segments import on_device
from headrace.backends.torch_ops import TileMask, TorchBackend
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.kv.codecs import check_finite
from headrace.kv.formats import Which
from headrace.kv.tables import Table, Window
from headrace.layers.block_fp8 import BlockFp8Weight
from headrace.layers.norm import Norm, RMSNorm, ZeroCentredRMSNorm
from headrace.layers.rope import RotaryEmbedding

if TYPE_CHECKING:
    from headrace.models.batch import ForwardBatch, PrefillSegment, TokenFeed
    from headrace.models.config import ModelConfig

# What `SkinnyGemm` asks of a matrix: multiples of so many rows and columns.
_ROW_UNIT, _COLUMN_UNIT = 16, 64
_WIDTH_UNIT = 8  # of norms and gates, 16 bytes


class CudaBackend:
    """All operations of `Backend` on one GPU of compute capability 9.0.

    deterministic: the bits of a row depend on nothing but its own request.

    Raises
    ------
    CudaUnavailable
        The machine cannot run the kernels; says what is missing.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, deterministic: bool = True) -> None:
        require_gpu()
        self.device = device
        self.deterministic = deterministic
        # Of the process, and what every model here is defined by: sums in fp32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._few = SkinnyGemm(device, early=True)
        self._many = ManyRows(fixed=deterministic)
        self._exact = TorchBackend(device, deterministic=True)
        self._dtype: torch.dtype | None = None
        self._delta: tuple[DeltaStep, DeltaPrefill] | None = None
        self._kv: KVKernels | None = None
        self._prefill: PrefillAttention | None = None

    def check_model(self, config: "ModelConfig", dtype: torch.dtype) -> None:
        """Refuse what no kernel has; make the kernels of linear layers."""
        problems = []
        if dtype not in ELEMENTS:
            problems.append(f"dtype {dtype}: accepted is {_listed(ELEMENTS)}")
        if config.head_dim not in HEAD_DIMS:
            problems.append(f"head_dim {config.head_dim}: accepted is {_listed(HEAD_DIMS)}")
        group = config.num_heads // config.num_kv_heads
        if group > MAX_GROUP:
            problems.append(f"{group} query heads a KV head: accepted is up to {MAX_GROUP}")
        rotary = config.head_dim if config.rotary_dim is None else config.rotary_dim
        if rotary % (config.head_dim // 16):
            problems.append(
                f"rotary_dim {rotary}: accepted is a multiple of {config.head_dim // 16}"
            )
        for name in ("hidden_size", "intermediate_size"):
            if getattr(config, name) % _WIDTH_UNIT:
                size = getattr(config, name)
                problems.append(f"{name} {size}: accepted is a multiple of {_WIDTH_UNIT}")
        if problems:
            raise ConfigError(f"device cuda with {'; '.join(problems)}")
        self._dtype = dtype
        if config.linear is not None:
            self._delta = (
                DeltaStep(config.linear, dtype),
                DeltaPrefill(config.linear, dtype, self.device),
            )

    def attach(self, kv: KVCache, *, query_heads: int, max_rows: int, max_context: int) -> None:
        """Make the kernels of a cache; the scratch is for `max_rows` rows of `max_context` tokens.

        Raises
        ------
        ConfigError
            The kernels do not have a size or format of the cache.
        """
        self._kv = KVKernels(
            kv.pool, query_heads=query_heads, max_rows=max_rows, max_context=max_context
        )
        if self._dtype != torch.float32:
            self._prefill = PrefillAttention(self._kv)

    def embed(
        self, ids: torch.Tensor, table: torch.Tensor, feed: "TokenFeed | None" = None
    ) -> torch.Tensor:
        """Rows of the table."""
        if feed is None:
            return fused.embed(table, ids)
        return fused.embed(table, ids, sources=feed.sources, tokens=feed.tokens)

    def pack_linear(self, weight: Weight) -> Weight:
        """Return the weight as it is, which is what all products read.

        Raises
        ------
        ConfigError
            Codes in a model of another dtype than bf16.
        """
        if isinstance(weight, BlockFp8Weight):
            if self._dtype != torch.bfloat16:
                raise ConfigError(
                    f"fp8 weights with dtype {self._dtype} on device cuda: accepted is bfloat16, "
                    "or fp8_weights='dequantize'"
                )
            if not _is_skinny(weight):
                weight = weight.dequantise(torch.bfloat16)
        if isinstance(weight, torch.Tensor):
            weight = weight.contiguous()
            if weight.dtype == torch.float32:
                return weight
        self._many.probe(weight)
        return weight

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
        """Decode rows by `SkinnyGemm`, the others by library products; both of one storage."""
        few = self._few_rows(x, decode_rows)
        if few == x.shape[0]:
            return self._skinny(x, weight, residual=residual, wide=wide, same_input=same_input)
        if not few:
            return self._library(x, weight, residual, wide)
        rests = (None, None) if residual is None else (residual[:few], residual[few:])
        decoded = self._skinny(x[:few], weight, residual=rests[0], wide=wide)
        return torch.cat((decoded, self._library(x[few:], weight, rests[1], wide)))

    def mlp(
        self,
        x: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        decode_rows: int,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """Decode rows: product and gate in one launch. Prompts alone: gate and codes in one."""
        few = self._few_rows(x, decode_rows)
        if not few:
            return self._many.linear(self._many.linear(x, gate_up), down, residual, gated=True)
        parts = [self._skinny_silu_mul(x[:few], gate_up)]
        if few < x.shape[0]:
            parts.append(fused.silu_mul(self._many.linear(x[few:], gate_up)))
        product = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.linear(product, down, decode_rows=decode_rows, residual=residual)

    def _few_rows(self, x: torch.Tensor, decode_rows: int) -> int:
        """Leading rows that the kernels for a few rows take."""
        rows = x.shape[0]
        if x.dtype == torch.float32:
            return rows  # there is one exact product, whatever the rows
        if self.deterministic:
            return min(rows, decode_rows)
        return rows if rows <= MAX_ROWS else 0

    def _skinny(
        self,
        x: torch.Tensor,
        weight: Weight,
        *,
        residual: torch.Tensor | None,
        wide: bool,
        same_input: bool = False,
    ) -> torch.Tensor:
        if x.dtype == torch.float32:
            out = self._few.linear(x, weight)
            return out if residual is None else out.add_(residual)
        if _is_skinny(weight):
            return self._few.linear(x, weight, residual=residual, wide=wide, same_input=same_input)
        out = self._exact.linear(x, weight)
        if residual is not None:
            out = residual + out
        return out.float() if wide else out

    def _skinny_silu_mul(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if x.dtype != torch.float32 and _is_skinny(weight, 2 * _ROW_UNIT):
            return self._few.linear(x, weight, silu_mul=True)
        return fused.silu_mul(self._skinny(x, weight, residual=None, wide=False).contiguous())

    def _library(
        self, x: torch.Tensor, weight: Weight, residual: torch.Tensor | None, wide: bool
    ) -> torch.Tensor:
        out = self._many.linear(x, weight, residual)
        return out.float() if wide else out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One launch; an order that depends on the width alone."""
        return fused.rms_norm(x, weight, eps)

    def rms_norm_wide(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """One launch; an order that depends on the width alone."""
        return fused.rms_norm_wide(x, scale, eps)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Reads the gate out of the projection it is part of."""
        return fused.sigmoid_gate(x, gate if gate.ndim == 3 else gate.unsqueeze(1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """One launch."""
        return fused.silu_mul(gate_up)

    def rotary(
        self, rope: RotaryEmbedding, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole tables; the kernel looks up the positions."""
        return rope.cos, rope.sin

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
        """All of it in one launch, q in place. With checks on, K before its norm is looked at."""
        kernels = self._kernels(kv)
        if kv.pool.checked:
            live = batch.token_pages >= 0
            sides: tuple[tuple[Which, torch.Tensor], ...] = (("k", k), ("v", v))
            for which, x in sides:
                check_finite(
                    which,
                    x[live],
                    layer=layer,
                    pages=batch.token_pages[live],
                    positions=batch.token_offsets[live],
                )
        kernels.append_fused(
            layer,
            batch.token_pages,
            batch.token_offsets,
            batch.positions,
            q,
            k,
            v,
            q_out=q,
            norm=None if norms is None else _qk_norm(*norms),
            rotary=Rotary(cos=rotary[0], sin=rotary[1]),
        )
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
        """The bytes of the reference codecs."""
        self._kernels(kv).append(layer, pages, offsets, k, v)

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
        """By 32 segments a launch; fp32 exactly, one after the other."""
        if q.dtype != torch.float32:
            assert self._prefill is not None, "the cache was attached"
            self._prefill.attend(layer, q, segments, out=out, low=_low(window))
            return
        for segment in segments:
            rows = slice(segment.offset, segment.offset + segment.length)
            assert isinstance(segment.table, torch.Tensor), "a table of the device"
            shape = (2, segment.start + segment.length, kv.kv_heads, q.shape[2])
            keys, values = torch.empty(shape, dtype=q.dtype, device=q.device).unbind()
            self._kernels(kv).gather(
                layer, segment.table, 0, k_out=keys, v_out=values, low=_low(window)
            )
            mask = self._exact.tile_mask
            out[rows] = _tiled_attention(q[rows], keys, values, segment.start, mask)

    def attention_decode(
        self,
        q: torch.Tensor,
        layer: int,
        kv: KVCache,
        tables: Sequence[Table] | torch.Tensor,
        lengths: Sequence[int] | torch.Tensor,
        window: Window,
    ) -> torch.Tensor:
        """All rows in two launches; tables int32 `[B, pages]`, lengths int32, on the device."""
        assert isinstance(tables, torch.Tensor), "tables of the device"
        assert isinstance(lengths, torch.Tensor), "lengths on the device"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._kernels(kv).attention_decode(
            layer, q, tables, lengths, out=out, low=_low(window), settled=True
        )
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
        """One launch."""
        step = self._deltas()[0]
        return step.step(qkv, z, b, a, weights, conv, state, slots, out, settled=True)

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
        """Five launches; two more for every further 32 chunks, four for every further 32 segments.

        What differs from step to step is read on the device, but for the bounds of the segments.
        """
        sent = on_device(segments, self.device)
        tokens, (heads, width, _) = qkv.shape[0], state.shape[1:]
        mixed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        values = torch.empty((tokens, heads, width), dtype=torch.float32, device=qkv.device)
        prefill.conv_prefill(qkv, weights.taps, conv, sent, out=mixed)
        self._deltas()[1].prefill(mixed, b, a, weights, state, sent, out=values)
        first, end = sent[0].offset, sent[-1].offset + sent[-1].length
        if end - first < tokens:
            values, z, out = values[first:end], z[first:end], out[first:end]
        prefill.gated_norm(values, z, weights.norm, weights.eps, out=out)

    def _kernels(self, kv: KVCache) -> KVKernels:
        assert self._kv is not None, "the cache was attached"
        assert self._kv.pool is kv.pool, "of this cache"
        return self._kv

    def _deltas(self) -> tuple[DeltaStep, DeltaPrefill]:
        assert self._delta is not None, "made for a model with linear layers"
        return self._delta


def _is_skinny(weight: Weight, row_unit: int = _ROW_UNIT) -> bool:
    rows, columns = weight.shape
    return rows % row_unit == 0 and columns % _COLUMN_UNIT == 0


def _qk_norm(q_norm: Norm, k_norm: Norm) -> QKNorm:
    if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
        return QKNorm(q=q_norm.weight, k=k_norm.weight, eps=q_norm.eps, wide=False)
    assert isinstance(q_norm, ZeroCentredRMSNorm), "one of the two norms there are"
    assert isinstance(k_norm, ZeroCentredRMSNorm), "of the same kind"
    return QKNorm(q=q_norm.scale, k=k_norm.scale, eps=q_norm.eps, wide=True)


def _low(window: Window) -> LowWindow | None:
    if not isinstance(window.k0, torch.Tensor):
        return None
    return LowWindow(size=window.width, k0=window.k0)


def _tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, mask: TileMask
) -> torch.Tensor:
    """Exact fp32 attention in tiles of 64 queries at absolute places, as the torch backend has it.

    Written as products and a softmax, so that no library kernel with tf32 can be chosen.
    """
    tokens, heads, head_dim = q.shape
    end, kv_heads = start + tokens, k.shape[1]
    queries = q.view(tokens, kv_heads, heads // kv_heads, head_dim) / math.sqrt(head_dim)
    out = torch.empty_like(queries)
    for tile_start in range(start - start % PREFILL_TILE, end, PREFILL_TILE):
        tile_end = min(tile_start + PREFILL_TILE, end)
        first = max(tile_start, start)
        rows = slice(first - start, tile_end - start)
        scores = torch.einsum("qhgd,khd->hgqk", queries[rows], k[:tile_end])
        scores = scores + mask.rows(first, tile_end, scores.dtype, last=end - 1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v[:tile_end])
    return out.view(tokens, heads, head_dim)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
