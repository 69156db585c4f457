"""The wait for a step on a GPU has an end, and what comes after it. The GPU is made up."""

import contextlib
import threading
import time
import types
from collections import defaultdict

import numpy as np
import pytest
import torch

import headrace
from headrace import LLM, BatchedRequest, Engine, EngineConfig, SamplingParams, errors
from headrace import cuda_runner as runner_module
from headrace.backends.cuda import deadline
from headrace.backends.cuda.deadline import StepWaits
from headrace.cuda_runner import CudaRunner, _Launched
from headrace.pipeline import Pipeline, execute_plan
from headrace.sampling import SamplingBatch, SamplingRow, sample
from headrace.tiers import HostTier
from tiny_models import random_prompt

LIMIT_S = 2.5
GPU = 5
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def given_up(monkeypatch):
    monkeypatch.setattr(deadline, "_given_up", defaultdict(list))


class FakeWaiter:
    """Ends the events of `over`; remembers what it was asked. The others are over in no time."""

    def __init__(self, *over):
        self.over = set(over)
        self.asked = []
        self.closed = threading.Event()

    def wait(self, event_handle, timeout):
        self.asked.append((event_handle, timeout))
        if event_handle not in self.over and self.ended(timeout):
            raise errors.EngineClosed("engine is closed: closed while a step was on the GPU")
        return event_handle in self.over

    def ended(self, _timeout):
        return self.closed.is_set()

    def close(self):
        self.closed.set()


class SlowWaiter(FakeWaiter):
    """Waits for as long as it is told, as the real one does."""

    def ended(self, timeout):
        return self.closed.wait(timeout)


def event(handle):
    return types.SimpleNamespace(cuda_event=handle)


def test_an_event_that_ends_is_waited_for_with_the_limit():
    waiter = FakeWaiter(7)
    waits = StepWaits(waiter, LIMIT_S, GPU)
    waits.check()
    waits.wait(event(7))
    waits.wait(event(0))  # never recorded
    assert waiter.asked == [(7, LIMIT_S)]
    waits.check()


def test_after_one_that_does_not_end_nothing_is_waited_for_or_run():
    waiter = FakeWaiter(7)
    waits = StepWaits(waiter, LIMIT_S, GPU)
    text = r"within step_timeout_s=2\.5 "
    with pytest.raises(errors.StepTimeout, match=text):
        waits.wait(event(8))
    with pytest.raises(errors.StepTimeout, match=text):
        waits.wait(event(9))
    assert waiter.asked == [(8, LIMIT_S), (9, 0.0)]
    waits.wait(event(7))  # what has ended has ended
    waiter.over.add(8)
    waits.wait(event(8))
    with pytest.raises(errors.StepTimeout, match=text):
        waits.check()


def test_once_closed_only_what_is_over_is_handed_out():
    waiter = FakeWaiter(7)
    waits = StepWaits(waiter, LIMIT_S, GPU)
    waits.close()
    waits.wait(event(7))
    assert not waits.gave_up
    with pytest.raises(errors.EngineClosed, match="while a step was on the GPU"):
        waits.wait(event(8))
    assert waits.gave_up
    with pytest.raises(errors.EngineClosed):
        waits.check()


class Interrupted(FakeWaiter):
    def wait(self, event_handle, timeout):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("waiter", "error"),
    [(FakeWaiter(), errors.StepTimeout), (Interrupted(), KeyboardInterrupt)],
    ids=["late", "interrupted"],
)
def test_a_gpu_takes_an_engine_once_what_was_given_up_is_over(monkeypatch, waiter, error):
    waits = StepWaits(waiter, LIMIT_S, GPU)
    with pytest.raises(error):
        waits.wait(event(8))
    assert waits.gave_up
    gpu = torch.device("cuda", GPU)
    monkeypatch.setattr(deadline, "EventWaiter", lambda _index: FakeWaiter())
    for _ in range(2):
        with pytest.raises(errors.StepTimeout, match="try again later, or start over"):
            deadline.check_gpu(gpu)
    later = FakeWaiter(8)
    monkeypatch.setattr(deadline, "EventWaiter", lambda _index: later)
    deadline.check_gpu(gpu)
    deadline.check_gpu(gpu)
    assert [handle for handle, _ in later.asked] == [8], "looked at once, and dropped"


def test_after_a_timeout_a_close_does_not_change_the_error():
    waits = StepWaits(FakeWaiter(), LIMIT_S, GPU)
    with pytest.raises(errors.StepTimeout):
        waits.wait(event(8))
    waits.close()
    with pytest.raises(errors.StepTimeout):
        waits.wait(event(9))


def test_a_wait_on_another_thread_ends_when_it_is_closed():
    waits = StepWaits(SlowWaiter(), 60.0, GPU)
    threading.Timer(0.05, waits.close).start()
    began = time.monotonic()
    with pytest.raises(errors.EngineClosed):
        waits.wait(event(8))
    assert time.monotonic() - began < 30


def test_a_stream_on_which_something_may_run_is_given_to_nobody(monkeypatch):
    idle = {"gpu": []}
    monkeypatch.setattr(runner_module, "_idle_streams", idle)
    waits = StepWaits(FakeWaiter(), LIMIT_S, GPU)
    runner_module._give_stream_back("gpu", "one", waits)
    with pytest.raises(errors.StepTimeout):
        waits.wait(event(8))
    runner_module._give_stream_back("gpu", "other", waits)
    assert idle == {"gpu": ["one"]}


def test_no_engine_is_made_on_a_gpu_with_a_stuck_step(monkeypatch):
    """Nothing that could wait for it is called."""
    with pytest.raises(errors.StepTimeout):
        StepWaits(FakeWaiter(), LIMIT_S, GPU).wait(event(8))
    gpu = torch.device("cuda", GPU)
    monkeypatch.setattr(deadline, "EventWaiter", lambda _index: FakeWaiter())
    monkeypatch.setattr("headrace.engine.choose_device", lambda _config: gpu)
    made = []
    monkeypatch.setattr("headrace.engine.make_backend", lambda *_, **__: made.append(0))
    with pytest.raises(errors.StepTimeout, match=f"may still run on cuda:{GPU}: try again"):
        Engine(EngineConfig(model="smollm2-135m", load_format="dummy"))
    assert made == []
    deadline.check_gpu(torch.device("cuda", GPU + 1))


def test_a_fault_of_the_device_is_passed_on_and_is_no_timeout():
    class Faulty(FakeWaiter):
        def wait(self, event_handle, timeout):
            raise errors.DeviceError("cuEventQuery: an illegal memory access was encountered")

    waits = StepWaits(Faulty(), LIMIT_S, GPU)
    with pytest.raises(errors.DeviceError):
        waits.wait(event(7))
    waits.check()


class FakeGpu:
    """What a launched step needs of its runner."""

    runs_ahead = True
    timed = False

    def __init__(self, waiter):
        self.waits = StepWaits(waiter, LIMIT_S, GPU)
        self.returned = []

    def give_back(self, ticket):
        self.returned.append(ticket)


def ticket_of(tokens, handle):
    return types.SimpleNamespace(tokens=torch.tensor(tokens, dtype=torch.int32), end=event(handle))


def test_a_step_keeps_its_ticket_until_it_has_ended():
    gpu = FakeGpu(FakeWaiter())
    ticket = ticket_of([5, 6], 8)
    step = _Launched(gpu, ticket, np.array([1, 0]), None)
    for _ in range(2):
        with pytest.raises(errors.StepTimeout):
            step.wait()
    assert gpu.returned == [], "the device may still write to it"
    gpu.waits._waiter.over.add(8)
    assert step.wait().token_ids.tolist() == [6, 5]
    assert gpu.returned == [ticket]
    assert step.wait().token_ids.tolist() == [6, 5]
    assert gpu.returned == [ticket]


def test_a_runner_with_a_stuck_step_launches_nothing():
    runner = CudaRunner.__new__(CudaRunner)  # without a GPU it has nothing but its waits
    runner.waits = StepWaits(FakeWaiter(), LIMIT_S, GPU)
    with pytest.raises(errors.StepTimeout):
        runner.waits.wait(event(8))
    plan = types.SimpleNamespace(num_rows=1)
    with pytest.raises(errors.StepTimeout):
        runner.launch(plan)
    with pytest.raises(errors.StepTimeout):
        runner.forward(plan)


def stick(engine):
    """Have every step of an engine be launched and never end."""
    gpu = FakeGpu(FakeWaiter())
    run = engine.runner.launch

    def launch(plan, gates=None, previous=None):
        gpu.waits.check()
        result = run(plan, gates)
        ticket = ticket_of(result.wait().token_ids.tolist(), 8)
        return _Launched(gpu, ticket, np.arange(len(ticket.tokens)), None)

    engine.runner.launch = launch
    return gpu


def test_the_engine_reports_the_error_to_the_requests_of_the_step_and_of_later_ones(tiny):
    options = {"max_batch_size": 2, "max_context": 128, "skip_tokenizer": True}
    with LLM(str(tiny("tiny_qwen3").path), **options) as llm:
        gpu = stick(llm.engine)
        prompts = [random_prompt(9, seed=seed) for seed in range(3)]
        for outputs in (llm.generate(prompts, PARAMS), llm.generate(prompts[:1], PARAMS)):
            assert {output.finish_reason for output in outputs} == {"error"}
            assert all(output.error.startswith("StepTimeout: a step") for output in outputs)
        # One wait with the limit, and a look for the one that was queued behind it.
        assert [seconds for _, seconds in gpu.waits._waiter.asked] in ([LIMIT_S], [LIMIT_S, 0.0])
        assert llm.loop.alive
        llm.loop.scheduler.check()
        assert llm.engine.slots.stats()["free"] == 2


def test_the_engine_hands_the_limit_to_its_runner(tiny, monkeypatch):
    given = {}

    class Runner:
        def __init__(self, *args, **options):
            given.update(options)

    class Backend:
        def attach(self, *args, **options):
            pass

    options = {"step_timeout_s": LIMIT_S, "skip_tokenizer": True, "max_context": 64}
    with Engine(EngineConfig(model=str(tiny("tiny_qwen3").path), **options)) as engine:
        monkeypatch.setattr("headrace.cuda_runner.CudaRunner", Runner)
        monkeypatch.setattr("headrace.backends.cuda_ops.CudaBackend", Backend)
        monkeypatch.setattr(engine, "backend", Backend())
        monkeypatch.setattr(engine, "device", torch.device("cuda", 0))
        engine._runner(engine.runner.model)
        assert given["step_timeout_s"] == LIMIT_S


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_runner_with_a_stuck_step_starts_no_copies(has_copies):
    """They would go to pages that the stuck step may still write."""
    waits = StepWaits(FakeWaiter(), LIMIT_S, GPU)
    with pytest.raises(errors.StepTimeout):
        waits.wait(event(8))
    calls = []
    scheduler = types.SimpleNamespace(
        start_stores=lambda _copies: calls.append("stores"),
        start_step=lambda _plan, _copies: calls.append("step"),
    )
    engine = types.SimpleNamespace(
        tier=types.SimpleNamespace(queue=None),
        check=waits.check,
        launch=lambda _plan, _previous: calls.append("launch"),
        execute=lambda _plan, _gates: calls.append("launch"),
    )
    plan = types.SimpleNamespace(has_copies=has_copies)
    [ended] = Pipeline(engine, scheduler).run(plan)
    assert isinstance(ended.error, errors.StepTimeout)
    with pytest.raises(errors.StepTimeout):
        execute_plan(engine, scheduler, plan)
    assert calls == []


def opened(tiny, limit_s):
    """An engine whose steps are waited for under its lock, for at most `limit_s`."""
    config = EngineConfig(
        model=str(tiny("tiny_qwen3").path), max_batch_size=2, max_context=128, skip_tokenizer=True
    )
    engine = Engine(config)
    gpu = FakeGpu(SlowWaiter())
    gpu.waits = StepWaits(gpu.waits._waiter, limit_s, GPU)
    choose = engine.runner.sample

    def sample_late(logits, options):
        gpu.waits.check()
        gpu.waits.wait(event(8))
        return choose(logits, options)

    engine.runner.sample = sample_late
    engine.runner.check = gpu.waits.check
    engine.runner.end_waits = gpu.waits.close
    return engine, gpu


def test_the_batch_api_reports_the_timeout_and_runs_no_more(tiny):
    engine, gpu = opened(tiny, 0.05)
    with engine:
        requests = [BatchedRequest(request_id=i, prompt_tokens=[1, 2, 3]) for i in range(2)]
        for request in requests:
            engine.allocate_slot(request.request_id)
        for request in requests:
            with pytest.raises(errors.StepTimeout, match=r"step_timeout_s=0\.05 "):
                engine.batch_prefill([request])
            assert request.finish_reason == "error"
        with pytest.raises(errors.StepTimeout):
            engine.check()
    assert gpu.waits._waiter.asked == [(8, 0.05)]
    with pytest.raises(errors.EngineClosed):
        engine.check()


@pytest.fixture
def no_grace(monkeypatch):
    monkeypatch.setattr("headrace.engine.CLOSE_GRACE_S", 0.05)
    monkeypatch.setattr("headrace.step_loop.CLOSE_GRACE_S", 0.05)


def test_close_ends_a_wait_inside_a_forward(tiny, no_grace):
    engine, gpu = opened(tiny, 60.0)
    request = BatchedRequest(request_id=0, prompt_tokens=[1, 2, 3])
    engine.allocate_slot(0)
    raised = []

    def run():
        try:
            engine.batch_prefill([request])
        except errors.HeadraceError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not gpu.waits._waiter.asked:
        time.sleep(0.001)
    began = time.monotonic()
    engine.close()
    thread.join(30)
    assert time.monotonic() - began < 30
    assert [type(error) for error in raised] == [errors.EngineClosed]
    assert request.finish_reason == "error", "its forward has run"


def test_a_forward_that_ends_in_time_is_let_to_end_by_close(tiny):
    engine, gpu = opened(tiny, 60.0)
    request = BatchedRequest(request_id=0, prompt_tokens=[1, 2, 3])
    engine.allocate_slot(0)
    waiter = gpu.waits._waiter
    waiter.ended = lambda _timeout: time.sleep(0.2) or waiter.over.add(8)
    thread = threading.Thread(target=engine.batch_prefill, args=[[request]])
    thread.start()
    while not waiter.asked:
        time.sleep(0.001)
    engine.close()
    thread.join(30)
    assert len(request.generated_tokens) == 1
    assert not gpu.waits.gave_up


@pytest.mark.parametrize("locked", [False, True], ids=["launched", "executed"])
def test_closing_an_llm_does_not_wait_for_a_stuck_step(tiny, no_grace, locked):
    options = {"max_batch_size": 2, "max_context": 128, "skip_tokenizer": True}
    with LLM(str(tiny("tiny_qwen3").path), **options) as llm:
        gpu = stick(llm.engine)
        gpu.waits = StepWaits(SlowWaiter(), 60.0, GPU)
        llm.engine.runner.end_waits = gpu.waits.close
        if locked:
            launch = llm.engine.runner.launch

            def launch_and_wait(plan, gates=None, previous=None):
                return launch(plan, gates, previous).wait()

            llm.engine.runner.launch = launch_and_wait
        handle = llm.loop.submit(random_prompt(9), PARAMS)
        while not gpu.waits._waiter.asked:
            time.sleep(0.001)
        began = time.monotonic()
    assert time.monotonic() - began < 25
    assert handle.future.result(0).finish_reason == "abort"
    assert not llm.loop.alive


@pytest.mark.parametrize("gave_up", [False, True])
def test_copies_behind_a_step_that_was_given_up_are_not_waited_for(tiny, gave_up):
    config = EngineConfig(model=str(tiny("tiny_qwen3").path), max_context=64, skip_tokenizer=True)
    engine = Engine(config)
    deadlines = []
    engine.tier = HostTier.__new__(HostTier)
    engine.tier.queue = types.SimpleNamespace(shutdown=deadlines.append)
    engine.runner = types.SimpleNamespace(end_waits=lambda: None, gave_up=gave_up)
    engine.close()
    assert deadlines == [0.0 if gave_up else None]


def options_of(history):
    params = SamplingParams(presence_penalty=0.5, logprobs=1)
    row = SamplingRow(params=params, prompt=[1] * history)
    return SamplingBatch.from_rows([row] * 2)


def test_large_options_are_sent_once_the_forward_is_over():
    """CUDA may wait for the stream before it reads them, and that wait would have no end."""
    runner = CudaRunner.__new__(CudaRunner)
    waited = []
    runner._end = lambda: waited.append(1)
    for history, times in ((10, 0), (4096, 0), (4097, 1)):
        waited.clear()
        runner._before_choice(options_of(history))
        assert len(waited) == times


def test_everything_that_is_read_was_waited_for(monkeypatch):
    asked = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: asked.append("read") or cpu(self))
    sample(torch.rand(2, 64), options_of(3), lambda: asked.append("wait"))
    assert asked[:3] == ["wait", "read", "wait"]
    assert set(asked[3:]) == {"read"}


def test_the_batch_api_chooses_tokens_on_the_stream_of_the_runner(monkeypatch):
    """Nobody else enqueues there between the wait for the tokens and the read."""
    runner = CudaRunner.__new__(CudaRunner)
    runner.waits = StepWaits(FakeWaiter(), LIMIT_S, GPU)
    inside = []

    @contextlib.contextmanager
    def own_stream():
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr(runner, "_own_stream", own_stream, raising=False)
    monkeypatch.setattr(runner_module, "sample", lambda *_: list(inside))
    assert runner.sample(torch.rand(1, 8), options_of(3)) == [True]


def test_the_errors_of_a_gpu_are_exported():
    assert headrace.StepTimeout is errors.StepTimeout
    assert headrace.DeviceError is errors.DeviceError
