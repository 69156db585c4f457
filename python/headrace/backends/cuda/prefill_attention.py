"""Attention of prompts: one launch for all segments of a step, over the pool or a workspace.

KV in the model's own dtype is read where it lies. Codes are decoded into a workspace first, the
whole request at a time. No locks: calls are made by whoever runs the step.
"""

import functools
import math
import struct
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.kv import HEAD_DIMS, KVKernels, LowWindow
from headrace.backends.cuda.loader import load_kernel
from headrace.backends.cuda.nvrtc import Variant
from headrace.errors import ConfigError
from headrace.kv.formats import AUTO, KVFormat

if TYPE_CHECKING:
    from headrace.models.batch import PrefillSegment

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
_QUERIES = 64  # of a tile
_MAX_SEGMENTS = 32  # of a launch
_SEGMENT = struct.Struct("<Qiiii")
_SIZES = struct.Struct("<iiixxxx")
_ALIGNMENT = 16  # of a row of queries or results, in bytes
# Keys of a block, which fix the bits, and tiles of a unit, which do not: by head_dim. Larger units
# read less, and are for steps that have at least so many of them for a multiprocessor.
_KEYS = {64: 128, 128: 64, 256: 64}
_TILES = {64: (2,), 128: (2, 3), 256: (2,)}
_UNITS_EACH = 2


def _variant(dtype: torch.dtype, head_dim: int, tiles: int) -> Variant:
    shape = f"{head_dim}, {_KEYS[head_dim]}, {tiles}"
    return Variant(
        file="attention_prefill.cu",
        names=(
            f"attention_prefill<{_DTYPES[dtype]}, {shape}>",
            f"attention_prefill_limits<{shape}>",
        ),
        arch="sm_90a",
    )


VARIANTS = tuple(
    _variant(dtype, head_dim, tiles)
    for dtype in _DTYPES
    for head_dim in HEAD_DIMS
    for tiles in _TILES[head_dim]
)


def reads_pool(kv_format: KVFormat) -> bool:
    """Whether prompts read KV of a format where it lies, without a workspace."""
    return kv_format.name == AUTO and kv_format.model_dtype in _DTYPES


class PrefillAttention:
    """Attention of new tokens of one or more requests over their own KV, causal.

    Accepts queries in bf16 or fp16 over a pool of any format. Serves one stream at a time: the
    count of drawn units is zero between launches.
    """

    def __init__(self, kernels: KVKernels) -> None:
        self._kernels = kernels
        layout = kernels.pool.layout
        self._kv_heads, self._head_dim = layout.kv_heads, layout.head_dim
        self._scale = np.float32(math.log2(math.e) / math.sqrt(layout.head_dim))
        self._direct = reads_pool(layout.kv_format)
        device = kernels.pool.device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._drawn = torch.zeros(1, dtype=torch.int32, device=device)
        if not self._direct:
            # A workspace is one page, the first.
            self._first_page = torch.zeros((1, 1), dtype=torch.int32, device=device)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        segments: "Sequence[PrefillSegment]",
        *,
        out: torch.Tensor,
        low: LowWindow | None = None,
    ) -> None:
        """Write attention of rows `segment.offset...` of `q` to the same rows of `out`.

        q, out: `[T, query_heads, head_dim]`, rows aligned to 16 bytes. Tables are int32 `[pages]`
        on the device. The bits of a row depend on its own request alone, up to the row itself.

        Raises
        ------
        ConfigError
            A dtype or strides that the kernel cannot read.
        """
        rows = (*_rows("q", q), *_rows("out", out))
        if self._direct:
            pool = self._kernels.pool
            planes = tuple(pool.tensors[name].data_ptr() for name in ("k", "v"))
            tables = [_table(segment) for segment in segments]
            longest = max(tables, key=len)
            pages = self._kernels.pages(layer, longest.unsqueeze(0), low)[2:]
            self._launch(q.dtype, list(zip(segments, tables, strict=True)), pages, planes, rows)
            return
        for segment in segments:
            end = segment.start + segment.length
            keys, values = torch.empty(
                (2, end, self._kv_heads, self._head_dim), dtype=q.dtype, device=q.device
            ).unbind()
            self._kernels.gather(layer, _table(segment), 0, k_out=keys, v_out=values, low=low)
            planes = (keys.data_ptr(), values.data_ptr())
            self._launch(q.dtype, [(segment, self._first_page[0])], (end, 0, 0, 1, 0), planes, rows)

    def _launch(
        self,
        dtype: torch.dtype,
        segments: "Sequence[tuple[PrefillSegment, torch.Tensor]]",
        pages: tuple[int, ...],
        planes: tuple[int, ...],
        rows: tuple[int, ...],
    ) -> None:
        group = self._kernels.group
        remaining = iter(segments)
        while chosen := list(islice(remaining, _MAX_SEGMENTS)):
            longest = max(segment.length for segment, _ in chosen)
            tiles, numbers = self._units(-(-longest // _QUERIES) * group, len(chosen))
            kernel = _kernel(dtype, self._head_dim, tiles, torch.cuda.current_device())
            packed = b"".join(
                _SEGMENT.pack(
                    table.data_ptr(), table.shape[0], segment.start, segment.length, segment.offset
                )
                for segment, table in chosen
            ).ljust(_MAX_SEGMENTS * _SEGMENT.size, b"\0")
            kernel.launch(
                (min(numbers, self._processors),),
                128 * (tiles + 1),
                (
                    packed + _SIZES.pack(len(chosen), self._kv_heads, group),
                    *pages,
                    *planes,
                    *rows,
                    self._scale,
                    self._drawn.data_ptr(),
                    numbers,
                ),
            )

    def _units(self, items: int, segments: int) -> tuple[int, int]:
        """Tiles of a unit, and numbers of units, for so many items in the longest segment."""
        small, *larger = _TILES[self._head_dim]
        numbers = {
            tiles: -(-items // tiles) * self._kv_heads * segments for tiles in (small, *larger)
        }
        enough = [n for n in larger if numbers[n] >= _UNITS_EACH * self._processors]
        tiles = max(enough, default=small)
        return tiles, numbers[tiles]


def _table(segment: "PrefillSegment") -> torch.Tensor:
    assert isinstance(segment.table, torch.Tensor), "a table of the device"
    return segment.table


def _rows(name: str, x: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides of `x [T, heads, head_dim]`."""
    strides = (x.stride(0), x.stride(1))
    aligned = not any(n * x.element_size() % _ALIGNMENT for n in strides)
    if x.dtype not in _DTYPES or x.stride(2) != 1 or not aligned or x.data_ptr() % _ALIGNMENT:
        raise ConfigError(
            f"prefill attention: {name} is {x.dtype}, strides {x.stride()}; accepted are bf16 and "
            f"fp16 with rows aligned to {_ALIGNMENT} bytes"
        )
    return x.data_ptr(), *strides


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, tiles: int, device: int) -> Kernel:
    variant = _variant(dtype, head_dim, tiles)
    name, limits = variant.names
    told = torch.empty(1, dtype=torch.int32, device=torch.device("cuda", device))
    load_kernel(variant, limits, device).launch((1,), 1, (told.data_ptr(),))
    return load_kernel(variant, name, device, shared=int(told.item()))
