"""The hybrid model against transformers in fp32, and the bits promised in deterministic mode."""

import copy
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loading.build import load_model
from headrace.loading.resolve import resolve_model
from tiny_models import (
    HYBRID_NAMES,
    assert_same_bits,
    build_tiny,
    decode,
    greedy,
    hf_greedy,
    hf_logits,
    make_batch,
    pools,
    prefill,
    random_prompt,
    relative,
    slot_bits,
)

LOGIT_TOLERANCE = 1e-4
MIN_MARGIN = 1e-4
STATE_TOLERANCE = 1e-5  # relative, in the Frobenius norm: fp32 sums in another order
LENGTHS = (1, 2, 3, 4, 63, 64, 65)


@pytest.fixture(scope="module")
def loaded(tiny):
    """Load a tiny model by name, deterministic unless said."""

    def get(name="tiny_hybrid", *, deterministic=True):
        return tiny(name).load(deterministic=deterministic)

    return get


@contextmanager
def rounded_embeddings(hf, seed):
    """The oracle with every embedding moved by one rounding.

    Random layers with a fast decay divide by norms of near zero, and some prompts are ill
    conditioned there: a fixed tolerance would measure that and not the code. What the oracle does
    to one rounding of its own input is the unit instead.
    """
    weight = hf.get_input_embeddings().weight.data
    kept = weight.clone()
    generator = torch.Generator().manual_seed(seed)
    weight.mul_(1 + 2**-23 * torch.randn(weight.shape, generator=generator).sign())
    try:
        yield
    finally:
        weight.copy_(kept)


# --- against transformers


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_logits_equal_transformers(tiny, loaded, name, deterministic):
    model, hf = loaded(name, deterministic=deterministic), tiny(name).hf
    prompts = [random_prompt(length) for length in (*LENGTHS, 129)]
    runs = [(prompt, slot, 0) for slot, prompt in enumerate(prompts)]
    logits = model.forward(make_batch(prefill=runs), *pools(model))
    for row, prompt in zip(logits, prompts, strict=True):
        expected, noise = hf_logits(hf, prompt), 0.0
        for seed in range(3):
            with rounded_embeddings(hf, seed):
                noise = max(noise, float((hf_logits(hf, prompt) - expected).abs().max()))
        bound = max(LOGIT_TOLERANCE, 4 * noise)
        assert bound < 1e-3  # what a wrong norm or gate exceeds by far
        assert (row - expected).abs().max() < bound


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_greedy_tokens_equal_transformers(tmp_path, name, seed):
    """BAT-03: mixed lengths in one batch against single runs of the oracle."""
    tiny_model = build_tiny(name, tmp_path, seed)
    prompts = [random_prompt(length, seed + length) for length in (1, 2, 5, 37, 64, 65, 100)]
    tokens, _ = greedy(tiny_model.load(), prompts, steps=32)
    for prompt, out in zip(prompts, tokens, strict=True):
        expected, margin = hf_greedy(tiny_model.hf, prompt, steps=32)
        assert margin > MIN_MARGIN
        assert out == expected


@torch.inference_mode()
def oracle_caches(hf, prompt, generated):
    """Cache tensors after the prompt and after each token, in our order and layout."""
    cache, steps = None, []
    for run in (prompt, *([token] for token in generated)):
        out = hf(input_ids=torch.tensor([run]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        linear = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
        full = [layer for layer in cache.layers if not hasattr(layer, "recurrent_states")]
        tensors = [layer.keys[0].transpose(0, 1) for layer in full]
        tensors += [layer.values[0].transpose(0, 1) for layer in full]
        tensors += [layer.recurrent_states[0][0].mT for layer in linear]  # theirs: [Hv, dk, dv]
        tensors += [layer.conv_states[0][0, :, -3:] for layer in linear]  # theirs: four inputs
        steps.append([tensor.clone() for tensor in tensors])
    return steps


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_states_equal_the_cache_of_transformers(tiny, loaded, name, length):
    """Prompts shorter than the convolution, one short of a block, a block, and one more."""
    model, hf = loaded(name), tiny(name).hf
    prompt, generated = random_prompt(length), (7, 300, 41)
    expected = oracle_caches(hf, prompt, generated)
    with rounded_embeddings(hf, 0):
        rounded = [oracle_caches(hf, prompt, generated)]
    with rounded_embeddings(hf, 1):
        rounded.append(oracle_caches(hf, prompt, generated))
    caches = pools(model)
    prefill(model, caches, prompt, slot=3)
    for step, token in enumerate((*generated, None)):
        actual = [layer for pool in slot_bits(caches, 3, length + step) for layer in pool]
        for index, (ours, theirs) in enumerate(zip(actual, expected[step], strict=True)):
            noise = max(relative(shifted[step][index], theirs) for shifted in rounded)
            bound = max(STATE_TOLERANCE, 4 * noise)
            assert bound < 1e-3
            assert relative(ours, theirs) < bound
        if token is not None:
            decode(model, caches, [(token, 3, length + step)])


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(tiny):
    prompt = random_prompt(40)
    hf = tiny("tiny_hybrid").hf
    half = load_model(resolve_model(tiny("tiny_hybrid").path), dtype="bfloat16").model
    caches = pools(half)
    logits = prefill(half, caches, prompt, 0)
    exact = hf_logits(hf, prompt)
    theirs = hf_logits(copy.deepcopy(hf).to(torch.bfloat16), prompt).float()
    assert caches[1].recurrent.dtype == torch.float32
    assert caches[1].conv.dtype == torch.bfloat16
    # Rounding noise of two paths is alike in size, not in value; 1.5 covers its spread.
    assert (logits - exact).norm() < 1.5 * (theirs - exact).norm()


# --- bits


@pytest.mark.parametrize("cut", [64, 128, 192])
@pytest.mark.parametrize("name", HYBRID_NAMES)
def test_a_cut_at_a_multiple_of_64_changes_no_bit(loaded, name, cut):
    """PFX-03."""
    model = loaded(name)
    prompt = random_prompt(230)
    whole, parts = pools(model), pools(model)
    expected = prefill(model, whole, prompt, 0)
    logits = prefill(model, parts, prompt, 2, cuts=range(cut, len(prompt), cut))
    assert torch.equal(logits, expected)
    assert_same_bits(slot_bits(parts, 2, 230), slot_bits(whole, 0, 230))


def test_a_cut_elsewhere_is_close(loaded):
    model = loaded(deterministic=False)
    prompt = random_prompt(230)
    whole, parts = pools(model), pools(model)
    expected = prefill(model, whole, prompt, 0)
    logits = prefill(model, parts, prompt, 0, cuts=(100, 101))
    torch.testing.assert_close(logits, expected, rtol=0, atol=5e-4)
    for one, other in zip(slot_bits(parts, 0, 230), slot_bits(whole, 0, 230), strict=True):
        assert relative(one, other) < STATE_TOLERANCE


REQUESTS = [(random_prompt(length, 50), steps) for length, steps in
            ((1, 3), (2, 8), (3, 1), (64, 5), (65, 4), (130, 2), (196, 6), (255, 3))]  # fmt: skip


@pytest.fixture(scope="module")
def solo(loaded):
    """Per request: logits of every sampled token, and its slot at the end, run all alone."""
    model, runs = loaded(), []
    for prompt, steps in REQUESTS:
        caches = pools(model, slots=1)
        history, tokens = [prefill(model, caches, prompt, 0)], []
        for step in range(steps):
            tokens.append(int(history[-1].argmax()))
            history.append(decode(model, caches, [(tokens[-1], 0, len(prompt) + step)])[0])
        runs.append((history, tokens, slot_bits(caches, 0, len(prompt) + steps)))
    return runs


@settings(max_examples=12)
@given(data=st.data())
def test_company_cuts_and_order_change_no_bit(loaded, solo, data):
    """BAT-01, BAT-03, BAT-04, PFX-03: any mix of prefills and decode rows, any slots, B = 1..8."""
    model = loaded()
    caches = pools(model)
    chosen = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    slot_of = dict(zip(chosen, data.draw(st.permutations(range(8))), strict=False))
    done = dict.fromkeys(chosen, 0)
    history = {index: [] for index in chosen}
    waiting = list(chosen)
    while waiting:
        rows = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        decodes, prefills = [], []
        for index in rows:
            prompt, tokens = REQUESTS[index][0], solo[index][1]
            start = done[index]
            if start < len(prompt):
                blocks = data.draw(st.integers(1, 4))
                end = min(len(prompt), start + 64 * blocks)
                prefills.append((index, (prompt[start:end], slot_of[index], start)))
                done[index] = end
            else:
                token = tokens[start - len(prompt)]
                decodes.append((index, (token, slot_of[index], start)))
                done[index] += 1
        batch = make_batch(decode=[row for _, row in decodes], prefill=[run for _, run in prefills])
        logits = model.forward(batch, *caches)
        for (index, _), row in zip(decodes + prefills, logits, strict=True):
            if done[index] >= len(REQUESTS[index][0]):
                history[index].append(row)
        waiting = [i for i in chosen if done[i] < len(REQUESTS[i][0]) + REQUESTS[i][1]]
    for index in chosen:
        assert_same_bits(history[index], solo[index][0])
        assert_same_bits(slot_bits(caches, slot_of[index], done[index]), solo[index][2])
