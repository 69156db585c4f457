"""Choosing one token a row from logits, in such a way that no row depends on its neighbours.

Owns nothing; `sample` is a pure function of the logits and a `SamplingBatch`. Order of operations:
penalties, banned tokens, temperature, min_p, top_k, top_p, draw.

A row gives the same bits alone, in any batch and at any place in it, because only three kinds of
operation are used:
- IEEE arithmetic element by element, comparisons and integer counts, exact in any order;
- sorting by keys that are unique (logit, then id), so that no algorithm can order ties otherwise;
- sums of probabilities as 64-bit fixed-point numbers. Integer addition is associative, so it does
  not matter how a library splits a sum or a prefix sum, which for floats it does by batch shape.
What is left is `exp`, whose last bit on a CPU can depend on where in a tensor an element lies;
there it is taken row by row, and the one logarithm a row needs is left to the host.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.request import SamplingParams, TokenLogprobs

# Below this a division by the temperature could overflow; vLLM uses the same bound.
GREEDY_BELOW = 1e-5
# Weights exp(x - max) <= 1 as multiples of 2**-44: sums over 2**18 tokens stay below 2**63.
FIXED_POINT_ONE = 2.0**44
MAX_VOCAB = 2**18
# Rows that go through together: bounds the workspace to about 150 MB for 150k tokens.
ROWS_PER_PASS = 16
# So many candidates are selected, more are sorted.
SHORT_LIST = 1024
# CUDA reads so much pageable memory at once; for more it may first wait for the stream.
UPLOAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What one row of a `SamplingBatch` is made from.

    `uniform` in [0, 1) decides the draw. `prompt` and `generated` matter only with penalties.
    `banned` are ids that must not be chosen.
    """

    params: SamplingParams
    uniform: float = 0.0
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    banned: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Options of S sampled rows as arrays, in row order.

    Attributes
    ----------
    temperature, top_p, min_p
        float32 [S]; a temperature below 1e-5 is greedy, 1 and 0 turn the others off.
    top_k
        int32 [S], 0 is off.
    repetition, presence, frequency
        float32 [S]; 1, 0 and 0 are off.
    uniform
        float64 [S] in [0, 1): the place in the cumulative distribution that is drawn. Made by the
        scheduler from the seed and the index of the token, so that a draw can be repeated.
    logprobs
        int32 [S]: how many most probable tokens to report; -1 is no report at all.
    history_tokens, history_offsets, history_prompt_lens
        int64: row i has seen `history_tokens[history_offsets[i]:history_offsets[i + 1]]`, its first
        `history_prompt_lens[i]` in the prompt. Empty for a row without penalties.
    banned_tokens, banned_offsets
        int64: ids of row i that must not be chosen, in the same layout.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    uniform: NDArray[np.float64]
    logprobs: NDArray[np.int32]
    history_tokens: NDArray[np.int64]
    history_offsets: NDArray[np.int64]
    history_prompt_lens: NDArray[np.int64]
    banned_tokens: NDArray[np.int64]
    banned_offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        rows = len(self.temperature)
        assert all(
            len(column) == rows
            for column in (
                self.top_k,
                self.top_p,
                self.min_p,
                self.repetition,
                self.presence,
                self.frequency,
                self.uniform,
                self.logprobs,
                self.history_prompt_lens,
            )
        ), "every array has one entry a row"
        assert len(self.history_offsets) == rows + 1, "one offset more than rows"
        assert len(self.banned_offsets) == rows + 1, "one offset more than rows"

    def __len__(self) -> int:
        return len(self.temperature)

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow]) -> Self:
        """Collect rows into arrays; histories of rows without penalties are left out."""
        params = [row.params for row in rows]
        prompts = [row.prompt if row.params.has_penalties else () for row in rows]
        generated = [row.generated if row.params.has_penalties else () for row in rows]
        histories = [[*p, *g] for p, g in zip(prompts, generated, strict=True)]
        banned = [row.banned for row in rows]
        return cls(
            temperature=np.array([p.temperature for p in params], np.float32),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            repetition=np.array([p.repetition_penalty for p in params], np.float32),
            presence=np.array([p.presence_penalty for p in params], np.float32),
            frequency=np.array([p.frequency_penalty for p in params], np.float32),
            uniform=np.array([row.uniform for row in rows], np.float64),
            logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
            history_tokens=_flat(histories),
            history_offsets=_offsets(histories),
            history_prompt_lens=np.array([len(p) for p in prompts], np.int64),
            banned_tokens=_flat(banned),
            banned_offsets=_offsets(banned),
        )

    @property
    def random_rows(self) -> NDArray[np.bool_]:
        """[S]: rows that draw instead of taking the highest logit."""
        return self.temperature >= GREEDY_BELOW

    @property
    def edited_rows(self) -> NDArray[np.bool_]:
        """[S]: rows whose logits are changed by penalties or banned tokens."""
        penalties = (self.repetition != 1.0) | (self.presence != 0.0) | (self.frequency != 0.0)
        edited: NDArray[np.bool_] = penalties | (np.diff(self.banned_offsets) > 0)
        return edited


def _flat(lists: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.array([token for tokens in lists for token in tokens], np.int64)


def _offsets(lists: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Tokens of S rows.

    Attributes
    ----------
    token_ids
        int32 [S] on the host; -1 for a bad row.
    logprobs
        [S], None for rows that did not ask and for bad rows.
    bad_rows
        Rows without a finite maximum (NaN or +inf anywhere, nothing but -inf, or everything
        banned). The engine fails their requests; other rows are not affected.
    """

    token_ids: NDArray[np.int32]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    bad_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, token_ids: NDArray[np.int32]) -> Self:
        """Tokens of rows that asked for no log-probabilities."""
        bad_rows = tuple(np.flatnonzero(token_ids < 0).tolist())
        return cls(token_ids=token_ids, logprobs=[None] * len(token_ids), bad_rows=bad_rows)


def sample(
    logits: Tensor, batch: SamplingBatch, before_read: Callable[[], None] | None = None
) -> SampleResult:
    """Choose a token for every row; a batch that is greedy throughout costs one argmax.

    Parameters
    ----------
    logits
        float32 [S, vocab], not changed. At most 2**18 tokens.
    batch
        Options of the same S rows.
    before_read
        Called once something is asked of the device, before it is read.

    Notes
    -----
    Greedy takes the lowest id of equal logits. A draw walks down the kept tokens from the most
    probable one, ties to the lower id, and takes the first whose cumulative probability exceeds
    `uniform`. `top_k` keeps exactly k tokens, `top_p` at least one. Log-probabilities are of the
    logits as given, before any option.
    """
    chosen = choose(logits, batch)
    if before_read is not None:
        before_read()
    token_ids = chosen.cpu().numpy()
    reported = np.flatnonzero((batch.logprobs >= 0) & (token_ids >= 0))
    result = SampleResult.of(token_ids)
    for part in _passes(reported):
        entries = _logprobs(logits, batch, part, token_ids, before_read)
        for row, entry in zip(part, entries, strict=True):
            result.logprobs[row] = entry
    return result


def choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the tokens that `sample` chooses, int32 [S] on the device of the logits."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32, "logits are float32"
    assert rows == len(batch), "one row of logits per row of options"
    assert vocab <= MAX_VOCAB, "more tokens than a fixed-point sum has room for"
    special = batch.random_rows | batch.edited_rows
    if not special.any():
        return _argmax(logits).to(torch.int32)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    plain = _index(np.flatnonzero(~special), logits)
    if len(plain):
        chosen[plain] = _argmax(logits[plain])
    for part in _passes(np.flatnonzero(special)):
        chosen[_index(part, logits)] = _choose(logits, batch, part)
    return chosen.to(torch.int32)


def _passes(rows: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Cut row numbers into parts that go through together."""
    for start in range(0, len(rows), ROWS_PER_PASS):
        yield rows[start : start + ROWS_PER_PASS]


def _index(rows: NDArray[np.intp], like: Tensor) -> Tensor:
    return _upload(rows, like.device)


def _upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy to the device, without waiting for what it runs up to `UPLOAD_BYTES`.

    Histories and banned tokens alone are larger; rows go through in passes.
    """
    return torch.from_numpy(values).to(device, non_blocking=True)


def _argmax(scores: Tensor) -> Tensor:
    """[R] highest score of each row, ties to the lowest id; -1 if the highest is not finite."""
    best = scores.argmax(dim=-1)
    # argmax finds a NaN before any number, so that this one look-up sees every bad row.
    highest = scores.gather(-1, best[:, None])[:, 0]
    return torch.where(highest.isfinite(), best, -1)


def _choose(logits: Tensor, batch: SamplingBatch, rows: NDArray[np.intp]) -> Tensor:
    """[R] tokens of rows with penalties, banned tokens or a temperature."""
    scores = logits[_index(rows, logits)]  # a copy [R, vocab]
    # Before a ban can hide a NaN.
    sound = scores.amax(dim=-1).isfinite()
    if batch.edited_rows[rows].any():
        scores = _edit(scores, batch, rows)
    chosen = _argmax(scores)
    random = np.flatnonzero(batch.random_rows[rows])
    if len(random):
        where = _index(random, logits)
        sound[where] &= chosen[where] >= 0
        chosen[where] = _draw(scores[where], batch, rows[random])
    return torch.where(sound, chosen, -1)


def _edit(scores: Tensor, batch: SamplingBatch, rows: NDArray[np.intp]) -> Tensor:
    """Apply penalties, then bans, to scores [R, vocab]."""
    seen_at, seen_in_answer, banned_at = [], [], []
    for place, row in enumerate(rows):
        start, end = batch.history_offsets[row : row + 2]
        seen_at.append(place * scores.shape[1] + batch.history_tokens[start:end])
        seen_in_answer.append(np.arange(end - start) >= batch.history_prompt_lens[row])
        start, end = batch.banned_offsets[row : row + 2]
        banned_at.append(place * scores.shape[1] + batch.banned_tokens[start:end])
    at, in_answer, bans = (
        _upload(np.concatenate(part), scores.device)
        for part in (seen_at, seen_in_answer, banned_at)
    )
    if len(at):
        scores = _penalize(scores, batch, rows, at, in_answer)
    return scores.reshape(-1).index_fill(0, bans, -torch.inf).view_as(scores)


def _penalize(
    scores: Tensor, batch: SamplingBatch, rows: NDArray[np.intp], at: Tensor, in_answer: Tensor
) -> Tensor:
    """Lower the scores at flat places `at`, the tokens seen, some of them `in_answer`."""
    device = scores.device
    # Integer counts, so that the order of the additions does not matter.
    zeros = torch.zeros(scores.numel(), dtype=torch.int32, device=device)
    seen = zeros.index_fill(0, at, 1).view_as(scores) > 0
    counts = zeros.index_add(0, at, in_answer.to(torch.int32)).view_as(scores)

    repetition = _column(batch.repetition, rows, device)
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    lowered = scores - _column(batch.frequency, rows, device) * counts
    lowered = lowered - _column(batch.presence, rows, device)
    return torch.where(counts > 0, lowered, scores)


def _column(values: NDArray[np.generic], rows: NDArray[np.intp], device: torch.device) -> Tensor:
    return _upload(values[rows], device)[:, None]  # [R, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """Options of the rows that draw, each [R, 1]; `least` is min_p in fixed point."""

    least: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor

    def of(self, rows: Tensor) -> "_Limits":
        return _Limits(
            least=self.least[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            uniform=self.uniform[rows],
        )


def _draw(scores: Tensor, batch: SamplingBatch, rows: NDArray[np.intp]) -> Tensor:
    """[R] tokens drawn from scores [R, vocab]; void for a row without a finite maximum."""
    device, vocab = scores.device, scores.shape[1]
    highest = scores.amax(dim=-1, keepdim=True)
    # Subtracting first keeps the quotient finite at any temperature: the best token is at 0.
    scores = (scores - highest) / _column(batch.temperature, rows, device)
    weights = _fixed_point(scores)
    top_k = np.where(batch.top_k > 0, batch.top_k, vocab).clip(max=vocab).astype(np.int64)
    limits = _Limits(
        least=(_column(batch.min_p, rows, device).double() * FIXED_POINT_ONE).round().long(),
        top_k=_column(top_k, rows, device),
        top_p=_column(batch.top_p, rows, device).double(),
        uniform=_column(batch.uniform, rows, device),
    )
    longest = int(top_k[rows].max())
    # Nearly every draw falls on one of the first tokens, and on a CPU selecting these is five
    # times faster than sorting all. A GPU would have to wait for the answer; it sorts at once.
    if device.type != "cpu" or longest <= SHORT_LIST:
        return _pick(scores, weights, limits, longest)[0]
    tokens, settled = _pick(scores, weights, limits, SHORT_LIST)
    rest = (~settled).nonzero()[:, 0]
    if len(rest):
        tokens[rest] = _pick(scores[rest], weights[rest], limits.of(rest), longest)[0]
    return tokens


def _pick(scores: Tensor, weights: Tensor, limits: _Limits, count: int) -> tuple[Tensor, Tensor]:
    """[R] drawn tokens as far as the best `count` tokens tell, and [R] whether they do.

    Every restriction keeps a prefix of the tokens in descending order, so it is a number and not
    a mask. All sums are of integers: a short list gives what the whole vocabulary gives, or is
    not settled.
    """
    order = _descending(scores, count)  # [R, count]
    listed = weights.gather(-1, order)
    cumulative = listed.cumsum(dim=-1)
    num_likely = (weights >= limits.least).sum(dim=-1, keepdim=True)
    num_kept = torch.minimum(num_likely, limits.top_k).clamp(min=1)  # before top_p, [R, 1]
    all_listed = num_kept <= count
    mass = torch.where(
        all_listed,
        cumulative.gather(-1, num_kept.clamp(max=count) - 1),
        weights.sum(dim=-1, keepdim=True),
    )
    # A token is kept while those before it fall short of top_p.
    reach = torch.where(limits.top_p < 1, (mass.double() * limits.top_p).long(), mass)
    num_short = (cumulative - listed < reach).sum(dim=-1, keepdim=True).clamp(min=1)
    cut_listed = all_listed | (num_short < count)
    cut = torch.minimum(num_kept, num_short)
    total = torch.where(cut_listed, cumulative.gather(-1, cut - 1), mass)

    target = torch.minimum((total.double() * limits.uniform).long(), total - 1)
    place = (cumulative <= target).sum(dim=-1, keepdim=True)
    tokens = order.gather(-1, place.clamp(max=count - 1))
    # Beyond the list the mass is known only if nothing but top_p restricts the vocabulary.
    unrestricted = num_kept == weights.shape[1]
    reached = cut_listed | ((limits.top_p >= 1) & (place < count))
    settled = all_listed | (unrestricted & reached)
    return tokens[:, 0], settled[:, 0]


def _fixed_point(differences: Tensor) -> Tensor:
    """Return exp of differences <= 0, [R, vocab], as int64 multiples of 2**-44."""
    if differences.device.type == "cpu":
        # A clone starts at an aligned address, whatever the row.
        powers = torch.stack([row.clone().exp_() for row in differences])
    else:
        powers = differences.exp()
    return (powers.double() * FIXED_POINT_ONE).round().long()


def _descending(scores: Tensor, count: int) -> Tensor:
    """[R, count] ids of the highest scores, from the highest down, ties to the lower id."""
    vocab = scores.shape[1]
    # Bits of a float read as an integer have its order once those of negative numbers are
    # flipped; adding 0 makes -0 equal to +0.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(vocab - 1, -1, -1, device=scores.device)
    keys = (ordered << 32) | ids
    if count <= min(SHORT_LIST, vocab // 2):
        best = keys.topk(count, dim=-1).values
    else:
        best = keys.sort(dim=-1, descending=True).values[:, :count]
    return vocab - 1 - (best & 0xFFFFFFFF)


def _logprobs(
    logits: Tensor,
    batch: SamplingBatch,
    rows: NDArray[np.intp],
    token_ids: NDArray[np.int32],
    before_read: Callable[[], None] | None,
) -> list[TokenLogprobs]:
    """Entries of sound rows: log-softmax of the logits as given, rounded once to float32."""
    raw = logits[_index(rows, logits)]
    differences = raw - raw.amax(dim=-1, keepdim=True)
    sums = _fixed_point(differences).sum(dim=-1)
    chosen = torch.from_numpy(token_ids[rows].astype(np.int64)).to(logits.device)[:, None]
    count = min(int(batch.logprobs[rows].max()), raw.shape[1])
    ids = torch.cat([chosen, _descending(raw, count)], dim=-1) if count else chosen
    numbers = differences.gather(-1, ids)
    if before_read is not None:
        before_read()
    totals = sums.cpu().tolist()
    log_totals = np.array([[math.log(total / FIXED_POINT_ONE)] for total in totals])
    values = (numbers.cpu().numpy() - log_totals).astype(np.float32)
    columns = ids.cpu().numpy()
    entries = []
    for place, row in enumerate(rows):
        wanted = slice(1, 1 + int(batch.logprobs[row]))
        top = zip(columns[place, wanted].tolist(), values[place, wanted].tolist(), strict=True)
        entries.append(
            TokenLogprobs(
                token_id=int(token_ids[row]), logprob=float(values[place, 0]), top=tuple(top)
            )
        )
    return entries
