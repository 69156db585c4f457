"""The wait for a step on a GPU has an end, and what comes after it. The GPU is made up."""

import types

import numpy as np
import pytest
import torch

from headrace import LLM, Engine, EngineConfig, SamplingParams, errors
from headrace.backends.cuda.deadline import StepWaits
from headrace.cuda_runner import CudaRunner, _Launched
from tiny_models import random_prompt

LIMIT_S = 2.5
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class FakeWaiter:
    """Ends the events of `over`; remembers what it was asked."""

    def __init__(self, *over):
        self.over = set(over)
        self.asked = []

    def wait(self, event_handle, timeout):
        self.asked.append((event_handle, timeout))
        return event_handle in self.over


def event(handle):
    return types.SimpleNamespace(cuda_event=handle)


def test_an_event_that_ends_is_waited_for_with_the_limit():
    waiter = FakeWaiter(7)
    waits = StepWaits(waiter, LIMIT_S)
    waits.check()
    waits.wait(event(7))
    waits.wait(event(0))  # never recorded
    assert waiter.asked == [(7, LIMIT_S)]
    waits.check()


def test_after_one_that_does_not_end_nothing_is_waited_for_or_run():
    waiter = FakeWaiter(7)
    waits = StepWaits(waiter, LIMIT_S)
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


def test_a_fault_of_the_device_is_passed_on_and_is_no_timeout():
    class Faulty:
        def wait(self, event_handle, timeout):
            raise errors.DeviceError("cuEventQuery: an illegal memory access was encountered")

    waits = StepWaits(Faulty(), LIMIT_S)
    with pytest.raises(errors.DeviceError):
        waits.wait(event(7))
    waits.check()


class FakeGpu:
    """What a launched step needs of its runner."""

    runs_ahead = True
    timed = False

    def __init__(self, waiter):
        self.waits = StepWaits(waiter, LIMIT_S)
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
    runner.waits = StepWaits(FakeWaiter(), LIMIT_S)
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
