"""Prefix tree and host pages through the binding, against a naive model (T1-T13; PFX, HST-05)."""

import gc
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace._core import HostPages, PrefixTree
from headrace.errors import (
    ConfigError,
    HeadraceError,
    InvalidRequest,
    LeaseReleased,
    PageStateError,
)
from models.tree_model import TreeModel

LOW = 1 << 31
DEVICE, HOST, SLOTS = 16, 10, 3
PATHS = st.lists(st.integers(0, 2), max_size=6)
CLASSES = st.sampled_from(["high", "high", "low"])


def tokens(pages, page_size=64):
    return np.repeat(np.asarray(pages, dtype=np.int64), page_size)


def longer(pages):
    return np.append(tokens(pages), 0)


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([16, 64, 128]),
        snapshots=st.booleans(),
        policy=st.sampled_from(["write_through", "none"]),
        collide=st.booleans(),
    )
    def build(self, page_size, snapshots, policy, collide):
        self.size = page_size
        self.tree = PrefixTree(
            page_size, snapshots=snapshots, policy=policy, colliding_hash=collide
        )
        self.pool = HostPages(HOST)
        self.model = TreeModel(page_size, snapshots)
        self.leases, self.loads, self.stores, self.snapshot_jobs = {}, [], [], []
        self.free = set(range(DEVICE)) | {LOW + page for page in range(DEVICE)}
        self.slots = set(range(SLOTS))
        self.issued = 0

    def take(self, n, low=False):
        return sorted(page for page in self.free if (page >= LOW) == low)[:n]

    def give_back(self, given):
        assert self.free.isdisjoint(given["device"])
        self.free.update(given["device"])
        self.pool.free(given["host"])
        self.slots.update(given["snapshots"])

    def same(self, given, expected):
        assert {key: sorted(v) if v != given["coming"] else v for key, v in given.items()} == {
            key: sorted(v) if v != expected["coming"] else v for key, v in expected.items()
        }
        self.give_back(given)

    def lease(self, data):
        return data.draw(st.sampled_from(sorted(self.leases))) if self.leases else None

    @rule(ns=st.integers(0, 1), pages=PATHS, extra=st.booleans(), reader=CLASSES)
    def match(self, ns, pages, extra, reader):
        if len(self.leases) == 5:
            return
        prompt = tokens(pages, self.size)
        prompt = np.append(prompt, 9) if extra else prompt
        expected, _ = self.model.hit((ns, *pages), max(0, len(prompt) - 1) // self.size)
        peeked = self.tree.peek(ns, prompt)
        lease = self.tree.match_prefix(ns, prompt, None, reader)
        assert (lease.device_len(), lease.host_len()) == peeked
        assert sum(peeked) == expected * self.size
        self.issued += 1
        self.leases[self.issued] = lease
        most = max(0, len(prompt) - 1) // self.size
        self.model.match(self.issued, (ns, *pages), most, reader)

    @rule(data=st.data())
    def release(self, data):
        if (key := self.lease(data)) is None:
            return
        lease = self.leases.pop(key)
        lease.release()
        with pytest.raises(LeaseReleased):
            lease.release()
        garbage = self.model.release(key)
        self.same(self.tree.take_garbage(), self.evicted(device=garbage))

    def evicted(self, **lists):
        return {"device": [], "host": [], "snapshots": [], "coming": 0} | lists

    @rule(data=st.data(), pages=PATHS, priority=CLASSES)
    def insert(self, data, pages, priority):
        if (key := self.lease(data)) is None:
            return
        given = self.take(min(len(pages), 10 - len(self.model.holds[key].path)))
        pages = pages[: len(given)]
        covered, duplicates, garbage = self.model.insert(key, pages, given, priority)
        result = self.tree.insert(self.leases[key], tokens(pages, self.size), given, priority)
        assert result == (covered, duplicates)
        self.free -= set(given[:covered]) - {own for _, own, _ in duplicates}
        self.same(self.tree.take_garbage(), self.evicted(device=garbage))

    @rule(n=st.integers(0, 5))
    def evict_device(self, n):
        expected = self.model.evict_device(n)
        self.same(self.tree.evict_device(n), expected)

    @rule(n=st.integers(0, 5))
    def evict_host(self, n):
        expected = self.model.evict_host(n)
        self.same(self.tree.evict_host(n), expected)

    @rule(n=st.integers(0, 2))
    def evict_snapshot(self, n):
        slots = self.model.evict_snapshot(n)
        assert self.tree.evict_snapshot(n) == slots
        self.slots.update(slots)

    @rule(data=st.data(), n=st.integers(1, 4))
    def load(self, data, n):
        if (key := self.lease(data)) is None:
            return
        run, given = self.model.run(key, "host"), self.take(n)
        job, copies, unused = self.tree.begin_load(self.leases[key], given)
        run = run[: len(given)]
        assert copies == [
            (self.model.pages[p].host, page) for p, page in zip(run, given, strict=False)
        ]
        assert unused == given[len(run) :]
        for path, page in zip(run, given, strict=False):
            self.model.pages[path].state, self.model.pages[path].device = "loading", page
            self.free.remove(page)
        if run:
            self.model.jobs[job] = (run[-1], run)
            self.loads.append(job)

    @rule(ok=st.booleans())
    def end_load(self, ok):
        if not self.loads:
            return
        job = self.loads.pop(0)
        freed = []
        for path in self.model.jobs.pop(job)[1]:
            page = self.model.pages[path]
            if ok:
                page.state = "full"
            else:
                freed.append(page.device)
                page.state, page.device = "host", None
        assert self.tree.end_load(job, ok) == freed
        assert self.tree.end_load(job, ok) == []
        self.free.update(freed)

    @rule(n=st.integers(1, 4))
    def store(self, n):
        if (want := self.tree.next_store(n)) is None:
            return
        where = {page.device: path for path, page in self.model.pages.items()}
        paths = [where[page] for page in want.pages]
        for path in paths:
            page = self.model.pages[path]
            assert (page.state, page.host) == ("full", None)
        assert len(paths[0]) == 2 or self.model.pages[paths[0][:-1]].host is not None
        given = self.pool.alloc(len(paths))
        if given is None:
            self.tree.drop_store(want)
            with pytest.raises(LeaseReleased):
                self.tree.drop_store(want)
            return
        job = self.tree.begin_store(want, given)
        for path, page in zip(paths, given, strict=True):
            self.model.pages[path].state, self.model.pages[path].host = "backing", page
        self.model.jobs[job] = (paths[-1], paths)
        self.stores.append(job)

    @rule(ok=st.booleans())
    def end_store(self, ok):
        if not self.stores:
            return
        job = self.stores.pop(0)
        freed = []
        for path in self.model.jobs.pop(job)[1]:
            page = self.model.pages[path]
            page.state = "full"
            if not ok:
                freed.append(page.host)
                page.host = None
        assert self.tree.end_store(job, ok) == freed
        self.pool.free(freed)

    @rule(data=st.data(), n=st.integers(0, 4))
    def stream(self, data, n):
        if (key := self.lease(data)) is None:
            return
        freed = self.model.demote(key)
        assert sorted(self.tree.demote(self.leases[key])) == sorted(freed)
        self.free.update(freed)
        hold = self.model.holds[key]
        missing = [p for p in self.model.steps(hold.path) if self.model.pages[p].state == "host"]
        assert self.tree.window_missing(self.leases[key]) == len(missing)
        given = self.take(n, low=True)
        left = self.tree.give_window(self.leases[key], given)
        if hold.reader == "high":
            assert left == given
            return
        hold.windows = True
        assert left == given[len(missing) :]
        for path, page in zip(missing, given, strict=False):
            self.model.pages[path].state, self.model.pages[path].device = "low", page
            self.free.remove(page)

    @rule(data=st.data(), position=st.integers(0, 12))
    def begin_snapshot(self, data, position):
        if (key := self.lease(data)) is None or not self.slots:
            return
        position *= 64
        path = self.model.holds[key].path
        pages = position // self.size
        at = path[: pages + 1]
        pending = [end for end, paths in self.model.jobs.values() if not paths]
        fits = (
            self.model.snapshots
            and 0 < pages < len(path)
            and position % max(64, self.size) == 0
            and self.model.pages[at].snapshot is None
            and at not in pending
        )
        slot = min(self.slots)
        if not fits:
            with pytest.raises(InvalidRequest):
                self.tree.begin_snapshot(self.leases[key], position, slot)
            return
        job = self.tree.begin_snapshot(self.leases[key], position, slot)
        self.slots.remove(slot)
        self.model.jobs[job] = (at, [])
        self.snapshot_jobs.append((job, at, slot))

    @rule(ok=st.booleans())
    def end_snapshot(self, ok):
        if not self.snapshot_jobs:
            return
        job, at, slot = self.snapshot_jobs.pop(0)
        del self.model.jobs[job]
        assert self.tree.end_snapshot(job, ok) == (None if ok else slot)
        if ok:
            self.model.tick += 1
            self.model.pages[at].snapshot = slot
            self.model.pages[at].snapshot_tick = self.model.tick
        else:
            self.slots.add(slot)

    @invariant()
    def agrees(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        self.pool.check()
        shown, path = {}, ()
        for node in self.tree.dump():
            path = (node["namespace"], *path[1 : 1 + node["start"] // self.size])
            numbers = node["tokens"][:: self.size]
            for index, number in enumerate(numbers):
                path = (*path, number)
                last = index + 1 == len(numbers)
                shown[path] = (
                    node["state"],
                    node["device"][index] if node["device"] else None,
                    node["host"][index] if node["host"] else None,
                    node["priority"],
                    node["tick"],
                    node["snapshot"] if last else None,
                    node["locks"],
                )
        assert shown == {
            path: (
                p.state,
                p.device,
                p.host,
                p.priority,
                p.tick,
                p.snapshot,
                self.model.locks(path),
            )
            for path, p in self.model.pages.items()
        }
        held = [page.host for page in self.model.pages.values() if page.host is not None]
        assert self.pool.free_count() + len(held) == HOST, "T12"
        on_device = [p.device for p in self.model.pages.values() if p.device is not None]
        assert len(self.free) + len(on_device) == 2 * DEVICE, "T4"
        for key, lease in self.leases.items():
            steps = self.model.steps(self.model.holds[key].path)
            assert [page[:2] for page in self.tree.pages(lease)] == [
                (self.model.pages[p].state, self.model.pages[p].device) for p in steps
            ]

    def teardown(self):
        """LEK-07: everything ended and dropped, nothing is locked and nothing is lost."""
        if not hasattr(self, "tree"):
            return
        self.leases.clear()
        gc.collect(0)
        for job in self.loads:
            self.free.update(self.tree.end_load(job, False))
        for job in self.stores:
            self.pool.free(self.tree.end_store(job, False))
        for job, _, slot in self.snapshot_jobs:
            assert self.tree.end_snapshot(job, False) == slot
            self.slots.add(slot)
        self.give_back(self.tree.take_garbage())
        stats = self.tree.stats()
        assert (stats["leases"], stats["jobs"]) == (0, 0)
        assert self.tree.evictable_device() == stats["full_pages"]
        self.give_back(self.tree.clear())
        assert len(self.free) == 2 * DEVICE
        assert self.pool.free_count() == HOST
        assert len(self.slots) == SLOTS
        self.tree.check()


TestTreeMachine = TreeMachine.TestCase


def publish(tree, pages, first=0):
    lease = tree.match_prefix(1, longer(pages))
    done = (lease.device_len() + lease.host_len()) // 64
    ids = list(range(first + done, first + len(pages)))
    assert tree.insert(lease, tokens(pages[done:]), ids) == (len(ids), [])
    return lease


def test_pfx_01_a_hybrid_hit_ends_at_the_deepest_snapshot():
    tree = PrefixTree(snapshots=True)
    lease = publish(tree, range(1, 16))
    for slot, position in enumerate([512, 896]):
        assert tree.end_snapshot(tree.begin_snapshot(lease, position, slot), True) is None
    lease.release()
    hit = tree.match_prefix(1, np.append(tokens(range(1, 16)), np.full(40, 7)))
    assert (hit.device_len(), hit.snapshot()) == (896, (896, 1))


@pytest.mark.parametrize("colliding_hash", [False, True])
def test_pfx_05_tokens_decide(colliding_hash):
    tree = PrefixTree(colliding_hash=colliding_hash)
    publish(tree, [1, 2]).release()
    assert tree.peek(1, longer([1, 2])) == (128, 0)
    assert tree.peek(2, longer([1, 2])) == (0, 0)
    for difference in (1, 256, 65_536):
        other = longer([1, 2])
        other[5] += difference
        assert tree.peek(1, other) == (0, 0)


def test_pfx_09_a_lease_keeps_its_length_and_pfx_12_gives_it_up_once():
    tree = PrefixTree(policy="none")
    lease = publish(tree, [1, 2])
    assert tree.evict_device(9)["device"] == []
    assert lease.device_len() == 128
    lease.release()
    for call in (lease.release, lease.device_len, lambda: tree.pages(lease)):
        with pytest.raises(LeaseReleased, match="lease"):
            call()
    assert tree.evictable_device() == 2
    assert sorted(tree.evict_device(9)["device"]) == [0, 1]


def test_a_dropped_lease_unlocks():
    tree = PrefixTree(policy="none")
    lease = publish(tree, [1])
    assert tree.evictable_device() == 0
    del lease
    assert tree.evictable_device() == 1


def test_pfx_14_a_snapshot_without_a_slot_is_counted():
    tree = PrefixTree(snapshots=True)
    assert tree.evict_snapshot(2) == []
    assert tree.stats()["snapshots_short"] == 2


def test_bad_calls_name_what_is_wrong_and_change_nothing():
    tree, other = PrefixTree(), PrefixTree()
    lease = publish(tree, [1])
    before = tree.digest()
    with pytest.raises(InvalidRequest, match="lease of this tree"):
        other.insert(lease, tokens([2]), [5])
    with pytest.raises(InvalidRequest, match="HIGH"):
        tree.insert(lease, tokens([2]), [LOW])
    with pytest.raises(InvalidRequest, match="LOW"):
        tree.give_window(lease, [3])
    with pytest.raises(InvalidRequest, match="first_page"):
        tree.insert_host(1, tokens([1, 2]), 0, [1])
    with pytest.raises(InvalidRequest, match="priority"):
        tree.match_prefix(1, [], reader="middle")
    with pytest.raises(InvalidRequest, match="token"):
        tree.peek(1, [-1])
    assert tree.digest() == before


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": 96}, "page_size"),
        ({"policy": "x"}, "policy"),
    ],
)
def test_bad_settings_are_refused(arguments, field):
    with pytest.raises(ConfigError, match=field):
        PrefixTree(**arguments)
    with pytest.raises(ConfigError, match="hits"):
        PrefixTree(policy="write_through_selective", hits=0)


def test_host_pages_refuse_what_is_not_theirs():
    pool = HostPages(4)
    assert pool.alloc(3) == [0, 1, 2]
    assert pool.alloc(2) is None
    for bad in ([3], [0, 0], [0, 4]):
        with pytest.raises(PageStateError) as caught:
            pool.free(bad)
        assert caught.value.page in bad
    assert pool.dump() == [(3, 1)]
    assert isinstance(caught.value, HeadraceError)
    with pytest.raises(ConfigError, match="host_pages"):
        HostPages(2**31 + 1)


def test_threads_match_and_release_beside_eviction():
    tree = PrefixTree(policy="none")
    free, guard, errors = set(range(64)), threading.Lock(), []

    def work(thread):
        for turn in range(300):
            pages = [thread % 2, turn % 5, turn % 3]
            lease = tree.match_prefix(1, longer(pages))
            done = lease.device_len() // 64
            with guard:
                given = [free.pop() for _ in range(min(3 - done, len(free)))]
            covered, duplicates = tree.insert(lease, tokens(pages[done : done + len(given)]), given)
            if lease.device_len() != 64 * (done + covered):
                errors.append("a lease lost pages")
            lease.release()
            evicted = tree.evict_device(2)["device"]
            with guard:
                free.update(evicted, [own for _, own, _ in duplicates], given[covered:])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tree.check()
    assert errors == []
    assert len(free) + tree.evictable_device() == 64
