"""Page allocator through the binding, against a naive model (I1-I20; cases PAG, INT)."""

import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import threading
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace import ConfigError, InvalidRequest, OutOfPages, PageAllocator, PageStateError
from models.page_model import Bad, PageModel

ERRORS = {
    error.__name__: error for error in (ConfigError, InvalidRequest, OutOfPages, PageStateError)
}
OWNERS = ["request", "tree", "copy"]


def arrays(slots):
    table = np.array(slots, dtype=np.uint32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def slots_of(result):
    return list(zip(result[0].tolist(), result[1].tolist(), strict=True))


class Trio:
    """The allocator, a twin that is traced and restored, and the model; all get every call.

    `draw` is a `random.Random`; every choice comes from it.
    """

    def __init__(self, draw):
        self.draw = draw
        N, L = draw.randint(1, 24), draw.choice([4, 8, 15, 16, 36, 64])
        P, w = draw.choice([64, 128, 256]), draw.choice([1, 2, 3, 4])
        addressing = draw.choice(["flat", "flat", "strict"])
        caps = [draw.choice([None, draw.randint(0, N), N]) for _ in "hl"]
        self.model = PageModel((N, L, P, w), addressing, *caps)
        named = {"addressing": addressing, "cap_high": caps[0], "cap_low": caps[1]}
        self.real = PageAllocator(N, L, P, slot_widths=w, **named)
        self.twin = PageAllocator(N, L, P, slot_widths=w, **named)
        self.seen = Counter()

    def both(self, call, expect):
        """`call(allocator)` on both must do what `expect()` does on the model."""
        try:
            wanted = expect()
        except Bad as bad:
            self.seen[bad.kind] += 1
            self.refused(bad, bad.numbers, lambda: call(self.real))
            self.refused(bad, bad.numbers, lambda: call(self.twin))
            return
        for pages in (self.real, self.twin):
            result = call(pages)
            assert (None if result is None else result.tolist()) == wanted

    def refused(self, bad, numbers, call):
        before = self.real.dump()
        with pytest.raises(ERRORS[bad.kind]) as caught:
            call()
        assert {name: getattr(caught.value, name) for name in numbers} == numbers
        assert self.real.dump() == before

    def class_(self):
        return self.draw.choice(["low", "low", "low", "high"])

    def item(self, c):
        draw = self.draw
        starts = self.model.starts(c)
        start = draw.choice([None, *draw.choices(starts, k=2), draw.choice([*starts, 3, 70])])
        n = draw.choice([draw.randrange(4), draw.randrange(12), 1, None])
        if n is None:
            n = max(0, self.model.available(c) + draw.choice([-1, 0, 1, 2**40]))
        return n, start

    def alloc(self):
        c = self.class_()
        n, start = self.item(c)
        self.group([(n, start)], c, lambda pages: [pages.alloc(n, c, start)], None)

    def alloc_many(self):
        c = self.class_()
        items = [self.item(c) for _ in range(self.draw.randrange(6))]
        self.group(items, c, lambda pages: pages.alloc_many(items, c))

    def group(self, items, c, call, *item):
        try:
            wanted = self.model.alloc_many(items, c)
        except Bad as bad:
            self.seen[bad.kind] += 1
            self.refused(bad, bad.numbers, lambda: self.twin.alloc_traced(items, c))
            # A single call has no item.
            numbers = bad.numbers | ({"item": item[0]} if item and "item" in bad.numbers else {})
            self.refused(bad, numbers, lambda: call(self.real))
            return
        traced = self.twin.alloc_traced(items, c)
        got = [[(*slot, s) for slot, s in zip(slots_of(t), t[2].tolist(), strict=True)]
               for t in traced]  # fmt: skip
        assert got == wanted
        assert [slots_of(group) for group in call(self.real)] == [slots_of(t) for t in traced]
        self.seen.update(step for group in got for *_, step in group)

    def some(self, slots):
        """Some of the slots, now and then with one that does not belong there."""
        draw, model = self.draw, self.model
        slots = sorted(slots)
        most = len(slots) if draw.random() < 0.1 else min(5, len(slots))
        picked = draw.sample(slots, draw.randint(0, most))
        if draw.random() < 0.25:
            stray = (draw.randrange(model.N), draw.choice(model.starts("low")))
            wild = draw.choice([(model.N, 0), (2**32 - 1, 2**32 - 1), (0, model.L), (0, 1)])
            others = sorted(model.live.keys() - set(slots)) or [stray]
            bad = draw.choice([stray, wild, draw.choice(picked or [stray]), draw.choice(others)])
            picked.insert(draw.randint(0, len(picked)), bad)
        return picked

    def of_owner(self, owner):
        return [slot for slot, held_by in self.model.live.items() if held_by == owner]

    def free(self):
        owner = self.draw.choice(["request", *OWNERS])
        slots = self.some(self.of_owner(owner))
        epoch = self.draw.choice([0, 0, self.model.retired + self.draw.randrange(4)])
        self.both(
            lambda pages: pages.free(*arrays(slots), epoch, owner=owner),
            lambda: self.model.free(slots, epoch, owner),
        )

    def transfer(self):
        owner, to = self.draw.choice(OWNERS), self.draw.choice(OWNERS)
        slots = self.some(self.of_owner(owner))
        self.both(
            lambda pages: pages.transfer(*arrays(slots), owner, to),
            lambda: self.model.transfer(slots, owner, to),
        )

    def pin(self):
        slots = self.some(self.model.live)
        self.both(lambda pages: pages.pin(*arrays(slots)), lambda: self.model.pin(slots))

    def unpin(self):
        slots = self.some(self.model.pins)
        self.both(lambda pages: pages.unpin(*arrays(slots)), lambda: self.model.unpin(slots))

    def retire(self):
        epoch = max(0, self.model.retired + self.draw.randint(-1, 2))
        self.both(lambda pages: pages.retire(epoch), lambda: self.model.retire(epoch))

    def set_cap(self):
        c, N = self.draw.choice(["high", "low"]), self.model.N
        cap = self.draw.choice([self.draw.randint(0, N), N, N + 1])
        self.both(lambda pages: pages.set_cap(c, cap), lambda: self.model.set_cap(c, cap))

    def reclaim(self):
        k = self.draw.randint(0, len(self.model.cls) + 1)
        self.both(lambda pages: pages.reclaim_plan(k), lambda: self.model.reclaim_plan(k))

    def restore(self):
        self.twin = PageAllocator.restore(json.loads(json.dumps(self.twin.dump())))

    def agree(self):
        self.real.check()
        self.twin.check()
        assert self.real.digest() == self.twin.digest()
        assert self.real.dump() == self.twin.dump() == self.model.dump()
        model, stats = self.model, self.real.stats()
        assert stats["free"] == len(model.free_pages())
        for c in ("high", "low"):
            assert self.real.available(c) == model.available(c)
            mine = [slot for slot in model.live if model.cls[slot[0]] == c]
            owners = Counter(model.live[slot] for slot in mine)
            assert {owner: stats[c][owner] for owner in OWNERS} == {o: owners[o] for o in OWNERS}
            assert stats[c]["partial"] == len(model.partial(c))
            waiting = sum(model.cls[r] == c for r, _ in model.pending)
            assert stats[c]["pending"] == waiting

    def drain(self):
        """Everyone lets go: the pool is as new (I14, I17)."""
        model = self.model
        pinned = [slot for slot, pins in model.pins.items() for _ in range(pins)]
        self.real.unpin(*arrays(pinned))
        for owner in OWNERS:
            self.real.free(*arrays(self.of_owner(owner)), owner=owner)
        self.real.retire(2**64 - 1)
        self.real.check()
        dump = self.real.dump()
        assert (dump["free"], dump["pages"]) == ([[0, model.N]], [])


CALLS = {
    "alloc": 8, "alloc_many": 4, "free": 8, "transfer": 3, "pin": 2, "unpin": 2, "retire": 2,
    "set_cap": 2, "reclaim": 1, "restore": 1,
}  # fmt: skip


class PageMachine(RuleBasedStateMachine):
    @initialize(draw=st.randoms(use_true_random=False))
    def start(self, draw):
        self.trio = Trio(draw)

    @rule(draw=st.randoms(use_true_random=False), name=st.sampled_from(sorted(CALLS)))
    def call(self, draw, name):
        self.trio.draw = draw
        getattr(self.trio, name)()

    @invariant()
    def all_agree(self):
        if hasattr(self, "trio"):
            self.trio.agree()

    def teardown(self):
        if hasattr(self, "trio"):
            self.trio.drain()


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(max_examples=max(15, settings().max_examples // 10))


def trace(seed, pools, calls):
    draw, seen = random.Random(seed), Counter()
    for _ in range(pools):
        trio = Trio(draw)
        for name in draw.choices(list(CALLS), CALLS.values(), k=calls):
            getattr(trio, name)()
            trio.agree()
        trio.drain()
        seen += trio.seen
    return seen


def test_long_trace_sees_every_step_and_every_error_a_hundred_times():
    seen = trace(20, 110, 60)
    assert {key: seen[key] >= 100 for key in [1, 2, 3, 4, 5, *ERRORS]} == dict.fromkeys(
        [1, 2, 3, 4, 5, *ERRORS], True
    ), seen


@pytest.mark.soak
def test_soak_against_the_naive_model():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    seen = trace(seed, 1000, 200)
    print(f"200,000 calls: {dict(seen)}")
    assert all(seen[key] >= 100 for key in [1, 2, 3, 4, 5, *ERRORS])


def state(pages):
    """Free raw pages, and partial and pending LOW slots as "r:s" words."""
    pages.check()
    dump = pages.dump()
    free = [r for first, end in dump["free"] for r in range(first, end)]
    partial, pending = [], []
    for r, c, live, waiting, _, _ in dump["pages"]:
        fenced = [s for s, _ in waiting]
        pending += [f"{r}:{s}" for s in fenced]
        rest = [s for s in (0, 2, 4, 6) if c == "low" and s not in live and s not in fenced]
        partial += [f"{r}:{s}" for s in rest]
    return free, " ".join(partial), " ".join(pending)


class Example:
    def __init__(self, addressing):
        self.pages = PageAllocator(4, 8, 64, cap_high=4, cap_low=3, addressing=addressing)

    def alloc(self, n, priority, start, pages, starts, steps, *after):
        twin = PageAllocator.restore(self.pages.dump())
        got = self.pages.alloc(n, priority, start)
        assert [array.tolist() for array in got] == [pages, starts]
        assert [array.dtype for array in got] == [np.uint32, np.uint32]
        ((*_, traced),) = twin.alloc_traced([(n, start)], priority)
        assert traced.tolist() == steps
        assert self.pages.digest() == twin.digest()
        if after:
            self.state(*after)
        return got

    def refused(self, needed, free, call, item=None):
        before = self.pages.dump()
        with pytest.raises(OutOfPages) as caught:
            call()
        error = caught.value
        assert (error.needed, error.free, error.evictable, error.item) == (needed, free, 0, item)
        assert self.pages.dump() == before

    def state(self, free, partial, pending=""):
        assert state(self.pages) == (free, partial, pending)


def test_worked_example_flat():
    x = Example("flat")
    pages = x.pages
    a = x.alloc(2, "low", None, [0, 1], [0, 0], [2, 3], [2, 3], "0:2 0:4 0:6 1:2 1:4 1:6")
    b = x.alloc(2, "low", 2, [0, 1], [2, 2], [1, 1], [2, 3], "0:4 0:6 1:4 1:6")
    c = x.alloc(3, "low", 2, [2, 0, 0], [2, 4, 6], [3, 4, 4], [3], "1:4 1:6 2:0 2:4 2:6")
    d = x.alloc(2, "low", 0, [2, 1], [0, 4], [1, 4], [3], "1:6 2:4 2:6")
    x.refused(4, 3, lambda: pages.alloc(4, "low"))
    x.refused(2, 1, lambda: pages.alloc(2, "high"))
    x.alloc(1, "high", None, [3], [0], [2], [], "1:6 2:4 2:6")
    pages.free(*c, 7)
    x.state([], "1:6 2:4 2:6", "0:4 0:6 2:2")
    e = x.alloc(1, "low", None, [1], [6], [1], [], "2:4 2:6", "0:4 0:6 2:2")
    pages.retire(7)
    x.state([], "0:4 0:6 2:2 2:4 2:6")
    for slots in (a, b, d, e):
        pages.free(*slots)
    x.state([0, 1, 2], "")
    x.refused(13, 12, lambda: pages.alloc(13, "low"))
    f = x.alloc(
        7, "low", 4, [0, 1, 2, 0, 0, 0, 1], [4, 4, 4, 0, 2, 6, 0], [3, 3, 3, 5, 5, 5, 5],
        [], "1:2 1:6 2:0 2:2 2:6",
    )  # fmt: skip
    g = x.alloc(1, "low", 4, [1], [2], [4], [], "1:6 2:0 2:2 2:6")
    pages.free(*f)
    pages.free(*g)
    x.state([0, 1, 2], "")
    items = [(2, None), (2, 2), (2, 6)]
    traced = PageAllocator.restore(pages.dump()).alloc_traced(items, "low")
    assert [steps.tolist() for *_, steps in traced] == [[2, 3], [2, 2], [2, 2]]
    got = [slots_of(group) for group in pages.alloc_many(items, "low")]
    assert got == [[(0, s), (1, s)] for s in (0, 2, 6)]
    x.state([2], "0:4 1:4")
    x.refused(9, 4, lambda: pages.alloc_many([(2, 4), (9, 0)], "low"), item=1)


def test_worked_example_strict():
    x = Example("strict")
    x.alloc(3, "low", None, [0, 1, 2], [0, 0, 0], [2, 3, 3])
    x.refused(3, 0, lambda: x.pages.alloc(3, "low", 0))
    x.alloc(3, "low", 2, [0, 1, 2], [2, 2, 2], [1, 1, 1])
    x.refused(1, 0, lambda: x.pages.alloc(1, "low", 2))
    x.alloc(3, "low", None, [0, 1, 2], [4, 4, 4], [1, 1, 1])


@pytest.mark.parametrize("addressing", ["flat", "strict"])
def test_pag_04_a_group_that_fails_at_any_item_leaves_nothing(addressing):
    pages = PageAllocator(12, 16, 64, addressing=addressing, cap_low=12)
    held = pages.alloc(5, "low", 4)
    pages.free(held[0][:2], held[1][:2])
    good, before = [(2, None), (1, 6), (3, 0), (0, None), (2, 14)], pages.dump()
    for item, (bad, error) in itertools.product(
        range(6), [((1000, 2), OutOfPages), ((1, 3), InvalidRequest)]
    ):
        with pytest.raises(error) as caught:
            pages.alloc_many([*good[:item], bad, *good[item:]], "low")
        assert error is InvalidRequest or caught.value.item == item
        assert pages.dump() == before
    pages.alloc_many(good, "low")
    pages.check()


@given(geometry=st.tuples(st.integers(1, 60), st.integers(1, 64)), data=st.data())
def test_int_03_entries_are_a_bijection_below_the_flag(geometry, data):
    """INT-03, GRF-03: a page or start outside of the pool is an error, never an entry."""
    N, L = geometry
    w = data.draw(st.integers(1, L))
    pages = PageAllocator(N, L, 64, slot_widths=w)
    seen = set()
    for c, starts in (("high", [0]), ("low", [i * w for i in range(L // w)])):
        slots = [(r, s) for r in range(N) for s in starts]
        entries = pages.encode(*arrays(slots), c)
        flag = 2**31 if c == "low" else 0
        assert entries.tolist() == [r + s * N + flag for r, s in slots]
        raw, start, is_low = pages.decode(entries)
        assert slots_of((raw, start)) == slots
        assert set(is_low.tolist()) == {c == "low"}
        seen.update(entries.tolist())
    assert len(seen) == N * (1 + L // w)
    for slot in [(N, 0), (0, L), (0, (L // w) * w)]:
        with pytest.raises(PageStateError) as caught:
            pages.encode(*arrays([(0, 0), slot]), "low")
        assert (caught.value.index, caught.value.page, caught.value.start) == (1, *slot)


# A pool that is accepted is built, so these are small; Rust tests the rest.
@given(
    shape=st.tuples(
        st.integers(0, 2**17) | st.integers(2**31, 2**32 - 1),
        st.integers(0, 2**16) | st.integers(2**31, 2**32 - 1),
        st.sampled_from([0, 1, 48, 64, 2**31]),
    ),
    share=st.integers(1, 70),
)
@settings(max_examples=40)
def test_int_02_geometry_beyond_the_limits_is_a_config_error(shape, share):
    (N, L, P), w = shape, shape[1] // share
    legal = w and 0 < N < 2**31 and L // w <= 64 and N * L <= 2**31 and P.bit_count() == 1
    if not legal:
        with pytest.raises(ConfigError):
            PageAllocator(N, L, P, slot_widths=w)
        return
    pages = PageAllocator(N, L, P, slot_widths=w, cap_low=N)
    last = (L // w - 1) * w
    (entry,) = pages.encode(*arrays([(N - 1, last)]), "low").tolist()
    assert entry == 2**31 + N - 1 + last * N
    assert pages.available("low") == N * (L // w)
    with pytest.raises(OutOfPages) as caught:
        pages.alloc(2**63, "low")
    assert (caught.value.needed, caught.value.free) == (2**63, N * (L // w))


def test_errors_name_what_was_wrong():
    pages = PageAllocator(4, 8, 64)
    for field, call in {
        "priority": lambda: pages.alloc(1, "middle"),
        "preferred_start": lambda: pages.alloc(1, "high", 2),
        "return_slot_starts": lambda: pages.alloc(1, "low", return_slot_starts=False),
        "owner": lambda: pages.free(*arrays([]), owner="nobody"),
        "pages": lambda: pages.pin(np.zeros(1, np.int64), np.zeros(1, np.uint32)),
        "slot_starts": lambda: pages.pin(np.zeros(1, np.uint32), np.zeros((1, 1), np.uint32)),
        "entries": lambda: pages.decode([0]),
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="one start for each of the 2 pages"):
        pages.free(np.zeros(2, np.uint32), np.zeros(1, np.uint32))
    with pytest.raises(ConfigError, match="addressing"):
        PageAllocator(4, 8, 64, addressing="round")
    with pytest.raises(PageStateError, match=r"page 4 start 0 \(number 0 of the call\)"):
        pages.free(*arrays([(4, 0)]))
    with pytest.raises(OverflowError):
        pages.alloc(-1, "low")


def test_high_pages_may_come_alone():
    pages = PageAllocator(4, 8, 64)
    got = pages.alloc(2, "high", return_slot_starts=False)
    assert got.tolist() == [0, 1]
    pages.free(got, np.zeros_like(got))
    assert pages.stats()["free"] == 4


def damaged(dump):
    yield {**dump, "format": 2}
    for key in dump:
        yield {k: v for k, v in dump.items() if k != key}
        yield {**dump, key: None}
        yield {**dump, key: [["x"]]}
    for row, field in itertools.product(range(len(dump["pages"])), range(6)):
        for value in (None, "x", -1, [0], [[0]], [[0, 0, 0]], ["x"], 2**70):
            pages = json.loads(json.dumps(dump["pages"]))
            pages[row][field] = value
            yield {**dump, "pages": pages}
    yield {**dump, "pages": [row[:5] for row in dump["pages"]]}
    yield {**dump, "pages": dump["pages"][::-1]}
    yield None
    yield [1]


def test_i16_a_damaged_dump_is_refused():
    pages = PageAllocator(8, 8, 64)
    got = pages.alloc(5, "low")
    high = pages.alloc(2, "high")
    pages.pin(*high)
    pages.free(got[0][3:], got[1][3:], 5)
    dump = pages.dump()
    assert PageAllocator.restore(json.loads(json.dumps(dump))).dump() == dump
    for bad in damaged(dump):
        if bad == dump:
            continue
        with pytest.raises(ConfigError):
            PageAllocator.restore(bad)


def test_pag_07_threads_conserve_pages_and_see_whole_states():
    pages = PageAllocator(24, 16, 64, cap_low=20)
    failed, done = [], threading.Event()

    def work(seed):
        draw, held = random.Random(seed), []
        for step in range(400):
            try:
                c = draw.choice(["low", "low", "high"])
                held += slots_of(pages.alloc(draw.randrange(9), c))
            except OutOfPages:
                draw.shuffle(held)
                pages.free(*arrays(held[:20]), step)
                del held[:20]
                pages.retire(max(0, step - 5))
        pages.free(*arrays(held))

    def read():
        while not done.is_set():
            stats = pages.stats()
            used = [stats[c] for c in ("high", "low")]
            slots = [sum(c[k] for k in (*OWNERS, "pending", "partial")) for c in used]
            raw = stats["free"] + used[0]["used"] + used[1]["used"]
            if raw != 24 or slots != [used[0]["used"], 8 * used[1]["used"]]:
                failed.append(stats)

    def run(work, *args):
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=run, args=(work, seed)) for seed in range(4)]
    reader = threading.Thread(target=run, args=(read,))
    for thread in (*workers, reader):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    assert failed == []
    pages.check()
    pages.retire(400)
    assert pages.dump()["free"] == [[0, 24]]


DIGEST = """
from headrace import PageAllocator
pages = PageAllocator(9, 15, 64, slot_widths=4)
pages.alloc_many([(2, None), (5, 4)], "low")
high = pages.alloc(3, "high")
pages.pin(high[0][:1], high[1][:1])
pages.free(*high, 2)
print(pages.digest(), pages.dump())
"""


def test_i09_two_processes_agree_on_digest_and_dump():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**env, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != b""
