"""Steps that are launched before the tokens of the last one are read give the tokens they gave.

PAG-09 with a real model. On a CPU a launch is the whole step, so nothing is gained there and
`runs_ahead` is off; the tests turn it on, as every part but the device's queue is the same.
"""

import contextlib
import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from headrace import Engine, EngineConfig, SamplingParams
from headrace.bench.drive import drive
from headrace.llm import LLM
from headrace.pipeline import Pipeline
from headrace.runner import Finished
from headrace.text.tokenizer import Tokenizer
from tier_cases import wait_for
from tiny_models import VOCAB, random_prompt

MODELS = ("tiny_qwen3", "tiny_hybrid")
LAYOUTS = ("slots", "paged")
OPTIONS = {"max_batch_size": 4, "max_context": 256, "deterministic": "on", "max_batch_tokens": 64}
PROMPTS = [random_prompt(n, seed=n) for n in (3, 62, 64, 70, 5, 130, 1)]


def words():
    """Return a tokenizer whose tokens are the words t0, t1, ..."""
    vocab = {f"t{i}": i for i in range(VOCAB)}
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="t0")))


@pytest.fixture(scope="module", params=list(itertools.product(MODELS, LAYOUTS)), ids="-".join)
def both(request, tiny):
    """Two engines of one model: the ordinary one, and one that runs ahead."""
    name, layout = request.param
    pages = {"num_pages": 16} if layout == "paged" else {}
    with contextlib.ExitStack() as stack:
        llms = [
            stack.enter_context(LLM(str(tiny(name).path), kv_layout=layout, **OPTIONS, **pages))
            for _ in range(2)
        ]
        for llm in llms:
            llm.engine.tokenizer = words()
        llms[1].engine.runner.runs_ahead = True
        yield llms


def params(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def facts(outputs):
    return [(o.token_ids, o.finish_reason, o.stop_reason, o.text, o.logprobs) for o in outputs]


def same(both, prompts, options, *, ahead=True):
    """Generate on both; outputs must be equal.

    ahead: whether steps must have been run ahead, None where that is a matter of time.
    """
    plain, runs_ahead = both
    expected = plain.generate(prompts, options)
    before = runs_ahead.engine.runner.ahead_steps
    outputs = runs_ahead.generate(prompts, options)
    assert facts(outputs) == facts(expected)
    assert plain.engine.runner.ahead_steps == 0
    steps = runs_ahead.engine.runner.ahead_steps - before
    assert ahead is None or (steps > 0) == ahead, f"{steps} steps were run ahead"
    # The row of the last one to end may still run for nothing when its answer is there.
    wait_for(lambda: runs_ahead.engine.slots.stats()["free"] == OPTIONS["max_batch_size"])
    runs_ahead.loop.scheduler.check()
    return expected


def test_greedy(both):
    outputs = same(both, PROMPTS, params(20))
    assert all(len(set(output.token_ids)) > 3 for output in outputs), "nothing to tell apart"


def test_a_lone_request(both):
    same(both, PROMPTS[:1], params(70))  # over the edge of a page


def test_short_answers(both):
    same(both, PROMPTS[:2], params(1), ahead=False)
    same(both, PROMPTS[:2], params(2), ahead=False)
    same(both, PROMPTS[:2], params(3))
    same(both, PROMPTS, [params(1 + i % 5) for i in range(len(PROMPTS))], ahead=None)


def test_to_the_end_of_the_context(both):
    outputs = same(both, [random_prompt(240), random_prompt(200, seed=1)], params(200))
    assert [len(output.token_ids) for output in outputs] == [16, 56]


def test_stop_tokens(both):
    """Rows end where no length tells; others go on, and more come in."""
    answers = [output.token_ids for output in same(both, PROMPTS, params(20))]
    options = [params(20, stop_token_ids=[ids[3 + i]]) for i, ids in enumerate(answers)]
    outputs = same(both, PROMPTS, options)
    assert [output.finish_reason for output in outputs] == ["stop"] * len(PROMPTS)
    options = [params(20, stop_token_ids=[ids[4]], min_tokens=7) for ids in answers]
    same(both, PROMPTS, options)


def test_stop_strings(both):
    answers = [output.token_ids for output in same(both, PROMPTS, params(20))]
    options = [params(20, stop=f"t{ids[4 + i]}") for i, ids in enumerate(answers)]
    outputs = same(both, PROMPTS, options)
    assert [output.finish_reason for output in outputs] == ["stop"] * len(PROMPTS)


def test_draws_and_log_probabilities(both):
    options = [
        params(15, temperature=0.9, top_p=0.8, seed=i, logprobs=2 if i % 2 else None)
        for i in range(len(PROMPTS))
    ]
    same(both, PROMPTS, options)


def test_penalties_run_step_by_step(both):
    same(both, PROMPTS[:3], params(12, repetition_penalty=1.3), ahead=False)
    same(both, PROMPTS[:3], params(12, presence_penalty=0.5, frequency_penalty=0.2), ahead=False)
    mixed = [params(12), params(12, frequency_penalty=0.5), params(16)]
    same(both, PROMPTS[:3], mixed)  # as soon as the one with a penalty has ended


def test_streams(both):
    plain, runs_ahead = both
    expected = plain.generate([PROMPTS[1]], params(10))[0]
    *chunks, output = runs_ahead.stream(PROMPTS[1], params(10))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert facts([output]) == facts([expected])


def test_requests_that_come_and_go_while_others_decode(both):
    plain, runs_ahead = both
    expected = [plain.generate([p], params(25))[0].token_ids for p in PROMPTS]
    handles = []
    for _ in range(4):
        for i, prompt in enumerate(PROMPTS):
            handles.append((i, runs_ahead.loop.submit(prompt, params(25))))
            if i % 3 == 2:
                *_, (_, victim) = handles[:-1]
                runs_ahead.loop.abort(victim.request_id)
            if i % 2:
                handles[-1][1].future.result(60)
    ended = [(i, handle.future.result(60)) for i, handle in handles]
    reasons = {output.finish_reason for _, output in ended}
    assert reasons <= {"length", "abort"}
    for i, output in ended:
        assert output.token_ids == expected[i][: len(output.token_ids)]
        assert output.finish_reason == "abort" or len(output.token_ids) == 25
    runs_ahead.loop.scheduler.check()


def run(engine, arrivals, specs, *, aborts=(), stops=()):
    """Steps of a scheduler by `Pipeline`: tokens of all requests and what each step was.

    arrivals: step at which each prompt comes. aborts: (step, request) before a step is committed.
    stops: (step, request) ended by a stop string.
    """
    scheduler = engine.make_scheduler()
    pipeline = Pipeline(engine, scheduler)
    step, waiting, steps = 0, list(enumerate(arrivals)), []
    while waiting or scheduler.stats()["running"] + scheduler.stats()["waiting"]:
        while waiting and waiting[0][1] <= step:
            index, _ = waiting.pop(0)
            scheduler.submit(PROMPTS[index], specs[index], request_id=index)
        plan = scheduler.next_plan(0.0)
        if plan is None:
            step += 1
            continue
        for ended in pipeline.run(plan):
            rows = ended.plan.request_ids[ended.plan.sample_rows].tolist()
            for at, victim in aborts:
                if at == step:
                    scheduler.abort(victim)
            flags = np.array([(step, row) in stops for row in rows], np.bool_)
            _, accepted = scheduler.commit(ended.plan, ended.result.token_ids, flags)
            scheduler.check()
            ahead = bool((ended.plan.token_sources >= 0).any())
            steps.append((ahead, accepted.tolist()))
            step += 1
            while waiting and waiting[0][1] <= step:
                index, _ = waiting.pop(0)
                scheduler.submit(PROMPTS[index], specs[index], request_id=index)
    assert pipeline.in_flight == []
    results = [scheduler.take_result(i) for i in range(len(arrivals))]
    scheduler.close()
    assert engine.slots.stats()["free"] == engine.config.max_batch_size
    return results, steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_slot_of_a_row_that_ran_for_nothing_goes_to_the_next_as_new(tiny, name, layout):
    """Two slots, ends nobody can foresee, and requests that wait for them (hybrid: with state)."""
    options = OPTIONS | {"max_batch_size": 2, "kv_layout": layout}
    if layout == "paged":
        options |= {"num_pages": 6, "prefix_cache": False}
    with Engine(EngineConfig(model=str(tiny(name).path), skip_tokenizer=True, **options)) as engine:
        specs = [engine.sampling_spec(params(12)) for _ in PROMPTS]
        alone = run(engine, [0], specs)[0][0].token_ids
        whole, _ = run(engine, [0] * len(PROMPTS), specs)
        assert whole[0].token_ids == alone
        engine.runner.runs_ahead = True
        results, steps = run(
            engine,
            [0, 0, 2, 5, 5, 9, 9],
            specs,
            aborts=[(6, 2), (14, 4)],
            stops={(4, 0), (5, 1), (11, 3), (20, 5)},
        )
        assert any(ahead for ahead, _ in steps)
        lost = [accepted for ahead, accepted in steps if ahead and not all(accepted)]
        assert lost, "no row ran for nothing"
        for one, other in zip(whole, results, strict=True):
            assert other.token_ids == one.token_ids[: len(other.token_ids)]
        assert {r.finish_reason for r in results} >= {"length", "stop"}


def test_the_bench_counts_the_same_steps(tiny):
    options = OPTIONS | {"skip_tokenizer": True}
    with Engine(EngineConfig(model=str(tiny("tiny_qwen3").path), **options)) as engine:
        prompts = [np.array(p, np.int64) for p in PROMPTS[:3]]
        plain = drive(engine, prompts, 9)
        engine.runner.runs_ahead = True
        ahead = drive(engine, prompts, 9)
        assert engine.runner.ahead_steps == 7
    assert ahead.tokens == plain.tokens
    assert len(ahead.steps) == len(plain.steps)
    assert [step.num_rows for step in ahead.steps] == [step.num_rows for step in plain.steps]
    assert sum(step.seconds for step in ahead.steps) <= ahead.wall_s


@pytest.fixture
def llm(tiny):
    with LLM(str(tiny("tiny_qwen3").path), skip_tokenizer=True, **OPTIONS) as llm:
        llm.engine.runner.runs_ahead = True
        yield llm


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_step_that_fails_fails_its_rows_alone(llm, where):
    [expected] = llm.generate([PROMPTS[0]], params(9))
    launch = llm.engine.runner.launch
    count = itertools.count()

    def broken(plan, gates=None, previous=None):
        if next(count) != 4:
            return launch(plan, gates, previous)
        assert previous is not None, "the fifth step is run ahead"
        if where == "launch":
            raise RuntimeError("boom")
        return Failing()

    class Failing:
        feeds_next = False

        def wait(self):
            raise RuntimeError("boom")

    llm.engine.runner.launch = broken
    [failed] = llm.generate([PROMPTS[0]], params(9))
    llm.engine.runner.launch = launch
    assert failed.finish_reason == "error"
    assert "boom" in failed.error
    # What the steps before it gave was delivered.
    assert failed.token_ids == expected.token_ids[:4]
    assert facts(llm.generate([PROMPTS[0]], params(9))) == facts([expected])
    wait_for(lambda: llm.engine.slots.stats()["free"] == 4)
    llm.loop.scheduler.check()


def test_the_step_behind_one_that_fails_changes_nothing(llm):
    [expected] = llm.generate([PROMPTS[0]], params(9))
    launch, count, launched = llm.engine.runner.launch, itertools.count(), []

    class Failing(Finished):
        def wait(self):
            if launched:  # the next step is there already, and has taken its tokens
                raise RuntimeError("boom")
            return super().wait()

    def broken(plan, gates=None, previous=None):
        at = next(count)
        pending = launch(plan, gates, previous)
        if at == 2:
            return Failing(pending.wait(), feeds_next=True)
        if at == 3:
            launched.append(plan)
        return pending

    llm.engine.runner.launch = broken
    [failed] = llm.generate([PROMPTS[0]], params(9))
    llm.engine.runner.launch = launch
    assert len(launched) == 1, "no step behind it"
    assert (failed.finish_reason, failed.token_ids) == ("error", expected.token_ids[:2])
    assert facts(llm.generate([PROMPTS[0]], params(9))) == facts([expected])
    wait_for(lambda: llm.engine.slots.stats()["free"] == 4)
    llm.loop.scheduler.check()


def test_a_bad_row_fails_alone_and_its_next_row_runs_for_nothing(llm):
    expected = llm.generate(PROMPTS[:3], params(12))
    forward = llm.engine.runner.forward
    victim = expected[-1].request_id + 2

    def poisoned(plan, gates=None, tokens=None):
        logits = forward(plan, gates, tokens).clone()
        for row, request in enumerate(plan.request_ids[plan.sample_rows].tolist()):
            if request == victim and plan.starts[plan.sample_rows[row]] == len(PROMPTS[1]) + 4:
                logits[row, 3] = float("nan")
        return logits

    llm.engine.runner.forward = poisoned
    outputs = llm.generate(PROMPTS[:3], params(12))
    llm.engine.runner.forward = forward
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == expected[1].token_ids[:5]
    for i in (0, 2):
        assert outputs[i].token_ids == expected[i].token_ids


def test_a_dead_thread_ends_both_steps(llm):
    class Broken:
        def __init__(self, inner):
            self._inner, self._count = inner, itertools.count()

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def commit(self, *args):
            if next(self._count) == 3:
                raise MemoryError("no more")
            return self._inner.commit(*args)

    scheduler = llm.loop.scheduler
    llm.loop.scheduler = Broken(scheduler)
    output = llm.loop.submit(PROMPTS[0], params(50)).future.result(30)
    assert output.finish_reason == "error"
    assert "no more" in output.error
    scheduler.check()
    wait_for(lambda: llm.engine.slots.stats()["free"] == 4)
