"""The forward pass against transformers in fp32, and the bits promised in deterministic mode."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache, kv_layout
from headrace.kv.formats import KVFormat
from headrace.kv.memory import available_bytes
from headrace.layers import rope
from headrace.loading.build import load_model
from headrace.loading.resolve import resolve_model
from headrace.models.batch import ForwardBatch, PrefillSegment
from headrace.models.config import ModelConfig
from headrace.models.known import KNOWN_CONFIGS
from tiny_models import (
    TINY_NAMES,
    greedy,
    hf_greedy,
    hf_logits,
    load,
    make_batch,
    make_kv,
    random_prompt,
)

# fp32 sums in another order differ by about 5e-7; 1e-4 leaves room for four layers of them.
LOGIT_TOLERANCE = 1e-4
# Far above path differences, so equal greedy tokens are no accident.
MIN_MARGIN = 1e-4


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_equal_transformers(tiny, name, deterministic):
    model = tiny(name).load(deterministic=deterministic)
    prompts = [random_prompt(length) for length in (1, 3, 63, 64, 65, 129)]
    runs = [(prompt, slot, 0) for slot, prompt in enumerate(prompts)]
    logits = model.forward(make_batch(prefill=runs), make_kv(model))
    assert logits.dtype == torch.float32
    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(
            row, hf_logits(tiny(name).hf, prompt), rtol=0, atol=LOGIT_TOLERANCE
        )


@pytest.mark.parametrize("name", TINY_NAMES)
def test_greedy_tokens_equal_transformers(tiny, name):
    prompts = [random_prompt(length, seed) for seed, length in enumerate((5, 37, 64, 100))]
    tokens, _ = greedy(tiny(name).load(), prompts, steps=32)
    for prompt, out in zip(prompts, tokens, strict=True):
        expected, margin = hf_greedy(tiny(name).hf, prompt, steps=32)
        assert margin > MIN_MARGIN
        assert out == expected


@pytest.mark.parametrize("cut", [64, 128, 192])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3", "tiny_qwen3_d128"])
def test_a_cut_at_a_multiple_of_64_changes_no_bit(tiny, name, cut):
    """PFX-03."""
    model = tiny(name).load(deterministic=True)
    prompt = random_prompt(230)
    whole, cut_up = make_kv(model), make_kv(model)
    expected = model.forward(make_batch(prefill=[(prompt, 0, 0)]), whole)
    for start in range(0, len(prompt), cut):
        run = prompt[start : start + cut]
        # Another slot and a neighbour, so that place and company are seen not to matter.
        logits = model.forward(
            make_batch(prefill=[(random_prompt(7, start), 5, 0), (run, 2, start)]), cut_up
        )
    assert torch.equal(logits[1], expected[0])
    assert torch.equal(cut_up.k[:, 2, : len(prompt)], whole.k[:, 0, : len(prompt)])
    assert torch.equal(cut_up.v[:, 2, : len(prompt)], whole.v[:, 0, : len(prompt)])


def test_a_cut_elsewhere_is_close(tiny_qwen3):
    model = tiny_qwen3.load()
    prompt = random_prompt(230)
    expected = model.forward(make_batch(prefill=[(prompt, 0, 0)]), make_kv(model))
    kv = make_kv(model)
    for start, end in ((0, 100), (100, 101), (101, 230)):
        logits = model.forward(make_batch(prefill=[(prompt[start:end], 0, start)]), kv)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3"])
def test_company_and_row_position_change_no_bit(tiny, name):
    """BAT-01."""
    model = tiny(name).load(deterministic=True)
    prompt = random_prompt(70)
    kv = make_kv(model)
    model.forward(make_batch(prefill=[(prompt, 0, 0)]), kv)
    alone = model.forward(make_batch(decode=[(11, 0, 70)]), kv)[0]
    for slot in range(1, 8):
        model.forward(make_batch(prefill=[(random_prompt(9 * slot, slot), slot, 0)]), kv)
    for width in range(1, 9):
        neighbours = [(7 * slot, slot, 9 * slot) for slot in range(1, width)]
        for place in range(width):
            rows = [*neighbours[:place], (11, 0, 70), *neighbours[place:]]
            assert torch.equal(model.forward(make_batch(decode=rows), kv)[place], alone)


@pytest.mark.parametrize("deterministic", [False, True])
def test_decode_rows_and_prefills_share_one_forward(tiny_qwen3, deterministic):
    """BAT-04."""
    model = tiny_qwen3.load(deterministic=deterministic)
    prompts = [random_prompt(length) for length in (20, 75, 130, 1, 64)]
    kv = make_kv(model)
    model.forward(make_batch(prefill=[(prompts[0], 6, 0), (prompts[1], 1, 0)]), kv)
    model.forward(make_batch(prefill=[(prompts[2][:64], 4, 0)]), kv)
    mixed = model.forward(
        make_batch(
            decode=[(3, 6, 20), (4, 1, 75)],
            prefill=[(prompts[2][64:], 4, 64), (prompts[3], 0, 0), (prompts[4], 2, 0)],
        ),
        kv,
    )
    texts = [[*prompts[0], 3], [*prompts[1], 4], prompts[2], prompts[3], prompts[4]]
    for row, text in zip(mixed, texts, strict=True):
        torch.testing.assert_close(
            row, hf_logits(tiny_qwen3.hf, text), rtol=0, atol=LOGIT_TOLERANCE
        )


def test_a_reused_slot_full_of_nan_gives_the_bits_of_a_fresh_one(tiny_qwen3):
    """PFX-06."""
    model = tiny_qwen3.load()
    prompt = random_prompt(90)
    fresh = KVCache(model.config, pages=1, page_tokens=128, dtype=torch.float32)
    fresh.k.zero_()
    fresh.v.zero_()
    poisoned = make_kv(model, slots=1, max_context=128)
    for batch in (make_batch(prefill=[(prompt, 0, 0)]), make_batch(decode=[(5, 0, 90)])):
        logits = model.forward(batch, poisoned)
        assert torch.isfinite(logits).all()
        assert torch.equal(logits, model.forward(batch, fresh))


def test_only_the_named_slot_is_written(tiny_llama):
    model = tiny_llama.load()
    kv = make_kv(model, slots=3, max_context=64)
    model.forward(make_batch(prefill=[(random_prompt(10), 1, 0)]), kv)
    assert torch.isfinite(kv.k[:, 1, :10]).all()
    assert kv.k[:, 1, 10:].isnan().all()
    assert kv.v[:, [0, 2]].isnan().all()


def test_a_step_that_samples_nothing_gives_no_rows(tiny_qwen3):
    for deterministic in (False, True):
        model = tiny_qwen3.load(deterministic=deterministic)
        batch = ForwardBatch(
            token_ids=torch.tensor([1, 2]),
            positions=torch.tensor([0, 1]),
            token_pages=torch.tensor([0, 0]),
            token_offsets=torch.tensor([0, 1]),
            num_decode=0,
            tables=[],
            decode_lengths=[],
            state_slots=torch.tensor([], dtype=torch.int64),
            segments=[PrefillSegment(table=[0], state_slot=0, start=0, length=2, offset=0)],
            sample_index=torch.tensor([], dtype=torch.int64),
        )
        assert model.forward(batch, make_kv(model)).shape == (0, model.config.vocab_size)


def test_batch_must_cover_its_tokens():
    good = make_batch(decode=[(1, 0, 0), (2, 1, 0)], prefill=[([3, 4], 2, 0)])
    parts = {field.name: getattr(good, field.name) for field in dataclasses.fields(good)}
    for changes, words in (
        ({"segments": []}, "cover 2 of 4"),
        ({"token_pages": torch.tensor([0])}, "4 token_ids and 1 token_pages"),
        ({"tables": [[0]]}, "2 decode rows and 1 tables"),
        ({"state_slots": torch.tensor([0])}, "2 decode rows and 1 state_slots"),
    ):
        with pytest.raises(ValueError, match=words):
            ForwardBatch(**(parts | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_linear_is_row_invariant(dtype):
    backend = TorchBackend("cpu", deterministic=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((200, 576), generator=generator).to(dtype)
    weight = torch.randn((960, 576), generator=generator).to(dtype)
    packed = backend.pack_linear(weight)
    whole = backend.linear(x, packed)
    for rows in (1, 2, 3, 8, 15, 16, 17, 64, 129):
        assert torch.equal(backend.linear(x[7 : 7 + rows], packed), whole[7 : 7 + rows])
    exact = F.linear(x.double(), weight.double())
    bound = 2e-3 if dtype == torch.float32 else 1.0  # one rounding of values near 100
    assert (whole.double() - exact).abs().max() < bound


def test_rms_norm_and_silu_are_row_invariant_and_right():
    backend = TorchBackend("cpu", deterministic=True)
    x = torch.randn((301, 2 * 1000), generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 1.5, 2000)
    normed, gated = backend.rms_norm(x, weight, 1e-5), backend.silu_mul(x)
    for row in (0, 1, 150, 299, 300):
        one = x[row : row + 1]
        assert torch.equal(backend.rms_norm(one, weight, 1e-5)[0], normed[row])
        assert torch.equal(backend.silu_mul(one)[0], gated[row])
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
    gate, up = wide.chunk(2, dim=-1)
    torch.testing.assert_close(gated.double(), F.silu(gate) * up, rtol=1e-5, atol=1e-6)


def test_rope_rotates_pairs_half_a_head_apart():
    table = rope.RotaryEmbedding(8, 1e4, 32, "cpu")
    x = torch.randn((1, 1, 8), generator=torch.Generator().manual_seed(0))
    out = rope.apply(x, *table.at(torch.tensor([5])))[0, 0].double()
    for j in range(4):
        angle = torch.tensor(5.0 * 1e4 ** (-2 * j / 8), dtype=torch.float64)
        a, b = x[0, 0, j].double(), x[0, 0, j + 4].double()
        assert out[j] == pytest.approx(float(a * angle.cos() - b * angle.sin()), abs=1e-6)
        assert out[j + 4] == pytest.approx(float(b * angle.cos() + a * angle.sin()), abs=1e-6)


def test_bf16_is_as_near_to_fp32_as_transformers_bf16(tiny_llama):
    prompt = random_prompt(40)
    source = resolve_model(tiny_llama.path)
    half = load_model(source, dtype="bfloat16").model
    logits = half.forward(make_batch(prefill=[(prompt, 0, 0)]), make_kv(half))[0]
    exact = hf_logits(tiny_llama.hf, prompt)
    theirs = hf_logits(copy.deepcopy(tiny_llama.hf).to(torch.bfloat16), prompt).float()
    assert logits.dtype == torch.float32
    # Rounding noise of two paths is alike in size, not in value; 1.5 covers its spread.
    assert (logits - exact).norm() < 1.5 * (theirs - exact).norm()


# Published counts, in units of the last digit given in the design notes.
@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("smollm2-135m", 0.1345, 23_040),
        ("qwen3-0.6b", 0.596, 114_688),
        ("qwen3-1.7b", 1.721, 114_688),
        ("qwen3-4b", 4.022, 147_456),
        ("qwen3-8b", 8.191, 147_456),
        ("qwen3-14b", 14.77, 163_840),
        ("qwen3-32b", 32.76, 262_144),
    ],
)
def test_known_configurations_have_their_published_sizes(name, billions, kv_bytes):
    config = KNOWN_CONFIGS[name]
    assert config.parameter_count / 1e9 == pytest.approx(billions, rel=1e-3)
    assert config.kv_bytes_per_token(2) == kv_bytes


@given(
    slots=st.integers(1, 256),
    max_context=st.integers(1, 2**20),
    layers=st.integers(1, 128),
    heads=st.integers(1, 64),
    head_dim=st.integers(1, 128),
)
def test_pool_bytes_are_exact_integers(slots, max_context, layers, heads, head_dim):
    """INT-02."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=2 * head_dim,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position=8,
        tie_word_embeddings=True,
        qk_norm=False,
    )
    expected = 2 * layers * slots * max_context * heads * 2 * head_dim * 4
    layout = kv_layout(config, KVFormat(name="auto", model_dtype=torch.float32))
    assert layout.pool_bytes(slots, max_context) == expected


def test_a_pool_larger_than_memory_is_refused_before_allocation():
    config = KNOWN_CONFIGS["qwen3-32b"]
    assert available_bytes(torch.device("cpu")) > 0
    for slots, max_context, message in (
        (4096, 2**20, "lower max_batch_size or max_context"),
        (2**25, 2**40, "63 bits|64-bit|bytes"),
        (0, 16, "positive"),
        (1, -1, "positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            KVCache(config, pages=slots, page_tokens=max_context, dtype=torch.float32)


def test_smollm2_greedy_ids_equal_the_fixture(smollm2_dir, smollm2_fixture):
    """BAT-08, three prompts; the engine tests run all of them."""
    cases = smollm2_fixture["prompts"][:3]
    steps = 24
    tokens, _ = greedy(load(smollm2_dir), [case["prompt_ids"] for case in cases], steps)
    for case, out in zip(cases, tokens, strict=True):
        assert out == case["greedy_ids"][:steps]
