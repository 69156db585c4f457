"""Real weights: SmolLM2 in fp32 gives exactly the reference tokens (BAT-08, REQ-09).

The reference is transformers, eager attention, batch 1 (tests/fixtures/smollm2_greedy.json).
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import BatchedRequest, Engine, EngineConfig, SamplingParams
from headrace.llm import LLM

FIXTURE = json.loads((Path(__file__).parent / "fixtures/smollm2_greedy.json").read_text())
PROMPTS = [prompt["prompt_ids"] for prompt in FIXTURE["prompts"]]
EXPECTED = [prompt["greedy_ids"] for prompt in FIXTURE["prompts"]]
GREEDY = SamplingParams(max_tokens=64, ignore_eos=True)
OPTIONS = {"max_context": 256, "max_batch_size": 12, "max_batch_tokens": 512}


@pytest.fixture(scope="module", params=["off", "on"])
def llm(request, smollm2_dir):
    before = torch.get_num_threads()
    # As users have it: `make test` gives a process one thread.
    options = OPTIONS | {"num_threads": 2 if request.param == "off" else None}
    with LLM(str(smollm2_dir), deterministic=request.param, **options) as llm:
        yield llm
    torch.set_num_threads(before)


def test_each_prompt_alone(llm):
    for prompt, expected in zip(PROMPTS, EXPECTED, strict=True):
        [output] = llm.generate([prompt], GREEDY)
        assert output.token_ids == expected


def test_all_prompts_in_one_batch(llm):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == EXPECTED
    assert all(output.finish_reason == "length" for output in outputs)


def run_plans(engine, scheduler, arrivals, aborts=()):
    """Drive the scheduler by hand: `arrivals` and `aborts` are (step, index)."""
    spec = engine.sampling_spec(GREEDY)
    arrivals, aborts = sorted(arrivals), sorted(aborts)
    step = 0
    while True:
        while arrivals and arrivals[0][0] <= step:
            index = arrivals.pop(0)[1]
            scheduler.submit(PROMPTS[index], spec, request_id=index)
        while aborts and aborts[0][0] <= step:
            scheduler.abort(aborts.pop(0)[1])
        plan = scheduler.next_plan(0)
        step += 1
        if plan is None:
            if not arrivals:
                break
            continue
        scheduler.commit(plan, engine.execute(plan).token_ids)
        scheduler.check()


@pytest.fixture(scope="module")
def engine(smollm2_dir):
    with Engine(EngineConfig(model=str(smollm2_dir), **OPTIONS)) as engine:
        yield engine


def test_arriving_at_random_steps(engine):
    rng = random.Random(1)
    scheduler = engine.make_scheduler()
    run_plans(engine, scheduler, [(rng.randrange(40), i) for i in range(len(PROMPTS))])
    assert [scheduler.take_result(i).token_ids for i in range(len(PROMPTS))] == EXPECTED


@pytest.mark.parametrize("budget", [64, 128])
def test_small_prefill_budgets(smollm2_dir, budget):
    """512 is the budget of all other tests here. Prompts are joined, to be cut several times."""
    options = OPTIONS | {"max_batch_tokens": budget, "max_batch_size": 4}
    with LLM(str(smollm2_dir), **options) as llm:
        outputs = llm.generate(PROMPTS[:6], GREEDY)
        assert [output.token_ids for output in outputs] == EXPECTED[:6]
        assert llm.loop.scheduler.stats()["steps"] > 64


def test_neighbours_aborted_midway_change_nothing(engine):
    """SLT-01: aborted rows free their slots, the others are equal to a solo run."""
    scheduler = engine.make_scheduler()
    doomed = {1: 3, 4: 10, 6: 30}
    run_plans(
        engine,
        scheduler,
        [(0, i) for i in range(len(PROMPTS))],
        [(step, i) for i, step in doomed.items()],
    )
    for i in range(len(PROMPTS)):
        result = scheduler.take_result(i)
        if i in doomed:
            assert result.finish_reason == "abort"
            assert result.token_ids == EXPECTED[i][: len(result.token_ids)]
        else:
            assert result.token_ids == EXPECTED[i]
    assert engine.slots.stats()["free"] == OPTIONS["max_batch_size"]


def test_low_level_batch_api(engine):
    requests = [
        BatchedRequest(request_id=i, prompt_tokens=PROMPTS[i], sampling=GREEDY) for i in range(4)
    ]
    for request in requests:
        engine.allocate_slot(request.request_id)
    engine.batch_prefill(requests)
    while not all(request.finished for request in requests):
        engine.batch_decode_step([request for request in requests if not request.finished])
    assert [request.generated_tokens for request in requests] == EXPECTED[:4]
    for request in requests:
        engine.free_slot(request.request_id)


def test_chat_and_text_prompts(llm):
    chat = FIXTURE["prompts"][0]
    assert chat["kind"] == "chat"
    [output] = llm.generate([chat["text"]], GREEDY)
    assert output.prompt_token_ids == chat["prompt_ids"]
    assert output.token_ids == chat["greedy_ids"]
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_a_text_answer_is_the_decoded_tokens(llm):
    [output] = llm.generate(["Water is"], SamplingParams(max_tokens=12, ignore_eos=True))
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert np.isfinite(output.metrics.e2e_s)
