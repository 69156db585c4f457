"""Sampling options and requests: every bad value is refused by name (REQ-05)."""

import math

import numpy as np
import pytest

from headrace.errors import HeadraceError, InvalidRequest
from headrace.request import (
    BatchedRequest,
    CachedTokens,
    SamplingParams,
    check_request_id,
    check_token_ids,
)

NAN, INF = math.nan, math.inf
NOT_NUMBERS = ["1", None, True, [1], 1j]
BAD_VALUES = {
    "temperature": [NAN, INF, -INF, -0.1, 101, 10**400, *NOT_NUMBERS],
    "top_k": [-2, 1.5, NAN, 2**31, True, None, "5"],
    "top_p": [0, 2, 1.0001, -0.5, NAN, INF, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, NAN, *NOT_NUMBERS],
    "seed": [-1, 2**64, 0.5, True, "7"],
    "max_tokens": [0, -1, 2**31, 1.0, True, None],
    "min_tokens": [-1, 129, 0.5, True, None],
    "stop": ["", ("a", ""), ("a", 1), b"a", 5, None, {"a"}, ["x"] * 17, "x" * 257],
    "stop_token_ids": [(-1,), (2**31,), (1.0,), (True,), "12", 3, None, list(range(65))],
    "ignore_eos": [1, 0, None, "true"],
    "logprobs": [-1, 21, 1.0, True, "3"],
    "presence_penalty": [-2.1, 2.1, NAN, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, INF, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, 2.1, NAN, INF, *NOT_NUMBERS],
}
CASES = [(name, value) for name, values in BAD_VALUES.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_bad_value_is_refused_by_field_and_value(name, value):
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="accepted is") as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert repr(value) in message or name in ("stop_token_ids",)


def test_every_field_has_bad_values_in_this_file():
    """REQ-05."""
    assert set(BAD_VALUES) == set(SamplingParams.__dataclass_fields__)


def test_defaults_are_greedy_and_good():
    params = SamplingParams()
    assert params.temperature == 0.0
    assert params.stops == ()
    assert not params.has_penalties


def test_values_are_stored_in_one_form():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(-1), stop="x", stop_token_ids=[np.int32(3)]
    )
    assert (params.temperature, params.top_k, params.stop) == (0.5, 0, ("x",))
    assert params.stop_token_ids == (3,)
    assert type(params.top_k) is int
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")
    assert SamplingParams(seed=2**64 - 1, logprobs=20, min_tokens=128).seed == 2**64 - 1


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1}]
)
def test_each_penalty_counts_as_one(penalty):
    assert SamplingParams(**penalty).has_penalties


def test_unknown_keyword_is_refused_with_a_hint():
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="n=2"):
        SamplingParams.from_dict({"n": 2})
    with pytest.raises(InvalidRequest, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1})
    assert SamplingParams.from_dict({"top_k": 3}) == SamplingParams(top_k=3)


def test_params_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 5  # type: ignore[misc]


@pytest.mark.parametrize("request_id", [-1, 2**64, True, 1.0, "1", None])
def test_request_id_is_of_64_bits(request_id):
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="request_id="):
        BatchedRequest(request_id, [1])


@pytest.mark.parametrize("tokens", [[], [-1], [1, 1.5], [True], "12", None, {1: 2}, [2**31]])
def test_prompt_must_be_token_ids(tokens):
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="prompt_tokens"):
        BatchedRequest(1, tokens)


def test_token_outside_the_vocabulary_is_named_by_position():
    """REQ-05."""
    assert check_token_ids("prompt", np.array([0, 99]), 100) == [0, 99]
    assert check_token_ids("prompt", [], 100) == []
    with pytest.raises(InvalidRequest, match=r"prompt\[2\]=100: accepted is .* 0 to 99"):
        check_token_ids("prompt", [0, 99, 100], 100)


def test_batched_request_starts_fresh_and_owns_its_lists():
    prompt = [1, 2]
    first, second = BatchedRequest(0, prompt), BatchedRequest(check_request_id(2**64 - 1), prompt)
    prompt.append(3)
    first.generated_tokens.append(9)
    assert first.prompt_tokens == second.prompt_tokens == [1, 2]
    assert second.generated_tokens == []
    assert (first.seq_len, first.slot_id, first.finished, first.last_result) == (
        0,
        None,
        False,
        None,
    )
    with pytest.raises(InvalidRequest, match="sampling="):
        BatchedRequest(1, [1], {"top_k": 1})  # type: ignore[arg-type]


def test_cached_tokens_add_up():
    assert CachedTokens(device=3, host=4).total == 7


def test_errors_share_one_base():
    with pytest.raises(HeadraceError):
        SamplingParams(top_p=2)
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=2)
