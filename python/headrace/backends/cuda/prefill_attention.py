"""Attention of prompts, over the pool or a workspace.

KV in the model's own dtype is read where it lies, by up to 32 segments a launch. Codes are decoded
into a workspace first, the KV of one request at a time. No locks: calls are made by whoever runs
the step.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.kv import HEAD_DIMS, KVKernels, LowWindow
from headrace.backends.cuda.loader import load_kernel
from headrace.backends.cuda.nvrtc import Variant
from headrace.backends.cuda.segments import SegmentGroup, on_device
from headrace.errors import ConfigError
from headrace.kv.formats import AUTO, KVFormat

if TYPE_CHECKING:
    from headrace.models.batch import PrefillSegment

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
_QUERIES = 64  # of a tile
_ALIGNMENT = 16  # of a row of queries or results, in bytes
# Tiles of a unit, which no bit depends on, by head_dim. Larger units read less, and are for steps
# that have at least so many of them for a multiprocessor.
_TILES = {64: (2, 3), 128: (2, 3), 256: (2,)}
_UNITS_EACH = 2
# Prompts of a captured step. The delta rule has the chunks of eight of them, of 1024 tokens in all,
# in one pass; with codes each takes two launches a layer, also where there is none.
_CAPTURED, _CAPTURED_CODES = 8, 4


def _variant(dtype: torch.dtype, head_dim: int, tiles: int) -> Variant:
    shape = f"{head_dim}, {tiles}"
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


def most_captured(kv_format: KVFormat) -> int:
    """Most prompts of a captured step; 0 if what it does with them cannot be captured."""
    if kv_format.model_dtype not in _DTYPES:
        return 0
    return _CAPTURED if reads_pool(kv_format) else _CAPTURED_CODES


class PrefillAttention:
    """Attention of new tokens of one or more requests over their own KV, causal.

    For models in bf16 or fp16, over a pool of any format. Serves one stream at a time: the count of
    drawn units is zero between launches. Owns the workspace of codes, of one request at its
    longest, which a captured graph writes to as well.
    """

    def __init__(self, kernels: KVKernels) -> None:
        self._kernels = kernels
        layout = kernels.pool.layout
        self._kv_heads, self._head_dim = layout.kv_heads, layout.head_dim
        self._scale = np.float32(math.log2(math.e) / math.sqrt(layout.head_dim))
        self._dtype = layout.kv_format.model_dtype
        self._direct = reads_pool(layout.kv_format)
        self._by_tiles = {
            tiles: _kernel(self._dtype, layout.head_dim, tiles, torch.cuda.current_device())
            for tiles in _TILES[layout.head_dim]
        }
        device = kernels.pool.device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._drawn = torch.zeros(1, dtype=torch.int32, device=device)
        if not self._direct:
            shape = (2, kernels.max_context, layout.kv_heads, layout.head_dim)
            self._workspace = torch.empty(shape, dtype=self._dtype, device=device)
            # It is one page, the first.
            self._first_page = torch.zeros(1, dtype=torch.int32, device=device)

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
        on the device; segments that are not there yet are sent. The bits of a row depend on its own
        request alone, up to the row itself.

        Raises
        ------
        ConfigError
            A dtype or strides that the kernel cannot read.
        """
        rows = (*self._rows("q", q), *self._rows("out", out))
        segments = on_device(segments, q.device)
        pages = self._kernels.places(layer, segments.table_pages, low)
        if self._direct:
            planes = self._kernels.planes[::2]  # without scales
            for group in segments.groups:
                self._launch(group, group.tokens, (-1, 0), (*pages, *planes, *rows))
            return
        workspace = self._workspace
        for group in segments.groups:
            for index, (tokens, end) in enumerate(group.spans):
                keys, values = workspace[:, :end].unbind()
                assert len(keys) == end, "the workspace has the longest request"
                self._kernels.gather_segment(pages, group.record(index), keys, values)
                page = (workspace.shape[1], 0, 0, 1, 0)
                planes = (keys.data_ptr(), values.data_ptr())
                only = (index, self._first_page.data_ptr())
                self._launch(group, tokens, only, (*page, *planes, *rows))

    def _launch(
        self, group: SegmentGroup, tokens: int, only: tuple[int, int], rest: tuple[int, ...]
    ) -> None:
        """Attention of so many tokens, of all segments of a group or of `only` one of them."""
        heads = self._kernels.group
        items = -(-tokens // _QUERIES) * heads
        tiles = self._tiles(items)
        most = (-(-(items + group.count * heads) // tiles) + group.count) * self._kv_heads
        self._by_tiles[tiles].launch(
            (min(most, self._processors),),
            128 * (tiles + 1),
            (
                group.address,
                *only,
                self._kv_heads,
                heads,
                *rest,
                self._scale,
                self._drawn.data_ptr(),
            ),
        )

    def _tiles(self, items: int) -> int:
        """Tiles of a unit for so many of them; those of short last segments are not counted."""
        small, *larger = self._by_tiles
        enough = _UNITS_EACH * self._processors
        fitting = [tiles for tiles in larger if self._kv_heads * -(-items // tiles) >= enough]
        return max(fitting, default=small)

    def _rows(self, name: str, x: torch.Tensor) -> tuple[int, int, int]:
        """Address and strides of `x [T, heads, head_dim]`."""
        strides = (x.stride(0), x.stride(1))
        aligned = not any(n * x.element_size() % _ALIGNMENT for n in strides)
        if x.dtype != self._dtype or x.stride(2) != 1 or not aligned or x.data_ptr() % _ALIGNMENT:
            raise ConfigError(
                f"prefill attention: {name} is {x.dtype}, strides {x.stride()}; accepted is "
                f"{self._dtype} with rows aligned to {_ALIGNMENT} bytes"
            )
        return x.data_ptr(), *strides


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int, tiles: int, device: int) -> Kernel:
    variant = _variant(dtype, head_dim, tiles)
    name, limits = variant.names
    told = torch.empty(1, dtype=torch.int32, device=torch.device("cuda", device))
    load_kernel(variant, limits, device).launch((1,), 1, (told.data_ptr(),))
    return load_kernel(variant, name, device, shared=int(told.item()))
