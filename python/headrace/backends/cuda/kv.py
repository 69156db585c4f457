"""Calls of the KV kernels: append, decode attention and gather over the planes of a pool.

Every call launches on torch's current stream (decode attention two kernels, the others one), reads
nothing back and allocates nothing, so it can be captured in a CUDA graph; block tables, lengths and
pages are data.

A block table is int32 `[rows, max_pages]`: bit 31 (the sign) marks LOW pages, the other bits are a
flat page base. Fixed slots are a table `[rows, 1]` of slot numbers over a pool whose pages hold
`max_context` tokens. Invariants: the work counter is zero between calls, and one
`KVKernels` serves one stream at a time. No locks.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.loader import load_kernel, load_variant
from headrace.backends.cuda.nvrtc import Variant
from headrace.errors import ConfigError
from headrace.kv.formats import AUTO, FP8, INT8, K8V4, MODEL_DTYPES, KVFormat, positive
from headrace.kv.planes import PlanePool

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 8  # query heads of a KV head: the columns of a matrix product
MAX_CONTEXT = 1_048_576  # what the weights of a merge have shared memory for
TILE_TOKENS = 16  # a tile must lie in one page
_F32_GROUPS = (4, 8)
_APPEND_WARPS = 4
# One vector a warp while one wave of warps holds them all; beyond, a warp works on a span of heads,
# some at a time. No bit depends on it.
_APPEND_WAVE = 8192
_APPEND_TOGETHER, _APPEND_SPAN = 4, 8
_MAX_VECTORS = 2**32 - _APPEND_WARPS  # the kernel numbers them in 32 bits
_GATHER_WARPS, _GATHER_RUN = 4, 4
_GATHER_CTAS = 1 << 12  # several rounds of any GPU; the room of a graph is mostly empty
_MERGE_THREADS = 256
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_QUANTISED = ("FP8", "FP8_B64", "INT8", "K8V4")
_NO_FMA = ("-fmad=false",)


def _append_variant(dtype: str, kv_format: str, head_dim: int) -> Variant:
    return Variant(
        file="kv_append.cu",
        names=tuple(
            f"kv_append<{dtype}, {kv_format}, {head_dim}, {count}>"
            for count in (1, _APPEND_TOGETHER)
        ),
        # A fused multiply-add rounds once where the definition of the formats rounds twice.
        options=_NO_FMA,
    )


def _gather_variant(dtype: str, kv_format: str, head_dim: int, out: str) -> Variant:
    name = f"kv_gather<{dtype}, {kv_format}, {head_dim}, {out}>"
    return Variant(file="kv_gather.cu", names=(name,), options=_NO_FMA)


def _attention_variant(dtype: str, kv_format: str, head_dim: int) -> Variant:
    arguments = f"<{dtype}, {kv_format}, {head_dim}>"
    names = (f"attention_decode{arguments}", f"attention_limits{arguments}")
    return Variant(file="attention_decode.cu", names=(*names, f"attention_merge<{head_dim}>"))


def _attention_f32_variant(head_dim: int, group: int) -> Variant:
    arguments = f"_f32<{head_dim}, {group}>"
    names = (f"attention_decode{arguments}", f"attention_limits{arguments}")
    return Variant(file="attention_decode.cu", names=(*names, f"attention_merge<{head_dim}>"))


def _kinds() -> list[tuple[str, str]]:
    """Stored dtype and format; quantised kernels of attention and gather have no model dtype."""
    return [("BF16", "PLAIN"), ("F16", "PLAIN"), *(("BF16", name) for name in _QUANTISED)]


# All programs this module can ask for.
VARIANTS: tuple[Variant, ...] = (
    *(
        _append_variant(dtype, kv_format, head_dim)
        for dtype in _DTYPES.values()
        for kv_format in ("PLAIN", *_QUANTISED)
        for head_dim in HEAD_DIMS
    ),
    *(_gather_variant(name, "PLAIN", d, name) for name in _DTYPES.values() for d in HEAD_DIMS),
    *(
        _gather_variant("BF16", kv_format, head_dim, out)
        for kv_format in _QUANTISED
        for head_dim in HEAD_DIMS
        for out in _DTYPES.values()
    ),
    *(_attention_variant(*kind, head_dim) for kind in _kinds() for head_dim in HEAD_DIMS),
    *(_attention_f32_variant(head_dim, group) for head_dim in HEAD_DIMS for group in _F32_GROUPS),
)


def split_count(length: int) -> int:
    """Splits of a row of `length` tokens; depends on nothing else."""
    size = 128 if length <= 8192 else 256 if length <= 32768 else 512
    return -(-length // size)


def max_splits(max_context: int) -> int:
    """Most splits of any row of up to `max_context` tokens; the count drops where splits grow."""
    return max(split_count(min(max_context, limit)) for limit in (8192, 32768, max_context))


def scratch_bytes(rows: int, kv_heads: int, group: int, head_dim: int, max_context: int) -> int:
    """Bytes of device memory that decode attention of up to `rows` rows keeps."""
    return 4 * (rows * kv_heads * max_splits(max_context) * group * (head_dim + 2) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    """RMS norms of query and key heads.

    q, k: weights `[head_dim]` in the model dtype for `rms_norm`, fp32 scales for `rms_norm_wide`
    (wide).
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float
    wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """fp32 tables `[positions, rotary_dim / 2]` of `RotaryEmbedding`, contiguous."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LowWindow:
    """Where LOW pages are: streamed layer l uses window position `(k0 + l) mod size`.

    k0: int32 `[1]` on the device, read when the kernel runs.
    """

    size: int
    k0: torch.Tensor


class KVKernels:
    """Kernels for one pool and one number of query heads.

    max_rows: most rows of one decode call. max_context: most tokens of a row; a longer length in a
    decode call is cut to it.

    Raises
    ------
    ConfigError
        A size the kernels do not have; names it.
    CudaUnavailable, KernelError
        As `load_variant`.
    """

    def __init__(
        self, pool: PlanePool, *, query_heads: int, max_rows: int, max_context: int
    ) -> None:
        layout = pool.layout
        _check(pool, query_heads, max_context)
        positive("max_rows", max_rows)
        self.pool = pool
        self.group = query_heads // layout.kv_heads
        self.max_rows = max_rows
        self.max_context = max_context
        self.scratch_bytes = scratch_bytes(
            max_rows, layout.kv_heads, self.group, layout.head_dim, max_context
        )
        self._format = layout.kv_format
        self._head_dim = layout.head_dim
        self._kv_heads = layout.kv_heads
        self._dtype = layout.kv_format.model_dtype
        self._rotated = int(layout.kv_format.rotated)
        # Addresses of codes and scales of K, then of V; 0 for none.
        self.planes = tuple(
            pool.tensors[name].data_ptr() if name in pool.tensors else 0
            for name in ("k", "k_scale", "v", "v_scale")
        )
        self._max_splits = max_splits(max_context)
        kind = _kind(layout.kv_format)
        variant = _append_variant(_DTYPES[self._dtype], kind, self._head_dim)
        device = torch.cuda.current_device()
        self._append, self._append_spans = (
            load_kernel(variant, name, device, early=True) for name in variant.names
        )
        self._gathers: dict[torch.dtype, Kernel] = {}
        self._load_attention(kind)
        self._allocate_scratch()

    def append(
        self,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Encode `k, v [T, kv_heads, head_dim]` into row `offsets[t]` of page `pages[t]`.

        pages, offsets: both int64 or both int32 `[T]`. A page or an offset outside of the pool (-1)
        is a padding row: nothing is written. The bytes are those of `PlanePool.append`.
        """
        self._launch_append(layer, pages, offsets, offsets, None, None, k, v, None, None)

    def append_fused(
        self,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_out: torch.Tensor,
        norm: QKNorm | None,
        rotary: Rotary | None,
    ) -> None:
        """Norm and turn q and k, write q to `q_out` (q itself, if wanted), append k and v.

        q, q_out: `[T, query_heads, head_dim]`; all four may be strided views of one projection.
        positions: absolute, dtype of pages. Padding rows as in `append`, their q is not written.
        """
        self._launch_append(layer, pages, offsets, positions, q, q_out, k, v, norm, rotary)

    def _launch_append(
        self,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        positions: torch.Tensor,
        q: torch.Tensor | None,
        q_out: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        norm: QKNorm | None,
        rotary: Rotary | None,
    ) -> None:
        tokens = k.shape[0]
        q_heads = 0 if q is None else q.shape[1]
        if tokens == 0:
            return
        vectors = tokens * (q_heads + 2 * self._kv_heads)
        if vectors > _MAX_VECTORS:
            raise ConfigError(f"append: {tokens} tokens are more than one launch can number")
        assert pages.dtype == offsets.dtype == positions.dtype, "indices have one dtype"
        assert all(x.is_contiguous() for x in (pages, offsets, positions)), "indices are dense"
        queries = (0, 0, 0) if q is None else self._vectors("q", q)
        outputs = (0, 0, 0) if q_out is None else self._vectors("q_out", q_out)
        half = 0 if rotary is None else rotary.cos.shape[1]
        if half % (self._head_dim // 32) or half * 2 > self._head_dim:
            raise ConfigError(
                f"rotary_dim={2 * half}: the kernels accept multiples of {self._head_dim // 16} up "
                f"to head_dim {self._head_dim}"
            )
        kernel, span = self._append, 1
        if vectors > _APPEND_WAVE:
            kernel, span = self._append_spans, _APPEND_SPAN
        q_runs, kv_runs = -(-q_heads // span), -(-self._kv_heads // span)
        kernel.launch(
            (-(-tokens * (q_runs + 2 * kv_runs) // _APPEND_WARPS),),
            32 * _APPEND_WARPS,
            (
                *queries,
                *outputs,
                *self._vectors("k", k),
                *self._vectors("v", v),
                tokens,
                q_heads,
                self._kv_heads,
                span,
                q_runs,
                kv_runs,
                0 if norm is None else norm.q.data_ptr(),
                0 if norm is None else norm.k.data_ptr(),
                0 if norm is None else 2 if norm.wide else 1,
                np.float32(0.0 if norm is None else norm.eps),
                0 if rotary is None else rotary.cos.data_ptr(),
                0 if rotary is None else rotary.sin.data_ptr(),
                positions.data_ptr(),
                half,
                pages.data_ptr(),
                offsets.data_ptr(),
                int(pages.dtype == torch.int64),
                layer * self.pool.pages,
                self.pool.pages,
                self.pool.page_tokens,
                *self.planes,
                self._rotated,
            ),
        )

    def attention_decode(
        self,
        layer: int,
        q: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        *,
        out: torch.Tensor,
        low: LowWindow | None = None,
        settled: bool = False,
    ) -> None:
        """Attention of one new token a row over the first `lengths[b]` tokens of its pages.

        q, out: `[B, query_heads, head_dim]` in the model dtype, B up to `max_rows`. table: int32
        `[B, max_pages]`; lengths: int32 `[B]`. A row of length 0 gets zeros, and neither its q nor
        its pages are read. The bits of a row depend on that row alone. settled: all but the last
        token of a row was there before a copy or kernel that does not start early, see `kernel`.
        """
        rows = q.shape[0]
        assert rows <= self.max_rows, "rows fit the scratch"
        assert q.dtype == out.dtype, "one dtype goes in and out"
        assert out.stride(-1) == 1, "heads are contiguous"
        capacity = min(self.max_context, table.shape[1] * self.pool.page_tokens)
        self._attention.launch(
            (min(self._resident, rows * self._kv_heads * self._max_splits),),
            128,
            (
                *self._rows("q", q),
                _DTYPE_CODES[q.dtype],
                *self.planes,
                *self.pages(layer, table, low),
                lengths.data_ptr(),
                rows,
                self._kv_heads,
                self.group,
                capacity,
                self._score_scale,
                self._rotated,
                int(settled),
                self._outputs.data_ptr(),
                self._sums.data_ptr(),
                self._drawn.data_ptr(),
                self._max_splits,
            ),
            shared=self._shared_bytes + 8 * (rows + 1),
        )
        # Also for rows of one split: it applies the sums, and sets the counter back.
        self._merge.launch(
            (self._kv_heads * self.group, rows),
            _MERGE_THREADS,
            (
                self._outputs.data_ptr(),
                self._sums.data_ptr(),
                self._drawn.data_ptr(),
                self._max_splits,
                out.data_ptr(),
                out.stride(0),
                out.stride(1),
                _DTYPE_CODES[out.dtype],
                lengths.data_ptr(),
                self._kv_heads,
                self.group,
                capacity,
                self._rotated,
            ),
        )

    def gather(
        self,
        layer: int,
        table: torch.Tensor,
        first: int,
        *,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
        restore: bool = True,
        low: LowWindow | None = None,
    ) -> None:
        """Dequantise tokens of one request, from `first` on, into a workspace.

        k_out, v_out: `[tokens, kv_heads, head_dim]`, equal strides, rows contiguous, in the dtype
        of the pool for `auto`, else in any model dtype. table: int32 `[max_pages]`. restore: undo
        the rotation of rotated formats, so that plain queries can be used; without, values stay in
        the code domain.
        """
        pages = self.pages(layer, table.unsqueeze(0), low)
        self._gather(0, pages, first, k_out, v_out, restore=restore)

    def gather_segment(
        self, places: tuple[int, ...], record: int, k_out: torch.Tensor, v_out: torch.Tensor
    ) -> None:
        """Dequantise all tokens of the request of a segment, as `gather`.

        places: see there. record: its address on the device, see `DeviceSegments`. k_out, v_out: as
        many tokens as it may have, of which those that it does not have are left alone.
        """
        # Its table the kernel finds in the record.
        self._gather(record, (0, 0, *places), 0, k_out, v_out, restore=True)

    def _gather(
        self,
        record: int,
        pages: tuple[int, ...],
        first: int,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
        *,
        restore: bool,
    ) -> None:
        tokens = k_out.shape[0]
        if tokens == 0:
            return
        assert k_out.dtype == v_out.dtype, "one dtype for both"
        assert k_out.stride() == v_out.stride(), "one layout for both"
        assert k_out.stride(-1) == 1, "rows are contiguous"
        runs = -(-tokens // _GATHER_RUN) * self._kv_heads * 2
        self._gather_function(k_out.dtype).launch(
            (min(-(-runs // _GATHER_WARPS), _GATHER_CTAS),),
            32 * _GATHER_WARPS,
            (
                record,
                *pages,
                first,
                tokens,
                self._kv_heads,
                *self.planes,
                k_out.data_ptr(),
                v_out.data_ptr(),
                k_out.stride(0),
                k_out.stride(1),
                int(restore and self._format.rotated),
            ),
        )

    def _vectors(self, name: str, x: torch.Tensor) -> tuple[int, int, int]:
        """Address and strides of `x [T, heads, head_dim]`, whose rows a warp loads in pieces."""
        if x.dtype != self._dtype:
            raise ConfigError(f"{name} must be {self._dtype}, got {x.dtype}")
        return self._rows(name, x)

    def _rows(self, name: str, x: torch.Tensor) -> tuple[int, int, int]:
        """The same for any dtype."""
        piece = min(self._head_dim // 32 * x.element_size(), 16)
        strides = (x.stride(0), x.stride(1))
        if x.stride(2) != 1:
            raise ConfigError(f"{name} must have contiguous rows")
        if any(n * x.element_size() % piece for n in strides) or x.data_ptr() % piece:
            raise ConfigError(f"{name} has rows that are not aligned to {piece} bytes")
        return x.data_ptr(), *strides

    def pages(
        self, layer: int, table: torch.Tensor, low: LowWindow | None
    ) -> tuple[int, int, int, int, int, int, int]:
        """Arguments of a kernel that say where the pages of `table [rows, max_pages]` are."""
        assert table.dtype == torch.int32, "a block table is int32"
        assert table.stride(1) == 1, "entries of a row are contiguous"
        assert table.stride(0) == table.shape[1] or table.shape[0] == 1, "table rows are contiguous"
        return table.data_ptr(), table.shape[1], *self.places(layer, table.shape[1], low)

    def places(
        self, layer: int, table_pages: int, low: LowWindow | None
    ) -> tuple[int, int, int, int, int]:
        """Arguments of a kernel that say where a page is, of tables with so many of them."""
        if table_pages > 1 and self.pool.page_tokens % TILE_TOKENS:
            raise ConfigError(
                f"page_tokens={self.pool.page_tokens}: with several pages a request, accepted is a "
                f"multiple of {TILE_TOKENS}"
            )
        return (
            self.pool.page_tokens,
            layer,
            self.pool.pages,
            1 if low is None else low.size,
            0 if low is None else low.k0.data_ptr(),
        )

    def _load_attention(self, kind: str) -> None:
        dtype = "BF16" if kind != "PLAIN" else _DTYPES[self._dtype]
        if dtype == "F32":
            group = next(size for size in _F32_GROUPS if size >= self.group)
            variant = _attention_f32_variant(self._head_dim, group)
        else:
            variant = _attention_variant(dtype, kind, self._head_dim)
        module = load_variant(variant)
        kernel, limits, merge = variant.names
        told = torch.empty(2, dtype=torch.int32, device=self.pool.device)
        module.function(limits).launch((1,), 1, (told.data_ptr(),))
        self._shared_bytes: int
        self._shared_bytes, ctas = told.tolist()
        properties = torch.cuda.get_device_properties(self.pool.device)
        self._resident = properties.multi_processor_count * ctas
        device = torch.cuda.current_device()
        most_shared = self._shared_bytes + 8 * (self.max_rows + 1)
        self._attention = load_kernel(variant, kernel, device, shared=most_shared, early=True)
        self._merge = load_kernel(variant, merge, device, early=True)
        self._score_scale = np.float32(math.log2(math.e) / math.sqrt(self._head_dim))

    def _allocate_scratch(self) -> None:
        pairs = self.max_rows * self._kv_heads
        partial = (pairs, self._max_splits, self.group)
        device = self.pool.device
        self._outputs = torch.empty((*partial, self._head_dim), device=device)
        self._sums = torch.empty((*partial, 2), device=device)
        self._drawn = torch.zeros(1, dtype=torch.int32, device=device)

    def _gather_function(self, out: torch.dtype) -> Kernel:
        if out not in self._gathers:
            kind = _kind(self._format)
            if kind == "PLAIN" and out != self._dtype:
                raise ConfigError(f"gather of an unquantised KV in {self._dtype} to {out}")
            stored = _DTYPES[self._dtype] if kind == "PLAIN" else "BF16"
            variant = _gather_variant(stored, kind, self._head_dim, _DTYPES[out])
            self._gathers[out] = load_variant(variant).function(variant.names[0])
        return self._gathers[out]


def slot_table(slots: torch.Tensor) -> torch.Tensor:
    """Block table `[B, 1]` of fixed slots; a padding row (-1) has length 0, and is not read."""
    return slots.to(torch.int32).unsqueeze(1)


def _kind(kv_format: KVFormat) -> str:
    if kv_format.name == FP8:
        return "FP8_B64" if kv_format.fp8_block else "FP8"
    return {AUTO: "PLAIN", INT8: "INT8", K8V4: "K8V4"}[kv_format.name]


def _check(pool: PlanePool, query_heads: int, max_context: int) -> None:
    layout = pool.layout
    if layout.head_dim not in HEAD_DIMS:
        raise ConfigError(f"head_dim={layout.head_dim}: the CUDA kernels accept {HEAD_DIMS}")
    if layout.kv_format.model_dtype not in MODEL_DTYPES:
        raise ConfigError(f"model_dtype={layout.kv_format.model_dtype}: not one of {MODEL_DTYPES}")
    group, rest = divmod(positive("query_heads", query_heads), layout.kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        raise ConfigError(
            f"{query_heads} query heads over {layout.kv_heads} KV heads: the CUDA kernels accept 1 "
            f"to {MAX_GROUP} query heads a KV head"
        )
    if positive("max_context", max_context) > MAX_CONTEXT:
        raise ConfigError(f"max_context={max_context}: the CUDA kernels accept up to {MAX_CONTEXT}")
    if pool.device.type != "cuda":
        raise ConfigError(f"the CUDA kernels need a pool on a GPU, this one is on {pool.device}")
    for name, tensor in pool.tensors.items():
        if not tensor.is_contiguous():
            raise ConfigError(f"KV plane {name} is not contiguous, which the CUDA kernels need")
