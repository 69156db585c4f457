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
from headrace.backends.cuda.segments import nbytes_for, records
from headrace.models.config import ModelConfig

_ALIGNMENT = 16
_TORCH = {"int64": torch.int64, "int32": torch.int32}
_ITEMSIZE = {"int64": 8, "int32": 4}
PADDING = -1
_PADDED_BY_MINUS_ONE = ("token_pages", "token_offsets", "token_sources", "state_slots")


# Tokens of graphs of prompts.
PROMPT_TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# A step without a graph is as fast once the products of a layer (its weights times tokens) take the
# device longer than a host takes to launch the layer, some 0.4 ms. Models of 4e9 weights and more
# are there by 1361 tokens; graphs of up to 1024 are made all the same, for slow hosts.
_BUSY, _ALWAYS = 1 << 37, 1024


def prompt_sizes(max_tokens: int, config: ModelConfig) -> tuple[int, ...]:
    """Those of `PROMPT_TOKENS` that a model needs for steps of at most so many tokens."""
    last = max(_ALWAYS, _BUSY * config.num_layers // config.layer_parameters)
    sizes = [size for size in PROMPT_TOKENS if size <= last]
    return tuple(sizes[: sum(size < max_tokens for size in sizes) + 1])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a plan that run together."""

    decode: bool
    prompts: bool

    def tokens(self, plan: StepPlan) -> slice:
        """Its tokens in the plan: decode rows come first, one token each."""
        end = len(plan.token_ids) if self.prompts else plan.num_decode
        return slice(0 if self.decode else plan.num_decode, end)

    def samples(self, plan: StepPlan) -> NDArray[np.int64]:
        """Those of its tokens whose logits are wanted, counted from its first."""
        tokens, index = self.tokens(plan), plan.sample_index
        first, end = np.searchsorted(index, (tokens.start, tokens.stop))
        samples: NDArray[np.int64] = index[first:end] - tokens.start
        return samples


WHOLE = Part(decode=True, prompts=True)
DECODE = Part(decode=True, prompts=False)
PROMPTS = Part(decode=False, prompts=True)


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

    segments: prompts; segment_pages: entries of the tables of all of them.
    """

    tokens: int
    decode_rows: int
    table_pages: int
    samples: int = 0
    segments: int = 0
    segment_pages: int = 0

    def fields(self) -> tuple[Field, ...]:
        """Return the fields in the order in which they are stored."""
        per_token = ("token_ids", "positions", "token_pages", "token_offsets")
        return (
            *(Field(name, "int64", (self.tokens,)) for name in per_token),
            Field("state_slots", "int64", (self.decode_rows,)),
            Field("sample_index", "int64", (self.samples,)),
            Field("segments", "int64", (nbytes_for(self.segments) // 8,)),
            Field("token_sources", "int32", (self.tokens,)),
            Field("lengths", "int32", (self.decode_rows,)),
            Field("stream_k0", "int32", (1,)),
            Field("tables", "int32", (self.decode_rows, self.table_pages)),
            # Last: of a graph's, which has room for the longest, only what is used is sent.
            Field("segment_tables", "int32", (self.segment_pages,)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return sum(_padded(field.nbytes) for field in self.fields())


class StepArrays:
    """Views of one shape into host and device storage, both uint8 and at least `shape.nbytes`.

    used: bytes of it that the last `fill` wrote.
    """

    def __init__(self, shape: StepShape, host: NDArray[np.uint8], device: torch.Tensor) -> None:
        self.shape = shape
        self.used = shape.nbytes
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
        self.used = self.shape.nbytes
        for name, values in self.host.items():
            values.fill(PADDING if name in _PADDED_BY_MINUS_ONE else 0)

    def fill(
        self,
        plan: StepPlan,
        page_tokens: int,
        part: Part,
        *,
        token_ids: NDArray[np.int64] | None = None,
        sources: NDArray[np.int64] | None = None,
    ) -> None:
        """Write a part of a plan to the host side; what it does not fill becomes padding.

        token_ids: those of the whole plan, its own if None. sources `[tokens]`: rows of the
        device's tokens that go before them, -1 for none; None is none at all.
        """
        host, span = self.host, part.tokens(plan)
        tokens = span.stop - span.start
        positions = plan.positions[span]
        for name, values, rest in (
            ("token_ids", (plan.token_ids if token_ids is None else token_ids)[span], 0),
            ("token_sources", PADDING if sources is None else sources, PADDING),
            ("positions", positions, 0),
            ("token_pages", plan.token_pages[span], PADDING),
            ("token_offsets", positions % page_tokens, PADDING),
        ):
            host[name][:tokens] = values
            host[name][tokens:] = rest
        host["stream_k0"][0] = plan.stream_k0
        if self.shape.samples:
            samples = part.samples(plan)
            host["sample_index"][: len(samples)] = samples
            host["sample_index"][len(samples) :] = 0
        if part.decode:
            self._fill_decode_rows(plan)
        if self.shape.segments:
            self._fill_prompts(plan, span.start)

    def _fill_decode_rows(self, plan: StepPlan) -> None:
        host, rows = self.host, plan.num_decode
        host["state_slots"][:rows] = plan.slots[:rows]
        host["state_slots"][rows:] = PADDING
        host["lengths"][:rows] = plan.starts[:rows] + 1
        host["lengths"][rows:] = 0
        borders, entries = plan.table_offsets, plan.block_tables.view(np.int32)
        if int(borders[rows]) == rows:  # fixed slots, or short rows: one page each
            host["tables"][:rows, 0] = entries[:rows]
        else:
            for row in range(rows):
                first, end = borders[row], borders[row + 1]
                host["tables"][row, : end - first] = entries[first:end]

    def _fill_prompts(self, plan: StepPlan, first_token: int) -> None:
        rows, host = plan.num_decode, self.host
        borders, offsets = plan.table_offsets.tolist(), plan.token_offsets.tolist()
        starts, slots = plan.starts.tolist(), plan.slots.tolist()
        first, tables = borders[rows], self.device["segment_tables"].data_ptr()
        packed = records(
            (
                tables + (borders[row] - first) * _ITEMSIZE["int32"],
                borders[row + 1] - borders[row],
                starts[row],
                offsets[row + 1] - offsets[row],
                offsets[row] - first_token,
                slots[row],
            )
            for row in range(rows, plan.num_rows)
        )
        host["segments"].fill(0)
        host["segments"].view(np.uint8)[: len(packed)] = np.frombuffer(packed, np.uint8)
        entries = plan.block_tables.view(np.int32)[first:]
        host["segment_tables"][: len(entries)] = entries
        unused = self.shape.segment_pages - len(entries)
        self.used = self.shape.nbytes - unused * _ITEMSIZE["int32"]


def shape_of(plan: StepPlan, part: Part) -> StepShape:
    """The shape that holds exactly a part of a plan."""
    rows, borders = plan.num_decode, plan.table_offsets
    widths: Sequence[int] = np.diff(borders[: rows + 1]).tolist() if part.decode else ()
    tokens = part.tokens(plan)
    return StepShape(
        tokens=tokens.stop - tokens.start,
        decode_rows=rows if part.decode else 0,
        table_pages=max(widths, default=1),
        samples=len(part.samples(plan)),
        segments=plan.num_rows - rows if part.prompts else 0,
        segment_pages=int(borders[-1] - borders[rows]) if part.prompts else 0,
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
