"""The KV pool: one tensor per plane, written by `append` and read by `read`.

Owns the plane tensors `[layers, pages, page_tokens, kv_heads, row]`. Fixed slots are the same pool
with pages of `max_context` tokens. Who holds which page is the scheduler's business.

Invariants: every plane base is 256-byte aligned, rows are contiguous, and the pages of all layers
are evenly spaced, so that `layer * pages + page` is an address; other strides are free and
respected. Memory is not initialised, so untouched pages cost nothing on a CPU and stale rows may
hold NaN: whoever reads stays within the length of its request. Every reader sees what was stored,
never the value before quantisation. No locks: one step at a time.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.kv.codecs import check_finite, decode, encode
from headrace.kv.formats import KVLayout, Plane, Which
from headrace.kv.memory import available_bytes

PLANE_ALIGNMENT = 256  # bytes; what copies and vector loads want
POISON = 0xFF  # NaN in every float dtype of a plane


class PlanePool:
    """Pools of all planes over given tensors; `allocate` makes the tensors.

    tensors: by plane name, each `layout.plane_shape(...)`. The pool keeps them.
    checked: `append` raises on NaN and infinity instead of storing something finite.

    Raises
    ------
    ConfigError
        A plane is missing, unknown, or has another dtype, shape, stride or alignment.
    """

    def __init__(
        self,
        layout: KVLayout,
        tensors: Mapping[str, torch.Tensor],
        *,
        pages: int,
        page_tokens: int,
        checked: bool = False,
    ) -> None:
        self.layout = layout
        self.pages = pages
        self.page_tokens = page_tokens
        self.checked = checked
        self.bytes_per_token = layout.bytes_per_token
        self.bytes_total = layout.pool_bytes(pages, page_tokens)
        names = [plane.name for plane in layout.planes]
        if set(tensors) != set(names):
            raise ConfigError(
                f"KV format {layout.kv_format.label} has the planes {', '.join(names)}, got "
                f"{', '.join(tensors) or 'none'}"
            )
        for plane in layout.planes:
            shape = layout.plane_shape(plane, pages, page_tokens)
            _check_tensor(plane, shape, tensors[plane.name])
        # In the order of the planes: copies iterate over this, so that none can be forgotten.
        self.tensors: Mapping[str, torch.Tensor] = MappingProxyType(
            {name: tensors[name] for name in names}
        )
        self.device = self.tensors[names[0]].device
        self._names: dict[Which, list[str]] = {"k": [], "v": []}
        for plane in layout.planes:
            self._names[plane.which].append(plane.name)

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        *,
        pages: int,
        page_tokens: int,
        device: torch.device | str = "cpu",
        checked: bool = False,
    ) -> Self:
        """Allocate all planes once, contiguous and aligned.

        Raises
        ------
        ConfigError
            A size is not positive or too large, or the pool does not fit in the memory that is
            free now. Nothing has been allocated then.
        """
        target = torch.device(device)
        needed = layout.pool_bytes(pages, page_tokens)
        available = available_bytes(target)
        if needed > available:
            raise ConfigError(
                f"KV pools need {needed:,} bytes ({pages} slots or pages x {page_tokens} tokens x "
                f"{layout.bytes_per_token:,} bytes), {available:,} are free on {target}; lower "
                f"max_batch_size or max_context, or take a smaller kv_dtype"
            )
        tensors = {
            plane.name: _aligned(layout.plane_shape(plane, pages, page_tokens), plane.dtype, target)
            for plane in layout.planes
        }
        return cls(layout, tensors, pages=pages, page_tokens=page_tokens, checked=checked)

    def append(
        self,
        layer: int,
        pages: torch.Tensor,
        positions: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Encode `k, v [T, kv_heads, head_dim]` into row `positions[t]` of page `pages[t]`.

        pages, positions: int64 `[T]`, no pair twice. k, v: in the dtype of the model.

        Raises
        ------
        NonFiniteKV
            The pool is checked and an input is not finite; nothing was written.
        """
        expected = (len(pages), self.layout.kv_heads, self.layout.head_dim)
        assert k.shape == v.shape == expected, f"K and V must be {expected}"
        assert positions.shape == pages.shape, "one position a page number"
        sides: tuple[tuple[Which, torch.Tensor], ...] = (("k", k), ("v", v))
        if self.checked:
            for which, x in sides:
                check_finite(which, x, layer=layer, pages=pages, positions=positions)
        for which, x in sides:
            encoded = encode(self.layout.kv_format, which, x)
            for name, rows in zip(self._names[which], encoded, strict=True):
                self.tensors[name][layer].index_put_((pages, positions), rows)

    def rows(self, which: Which, layer: int, page: int, length: int) -> tuple[torch.Tensor, ...]:
        """Views `[length, kv_heads, row]` of the planes of K or V, as they are stored.

        For `auto` the only one is K or V itself, without a copy.
        """
        assert 0 <= length <= self.page_tokens, "a read stays within its page"
        return tuple(self.tensors[name][layer, page, :length] for name in self._names[which])

    def gather(
        self, which: Which, flats: NDArray[np.int64], length: int
    ) -> tuple[torch.Tensor, ...]:
        """Copies `[length, kv_heads, row]` of the planes of K or V, from several pages in order.

        flats: `layer * pages + page` of each page. Reads nothing beyond `length`.
        """
        full, rest = divmod(length, self.page_tokens)
        assert len(flats) == full + bool(rest), "as many pages as the length needs"
        # `index_select`: 16 pages of 48 KiB take 28 us, plain indexing 94.
        whole = torch.from_numpy(flats[:full]).to(self.device)
        copies = []
        for name in self._names[which]:
            pages = self.tensors[name].view(-1, *self.tensors[name].shape[2:])
            rows = pages.new_empty((length, *pages.shape[2:]))
            head = rows[: full * self.page_tokens].view(full, *pages.shape[1:])
            torch.index_select(pages, 0, whole, out=head)
            if rest:
                rows[full * self.page_tokens :] = pages[int(flats[full]), :rest]
            copies.append(rows)
        return tuple(copies)

    def read(self, layer: int, page: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `length` tokens of a page, fp32 `[length, kv_heads, head_dim]`.

        In the code domain: rotated for rotated formats. Reads nothing beyond `length`.
        """
        kv_format = self.layout.kv_format
        k = decode(kv_format, "k", self.rows("k", layer, page, length))
        return k, decode(kv_format, "v", self.rows("v", layer, page, length))

    def fill_poison(self) -> None:
        """Fill every row of every plane with 0xFF bytes, to find reads beyond a length."""
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).fill_(POISON)


def _aligned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    size_bytes = dtype.itemsize
    for extent in shape:
        size_bytes *= extent
    # torch aligns to 64 bytes on a CPU.
    storage = torch.empty(size_bytes + PLANE_ALIGNMENT - 1, dtype=torch.uint8, device=device)
    start = -storage.data_ptr() % PLANE_ALIGNMENT
    return storage[start : start + size_bytes].view(dtype).view(shape)


def _check_tensor(plane: Plane, shape: tuple[int, ...], tensor: torch.Tensor) -> None:
    if tensor.dtype != plane.dtype or tensor.shape != shape:
        raise ConfigError(
            f"KV plane {plane.name} must be {plane.dtype} {list(shape)}, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    if tensor.stride(-1) != 1:
        raise ConfigError(f"KV plane {plane.name} has a row stride of {tensor.stride(-1)}, not 1")
    layers, pages = shape[:2]
    if layers > 1 and tensor.stride(0) != pages * tensor.stride(1):
        raise ConfigError(
            f"KV plane {plane.name} has a layer stride of {tensor.stride(0)}, not {pages} pages of "
            f"{tensor.stride(1)}"
        )
    if tensor.data_ptr() % PLANE_ALIGNMENT:
        raise ConfigError(f"KV plane {plane.name} is not aligned to {PLANE_ALIGNMENT} bytes")
