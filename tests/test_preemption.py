"""A preempted request ends with the tokens and log-probabilities of an undisturbed run.

PRE-01, PRE-02, PRE-03, PRE-05, PRE-06 on the CPU.
"""

import pytest

from headrace import SamplingParams
from headrace.llm import LLM
from tier_cases import MODELS, PAGE, Plain, params, prompt, run, settle

PROMPTS = [prompt(2 * PAGE + 7), prompt(40, 2), prompt(PAGE, 3)]
OPTIONS = params(9)


@pytest.fixture(scope="module")
def plain(tiny):
    made = {}

    def get(model):
        if model not in made:
            made[model] = Plain(tiny(model).path)
        return made[model]

    yield get
    for one in made.values():
        one.llm.close()


@pytest.mark.parametrize("every", range(1, 8))
@pytest.mark.parametrize("preemption", ["recompute", "park"])
@pytest.mark.parametrize("model", MODELS)
def test_preempted_every_few_steps(plain, model, preemption, every, monkeypatch):
    """PRE-01, PRE-06: no token is lost, none comes twice; each log-probability is its token's."""
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", str(every))
    one = plain(model)
    options = {"preemption": preemption, "max_batch_size": 2, "max_batch_tokens": 64}
    with one.tiered(host_pages=40, num_pages=10, **options) as llm:
        outputs = run(llm, one, PROMPTS, OPTIONS)
        settle(llm)
        stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["generated_tokens"] == sum(len(o.token_ids) for o in outputs)  # PRE-05
    if preemption == "park":
        assert stats["memory"]["resumed"] > 0
    else:
        assert stats["recomputed_tokens"] > 0
    for output in outputs:
        assert [entry.token_id for entry in output.logprobs] == output.token_ids


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("model", MODELS)
def test_slots_are_preempted_too(plain, model, every, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", str(every))
    one = plain(model)
    with one.tiered(host_pages=40, kv_layout="slots", max_batch_size=2) as llm:
        run(llm, one, PROMPTS, OPTIONS)
        assert llm.stats()["preemptions"] > 0
        settle(llm)


@pytest.mark.parametrize("preemption", ["recompute", "park"])
def test_a_pool_too_small_for_all_preempts_the_newest(plain, preemption):
    """Optimistic admission that was wrong: the newest gives way, all end right."""
    one = plain("tiny_qwen3")
    texts = [prompt(50, seed) for seed in range(3)]
    options = {"admission_ratio": 0.05, "preemption": preemption, "max_batch_size": 3}
    with one.tiered(host_pages=30, num_pages=5, **options) as llm:
        outputs = run(llm, one, texts, params(100))
        assert llm.stats()["preemptions"] > 0
        settle(llm)
    assert [len(output.token_ids) for output in outputs] == [100] * 3


def test_sampled_tokens_survive_a_preemption(plain, monkeypatch):
    """Draws are numbered by token, so a replayed token draws nothing."""
    one = plain("tiny_qwen3")
    options = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, logprobs=2)
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", "3")
    with one.tiered(num_pages=10) as llm:
        run(llm, one, PROMPTS, options)
        assert llm.stats()["preemptions"] > 0


def test_a_stream_of_a_preempted_request_has_each_token_once(plain, monkeypatch):
    one = plain("tiny_qwen3")
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", "2")
    with one.tiered(num_pages=10) as llm:
        *chunks, output = llm.stream(PROMPTS[0], OPTIONS)
        streamed = [token for chunk in chunks for token in chunk.token_ids]
        assert streamed == output.token_ids == one.answer(PROMPTS[0], OPTIONS).token_ids
        assert llm.stats()["preemptions"] > 0


def test_smollm2_preempted(smollm2_dir, smollm2_fixture, monkeypatch):
    """The real model: exactly the ids of the fixture."""
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", "3")
    cases = smollm2_fixture["prompts"][:4]
    with LLM(
        str(smollm2_dir),
        max_context=256,
        max_batch_size=4,
        kv_layout="paged",
        num_pages=16,
        host_bytes=256 << 20,
        preemption="park",
    ) as llm:
        outputs = llm.generate(
            [case["prompt_ids"] for case in cases], SamplingParams(max_tokens=12, ignore_eos=True)
        )
        assert llm.stats()["preemptions"] > 0
        for output, case in zip(outputs, cases, strict=True):
            assert output.token_ids == case["greedy_ids"][:12], output.error
