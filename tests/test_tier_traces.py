"""Random traces through the real memory core, with a forward that knows what every read must give.

SLT-01, SLT-04, SLT-11, SCH-03, SCH-13, PRE-04, PFX-04, PFX-09 to PFX-12, HST-05, HST-06, HST-14,
HST-15, LEK-05, LEK-07 on the CPU (`shadow.py`).
"""

import os
import random

import pytest

from headrace.errors import OutOfPages
from shadow import PAGE, VOCAB, Shadow, Traffic, soak

TOTAL = int(os.environ.get("HEADRACE_TEST_REQUESTS", "100000"))


def tokens(n, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=n)


def errors(shadow):
    return [r.message for r in shadow.results.values() if r.finish_reason == "error"]


def random_options(rng):
    """Any legal memory, from one page up."""
    layers = rng.choice((1, 2, 3, 4, 5))
    host = rng.choice((0, 4, 8, 30, 100))
    pages = rng.choice((None, 4, 6, 9, 16, 40))
    options = {
        "pages": pages,
        "layers": layers,
        "width": rng.randint(1, layers),
        "host_pages": host,
        "hybrid": rng.random() < 0.4,
        "snapshots": rng.choice((1, 3, 8, 40)),
        "staging": rng.choice((1, 2, 4)),
        "snapshot_interval": rng.choice((64, 128, 256)),
        "slots": rng.choice((1, 2, 4, 8)),
        "budget": rng.choice((64, 128, 256)),
        "policy": rng.choice(("fcfs", "priority")),
        "write_policy": rng.choice(
            ("write_through", "write_through_selective", "write_back", "none")
        ),
        "admission": rng.choice(("estimate", "reserve")),
        "admission_ratio": rng.choice((0.1, 0.5, 1.0)),
        "load_back_threshold": rng.choice((1, 1, 2, 3)),
        "prefix_cache": rng.random() < 0.9,
        "preempt_every": rng.choice((0, 0, 1, 2, 3, 5, 7)),
        "settled": rng.random() < 0.3,
    }
    if pages and host:
        options["preemption"] = rng.choice(("park", "recompute"))
    low = rng.choice((0.0, 0.5, 1.0)) if pages and host else 0.0
    options["ahead"] = rng.choice((0.0, 0.5, 0.9, 1.0))
    options["stops"] = rng.choice((0.0, 0.02, 0.1))
    return options, min(700, PAGE * (pages or 12) - 70), low


class Lenient(Shadow):
    """Requests that can never fit are refused; the trace goes on without them."""

    def submit(self, *request):
        try:
            return super().submit(*request)
        except OutOfPages:
            return None


@pytest.mark.parametrize("seed", [*range(24), 293598])
def test_every_request_of_a_random_trace_reads_its_own_kv(seed):
    """All policies, both layouts, hybrid or not, LOW and HIGH, aborts and preemptions at random."""
    options, longest, low = random_options(random.Random(seed))
    with Lenient(**options) as shadow:
        traffic = Traffic(seed, longest, low=low)
        soak(shadow, traffic, 40, aborts=(0, 0.1, 0.4)[seed % 3], check_every=1)
        shadow.drain()
        assert errors(shadow) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_steps_planned_ahead_of_their_tokens_change_no_token(seed, layout, hybrid):
    """PAG-09: one and two steps of delay, ends nobody can foresee, pages tight, aborts between."""
    rng = random.Random(seed)
    with Shadow(
        pages=rng.choice((5, 8, 12)) if layout == "paged" else None,
        host_pages=rng.choice((0, 20)),
        layers=2,
        hybrid=hybrid,
        slots=rng.choice((2, 4)),
        admission_ratio=0.1,
        preempt_every=rng.choice((0, 7)),
        ahead=rng.choice((0.7, 1.0)),
        stops=0.03,
    ) as shadow:
        traffic = Traffic(seed, 220, families=3)

        def maybe_abort(_plan):
            shadow.scheduler.check()
            if shadow.live and rng.random() < 0.05:
                shadow.abort(rng.choice(list(shadow.live)))

        for _ in range(20):
            for _ in range(rng.randint(1, shadow.slots + 1)):
                shadow.submit(*traffic.request())
            shadow.run(during=maybe_abort)
        shadow.drain()
        stats = shadow.stats()
        assert errors(shadow) == []
    assert shadow.ahead_steps > 20, "hardly any step was planned ahead"
    assert stats["finished_stop"] > 0
    assert stats["finished_abort"] > 0


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize(
    "total", [1000, pytest.param(TOTAL, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_host_tier_of_eight_pages_under_random_requests(hybrid, total):
    """LEK-05: hits, aborts, preemptions; memory flat, nothing held at the end."""
    with Shadow(
        pages=12,
        host_pages=8,
        layers=4,
        slots=4,
        hybrid=hybrid,
        snapshots=4,
        preempt_every=5,
        preemption="park",
        policy="priority",
        budget=256,
    ) as shadow:
        shadow.keep_results = False
        traffic = Traffic(1, 400, families=4, low=0.2)
        used = soak(shadow, traffic, total, sample_memory=max(total // 20, 1))
        shadow.drain()
        stats = shadow.stats()
    assert stats["submitted"] == total
    ended = sum(stats[f"finished_{reason}"] for reason in ("stop", "length", "abort", "error"))
    assert ended == total
    assert (stats["finished_error"], stats["results"]) == (0, 0)
    assert stats["cached_device_tokens"] > 0
    if not hybrid:  # whose KV is of use only where one of four states ends
        assert stats["cached_host_tokens"] + stats["cached_streamed_tokens"] > 0
    assert stats["preemptions"] > 0
    assert stats["memory"]["parked"] > 0
    # The first quarter of the run is warm-up.
    slope = (used[-1] - used[len(used) // 4]) / (0.75 * total)
    print(f"{total} requests, {stats['steps']} steps, {slope:.1f} bytes of memory a request")
    assert slope < (4096 if total < 10_000 else 100)


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("parts", [(32, "full"), (32, "quarter")], ids=["large", "quarter"])
def test_a_long_prompt_comes_back_from_the_host_after_noise(layout, hybrid, parts):
    """HST-14: 32K tokens, noise that fills the device but not the host, the prompt again."""
    thousands, host = parts
    length = thousands * 1024
    pages = length // PAGE + 4
    host_pages = 3 * pages if host == "full" else pages // 4
    with Shadow(
        pages=pages if layout == "paged" else None,
        host_pages=host_pages,
        layers=1,
        width=1,
        slots=1,
        hybrid=hybrid,
        snapshots=host_pages // 4,
        snapshot_interval=4096,
        max_context=length + 256,
        budget=4096,
        settled=True,
    ) as shadow:
        question = tokens(length, 1)
        shadow.submit(question, 2)
        shadow.run()
        for i in range(5 if host == "full" else 12):
            shadow.submit(tokens(length // 4, 10 + i), 1)
            shadow.run()
        again = shadow.submit(question, 2)
        shadow.run()
        device, from_host, _ = shadow.results[again].cached_tokens
        if host == "full":
            assert device + from_host >= 0.99 * (length - 1) // PAGE * PAGE
            assert from_host >= 0.9 * length
        short = tokens(min(PAGE * (host_pages // 2), length // 4), 99)
        shadow.submit(short, 2)
        shadow.run()
        hit = shadow.submit(short, 2)
        shadow.run()
        assert sum(shadow.results[hit].cached_tokens) > 0, "no hits with a small host tier"
        shadow.drain()


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_the_same_trace_gives_the_same_hits(hybrid):
    """LEK-07, PFX: copies settled between steps, so that time decides nothing."""
    found = []
    for _ in range(2):
        with Shadow(
            pages=24, layers=4, host_pages=40, hybrid=hybrid, slots=3, settled=True
        ) as shadow:
            soak(shadow, Traffic(3, 500, low=0.3), 150, aborts=0.0)
            shadow.drain()
            stats = shadow.stats()
            found.append([v for k, v in stats.items() if k != "copies"])
            ids = [r.cached_tokens for r in shadow.results.values()]
            found[-1].append(ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_abort_all_at_any_step_leaves_nothing_behind(layout, hybrid):
    """SLT-04, LEK-07: waiting, loading, prefilling, decoding, parked, storing, over a slow link."""
    options = {
        "pages": 14 if layout == "paged" else None,
        "host_pages": 24,
        "layers": 4,
        "hybrid": hybrid,
        "slots": 3,
        "budget": 64,
        "link": 200_000,  # about 5 ms a page
        "policy": "priority",
    }
    if layout == "paged":
        options |= {"preempt_every": 3, "preemption": "park"}
    seen = set()
    with Shadow(**options) as shadow:
        traffic = Traffic(5, 400, families=2, low=0.3 if layout == "paged" else 0.0)
        for steps in range(1, 25):
            for _ in range(6):
                shadow.submit(*traffic.request())
            for at in range(steps):
                last = at == steps - 1

                def abort_all(_plan, last=last):
                    seen.update(shadow.scheduler.poll(i).phase for i in shadow.live)
                    for i in list(shadow.live) if last else ():
                        assert shadow.abort(i)

                shadow.step(0.05, abort_all if steps % 2 else None)
            for i in list(shadow.live):
                shadow.abort(i)
            shadow.drain()
        stats = shadow.stats()
    assert seen >= {"waiting", "prefilling", "decoding"}
    if layout == "paged":
        assert "preempted" in seen
        assert stats["memory"]["parked"] > 0
    assert stats["copies"]["store"]["jobs"] > 0
    assert stats["copies"]["load"]["jobs"] > 0


def test_thousand_preemptions_on_a_tiny_pool_conserve_everything():
    """PRE-04."""
    for preemption in ("recompute", "park"):
        with Shadow(
            pages=9, host_pages=12, slots=2, preempt_every=1, preemption=preemption
        ) as shadow:
            while shadow.stats()["preemptions"] < 1000:
                for seed in range(3):
                    shadow.submit(tokens(70 + seed, seed), 60)
                shadow.run()
                shadow.drain()


def running_order(shadow):
    return [i for i in shadow.live if shadow.scheduler.poll(i).phase in ("prefilling", "decoding")]


@pytest.mark.parametrize("preemption", ["recompute", "park"])
def test_under_shortage_the_oldest_runs_on_and_ends_first(preemption):
    """SCH-03: the victim is the newest; nobody older is ever preempted for somebody newer."""
    with Shadow(
        pages=9,
        host_pages=30,
        slots=4,
        admission="estimate",
        admission_ratio=0.05,
        preemption=preemption,
        prefix_cache=False,
    ) as shadow:
        ids = [shadow.submit(tokens(60, i), 240) for i in range(4)]
        before = []
        while shadow.live:
            shadow.step(0.02)
            now = running_order(shadow)
            gone = [i for i in before if i not in now and i in shadow.live]
            stayed = [i for i in before if i in now]
            for victim in gone:
                assert all(victim > other for other in stayed), (victim, stayed)
            before = now
        assert shadow.stats()["preemptions"] > 0, "no shortage, nothing was tested"
        results = [shadow.results[i] for i in ids]
        assert results[0].preemptions == 0
        assert [r.finished_ns for r in results] == sorted(r.finished_ns for r in results)
        assert max(r.preemptions for r in results) <= len(ids)


@pytest.mark.parametrize("seed", range(6))
def test_with_reserve_nobody_is_ever_preempted_for_want_of_pages(seed):
    """SCH-13, Q6: what is admitted can run to its limit.

    Alone it may wait for a copy, as it is admitted whatever copies still read.
    """
    rng = random.Random(seed)
    with Shadow(
        pages=rng.choice((8, 12, 20)), host_pages=rng.choice((0, 30)), slots=8, admission="reserve"
    ) as shadow:
        step = shadow.step

        def watched(*args):
            before = shadow.stats()
            plan = step(*args)
            deferred = shadow.stats()["deferred_rows"] - before["deferred_rows"]
            assert deferred == 0 or before["running"] == deferred == 1
            return plan

        shadow.step = watched
        soak(shadow, Traffic(seed, 380), 60, aborts=0.05)
        stats = shadow.stats()
    assert (stats["preemptions"], stats["finished_error"]) == (0, 0)


def test_order_of_admission_is_order_of_submit():
    """SCH-05, Q3: hits never reorder the queue."""
    with Shadow(pages=10, host_pages=20, slots=3) as shadow:
        traffic = Traffic(9, 400)
        ids = [shadow.submit(*traffic.request()) for _ in range(80)]
        shadow.run()
        stamps = [(shadow.results[i].first_planned_ns, i) for i in ids]
    assert stamps == sorted(stamps)


def test_one_page_pool_serves_what_fits():
    """Pool of minimum size; what can never fit is refused and changes nothing."""
    with Shadow(pages=1, host_pages=1, slots=2) as shadow:
        with pytest.raises(OutOfPages) as refused:
            shadow.submit(tokens(60), 10)
        assert "2" in str(refused.value)
        for seed in range(3):
            shadow.submit(tokens(50, seed), 14)
        shadow.run()
        shadow.drain()
        assert errors(shadow) == []


@pytest.mark.parametrize("fault", ["fail", "delay"])
@pytest.mark.parametrize("stream", ["load", "window", "store"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_failed_and_late_copies_never_show_in_tokens(stream, fault, hybrid):
    """HST-07, LEK-04: rows that needed the copy start again or end with CopyError; all is given
    back."""
    for layout in ("paged", "slots"):
        if layout == "slots" and stream == "window":
            continue
        with Shadow(
            pages=12 if layout == "paged" else None,
            layers=4,
            host_pages=30,
            hybrid=hybrid,
            slots=3,
            policy="priority",
            strict=fault == "delay",
            **({"preempt_every": 4, "preemption": "park"} if layout == "paged" else {}),
        ) as shadow:
            traffic = Traffic(11, 350, families=2, low=0.4 if layout == "paged" else 0.0)
            for _ in range(20):
                for nth in (0, 1, 5):
                    shadow.device.inject(stream, nth, fault, seconds=0.005)
                soak(shadow, traffic, 4, aborts=0.05)
            for _ in range(8):  # what is left of the faults
                soak(shadow, traffic, 4, aborts=0.0)
            shadow.drain()
            stats = shadow.stats()
            if fault == "fail":
                assert stats["memory"]["copies_failed"] > 0
            assert all("CopyError" in message for message in errors(shadow))
            if fault == "delay":
                assert errors(shadow) == []


def test_rows_that_share_a_load_share_its_failure():
    """HST-07: whoever joined the load starts again too, and reads nothing of it."""
    with Shadow(pages=14, host_pages=60, slots=3, strict=False, settled=True) as shadow:
        shared = tokens(5 * PAGE, 1)
        shadow.submit([*shared, 1], 1)
        for seed in range(2, 6):
            shadow.run()
            shadow.submit(tokens(6 * PAGE, seed), 1)
        shadow.run()
        shadow.device.inject("load", 0, "fail")
        ids = [shadow.submit([*shared, seed], 4) for seed in range(3)]
        shadow.run()
        shadow.drain()
        assert shadow.stats()["failed_copy_rows"] == 3
        assert shadow.wrong_reads > 0, "the failed load would not have shown"
        assert [shadow.results[i].finish_reason for i in ids] == ["length"] * 3


@pytest.mark.parametrize("preemption", ["recompute", "park"])
def test_a_load_never_starts_below_another(preemption):
    """Two prompts whose common part is loaded for the first: the second waits for its own part."""
    with Shadow(pages=16, host_pages=60, slots=3, settled=True, preemption=preemption) as shadow:
        long = tokens(5 * PAGE, 1)
        shadow.submit([*long, 1], 1)
        for seed in range(2, 6):
            shadow.run()
            shadow.submit(tokens(7 * PAGE, seed), 1)
        shadow.run()
        ids = [shadow.submit([*long[: n * PAGE], 3], 3) for n in (1, 3, 5)]
        shadow.run()
        shadow.drain()
        found = [sum(shadow.results[i].cached_tokens) for i in ids]
        assert found == [PAGE, 3 * PAGE, 5 * PAGE]
