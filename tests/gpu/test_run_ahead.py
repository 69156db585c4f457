"""Decode steps that are queued before the tokens of the last one are read, on a GPU.

The answers are those of the same engine with `runs_ahead` off; `ahead_steps` tells that it was
used.
"""

import numpy as np
import pytest
import torch

from headrace import LLM, BatchedRequest, Engine, EngineConfig, SamplingParams
from headrace.backends.cuda import fused
from headrace.bench.drive import drive
from headrace.pipeline import Pipeline
from tiny_models import random_prompt

OPTIONS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_batch_size": 8,
    "max_context": 512,
    "skip_tokenizer": True,
    "slot_widths": 1,
}
PROMPTS = [random_prompt(3 + 37 * i % 90, seed=i) for i in range(11)]
STEPS = 70  # over the edge of a page


def params(max_tokens=STEPS, **options):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def facts(outputs):
    return [(o.token_ids, o.finish_reason, o.logprobs) for o in outputs]


def on_and_off(llm, prompts, options, *, ahead=True):
    """Generate with and without; both must agree. Returns the outputs."""
    runner = llm.engine.runner
    runner.runs_ahead = False
    before = runner.ahead_steps
    expected = llm.generate(prompts, options)
    assert runner.ahead_steps == before
    runner.runs_ahead = True
    outputs = llm.generate(prompts, options)
    assert (runner.ahead_steps > before) == ahead
    assert facts(outputs) == facts(expected)
    llm.loop.scheduler.check()
    return expected


@pytest.fixture(scope="module", params=["slots", "paged"])
def llm(request, tiny):
    model = str(tiny("tiny_qwen3").path)
    with LLM(model, kv_layout=request.param, **OPTIONS) as llm:
        assert llm.engine.runner.runs_ahead
        yield llm


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
def test_greedy(llm, count):
    on_and_off(llm, PROMPTS[:count], params())


def test_hybrid(tiny):
    with LLM(str(tiny("tiny_hybrid_27").path), **OPTIONS) as llm:
        answers = [output.token_ids for output in on_and_off(llm, PROMPTS, params(20))]
        stops = [params(20, stop_token_ids=[ids[3 + i]]) for i, ids in enumerate(answers)]
        on_and_off(llm, PROMPTS, stops)


def test_rows_that_end_where_no_length_tells(llm):
    answers = [output.token_ids for output in on_and_off(llm, PROMPTS, params())]
    stops = [params(stop_token_ids=[ids[5 + 3 * i]]) for i, ids in enumerate(answers)]
    outputs = on_and_off(llm, PROMPTS, stops)
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_draws_are_run_ahead_and_log_probabilities_are_not(llm):
    draws = [params(20, temperature=1.0, top_p=0.9, seed=i) for i in range(len(PROMPTS))]
    on_and_off(llm, PROMPTS, draws)
    banned = [params(20, min_tokens=9, stop_token_ids=[7]) for _ in PROMPTS]
    on_and_off(llm, PROMPTS, banned)
    on_and_off(llm, PROMPTS, params(20, logprobs=2), ahead=False)
    on_and_off(llm, PROMPTS, params(20, frequency_penalty=0.3), ahead=False)


def test_a_bad_row_fails_alone(llm):
    """Its token is -1, which the step behind it is fed with."""
    engine = llm.engine
    expected = llm.generate(PROMPTS[:3], params(30))
    launch = engine.runner.launch
    poisoned = []

    def launch_poisoned(plan, gates=None, previous=None):
        ids = plan.request_ids.tolist()
        at = ids.index(victim) if victim in ids else None
        if at is not None and previous is not None and plan.starts[at] == len(PROMPTS[1]) + 9:
            poisoned.append(int(plan.block_tables[plan.table_offsets[at]]))
            for tensor in engine.kv.pool.tensors.values():
                tensor[:, poisoned[0]] = torch.nan
        return launch(plan, gates, previous)

    victim = expected[-1].request_id + 2
    engine.runner.launch = launch_poisoned
    try:
        outputs = llm.generate(PROMPTS[:3], params(30))
    finally:
        engine.runner.launch = launch
    assert len(poisoned) == 1
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == expected[1].token_ids[: len(outputs[1].token_ids)]
    for i in (0, 2):
        assert outputs[i].token_ids == expected[i].token_ids
    for tensor in engine.kv.pool.tensors.values():
        tensor[:, poisoned[0]] = 0
    assert facts(llm.generate(PROMPTS[:3], params(30))) == facts(expected)


def test_a_step_of_somebody_else_in_between_changes_nothing(tiny):
    """The batch API writes to the device's tokens too: the input then comes from the host."""
    with Engine(EngineConfig(model=str(tiny("tiny_qwen3").path), **OPTIONS)) as engine:
        prompts = [np.array(prompt, np.int64) for prompt in PROMPTS[:2]]
        expected = drive(engine, prompts, 20).tokens
        other = BatchedRequest(request_id=1, prompt_tokens=PROMPTS[5], sampling=params(300))
        engine.allocate_slot(1)
        engine.batch_prefill([other])
        scheduler = engine.make_scheduler()
        ids = [scheduler.submit(p, engine.sampling_spec(params(20))) for p in PROMPTS[:2]]
        pipeline = Pipeline(engine, scheduler)
        launch = engine.runner.launch

        def beside(plan, gates=None, previous=None):
            if previous is not None:
                engine.batch_decode_step([other])
            return launch(plan, gates, previous)

        engine.runner.launch = beside
        while (plan := scheduler.next_plan(0.0)) is not None:
            for ended in pipeline.run(plan):
                scheduler.commit(ended.plan, ended.result.token_ids)
        assert engine.runner.ahead_steps > 15
        assert [scheduler.take_result(i).token_ids for i in ids] == expected
        scheduler.close()


def test_steps_are_timed_one_by_one(tiny):
    """Times of the device add up to no more than the time of the run."""
    with Engine(EngineConfig(model=str(tiny("tiny_qwen3").path), **OPTIONS)) as engine:
        prompts = [np.array(prompt, np.int64) for prompt in PROMPTS[:4]]
        drive(engine, prompts, 5)
        before = engine.runner.ahead_steps
        run = drive(engine, prompts, 100)
        assert engine.runner.ahead_steps - before == 98
        times = run.device_ms(4)
        assert len(times) == 99
        assert all(time > 0 for time in times)
        assert sum(times) < run.wall_s * 1e3


def test_the_queue_holds_the_next_step_before_the_tokens_are_read(tiny):
    """A launch beside a busy device returns at once; a wait is for its own step alone."""
    with Engine(EngineConfig(model=str(tiny("tiny_qwen3").path), **OPTIONS)) as engine:
        [expected] = drive(engine, [np.array(PROMPTS[0], np.int64)], 4).tokens
        scheduler = engine.make_scheduler()
        scheduler.submit(PROMPTS[0], engine.sampling_spec(params(4)), request_id=0)
        first = scheduler.next_plan(0.0)
        scheduler.commit(first, engine.launch(first).wait().token_ids)
        busy = torch.cuda.Event()
        older = scheduler.next_plan(0.0)
        pending = engine.launch(older)
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        busy.record()
        newer = scheduler.plan_ahead(older)
        ahead = engine.launch(newer, pending)
        scheduler.commit(older, pending.wait().token_ids)
        assert not busy.query(), "the host has waited for the device"
        scheduler.commit(newer, ahead.wait().token_ids)
        last = scheduler.next_plan(0.0)
        scheduler.commit(last, engine.launch(last).wait().token_ids)
        assert scheduler.take_result(0).token_ids == expected
        scheduler.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_embed_reads_the_tokens_it_is_fed_with(dtype):
    table = torch.randn(50, 64, device="cuda", dtype=dtype)
    ids = torch.tensor([3, 0, 0, 9, 0], device="cuda")
    sources = torch.tensor([-1, 2, 0, -1, 1], device="cuda", dtype=torch.int32)
    tokens = torch.tensor([7, -1, 49], device="cuda", dtype=torch.int32)
    out = fused.embed(table, ids, sources=sources, tokens=tokens)
    assert torch.equal(out[:4], table[[3, 49, 7, 9]])
    assert not out[4].any()
    assert torch.equal(fused.embed(table, ids), table[ids])
