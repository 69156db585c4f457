"""Attention of prompts, over the pool or a workspace.

KV in the model's own dtype is read where it lies, by up to 32 segments a launch. Codes are decoded
into a workspace first, one segment at a time. No locks: calls are made by whoever runs the step.
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


class Workspace:
    """K and V of one segment at a time, decoded: room for the longest of some segments."""

    def __init__(
        self, kernels: KVKernels, segments: "Sequence[PrefillSegment]", dtype: torch.dtype
    ) -> None:
        layout = kernels.pool.layout
        longest = max(segment.start + segment.length for segment in segments)
        shape = (2, longest, layout.kv_heads, layout.head_dim)
        self._memory = torch.empty(shape, dtype=dtype, device=kernels.pool.device)
        self._kernels = kernels

    def gather(
        self, layer: int, segment: "PrefillSegment", low: LowWindow | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[end, kv_heads, head_dim]` of all tokens; the next call writes there again."""
        keys, values = self._memory[:, : segment.start + segment.length].unbind()
        assert isinstance(segment.table, torch.Tensor), "a table of the device"
        self._kernels.gather(layer, segment.table, 0, k_out=keys, v_out=values, low=low)
        return keys, values


class PrefillAttention:
    """Attention of new tokens of one or more requests over their own KV, causal.

    For models in bf16 or fp16, over a pool of any format. direct: KV is read where it lies. Serves
    one stream at a time: the count of drawn units is zero between launches.
    """

    def __init__(self, kernels: KVKernels) -> None:
        self._kernels = kernels
        layout = kernels.pool.layout
        self._kv_heads, self._head_dim = layout.kv_heads, layout.head_dim
        self._scale = np.float32(math.log2(math.e) / math.sqrt(layout.head_dim))
        self._dtype = layout.kv_format.model_dtype
        self.direct = reads_pool(layout.kv_format)
        self._by_tiles = {
            tiles: _kernel(self._dtype, layout.head_dim, tiles, torch.cuda.current_device())
            for tiles in _TILES[layout.head_dim]
        }
        device = kernels.pool.device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._drawn = torch.zeros(1, dtype=torch.int32, device=device)
        if not self.direct:
            # A workspace is one page, the first.
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
        if self.direct:
            planes = self._kernels.planes[::2]  # without scales
            pages = self._kernels.places(layer, segments.table_pages, low)
            for group in segments.groups:
                self._launch(group, group.tokens, (-1, 0), (*pages, *planes, *rows))
            return
        workspace = Workspace(self._kernels, segments, q.dtype)
        for group, members in zip(segments.groups, segments.members, strict=True):
            for index, segment in enumerate(members):
                keys, values = workspace.gather(layer, segment, low)
                page = (keys.shape[0], 0, 0, 1, 0)
                planes = (keys.data_ptr(), values.data_ptr())
                only = (index, self._first_page.data_ptr())
                self._launch(group, segment.length, only, (*page, *planes, *rows))

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
