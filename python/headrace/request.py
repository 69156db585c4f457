"""What a caller asks for and what comes back: sampling options, requests, results.

Owns no state of the engine. Everything here is plain data; `SamplingParams` and all results are
frozen. A field is checked once, in the constructor, and an error names the field, the value and
what would be accepted.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, Self

from headrace.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20  # what the OpenAI API accepts; a bound keeps the copy to the host small
MAX_STOPS = 16
MAX_STOP_CHARS = 256  # text is withheld up to the length of the longest stop string
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0  # beyond it float32 probabilities are uniform anyway
MIN_REPETITION_PENALTY = 0.01  # dividing logits by less could overflow float32
MAX_REPETITION_PENALTY = 2.0
MAX_TOKEN_ID = 2**31 - 1  # token ids travel as int32
MAX_COUNT = 2**31 - 1
MAX_U64 = 2**64 - 1


def _invalid(name: str, value: object, accepted: str) -> InvalidRequest:
    return InvalidRequest(f"{name}={value!r}: accepted is {accepted}")


def _integer(name: str, value: object, low: int, high: int, also: str = "") -> int:
    # bool is an int to Python, but `top_k=True` is a mistake. NumPy integers are fine.
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if low <= number <= high:
            return number
    raise _invalid(name, value, f"an integer from {low} to {high}{also}")


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float:
    accepted = f"a number {'above' if above_low else 'from'} {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _invalid(name, value, accepted)
    try:
        number = float(value)
    except OverflowError:
        raise _invalid(name, value, accepted) from None
    # A comparison with NaN is false, so NaN is refused by the same test as a value out of range.
    if not low <= number <= high or (above_low and number == low):
        raise _invalid(name, value, accepted)
    return number


def check_request_id(request_id: object) -> int:
    """Return `request_id` as an int; `InvalidRequest` unless it is an integer of 64 bits."""
    return _integer("request_id", request_id, 0, MAX_U64)


def check_token_ids(name: str, token_ids: object, vocab_size: int = MAX_TOKEN_ID + 1) -> list[int]:
    """Return `token_ids` as a new list of ints, each in `[0, vocab_size)`.

    Raises
    ------
    InvalidRequest
        If it is not a sequence of integers, or one of them is outside the vocabulary; the message
        names `name` and the first bad position. An empty sequence is fine here.
    """
    if isinstance(token_ids, str | bytes | Mapping) or not isinstance(token_ids, Iterable):
        raise _invalid(name, token_ids, "a sequence of token ids")
    ids = list(token_ids)
    # A prompt may have 100,000 tokens: the usual case is checked without a Python call per token.
    plain = all(type(token) is int for token in ids)
    if plain and min(ids, default=0) >= 0 and max(ids, default=0) < vocab_size:
        return ids
    return [
        _integer(f"{name}[{position}]", token, 0, vocab_size - 1)
        for position, token in enumerate(ids)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    r"""How to choose the next tokens of one request, and when to end it.

    Greedy by default: `temperature` is 0 where other engines use 1, so that a first try gives the
    same text twice.

    Attributes
    ----------
    temperature
        0 is greedy (highest logit, ties to the lowest id); otherwise logits are divided by it.
    top_k
        Keep the k most probable tokens. -1 or 0 is off, stored as 0.
    top_p
        Keep the smallest set of most probable tokens that together reach `top_p`. 1 is off.
    min_p
        Drop tokens less probable than `min_p` times the most probable one. 0 is off.
    seed
        The same seed gives the same draws whatever else is in the batch. None: the engine picks.
    max_tokens
        End with reason `length` after this many generated tokens.
    min_tokens
        No end-of-text token, stop token or stop string ends the request before so many tokens.
    stop
        A string or several; the text ends before the first one that appears. Stored as a tuple.
    stop_token_ids
        Tokens that end the request besides the model's own end-of-text tokens.
    ignore_eos
        Go on after the model's end-of-text tokens. `stop_token_ids` still end the request.
    logprobs
        Return the log-probability of each token and of so many most probable ones (0 to 20).
    presence_penalty, frequency_penalty
        Subtracted from the logits of generated tokens, once and per occurrence (-2 to 2).
    repetition_penalty
        Logits of tokens in the prompt or generated are divided by it if positive, else multiplied.

    Raises
    ------
    InvalidRequest
        If a field is of a wrong type, not finite or out of range, or `min_tokens > max_tokens`.

    Examples
    --------
    >>> SamplingParams(temperature=0.7, top_p=0.9, stop="\n\n").stop
    ('\n\n',)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        def store(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        store("temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        store("top_k", max(0, _integer("top_k", self.top_k, -1, MAX_COUNT, " (-1 and 0: off)")))
        store("top_p", _number("top_p", self.top_p, 0.0, 1.0, above_low=True))
        store("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            store("seed", _integer("seed", self.seed, 0, MAX_U64, " or None"))
        store("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_COUNT))
        store(
            "min_tokens",
            _integer("min_tokens", self.min_tokens, 0, self.max_tokens, " (max_tokens)"),
        )
        store("stop", _stops(self.stop))
        store("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", self.ignore_eos, "True or False")
        if self.logprobs is not None:
            store("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, " or None"))
        for name in ("presence_penalty", "frequency_penalty"):
            store(name, _number(name, getattr(self, name), -2.0, 2.0))
        store(
            "repetition_penalty",
            _number(
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
        )

    @classmethod
    def from_dict(cls, options: Mapping[str, object]) -> Self:
        """Build from keywords that come from outside; an unknown one is an `InvalidRequest`."""
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequest(
                    f"{name}={options[name]!r}: not a sampling option{hint} "
                    f"(accepted: {', '.join(known)})"
                )
        return cls(**options)  # type: ignore[arg-type]  # the constructor checks every type

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _stops(value: object) -> tuple[str, ...]:
    accepted = f"a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, tuple | list) or len(stops) > MAX_STOPS:
        raise _invalid("stop", value, accepted)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _invalid("stop", value, accepted)
    return tuple(stops)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = check_token_ids("stop_token_ids", value)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid("stop_token_ids", value, f"at most {MAX_STOP_TOKEN_IDS} ids")
    return tuple(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, from the logits before any option changed them.

    `top` holds (token id, logprob) pairs from the most probable down, ties to the lower id. The
    chosen token is in it only if it is that probable.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """What one step gave one request: its new token, -1 if the row's logits were not finite."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class BatchedRequest:
    """A request of the low-level batch API; the engine updates it in place after each call.

    Attributes
    ----------
    request_id
        Chosen by the caller, unique among live requests, 64 bits.
    prompt_tokens
        Ids of the prompt, at least one. The list is copied.
    seq_len
        Tokens whose KV is stored. The newest generated token is not among them.
    slot_id
        The fixed slot the request holds, None while it holds none. Set by the engine.
    slot_generation
        Which tenancy of the slot the KV is in. Set by the engine at the first forward; a later
        forward in another tenancy is refused. Set it to None to say that KV (and state) of
        `seq_len` tokens were restored into the slot that the request holds now.
    cached_prefix_len
        Leading prompt tokens whose KV came from a cache; 0 as long as there is none.
    finish_reason
        None until `finished`.
    last_token
        The newest generated token, which the next decode step feeds; None before the prefill.

    Raises
    ------
    InvalidRequest
        If the id, a token or the sampling options are not valid, or the prompt is empty.
    """

    request_id: int
    prompt_tokens: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seq_len: int = 0
    slot_id: int | None = None
    slot_generation: int | None = None
    cached_prefix_len: int = 0
    finished: bool = False
    finish_reason: FinishReason | None = None
    last_token: int | None = None
    generated_tokens: list[int] = field(default_factory=list)
    last_result: StepRow | None = None

    def __post_init__(self) -> None:
        self.request_id = check_request_id(self.request_id)
        self.prompt_tokens = check_token_ids("prompt_tokens", self.prompt_tokens)
        if not self.prompt_tokens:
            raise _invalid("prompt_tokens", self.prompt_tokens, "at least one token id")
        sampling: object = self.sampling
        if not isinstance(sampling, SamplingParams):
            raise _invalid("sampling", sampling, "a SamplingParams")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Prompt tokens that were not computed again, by the place their KV was found in."""

    device: int = 0
    host: int = 0
    """Copied back from host memory."""
    host_streamed: int = 0
    """Read from host memory in every step, by a low-priority request."""

    @property
    def total(self) -> int:
        """Tokens from all places."""
        return self.device + self.host + self.host_streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times in seconds since submission, and real token counts.

    `queue_s` is None for a request that was never admitted, `ttft_s` for one without a token.
    """

    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float
    num_prompt_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one request.

    Attributes
    ----------
    prompt
        The text of the prompt, None if token ids were given.
    text
        The generated text, ending before the stop string; "" without a tokenizer.
    finish_reason
        stop | length | abort | error.
    stop_reason
        The stop string or the token id that ended it, None for another reason.
    error
        What went wrong if `finish_reason` is `error`.
    logprobs
        One entry a generated token if they were asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: CachedTokens = field(default_factory=CachedTokens)
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrefillResult:
    """First tokens of a batch, in the order of the requests.

    `logits` is fp32 `[rows, vocab]`, kept only if it was asked for.
    """

    request_ids: list[int]
    token_ids: list[int]
    finished: list[bool]
    logits: "torch.Tensor | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDecodeResult:
    """Next tokens of a batch, in the order of the requests.

    `logits` is fp32 `[rows, vocab]`, kept only if it was asked for.
    """

    request_ids: list[int]
    token_ids: list[int]
    finished: list[bool]
    logits: "torch.Tensor | None" = None
