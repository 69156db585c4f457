"""Engine, step loop and LLM on a tiny random model: limits, faults, streams, clean-up."""

import gc
import threading
import time
import weakref

import pytest

from headrace import (
    BatchedRequest,
    ConfigError,
    DuplicateRequest,
    Engine,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    OutOfPages,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    UnknownRequest,
)
from headrace.llm import LLM
from headrace.request import RequestOutput

CONTEXT = 256
FOREVER = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tiny_qwen3):
    return str(tiny_qwen3.path)


@pytest.fixture
def llm(model_dir):
    with LLM(model_dir, max_batch_size=4, max_context=CONTEXT, max_batch_tokens=64) as llm:
        yield llm


@pytest.fixture
def engine(model_dir):
    config = EngineConfig(model=model_dir, max_batch_size=4, max_context=CONTEXT)
    with Engine(config) as engine:
        yield engine


def break_forward(llm, when):
    """Make the forward raise for plans that `when` selects."""
    forward = llm.engine.runner.forward

    def broken(plan, gates=None):
        if when(plan):
            raise RuntimeError("boom")
        return forward(plan, gates)

    llm.engine.runner.forward = broken


def test_a_forward_that_raises_fails_only_its_rows(llm):
    """SCH-04: a request that was not in the step goes on, and so do later ones."""
    [expected] = llm.generate([[1, 2, 3]], SHORT)
    [long] = llm.generate([[5]], FOREVER)
    break_forward(llm, lambda plan: 7 in plan.token_ids and plan.num_decode == 0)
    [failed] = llm.generate([[7]], SHORT)
    assert failed.finish_reason == "error"
    assert "boom" in failed.error
    broken = llm.engine.runner.forward
    waiting = [llm.loop.submit([5], FOREVER) for _ in range(4)]  # takes every slot
    behind = llm.loop.submit([1, 2, 3], SHORT)
    llm.engine.runner.forward = broken
    for handle in waiting:
        assert handle.future.result(60).token_ids == long.token_ids
    assert behind.future.result(60).token_ids == expected.token_ids
    assert llm.engine.slots.stats()["free"] == 4


def test_a_failing_step_leaves_waiting_requests_alone(llm):
    """SCH-04: all four slots fail in one step; what waits behind them is served."""
    [expected] = llm.generate([[1, 2, 3]], SHORT)
    gate = threading.Event()
    forward = llm.engine.runner.forward

    def fail_once(plan, gates=None):
        gate.wait(10)
        llm.engine.runner.forward = forward
        raise RuntimeError("boom")

    llm.engine.runner.forward = fail_once
    doomed = llm.loop.submit([9], SHORT)
    while llm.loop.scheduler.stats()["running"] == 0:
        gate.wait(0.001)
    behind = llm.loop.submit([1, 2, 3], SHORT)
    gate.set()
    assert doomed.future.result(30).finish_reason == "error"
    assert behind.future.result(30).token_ids == expected.token_ids


def test_a_future_cannot_be_cancelled_and_takes_nobody_down(llm):
    handle = llm.loop.submit([1, 2], FOREVER)
    assert not handle.future.cancel()
    assert llm.loop.abort(handle.request_id)
    assert handle.future.result(10).finish_reason == "abort"
    assert llm.generate([[1]], SHORT)[0].finish_reason == "length"


def test_logits_that_are_not_finite_fail_only_their_row(llm):
    clean = llm.generate([[i, 9] for i in range(3)], SHORT)
    forward = llm.engine.runner.forward

    def poisoned(plan, gates=None):
        logits = forward(plan, gates).clone()
        rows = plan.request_ids[plan.sample_rows].tolist()
        for row, request in enumerate(rows):
            if request == victim and plan.num_decode:
                logits[row, 3] = float("nan")
        return logits

    victim = clean[-1].request_id + 2
    llm.engine.runner.forward = poisoned
    outputs = llm.generate([[i, 9] for i in range(3)], SHORT)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[0].token_ids == clean[0].token_ids
    assert outputs[2].token_ids == clean[2].token_ids
    assert "finite" in outputs[1].error


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidRequest),
        ([512], InvalidRequest),
        ([-1], InvalidRequest),
        ([1.5], InvalidRequest),
        ([1] * CONTEXT, PromptTooLong),
        (None, InvalidRequest),
    ],
)
def test_a_bad_prompt_leaves_everything_else_running(llm, prompt, error):
    """REQ-02, REQ-05."""
    running = llm.loop.submit([1, 2], FOREVER)
    with pytest.raises(error):
        llm.generate([[3], prompt], SHORT)
    assert running.future.result(30).finish_reason == "length"
    assert llm.loop.scheduler.stats()["running"] == 0


def test_text_without_a_tokenizer_is_refused(model_dir):
    with LLM(model_dir, skip_tokenizer=True, max_context=64) as llm:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.generate("hello")
        with pytest.raises(InvalidRequest, match="stop"):
            llm.generate([[1]], SamplingParams(stop="x"))
        [output] = llm.generate([1, 2, 3], SHORT)
        assert (len(output.token_ids), output.text) == (5, "")


def test_two_hundred_prompts_some_aborted_come_back_in_order(llm):
    """REQ-09."""
    prompts = [[1 + i % 500] * (1 + i % 70) for i in range(200)]
    params = [SamplingParams(max_tokens=1 + i % 6, ignore_eos=True) for i in range(200)]
    stop = threading.Event()

    def abort_some():
        while not stop.wait(0.02):
            for request_id in llm.loop.live_ids()[2:3]:
                llm.loop.abort(request_id)

    thread = threading.Thread(target=abort_some)
    thread.start()
    outputs = llm.generate(prompts, params)
    stop.set()
    thread.join()
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, one in zip(outputs, params, strict=True):
        assert output.finish_reason in ("length", "abort")
        if output.finish_reason == "length":
            assert len(output.token_ids) == one.max_tokens
        assert output.metrics.num_generated_tokens == len(output.token_ids)
    assert llm.engine.slots.stats()["free"] == 4
    assert llm.loop.scheduler.stats()["results"] == 0


def test_more_prompts_than_the_queue_holds(model_dir):
    with LLM(model_dir, max_batch_size=2, max_context=64, max_waiting=3) as llm:
        outputs = llm.generate([[i] for i in range(20)], SHORT)
        assert [output.prompt_token_ids for output in outputs] == [[i] for i in range(20)]
        long = SamplingParams(max_tokens=60)
        with pytest.raises(QueueFull, match="max_waiting"):
            [llm.loop.submit([1], long) for _ in range(50)]


def test_random_sampling_options_in_a_batch_equal_solo(llm):
    """BAT-05."""
    options = [
        SamplingParams(max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=3),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.7, top_k=5, seed=4),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=2.0, top_p=0.5, seed=5),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5, min_p=0.1, seed=6),
        SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.5, logprobs=3),
        SamplingParams(max_tokens=8, temperature=1.0, presence_penalty=1.0, seed=7, logprobs=0),
        SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=tuple(range(64)), seed=1),
    ]
    prompts = [[5 + i, 6, 7] for i in range(len(options))]
    solo = [llm.generate([p], o)[0] for p, o in zip(prompts, options, strict=True)]
    for order in (range(8), reversed(range(8))):
        order = list(order)
        outputs = llm.generate([prompts[i] for i in order], [options[i] for i in order])
        for i, output in zip(order, outputs, strict=True):
            assert output.token_ids == solo[i].token_ids
            assert output.finish_reason == solo[i].finish_reason
            if options[i].logprobs is not None:
                assert len(output.logprobs) == len(output.token_ids)
                for entry, token in zip(output.logprobs, output.token_ids, strict=True):
                    assert entry.token_id == token


def test_one_token_and_a_stop_token_first(llm):
    """REQ-03: neither enters a decode step."""
    [free] = llm.generate([[4, 5]], SHORT)
    steps = llm.loop.scheduler.stats()["steps"]
    [one] = llm.generate([[4, 5]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert (one.token_ids, one.finish_reason) == (free.token_ids[:1], "length")
    stop = SamplingParams(max_tokens=9, stop_token_ids=(free.token_ids[0],))
    [stopped] = llm.generate([[4, 5]], stop)
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:1], "stop")
    assert stopped.stop_reason == free.token_ids[0]
    assert llm.loop.scheduler.stats()["steps"] == steps + 2


def test_context_end(llm):
    """REQ-02."""
    for length in (CONTEXT - 1, CONTEXT - 3):
        [output] = llm.generate([[1] * length], SamplingParams(max_tokens=99, ignore_eos=True))
        assert (output.finish_reason, len(output.token_ids)) == ("length", CONTEXT - length)


def test_a_stream_gives_the_same_tokens_and_ends_with_the_output(llm):
    """REQ-03, SLT-05."""
    [expected] = llm.generate([[1, 2, 3]], SHORT)
    *chunks, output = llm.stream([1, 2, 3], SHORT)
    assert isinstance(output, RequestOutput)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert output.token_ids == expected.token_ids


def test_a_dropped_stream_aborts_its_request(llm):
    """SLT-05."""
    stream = llm.stream([1, 2, 3], FOREVER)
    next(stream)
    stream.close()
    assert llm.loop.scheduler.stats()["finished_abort"] == 1
    [output] = llm.generate([[1, 2, 3]], SHORT)
    assert output.finish_reason == "length"


def test_close_ends_waiting_and_running_requests(model_dir):
    """SCH-06."""
    llm = LLM(model_dir, max_batch_size=2, max_context=CONTEXT)
    forward, started, gate = llm.engine.runner.forward, threading.Event(), threading.Event()

    def slow(plan, gates=None):
        started.set()
        gate.wait(10)
        return forward(plan, gates)

    llm.engine.runner.forward = slow
    handles = [llm.loop.submit([1, 2], FOREVER) for _ in range(6)]
    assert started.wait(10)
    closing = threading.Thread(target=llm.close)
    closing.start()
    llm.loop.scheduler.wait(handles[5].request_id, 5)  # ended although the forward still runs
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    for handle in handles:
        assert handle.future.result(5).finish_reason == "abort"
    with pytest.raises(EngineClosed):
        llm.generate([[1]], SHORT)
    llm.close()
    assert not llm.loop.alive


def test_a_dropped_llm_ends_its_thread_and_frees_its_pools(model_dir):
    """LEK-03."""
    threads = threading.active_count()
    for _ in range(3):
        llm = LLM(model_dir, max_batch_size=2, max_context=CONTEXT)
        llm.generate([[1]], SHORT)
        pool = weakref.ref(llm.engine.kv)
        del llm
        gc.collect()
        assert pool() is None
    assert threading.active_count() == threads


def test_a_dead_engine_thread_is_reported_to_everyone(llm):
    """SCH-06."""

    def broken(*_args):
        raise MemoryError("no more")

    llm.loop.scheduler = _Broken(llm.loop.scheduler)
    handle = llm.loop.submit([1], SHORT)
    output = handle.future.result(10)
    assert output.finish_reason == "error"
    assert "no more" in output.error
    with pytest.raises(EngineClosed, match="no more"):
        llm.generate([[1]], SHORT)


class _Broken:
    """A scheduler whose commit raises something nobody expects."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def commit(self, *_args):
        raise MemoryError("no more")


def test_submit_does_not_wait_for_a_forward(llm):
    """SCH-07: one submit during a forward of 300 ms; the bound is loose, a wait would take all."""
    forward = llm.engine.runner.forward
    started, release = threading.Event(), threading.Event()

    def slow(plan, gates=None):
        started.set()
        release.wait(10)
        return forward(plan, gates)

    llm.engine.runner.forward = slow
    first = llm.loop.submit([1], SHORT)
    started.wait(10)
    start = time.monotonic()
    second = llm.loop.submit([2], SHORT)
    assert llm.loop.abort(second.request_id)
    assert second.future.result(1).finish_reason == "abort"
    assert time.monotonic() - start < 1.0
    assert not first.future.done()
    release.set()
    assert first.future.result(30).finish_reason == "length"


def test_poisoned_slots_and_shrinking_batches_change_nothing(llm):
    """PFX-06, BAT-03: NaN in every slot before reuse."""
    prompts = [[3] * n for n in (1, 2, 63, 64, 65, 100)]
    params = [SamplingParams(max_tokens=1 + i, ignore_eos=True) for i in range(6)]
    clean = [llm.generate([p], o)[0].token_ids for p, o in zip(prompts, params, strict=True)]
    llm.engine.kv.k.fill_(float("nan"))
    llm.engine.kv.v.fill_(float("nan"))
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == clean


def test_one_forward_a_step_with_all_rows(llm):
    """BAT-06: never a forward per row."""
    plans = []
    forward = llm.engine.runner.forward

    def counted(plan, gates=None):
        plans.append((plan.num_decode, plan.num_rows))
        return forward(plan, gates)

    llm.engine.runner.forward = counted
    llm.generate([[i] for i in range(4)], SamplingParams(max_tokens=10, ignore_eos=True))
    assert plans.count((4, 4)) >= 6
    assert len(plans) == llm.loop.scheduler.stats()["steps"]


class TestBatchApi:
    def test_slots(self, engine):
        """SLT-07, SLT-08."""
        assert engine.supports_batching()
        assert engine.capabilities.supports_batch
        assert [engine.allocate_slot(i) for i in (10, 11)] == [0, 1]
        with pytest.raises(DuplicateRequest):
            engine.allocate_slot(10)
        for bad in (0, 5, 1, -1, True, 2.0):
            with pytest.raises(ConfigError):
                engine.allocate_batch_slots(bad)
        engine.allocate_batch_slots(2)
        with pytest.raises(OutOfPages):
            engine.allocate_slot(12)
        engine.free_slot(10)
        with pytest.raises(UnknownRequest):
            engine.free_slot(10)
        assert engine.allocate_slot(12) == 0

    def test_mixed_lengths_equal_the_scheduler_path(self, engine, llm):
        prompts = [[2] * 5, [3] * 100, [4] * 37]
        expected = [o.token_ids for o in llm.generate(prompts, SHORT)]
        requests = [
            BatchedRequest(request_id=i, prompt_tokens=p, sampling=SHORT)
            for i, p in enumerate(prompts)
        ]
        for request in requests:
            engine.allocate_slot(request.request_id)
        result = engine.batch_prefill(requests, return_logits=True)
        assert result.logits.shape == (3, engine.model_config.vocab_size)
        assert result.logits.argmax(-1).tolist() == result.token_ids
        while not all(request.finished for request in requests):
            engine.batch_decode_step(requests)
        assert [request.generated_tokens for request in requests] == expected
        assert {request.finish_reason for request in requests} == {"length"}
        with pytest.raises(InvalidRequest, match="finished"):
            engine.batch_decode_step(requests)

    def test_refusals_change_nothing(self, engine):
        request = BatchedRequest(request_id=1, prompt_tokens=[1, 2])
        with pytest.raises(UnknownRequest, match="allocate_slot"):
            engine.batch_prefill([request])
        engine.allocate_slot(1)
        with pytest.raises(InvalidRequest, match="prefill it first"):
            engine.batch_decode_step([request])
        with pytest.raises(InvalidRequest, match="twice"):
            engine.batch_prefill([request, request])
        stops = BatchedRequest(request_id=1, prompt_tokens=[1], sampling=SamplingParams(stop="x"))
        with pytest.raises(InvalidRequest, match="stop"):
            engine.batch_prefill([stops])
        with pytest.raises(PromptTooLong):
            engine.batch_prefill([BatchedRequest(request_id=1, prompt_tokens=[1] * CONTEXT)])
        with pytest.raises(InvalidRequest, match="prompt_tokens"):
            engine.batch_prefill([BatchedRequest(request_id=1, prompt_tokens=[9999])])
        outside = SamplingParams(stop_token_ids=(9999,), min_tokens=2)
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            engine.batch_prefill(
                [BatchedRequest(request_id=1, prompt_tokens=[1], sampling=outside)]
            )
        assert (request.seq_len, request.generated_tokens) == (0, [])
        assert engine.batch_prefill([]).token_ids == []
        assert engine.batch_decode_step([]).token_ids == []

    def test_a_request_whose_slot_changed_hands_is_refused(self, engine):
        request = BatchedRequest(request_id=1, prompt_tokens=[1, 2], sampling=SHORT)
        engine.allocate_slot(1)
        engine.batch_prefill([request])
        engine.free_slot(1)
        engine.allocate_slot(2)
        engine.allocate_slot(1)
        with pytest.raises(InvalidRequest, match="slot was freed"):
            engine.batch_decode_step([request])
        assert len(request.generated_tokens) == 1

    def test_a_length_that_is_stale_or_negative_is_refused(self, engine):
        """GRF-03: before anything runs; a slot that the caller made up is not looked at."""
        request = BatchedRequest(request_id=1, prompt_tokens=[1, 2, 3], sampling=SHORT)
        engine.allocate_slot(1)
        request.seq_len = -1
        with pytest.raises(InvalidRequest, match="seq_len=-1"):
            engine.batch_prefill([request])
        request.seq_len = 0
        engine.batch_prefill([request])
        assert request.seq_len == 3
        for wrong in (-1, 0, 2, 4, 2**31, 2**63):
            request.seq_len = wrong
            with pytest.raises(InvalidRequest, match=f"seq_len={wrong}"):
                engine.batch_decode_step([request])
            assert len(request.generated_tokens) == 1
        request.seq_len, request.slot_id = 3, -1
        with pytest.raises(InvalidRequest, match="slot was freed"):
            engine.batch_decode_step([request])

    def test_a_forward_that_raises_finishes_its_requests(self, engine):
        requests = [BatchedRequest(request_id=i, prompt_tokens=[1, i]) for i in range(2)]
        for request in requests:
            engine.allocate_slot(request.request_id)
        forward = engine.runner.forward

        def broken(plan, gates=None):
            raise MemoryError("no more")

        engine.runner.forward = broken
        with pytest.raises(MemoryError):
            engine.batch_prefill(requests[:1])
        assert (requests[0].finished, requests[0].finish_reason) == (True, "error")
        engine.runner.forward = forward
        with pytest.raises(InvalidRequest, match="finished"):
            engine.batch_prefill(requests)
        assert len(engine.batch_prefill(requests[1:]).token_ids) == 1


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_context", {"max_context": 10**6}),
        ("device", {"device": "cuda"}),
        ("max_batch_size", {"max_batch_size": 0}),
        ("max_results", {"max_results": 20, "max_waiting": 20}),
        ("max_batch_tokens", {"max_batch_tokens": 100}),
        ("no_such", {"no_such": 1}),
        ("kv_dtype", {"kv_dtype": "float16", "dtype": "float32"}),
    ],
)
def test_options_that_cannot_work(model_dir, field, options):
    """REQ-07."""
    with pytest.raises(ConfigError, match=field):
        LLM(model_dir, **options)


def test_pools_larger_than_memory_are_refused_with_numbers(model_dir, monkeypatch):
    """The KV and state pools are judged together, before either is allocated."""
    monkeypatch.setattr("headrace.engine.available_bytes", lambda _device: 10_000_000)
    with pytest.raises(ConfigError, match=r"KV pools need .* 10,000,000 are free"):
        Engine(EngineConfig(model=model_dir, max_batch_size=256))


@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_an_interrupted_forward_ends_the_requests_it_ran(tiny, decode):
    """Ctrl-C in the wait for the tokens: the state has moved, and a second run would move it on."""
    config = EngineConfig(
        model=str(tiny("tiny_hybrid").path),
        max_batch_size=2,
        max_context=CONTEXT,
        skip_tokenizer=True,
    )
    with Engine(config) as engine:
        requests = [BatchedRequest(request_id=i, prompt_tokens=[1, 2, 3 + i]) for i in range(2)]
        for request in requests:
            engine.allocate_slot(request.request_id)
        if decode:
            engine.batch_prefill(requests)
        sample = engine.runner.sample

        def interrupted(logits, options):
            sample(logits, options)
            raise KeyboardInterrupt

        engine.runner.sample = interrupted
        step = engine.batch_decode_step if decode else engine.batch_prefill
        with pytest.raises(KeyboardInterrupt):
            step(requests[:1])
        engine.runner.sample = sample
        assert (requests[0].finished, requests[0].finish_reason) == (True, "error")
        with pytest.raises(InvalidRequest, match="finished: error"):
            step(requests[:1])
        step(requests[1:])  # which was not in it
        assert not requests[1].finished
    with pytest.raises(EngineClosed):
        engine.batch_decode_step(requests[1:])
    assert not requests[1].finished, "nothing has run"
