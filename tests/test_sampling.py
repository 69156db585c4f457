"""Sampling against a float64 oracle, and bit for bit the same in any batch (BAT-05)."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.request import SamplingParams
from headrace.sampling import SamplingBatch, SamplingRow, sample

VOCAB = 101
# Cumulative probabilities closer than this to a limit may fall on either side of it: the engine
# works in float32 logits and fixed-point sums, the oracle in float64.
BORDER = 1e-5


def make_logits(rows, seed, vocab=VOCAB, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def run(logits, rows):
    return sample(logits, SamplingBatch.from_rows(rows))


def oracle(logits, row):
    """Kept ids in descending order and their probabilities; None if a limit is too close."""
    params = row.params
    scores = logits.double().numpy().copy()
    seen = [*row.prompt, *row.generated] if params.has_penalties else []
    for token in set(seen):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(row.generated):
        times = list(row.generated).count(token)
        scores[token] -= params.frequency_penalty * times + params.presence_penalty
    scores[list(row.banned)] = -np.inf
    if params.temperature == 0:
        return [int(np.argmax(scores))], [1.0]
    scores = scores / params.temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    limit = params.min_p * probabilities.max()
    if any(abs(probabilities[token] - limit) < BORDER * limit for token in order):
        return None
    order = [token for token in order if probabilities[token] >= limit]
    if params.top_k:
        order = order[: params.top_k]
    kept, mass = [], 0.0
    total = probabilities[order].sum()
    for token in order:
        if mass >= params.top_p * total:
            break
        kept.append(token)
        mass += probabilities[token]
        if params.top_p < 1 and abs(mass - params.top_p * total) < BORDER:
            return None
    return kept, probabilities[kept] / mass


options = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 100, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
    stop=st.sampled_from([(), ("a", "b")]),
)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
row_strategy = st.builds(
    SamplingRow,
    params=options,
    uniform=st.floats(0, 1, exclude_max=True),
    prompt=token_lists,
    generated=token_lists,
    banned=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
seeds = st.integers(0, 2**32 - 1)


def same(one, other):
    """Equal to the bit: floats are compared with ==, there is no NaN among them."""
    return one == other


@settings(deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=6), seed=seeds)
def test_row_alone_equals_row_in_a_batch(rows, seed):
    """BAT-05."""
    logits = make_logits(len(rows), seed)
    together = run(logits, rows)
    for place, row in enumerate(rows):
        alone = run(logits[place : place + 1].clone(), [row])
        assert alone.token_ids[0] == together.token_ids[place]
        assert same(alone.logprobs[0], together.logprobs[place])


@pytest.mark.parametrize("vocab", [101, 32_000, 151_936])
def test_seeded_row_is_the_same_as_row_0_and_row_7(vocab):
    """BAT-05: also where a library would split one long row over threads."""
    target = make_logits(1, 5, vocab, scale=2.0)
    row = SamplingRow(
        params=SamplingParams(temperature=0.9, top_p=0.97, logprobs=5, presence_penalty=0.5),
        uniform=0.731,
        prompt=[1, 2],
        generated=[3, 3],
    )
    neighbours = [
        SamplingRow(params=SamplingParams()),
        SamplingRow(params=SamplingParams(temperature=1.0, top_k=40, logprobs=20), uniform=0.2),
    ] * 4
    others = make_logits(8, 6, vocab)
    alone = run(target, [row])
    for place in (0, 3, 7):
        logits = others.clone()
        logits[place] = target[0]
        rows = [*neighbours[:place], row, *neighbours[place + 1 :]]
        together = run(logits, rows)
        assert together.token_ids[place] == alone.token_ids[0]
        assert same(together.logprobs[place], alone.logprobs[0])


def test_bits_do_not_depend_on_the_number_of_threads():
    """BAT-05."""
    logits = make_logits(3, 1, vocab=151_936)
    rows = [
        SamplingRow(params=SamplingParams(temperature=1.0, logprobs=20), uniform=u)
        for u in (0.1, 0.5, 0.9)
    ]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run(logits, rows))
    finally:
        torch.set_num_threads(before)
    assert (results[0].token_ids == results[1].token_ids).all()
    assert results[0].logprobs == results[1].logprobs


def chosen_tokens(logits, row, points):
    """Tokens of one row of options drawn at many points."""
    rows = [replace(row, uniform=float(point)) for point in points]
    return run(logits.expand(len(points), -1), rows).token_ids.tolist()


@settings(deadline=None)
@given(row=row_strategy, seed=seeds)
def test_kept_set_and_draw_match_a_float64_oracle(row, seed):
    logits = make_logits(1, seed)
    expected = oracle(logits[0], row)
    if expected is None:
        return
    kept, probabilities = expected
    edges = np.concatenate([[0.0], np.cumsum(probabilities)])
    wide = [place for place in range(len(kept)) if probabilities[place] > 4 * BORDER]
    middles = [(edges[place] + edges[place + 1]) / 2 for place in wide]
    assert chosen_tokens(logits, row, middles) == [kept[place] for place in wide]
    inside = [edges[place] + 2 * BORDER for place in wide]
    assert chosen_tokens(logits, row, inside) == [kept[place] for place in wide]
    # The very ends of the unit interval give the first and one of the last kept tokens.
    ends = chosen_tokens(logits, row, [0.0, math.nextafter(1.0, 0.0)])
    assert ends[0] == kept[0]
    assert ends[1] in kept


def kept_by_scan(logits, params):
    """The set of tokens that any point of a fine grid draws."""
    points = (np.arange(1000) + 0.5) / 1000
    return set(chosen_tokens(logits, SamplingRow(params=params), points))


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
    ],
)
def test_kept_set_equals_that_of_transformers(params, warper):
    logits = make_logits(1, 11, scale=1.5)
    expected = set(torch.isfinite(warper(None, logits.clone())[0]).nonzero()[:, 0].tolist())
    assert kept_by_scan(logits, SamplingParams(temperature=1.0, **params)) == expected


@settings(deadline=None)
@given(seed=seeds, penalty=st.sampled_from([0.5, 1.1, 2.0]), prompt=token_lists.filter(bool))
def test_repetition_penalty_equals_that_of_transformers(seed, penalty, prompt):
    logits = make_logits(1, seed)
    processor = RepetitionPenaltyLogitsProcessor(penalty=penalty)
    expected = processor(torch.tensor([prompt]), logits.clone())
    params = SamplingParams(repetition_penalty=penalty)
    half = len(prompt) // 2
    row = SamplingRow(params=params, prompt=prompt[:half], generated=prompt[half:])
    assert run(logits, [row]).token_ids[0] == int(expected.argmax())


def test_presence_and_frequency_look_at_generated_tokens_only():
    logits = torch.tensor([[5.0, 4.5, 4.0, 0.0]])
    history = {"prompt": [0, 0, 0], "generated": [1]}

    def choose(**penalties):
        row = SamplingRow(params=SamplingParams(**penalties), **history)
        return run(logits, [row]).token_ids[0]

    assert choose(presence_penalty=2.0) == 0
    assert choose(frequency_penalty=2.0) == 0
    history = {"prompt": [], "generated": [0, 0, 1]}
    assert choose(frequency_penalty=0.4) == 0  # 4.2, 4.1, 4.0
    assert choose(frequency_penalty=0.6) == 2  # 3.8, 3.9, 4.0
    assert choose(presence_penalty=0.6) == 0  # 4.4, 3.9, 4.0: once, however often it occurred
    assert choose(presence_penalty=-1.0) == 0


def test_banned_tokens_are_not_chosen():
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    rows = [
        SamplingRow(params=SamplingParams(), banned=[0]),
        SamplingRow(params=SamplingParams(temperature=1.0), uniform=0.0, banned=[0, 1]),
        SamplingRow(params=SamplingParams()),
    ]
    assert run(logits, rows).token_ids.tolist() == [1, 2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1.0, 100.0])
def test_ties_go_to_the_lower_id(temperature):
    logits = torch.tensor([[-0.0, 7.0, 0.0, 7.0, 7.0, 0.0]])
    params = SamplingParams(temperature=temperature, top_k=2, logprobs=4)
    first = run(logits, [SamplingRow(params=params, uniform=0.0)])
    assert first.token_ids.tolist() == [1]
    assert [token for token, _ in first.logprobs[0].top] == [1, 3, 4, 0]
    if temperature >= 1e-5:
        last = run(logits, [SamplingRow(params=params, uniform=0.999)])
        assert last.token_ids.tolist() == [3]


def test_logprobs_are_of_the_logits_as_given():
    logits = make_logits(4, 3)
    expected = logits.double().log_softmax(-1)
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=1.5, logprobs=20)
    rows = [SamplingRow(params=params, uniform=0.4, prompt=[1, 2, 3])] * 3
    rows.append(SamplingRow(params=SamplingParams(logprobs=0)))
    result = run(logits, rows)
    for row in range(3):
        entry = result.logprobs[row]
        values, ids = expected[row].sort(descending=True, stable=True)
        assert [token for token, _ in entry.top] == ids[:20].tolist()
        got = [value for _, value in entry.top]
        # One rounding of x - max in float32 and one at the end: 2 ulp of numbers below 32.
        np.testing.assert_allclose(got, values[:20], rtol=0, atol=4e-6)
        assert entry.token_id == result.token_ids[row]
        assert abs(entry.logprob - float(expected[row, entry.token_id])) < 4e-6
    assert result.logprobs[3].top == ()
    assert run(logits, [SamplingRow(params=SamplingParams())] * 4).logprobs == [None] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("poison", ["nan", "inf", "nothing", "all_banned"])
def test_bad_row_is_marked_and_alone(poison, logprobs, temperature):
    clean = make_logits(3, 8)
    logits = clean.clone()
    params = SamplingParams(temperature=temperature, logprobs=logprobs)
    good = SamplingRow(params=params, uniform=0.6)
    bad = replace(good, banned=range(VOCAB)) if poison == "all_banned" else good
    if poison in ("nan", "inf"):
        logits[1, 17] = float(poison)
    elif poison == "nothing":
        logits[1] = -torch.inf
    result = run(logits, [good, bad, good])
    expected = run(clean, [good] * 3)
    assert result.bad_rows == (1,)
    assert result.token_ids[1] == -1
    assert result.logprobs[1] is None
    for row in (0, 2):
        assert result.token_ids[row] == expected.token_ids[row]
        assert result.logprobs[row] == expected.logprobs[row]


def test_nan_under_a_ban_is_still_seen():
    logits = torch.tensor([[1.0, torch.nan, 0.0]])
    assert run(logits, [SamplingRow(params=SamplingParams(), banned=[1])]).bad_rows == (0,)


def test_masked_logits_are_never_drawn():
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 2] = logits[0, 5] = -1e30
    row = SamplingRow(params=SamplingParams(temperature=100.0))
    assert set(chosen_tokens(logits, row, np.linspace(0, 0.999999, 50))) == {2, 5}


@pytest.mark.parametrize("params", [{}, {"top_k": 12}, {"top_p": 0.9, "temperature": 1.7}])
def test_draws_follow_the_distribution(params):
    """Chi-square with fixed seeds, so that it cannot fail by bad luck."""
    logits = make_logits(1, 21, vocab=40, scale=1.0)
    row = SamplingRow(params=SamplingParams(**{"temperature": 1.0, **params}))
    kept, probabilities = oracle(logits[0], row)
    draws = 4000
    points = np.random.default_rng(4).random(draws)
    tokens = chosen_tokens(logits, row, points)
    assert set(tokens) <= set(kept)
    expected = np.asarray(probabilities) * draws
    counts = np.array([tokens.count(token) for token in kept])
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    # Mean + 4 standard deviations of the chi-square distribution.
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_logits_are_not_changed():
    logits = make_logits(2, 9)
    before = logits.clone()
    params = SamplingParams(temperature=0.7, presence_penalty=1.0, logprobs=3)
    run(logits, [SamplingRow(params=params, generated=[1, 2], banned=[5])] * 2)
    assert torch.equal(logits, before)


def test_greedy_batch_is_one_argmax(monkeypatch):
    logits = make_logits(8, 2)
    batch = SamplingBatch.from_rows([SamplingRow(params=SamplingParams())] * 8)

    def forbidden(*_args):
        raise AssertionError("not on the greedy path")

    monkeypatch.setattr("headrace.sampling._choose", forbidden)
    monkeypatch.setattr("headrace.sampling._logprobs", forbidden)
    assert sample(logits, batch).token_ids.tolist() == logits.argmax(-1).tolist()


def test_empty_batch_gives_nothing():
    result = run(torch.empty(0, VOCAB), [])
    assert len(result.token_ids) == 0
    assert result.logprobs == []


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    scale=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 3, 300, 1500]),
    top_p=st.sampled_from([1.0, 0.999, 0.6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.5]),
)
def test_short_list_and_whole_vocabulary_agree(seed, scale, top_k, top_p, min_p):
    """Draws that the best tokens settle, draws that they do not, ties included."""
    logits = (make_logits(1, seed, vocab=4000, scale=scale) * 8).round() / 8
    row = SamplingRow(params=SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    points = np.append((np.arange(12) + 0.5) / 12, math.nextafter(1.0, 0.0))
    short = chosen_tokens(logits, row, points)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.sampling.SHORT_LIST", 4000)
        assert chosen_tokens(logits, row, points) == short
    order = np.argsort(-logits[0].numpy(), kind="stable").tolist()
    ranks = [order.index(token) for token in short]
    assert ranks == sorted(ranks)
    assert ranks[0] < 4000 / 12
