"""The input of one forward pass: decode rows first, then prefill segments, all in one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """A run of new prompt tokens of one request.

    slot: where its KV lives; start: absolute position of its first token; length: number of
    tokens; offset: index of its first token in the batch.
    """

    slot: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens for one forward pass.

    The first `num_decode` tokens are decode rows, one token each; the segments follow without
    gaps. `decode_lengths` counts the KV of a row *including* its new token. `sample_index` holds
    the indices into T whose logits are wanted.

    Raises
    ------
    ValueError
        The parts do not cover the T tokens exactly.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    token_slots: torch.Tensor  # [T] int64
    num_decode: int
    decode_slots: Sequence[int]
    decode_lengths: Sequence[int]
    segments: Sequence[PrefillSegment]
    sample_index: torch.Tensor  # [S] int64

    def __post_init__(self) -> None:
        tokens = self.token_ids.shape[0]
        if self.positions.shape[0] != tokens or self.token_slots.shape[0] != tokens:
            raise ValueError(
                f"token_ids, positions and token_slots differ in length: {tokens}, "
                f"{self.positions.shape[0]}, {self.token_slots.shape[0]}"
            )
        if not self.num_decode == len(self.decode_slots) == len(self.decode_lengths):
            raise ValueError(
                f"{self.num_decode} decode rows, {len(self.decode_slots)} slots and "
                f"{len(self.decode_lengths)} lengths"
            )
        covered = self.num_decode
        for segment in self.segments:
            if segment.offset != covered or segment.length <= 0 or segment.start < 0:
                raise ValueError(f"{segment} does not follow token {covered} of the batch")
            covered += segment.length
        if covered != tokens:
            raise ValueError(f"decode rows and segments cover {covered} of {tokens} tokens")
