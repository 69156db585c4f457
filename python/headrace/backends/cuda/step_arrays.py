"""The arrays of a step in one piece of memory, so that one copy brings a plan to the device.

Fields stand one after the other at multiples of 16 bytes. The same storage serves any layout that
fits; views into it are made once for a captured graph and anew for other steps. No locks: whoever
fills the host side waits until the last copy out of it is done.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core import StepPlan

_ALIGNMENT = 16
_TORCH = {"int64": torch.int64, "int32": torch.int32}
_ITEMSIZE = {"int64": 8, "int32": 4}
PADDING = -1
_PADDED_BY_MINUS_ONE = ("token_pages", "token_offsets", "token_sources", "state_slots")


@dataclass(frozen=True, slots=True)
class Field:
    """One array: its dtype by name, int64 or int32, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How many there are of each kind. `table_pages` is the width of the decode rows' table.

    segment_pages: entries of the tables of all segments.
    """

    tokens: int
    decode_rows: int
    table_pages: int
    samples: int = 0
    segment_pages: int = 0

    def fields(self) -> tuple[Field, ...]:
        """Return the fields in the order in which they are stored."""
        per_token = ("token_ids", "positions", "token_pages", "token_offsets")
        return (
            *(Field(name, "int64", (self.tokens,)) for name in per_token),
            Field("state_slots", "int64", (self.decode_rows,)),
            Field("sample_index", "int64", (self.samples,)),
            Field("token_sources", "int32", (self.tokens,)),
            Field("lengths", "int32", (self.decode_rows,)),
            Field("stream_k0", "int32", (1,)),
            Field("tables", "int32", (self.decode_rows, self.table_pages)),
            Field("segment_tables", "int32", (self.segment_pages,)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return sum(_padded(field.nbytes) for field in self.fields())


class StepArrays:
    """Views of one shape into host and device storage, both uint8 and at least `shape.nbytes`."""

    def __init__(self, shape: StepShape, host: NDArray[np.uint8], device: torch.Tensor) -> None:
        self.shape = shape
        self.host: dict[str, NDArray[np.int64] | NDArray[np.int32]] = {}
        self.device: dict[str, torch.Tensor] = {}
        # The device waits while an eager step makes its views: as few operations as will do.
        host, device = host[: shape.nbytes], device[: shape.nbytes]
        hosts = {dtype: host.view(dtype) for dtype in _TORCH}
        devices = {name: device.view(dtype) for name, dtype in _TORCH.items()}
        start = 0
        for field in shape.fields():
            nbytes, itemsize = field.nbytes, _ITEMSIZE[field.dtype]
            span = slice(start // itemsize, (start + nbytes) // itemsize)
            host_view, device_view = hosts[field.dtype][span], devices[field.dtype][span]
            if len(field.shape) > 1:
                host_view = host_view.reshape(field.shape)
                device_view = device_view.view(field.shape)
            self.host[field.name], self.device[field.name] = host_view, device_view
            start += _padded(nbytes)

    def pad(self) -> None:
        """Write padding alone to the host side: rows that read and write nothing."""
        for name, values in self.host.items():
            values.fill(PADDING if name in _PADDED_BY_MINUS_ONE else 0)

    def fill(
        self,
        plan: StepPlan,
        page_tokens: int,
        *,
        token_ids: NDArray[np.int64] | None = None,
        sources: NDArray[np.int64] | None = None,
    ) -> None:
        """Write a plan to the host side; decode rows beyond the plan's become padding.

        token_ids: those of the plan if None. sources `[tokens]`: rows of the device's tokens that
        go before them, -1 for none; None is none at all. Only a plan of decode rows alone may be
        smaller than the shape.
        """
        host, tokens = self.host, len(plan.token_ids)
        rows = plan.num_decode
        positions = plan.positions
        for name, values, rest in (
            ("token_ids", plan.token_ids if token_ids is None else token_ids, 0),
            ("token_sources", PADDING if sources is None else sources, PADDING),
            ("positions", positions, 0),
            ("token_pages", plan.token_pages, PADDING),
            ("token_offsets", positions % page_tokens, PADDING),
        ):
            host[name][:tokens] = values
            host[name][tokens:] = rest
        host["state_slots"][:rows] = plan.slots[:rows]
        host["state_slots"][rows:] = PADDING
        host["lengths"][:rows] = plan.starts[:rows] + 1
        host["lengths"][rows:] = 0
        host["stream_k0"][0] = plan.stream_k0
        if self.shape.samples:
            host["sample_index"][:] = plan.sample_index
        borders, entries = plan.table_offsets, plan.block_tables.view(np.int32)
        last = int(borders[rows])
        if last == rows:  # fixed slots, or short rows: one page each
            host["tables"][:rows, 0] = entries[:rows]
        else:
            for row in range(rows):
                first, end = borders[row], borders[row + 1]
                host["tables"][row, : end - first] = entries[first:end]
        if self.shape.segment_pages:
            host["segment_tables"][:] = entries[last:]


def shape_of(plan: StepPlan) -> StepShape:
    """The shape that holds exactly a plan."""
    rows, borders = plan.num_decode, plan.table_offsets
    widths: Sequence[int] = np.diff(borders[: rows + 1]).tolist()
    return StepShape(
        tokens=len(plan.token_ids),
        decode_rows=rows,
        table_pages=max(widths, default=1),
        samples=len(plan.sample_index),
        segment_pages=int(borders[-1] - borders[rows]),
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
