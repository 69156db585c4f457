"""The input of one forward pass: decode rows first, then prefill segments, all in one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.kv.tables import NO_WINDOW, Table, Window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillSegment:
    """A run of new prompt tokens of one request.

    table: block table of its row; state_slot: where its state lives, if the model has any; start:
    absolute position of its first token; length: number of tokens; offset: index of its first token
    in the batch.
    """

    table: Table
    state_slot: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenFeed:
    """Input tokens that the step before has left on the device.

    Token t of a batch is `tokens[sources[t]]` where its source is not negative. Each of `tokens` is
    an id, or -1 for a row whose logits were not finite: whoever reads it stays inside the table.
    """

    sources: torch.Tensor  # [T] int32
    tokens: torch.Tensor  # [rows of the step before] int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """T tokens for one forward pass.

    The first `num_decode` tokens are decode rows, one token each; the segments follow without gaps.
    `token_pages` and `token_offsets` say which HIGH page each token is written to, and where in it.
    `tables`, `decode_lengths` and `state_slots` have one entry a decode row; a length counts the KV
    of a row *including* its new token, and is 0 for padding, whose page and slot are -1. `window`
    says where LOW entries of the tables lie. `sample_index` holds the indices into T whose logits
    are wanted, None is all of them. On a GPU `tables` is int32 `[num_decode, pages]`, the lengths
    are int32, and the table of a segment is int32 `[pages]`: all on the device. `feed` goes before
    `token_ids` where it names a source.

    Raises
    ------
    ValueError
        The parts do not cover the T tokens exactly.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    token_pages: torch.Tensor  # [T] int64
    token_offsets: torch.Tensor  # [T] int64
    num_decode: int
    tables: Sequence[Table] | torch.Tensor
    decode_lengths: Sequence[int] | torch.Tensor
    state_slots: torch.Tensor  # [num_decode] int64
    segments: Sequence[PrefillSegment]
    sample_index: torch.Tensor | None  # [S] int64
    window: Window = NO_WINDOW
    feed: TokenFeed | None = None

    def __post_init__(self) -> None:
        tokens = self.token_ids.shape[0]
        for name in ("positions", "token_pages", "token_offsets"):
            count = getattr(self, name).shape[0]
            if count != tokens:
                raise ValueError(f"{tokens} token_ids and {count} {name}")
        for name in ("tables", "decode_lengths", "state_slots"):
            count = len(getattr(self, name))
            if count != self.num_decode:
                raise ValueError(f"{self.num_decode} decode rows and {count} {name}")
        covered = self.num_decode
        for segment in self.segments:
            if segment.offset != covered or segment.length <= 0 or segment.start < 0:
                raise ValueError(f"{segment} does not follow token {covered} of the batch")
            covered += segment.length
        if covered != tokens:
            raise ValueError(f"decode rows and segments cover {covered} of {tokens} tokens")
