"""Prompts of a step as the kernels read them: records in memory of the device (cuda/segments.cuh).

Kernels take what differs from step to step from there, so that a captured graph serves any prompts
that fit. No state, no locks.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from headrace.models.batch import PrefillSegment
from headrace.models.hybrid_config import DELTA_CHUNK

GROUP = 32  # records that stand together
_RECORD = struct.Struct("<Qiiiiii")
GROUP_BYTES = GROUP * _RECORD.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGroup:
    """Up to 32 segments of one launch.

    address: of the records; tokens: of all together; spans: of each record, its tokens and the
    position after them; chunks: what is between absolute multiples of 64, a part of one included.
    In a captured graph these are the most there may be.
    """

    address: int
    tokens: int
    spans: tuple[tuple[int, int], ...]
    chunks: int

    @property
    def count(self) -> int:
        """Segments."""
        return len(self.spans)

    def record(self, index: int) -> int:
        """Address of a record."""
        return self.address + index * _RECORD.size


class DeviceSegments(Sequence[PrefillSegment]):
    """Segments of a step, and their records on the device.

    memory: `nbytes_for(len(segments))` bytes, to which whoever makes this sends the `records`.
    table_pages: of the longest table.
    """

    def __init__(self, segments: Sequence[PrefillSegment], memory: torch.Tensor) -> None:
        self._segments = tuple(segments)
        self.memory = memory
        ordered = sorted(self._segments, key=lambda one: _order(one.start, one.length))
        self.table_pages = max((len(segment.table) for segment in ordered), default=0)
        self.groups = [
            _group(ordered[at : at + GROUP], memory.data_ptr() + at * _RECORD.size)
            for at in range(0, len(ordered), GROUP)
        ]

    @classmethod
    def sent(cls, segments: Sequence[PrefillSegment], device: torch.device) -> "DeviceSegments":
        """Segments whose records are sent now."""
        memory = torch.zeros(nbytes_for(len(segments)), dtype=torch.uint8, device=device)
        made = cls(segments, memory)
        packed = records(
            (
                _table(segment).data_ptr(),
                len(segment.table),
                segment.start,
                segment.length,
                segment.offset,
                segment.state_slot,
            )
            for segment in segments
        )
        if packed:
            memory[: len(packed)].copy_(torch.frombuffer(packed, dtype=torch.uint8))
        return made

    @classmethod
    def captured(cls, tokens: int, count: int, end: int, memory: torch.Tensor) -> "DeviceSegments":
        """What a graph is captured with: room for so many segments of so many tokens in all.

        end: most tokens of a request. memory: one group. It has no segments of its own but one in
        the place of all.
        """
        table = torch.empty(0, dtype=torch.int32, device=memory.device)
        whole = PrefillSegment(table=table, state_slot=-1, start=0, length=tokens, offset=0)
        made = cls([whole], memory)
        # A segment that begins and ends inside of a chunk has two that are not whole.
        chunks = tokens // DELTA_CHUNK + 2 * count
        made.groups = [
            SegmentGroup(
                address=memory.data_ptr(),
                tokens=tokens,
                spans=((tokens, end),) * count,
                chunks=chunks,
            )
        ]
        return made

    @overload
    def __getitem__(self, index: int) -> PrefillSegment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PrefillSegment]: ...

    def __getitem__(self, index: int | slice) -> PrefillSegment | Sequence[PrefillSegment]:
        return self._segments[index]

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[PrefillSegment]:
        return iter(self._segments)


def on_device(segments: Sequence[PrefillSegment], device: torch.device) -> DeviceSegments:
    """The segments with their records, which are sent now unless they have been."""
    if isinstance(segments, DeviceSegments):
        return segments
    return DeviceSegments.sent(segments, device)


def records(segments: Iterable[tuple[int, int, int, int, int, int]]) -> bytearray:
    """Records of segments (address of its table, pages, start, length, offset, state slot)."""
    ordered = sorted(segments, key=lambda one: _order(one[2], one[3]))
    return bytearray(b"".join(_RECORD.pack(*segment, 0) for segment in ordered))


def nbytes_for(count: int) -> int:
    """Bytes of the records of so many segments."""
    return -(-count // GROUP) * GROUP_BYTES


def _order(start: int, length: int) -> int:
    """The longest first, so that the last work of a launch is short."""
    return -start - length


def _table(segment: PrefillSegment) -> torch.Tensor:
    assert isinstance(segment.table, torch.Tensor), "a table of the device"
    assert segment.table.dtype == torch.int32, "a block table is int32"
    return segment.table


def _group(members: Sequence[PrefillSegment], address: int) -> SegmentGroup:
    return SegmentGroup(
        address=address,
        tokens=sum(segment.length for segment in members),
        spans=tuple((segment.length, segment.start + segment.length) for segment in members),
        chunks=sum(
            -(-(segment.start % DELTA_CHUNK + segment.length) // DELTA_CHUNK) for segment in members
        ),
    )
