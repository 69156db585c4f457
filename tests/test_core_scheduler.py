"""Scheduler through the binding: against a naive model, from many threads, at interpreter exit."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace import (
    DuplicateRequest,
    EngineClosed,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    SlotAllocator,
    StalePlan,
    UnknownRequest,
)
from headrace._core import SamplingSpec, Scheduler

VOCAB, CONTEXT, SLOTS, BUDGET, WAITING = 50, 200, 3, 64, 5
STOP = 7


def make_scheduler(slots=SLOTS, **limits):
    limits = {"max_context": CONTEXT, "vocab_size": VOCAB, "max_batch_tokens": BUDGET} | limits
    return Scheduler(SlotAllocator(slots), **limits)


def run_step(scheduler, token=1):
    plan = scheduler.next_plan(0)
    if plan is not None:
        scheduler.commit(plan, np.full(len(plan.sample_rows), token, np.int32))
    return plan


class Model:
    """What the scheduler promises, as short as it can be said (FCFS)."""

    def __init__(self):
        self.live = {}  # id -> dict, in order of arrival
        self.results = {}
        self.flight = []  # ids and lengths of the steps in flight, oldest first

    def running(self):
        return [r for r in self.live.values() if r["running"]]

    def plan(self):
        rows = [(i, 1, True) for i, r in self.live.items() if r["running"] and r["tokens"]]
        budget = BUDGET
        for i, r in self.live.items():
            if r["tokens"] or not budget:
                continue
            left = r["prompt"] - r["computed"]
            end = r["computed"] + budget
            take = left if left <= budget else end // 64 * 64 - r["computed"]
            if take <= 0 or not (r["running"] or len(self.running()) < SLOTS):
                break
            r["running"] = True
            budget -= take
            rows.append((i, take, take == left))
        self.flight = [rows] if rows else []
        return rows

    def plan_ahead(self):
        [before] = self.flight
        running = self.running()
        rows, seen = [], []
        for i, _, samples in before:
            request = self.live.get(i)
            if not samples:
                return []
            if request is None or not request["running"]:
                continue
            if not request["tokens"]:
                return []
            seen.append(request)
            if not self.is_full(request, 1):
                rows.append((i, 1, True))
        waits = len(running) < len(self.live)
        if len(seen) < len(running) or (waits and not len(rows) == len(running) == SLOTS):
            return []
        if rows:
            self.flight.append(rows)
        return rows

    @staticmethod
    def is_full(request, more=0):
        count = len(request["tokens"]) + more
        return count >= request["max_tokens"] or request["prompt"] + count >= CONTEXT

    def end(self, i, reason):
        request = self.live.pop(i)
        self.results[i] = (reason, request["tokens"])

    def commit(self, tokens):
        tokens = iter(tokens)
        for i, take, samples in self.flight.pop(0):
            token = next(tokens) if samples else None
            request = self.live.get(i)
            # An id that was reused during the step is another request.
            if request is None or not request["running"]:
                continue
            request["computed"] += take
            if token is None:
                continue
            if token < 0:
                self.end(i, "error")
                continue
            request["tokens"].append(token)
            if token == STOP:
                self.end(i, "stop")
            elif self.is_full(request):
                self.end(i, "length")


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.real = make_scheduler(max_waiting=WAITING)
        self.model = Model()
        self.plans = []

    @rule(i=st.integers(0, 9), prompt=st.integers(1, CONTEXT + 2), max_tokens=st.integers(1, 9))
    def submit(self, i, prompt, max_tokens):
        spec = SamplingSpec(max_tokens=max_tokens, stop_token_ids=[STOP])
        waiting = len(self.model.live) - len(self.model.running())

        def call():
            return self.real.submit([1] * prompt, spec, request_id=i)

        if prompt >= CONTEXT:
            expected = PromptTooLong
        elif i in self.model.live:
            expected = DuplicateRequest
        elif waiting >= WAITING:
            expected = QueueFull
        else:
            assert call() == i
            self.model.results.pop(i, None)
            self.model.live[i] = {
                "prompt": prompt,
                "max_tokens": max_tokens,
                "computed": 0,
                "tokens": [],
                "running": False,
            }
            return
        with pytest.raises(expected):
            call()

    @precondition(lambda self: not self.plans)
    @rule()
    def next_plan(self):
        expected = self.model.plan()
        plan = self.real.next_plan(0)
        if not expected:
            assert plan is None
            return
        self.compare(plan, expected)
        assert (plan.token_sources == -1).all()
        ends = plan.starts + np.diff(plan.token_offsets)
        for row in range(plan.num_decode, plan.num_rows):
            request = self.model.live[int(plan.request_ids[row])]
            assert ends[row] % 64 == 0 or ends[row] == request["prompt"]

    @precondition(lambda self: self.plans)
    @rule()
    def plan_ahead(self):
        before = self.plans[0]
        if len(self.plans) == 2:
            for plan in self.plans:
                with pytest.raises(StalePlan):
                    self.real.plan_ahead(plan)
            assert self.real.next_plan(0) is None
            return
        expected = self.model.plan_ahead()
        plan = self.real.plan_ahead(before)
        if not expected:
            assert plan is None
            return
        self.compare(plan, expected)
        assert plan.num_decode == plan.num_rows
        sources = before.request_ids[before.sample_rows[plan.token_sources]]
        assert sources.tolist() == plan.request_ids.tolist()
        for i, start in zip(plan.request_ids.tolist(), plan.starts.tolist(), strict=True):
            assert start == self.model.live[i]["computed"] + 1

    def compare(self, plan, expected):
        lengths = np.diff(plan.token_offsets).tolist()
        assert list(zip(plan.request_ids.tolist(), lengths, strict=True)) == [
            (i, take) for i, take, _ in expected
        ]
        sampled = plan.request_ids[plan.sample_rows].tolist()
        assert sampled == [i for i, _, samples in expected if samples]
        self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def commit(self, data):
        plan, *newer = self.plans
        count = len(plan.sample_rows)
        token = st.sampled_from([1, 2, STOP, -1])
        tokens = data.draw(st.lists(token, min_size=count, max_size=count))
        with pytest.raises(InvalidRequest):
            self.real.commit(plan, np.zeros(count + 1, np.int32))
        for other in newer:
            with pytest.raises(StalePlan):
                self.real.commit(other, np.ones(len(other.sample_rows), np.int32))
        self.real.commit(plan, np.array(tokens, np.int32))
        self.model.commit(tokens)
        with pytest.raises(StalePlan):
            self.real.commit(plan, np.array(tokens, np.int32))
        self.plans.pop(0)

    @precondition(lambda self: self.plans)
    @rule()
    def forward_fails(self):
        rows = self.model.flight.pop(0)
        failed = self.real.fail(self.plans.pop(0), "boom")
        expected = [i for i, _, _ in rows if i in self.model.live and self.model.live[i]["running"]]
        assert failed == expected
        for i in expected:
            self.model.end(i, "error")
            assert self.real.poll(i).result.message == "boom"

    @rule(i=st.integers(0, 10))
    def abort(self, i):
        assert self.real.abort(i) == (i in self.model.live)
        if i in self.model.live:
            self.model.end(i, "abort")

    @rule(i=st.integers(0, 10))
    def take_result(self, i):
        if i in self.model.results:
            reason, tokens = self.model.results.pop(i)
            result = self.real.take_result(i)
            assert (result.finish_reason, result.token_ids) == (reason, tokens)
        else:
            with pytest.raises(UnknownRequest):
                self.real.take_result(i)

    @invariant()
    def agrees(self):
        self.real.check()
        for i, request in self.model.live.items():
            status = self.real.poll(i)
            assert status.token_ids == request["tokens"]
            assert (status.phase == "waiting") == (not request["running"])
        for i, (reason, tokens) in self.model.results.items():
            result = self.real.poll(i).result
            assert (result.finish_reason, result.token_ids) == (reason, tokens)
        stats = self.real.stats()
        assert stats["running"] == len(self.model.running())
        assert stats["waiting"] + stats["running"] == len(self.model.live)


TestSchedulerMachine = SchedulerMachine.TestCase


def test_hundred_thousand_requests_from_eight_threads_each_end_once():
    """SLT-03, LEK-01, LEK-02: random aborts, memory flat, tables empty."""
    total = int(os.environ.get("HEADRACE_TEST_REQUESTS", "20000"))
    scheduler = make_scheduler(slots=16, max_results=total, max_waiting=256)
    ended = [0] * total
    stop = threading.Event()

    def run_engine():
        while not stop.is_set():
            plan = scheduler.next_plan(0.05)
            while plan is not None:
                ahead = scheduler.plan_ahead(plan)
                scheduler.commit(plan, np.ones(len(plan.sample_rows), np.int32))
                plan = ahead

    def client(thread):
        rng = random.Random(thread)
        spec = SamplingSpec(max_tokens=3)
        mine = range(thread, total, 8)
        for i in mine:
            while True:
                try:
                    scheduler.submit([1] * rng.randint(1, 40), spec, request_id=i)
                    break
                except QueueFull:
                    stop.wait(0.001)  # back-pressure: try again a little later
            if rng.random() < 0.3:
                scheduler.abort(rng.choice([i, max(i - 8, thread)]))
        for i in mine:
            assert scheduler.wait(i, 30.0) is not None, f"request {i} did not end"
            result = scheduler.take_result(i)
            assert result.finish_reason in ("length", "abort")
            assert (result.finish_reason == "abort") or result.token_ids == [1, 1, 1]
            ended[i] += 1

    engine = threading.Thread(target=run_engine)
    engine.start()
    clients = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    stop.set()
    engine.join()
    assert ended == [1] * total
    scheduler.check()
    stats = scheduler.stats()
    assert (stats["waiting"], stats["running"], stats["results"]) == (0, 0, 0)
    assert stats["submitted"] == total == stats["finished_length"] + stats["finished_abort"]


def test_an_aborted_waiting_request_ends_at_once_although_every_slot_is_busy():
    """SLT-02."""
    scheduler = make_scheduler(slots=1)
    scheduler.submit([1], SamplingSpec(max_tokens=100), request_id=1)
    plan = scheduler.next_plan(0)
    scheduler.submit([1], SamplingSpec(), request_id=2)
    waiter = threading.Thread(target=lambda: scheduler.wait(2))
    waiter.start()
    assert scheduler.abort(2)
    waiter.join(1.0)
    assert not waiter.is_alive()
    result = scheduler.take_result(2)
    assert (result.finish_reason, result.computed_prompt_tokens) == ("abort", 0)
    scheduler.commit(plan, np.array([1], np.int32))


def test_a_submit_wakes_an_idle_planner():
    """SCH-07."""
    scheduler = make_scheduler()
    plans = []
    thread = threading.Thread(target=lambda: plans.append(scheduler.next_plan(10)))
    thread.start()
    scheduler.submit([1], SamplingSpec())
    thread.join(5.0)
    assert len(plans) == 1
    assert plans[0] is not None


def test_close_wakes_planner_and_waiters_and_keeps_results():
    """SCH-06: waiting, prefilling and decoding requests all end, later calls say why."""
    scheduler = make_scheduler(slots=2)
    for i in range(4):
        scheduler.submit([1] * (1 if i == 0 else 150), SamplingSpec(max_tokens=50), request_id=i)
    run_step(scheduler)
    phases = [scheduler.poll(i).phase for i in range(4)]
    assert phases == ["decoding", "waiting", "waiting", "waiting"] or "prefilling" in phases
    scheduler.next_plan(0)
    outcomes = []
    threads = [
        threading.Thread(target=lambda i=i: outcomes.append(scheduler.wait(i).finish_reason))
        for i in range(4)
    ]

    def plan():
        with pytest.raises(EngineClosed, match="maintenance"):
            scheduler.next_plan()
        outcomes.append("closed")

    threads.append(threading.Thread(target=plan))
    for thread in threads:
        thread.start()
    scheduler.close("maintenance")
    for thread in threads:
        thread.join(5.0)
    assert sorted(outcomes) == ["abort"] * 4 + ["closed"]
    assert scheduler.take_result(0).token_ids == [1]
    with pytest.raises(EngineClosed, match="maintenance"):
        scheduler.submit([1], SamplingSpec())
    scheduler.close("again")
    scheduler.check()


def test_ctrl_c_ends_a_blocking_wait_and_leaves_the_scheduler_usable():
    """SCH-12."""
    scheduler = make_scheduler()
    # A process started in the background of a script inherits that it ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scheduler.next_plan(60)
    assert time.monotonic() - start < 5.0
    timer.join()
    signal.signal(signal.SIGINT, before)
    scheduler.submit([1], SamplingSpec())
    assert scheduler.next_plan(0) is not None


def test_every_public_method_from_eight_threads():
    """SCH-12, REQ-10: no deadlock, no exception that is not documented."""
    scheduler = make_scheduler(slots=2, max_waiting=20, max_results=50)
    surprises = []
    end = time.monotonic() + 1.5
    short = SamplingSpec(max_tokens=2)
    calls = [
        lambda rng, i: scheduler.submit([1] * rng.randint(0, 210), short),
        lambda rng, i: scheduler.submit([1], short, request_id=i),
        lambda rng, i: run_step(scheduler),
        lambda rng, i: scheduler.abort(i),
        lambda rng, i: scheduler.poll(i),
        lambda rng, i: scheduler.wait(i, 0.001),
        lambda rng, i: scheduler.take_result(i),
        lambda rng, i: scheduler.stats(),
        lambda rng, i: scheduler.check(),
    ]

    def work(seed):
        rng = random.Random(seed)
        while time.monotonic() < end:
            i = rng.randrange(30)
            try:
                rng.choice(calls)(rng, i)
            except (InvalidRequest, DuplicateRequest, QueueFull, UnknownRequest, StalePlan):
                pass
            except Exception as error:
                surprises.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert surprises == []


def test_idle_planner_uses_no_cpu():
    """SCH-07."""
    scheduler = make_scheduler()
    before = time.process_time()
    assert scheduler.next_plan(1.0) is None
    assert time.process_time() - before < 0.1


EXIT_SCRIPT = textwrap.dedent("""
    import threading
    import headrace
    from headrace._core import SamplingSpec
    scheduler = headrace.Scheduler(headrace.SlotAllocator(1), max_context=10, vocab_size=5)
    ready = threading.Barrier(3)
    def plan():
        ready.wait()
        try:
            scheduler.next_plan()
            scheduler.next_plan()
        except headrace.EngineClosed:
            pass
    def wait():
        ready.wait()
        scheduler.wait(1)
    scheduler.submit([1], SamplingSpec(), request_id=1)
    for target in (plan, wait):
        threading.Thread(target=target, daemon=True).start()
    ready.wait()
""")


@pytest.mark.parametrize("runs", [5, pytest.param(200, marks=pytest.mark.soak)])
def test_the_interpreter_exits_with_threads_blocked_in_the_scheduler(runs):
    """LEK-08."""
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", EXIT_SCRIPT], capture_output=True, timeout=20, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


def _use_in_child(scheduler, queue):
    try:
        scheduler.stats()
    except Exception as error:
        queue.put((type(error).__name__, str(error)))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_use_in_a_forked_child_is_refused_with_advice():
    """LEK-08."""
    scheduler = make_scheduler()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use_in_child, args=(scheduler, queue))
    child.start()
    name, message = queue.get(timeout=10)
    child.join(10)
    assert name == "ForkedProcess"
    assert "spawn" in message


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": -1.0}),
        ("top_k", {"top_k": -3}),
        ("top_p", {"top_p": 0.0}),
        ("min_p", {"min_p": 1.5}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("presence_penalty", {"presence_penalty": float("inf")}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
    ],
)
def test_a_bad_sampling_option_is_refused_at_submit(field, spec):
    """REQ-05."""
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest, match=field):
        scheduler.submit([1], SamplingSpec(**spec))
    assert scheduler.stats()["submitted"] == 0


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1.5], "abc", None, [2**40], [[1]]])
def test_a_bad_prompt_is_refused_at_submit(prompt):
    """REQ-02, REQ-05."""
    with pytest.raises(InvalidRequest, match="prompt"):
        make_scheduler().submit(prompt, SamplingSpec())


@pytest.mark.parametrize("request_id", [-1, 2**64, 1.0, "1", True])
def test_an_id_that_is_not_64_bits_is_refused(request_id):
    """REQ-05."""
    with pytest.raises(InvalidRequest, match="request_id"):
        make_scheduler().submit([1], SamplingSpec(), request_id=request_id)


def test_context_end_gives_exactly_what_is_left():
    """REQ-02."""
    for prompt in (1, CONTEXT - 2, CONTEXT - 1):
        scheduler = make_scheduler()
        scheduler.submit([1] * prompt, SamplingSpec(max_tokens=10_000), request_id=0)
        while run_step(scheduler) is not None:
            pass
        result = scheduler.take_result(0)
        assert (result.finish_reason, len(result.token_ids)) == ("length", CONTEXT - prompt)


def _anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024


def test_memory_stays_flat_over_a_hundred_thousand_requests():
    """LEK-01, LEK-02: results nobody polls included; bound of 100 bytes a request."""
    scheduler = make_scheduler(slots=16, max_results=300, max_waiting=256)
    spec = SamplingSpec(max_tokens=1)
    used = []
    for _ in range(2):
        for _ in range(50_000 // 16):
            for _ in range(16):
                scheduler.submit([1, 2, 3], spec)
            run_step(scheduler)
        used.append(_anonymous_bytes())
    assert used[1] - used[0] < 100 * 50_000
    stats = scheduler.stats()
    assert (stats["waiting"], stats["running"], stats["results"]) == (0, 0, 300)
