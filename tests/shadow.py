"""A model whose KV says what it is: every position holds a hash of all tokens up to it.

The memory core (scheduler, pages, tree, host tier, copy queue) is the real one, the forward is
numpy: it writes 8 bytes a token and layer, reads every position of every row through its block
table behind the gates of its layer, and compares with the hash that must be there. Tokens computed
by prefill and by decode hash differently, as their bits differ in a real model. What a step reads
wrong becomes a wrong token. A row whose request is gone still writes, as it does on a device: what
it writes is nobody's, so that it shows wherever it should not be. A run of thousands of requests
takes seconds, so that random traces can be driven through every path.
"""

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from headrace._core import (
    CopyPlanes,
    CopyQueue,
    CpuDevice,
    HostMemory,
    MemoryConfig,
    Region,
    SamplingSpec,
    Scheduler,
    SlotAllocator,
)
from headrace.errors import HeadraceError, StalePlan
from headrace.kv.tables import Window, entries_of, flat_pages

VOCAB = 97
_NOBODY = np.uint64(0xDEAD)
PAGE = 64
_RNG = np.random.default_rng(0)
_TOKEN, _KIND = (_RNG.integers(1, 2**63, n, np.uint64) for n in (VOCAB, 2))
_LAYER = _RNG.integers(1, 2**63, 64, np.uint64)
_POSITION = _RNG.integers(1, 2**63, 65536, np.uint64) | np.uint64(1)


def chain(tokens, prompt_len, start=0, before=0):
    """Hash at every position of `tokens`, of which those from `prompt_len` on are decoded."""
    at = np.arange(start, start + len(tokens))
    kinds = _KIND[(at >= prompt_len).astype(np.int64)]
    with np.errstate(over="ignore"):
        parts = (_TOKEN[np.asarray(tokens, np.int64)] ^ kinds) * _POSITION[at]
        return np.uint64(before) + np.cumsum(parts, dtype=np.uint64)


def next_token(value):
    return int(value >> np.uint64(33)) % VOCAB


def answer(prompt, count):
    """Tokens that a request must generate, whatever became of it on the way."""
    value = chain(prompt, len(prompt))[-1]
    tokens = [next_token(value)]
    while len(tokens) < count:
        at = len(prompt) + len(tokens) - 1
        value = chain(tokens[-1:], len(prompt), at, value)[-1]
        tokens.append(next_token(value))
    return tokens


@dataclass
class Live:
    """What the forward must find of a request."""

    prompt: list[int]
    max_tokens: int
    hashes: np.ndarray
    known: int
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False

    def upto(self, length):
        """Hashes of the first `length` positions; its generated tokens are those it must have."""
        while self.known < length:
            at = self.known - len(self.prompt)
            before = self.hashes[self.known - 1]
            self.hashes[self.known] = chain(
                self.tokens[at : at + 1], len(self.prompt), self.known, before
            )[0]
            self.known += 1
        return self.hashes[:length]


class Shadow:
    """A scheduler with everything below it, and a forward that checks what it reads.

    pages: None for fixed slots. strict: a wrong read is an error at once; without, it becomes a
    wrong token, for runs in which copies fail. settled: the copies of a step end before the next.
    ahead: how often the next step is planned before the tokens of the last one are known; each
    step then runs as late as it may. stops: how often a row is ended by what it says.
    """

    def __init__(
        self,
        *,
        slots=4,
        pages=16,
        layers=2,
        width=2,
        host_pages=32,
        hybrid=False,
        snapshots=8,
        staging=2,
        max_context=1024,
        budget=256,
        policy="fcfs",
        strict=True,
        settled=False,
        link=None,
        timeout=30.0,
        ahead=0.0,
        stops=0.0,
        **memory,
    ):
        self.page_tokens = max_context if pages is None else PAGE
        self.pages, self.width, self.slots = pages or slots, width, slots
        self.max_context = max_context
        self.strict, self.settled, self.hybrid = strict, settled, hybrid
        snapshots, staging = (snapshots, staging) if hybrid and host_pages else (0, 0)
        self.kv = _RNG.integers(0, 2**63, (layers, self.pages, self.page_tokens, 1), np.uint64)
        self.state = _RNG.integers(0, 2**63, (1, slots + staging, 1), np.uint64)
        self.layers = ["state"] * hybrid + ["kv"] * layers
        self.device = self.queue = None
        if host_pages:
            self.host = HostMemory(8 * (layers * host_pages * PAGE + max(snapshots, 1)))
            self.device = CpuDevice(link)
            self.queue = CopyQueue(
                self.device,
                self._planes(layers, host_pages, snapshots),
                deadline=timeout,
                max_jobs=4096,
            )
        self.table = SlotAllocator(slots)
        self.scheduler = Scheduler(
            self.table,
            max_context=max_context,
            vocab_size=VOCAB,
            max_batch_tokens=budget,
            policy=policy,
            memory=MemoryConfig(
                page_size=PAGE,
                num_pages=pages,
                num_layers=layers,
                slot_widths=width if pages else 1,
                prefix_cache=memory.pop("prefix_cache", True),
                host_pages=host_pages,
                hybrid=hybrid,
                snapshots=snapshots,
                staging=staging,
                state_slots=slots,
                snapshot_interval=memory.pop("snapshot_interval", PAGE),
                page_bytes=8 * layers * PAGE,
                **memory,
            ),
        )
        if self.queue is not None:
            self.scheduler.connect(self.queue)
        self.live = {}
        self.results = {}
        self.keep_results = True
        self.wrong_reads = 0
        self.ahead, self.stops = ahead, stops
        self.random = random.Random(0)
        self.ahead_steps = 0
        self.flight = []  # (plan, gates), oldest first
        self.latest = np.empty(0, np.int64)  # tokens of the latest step that ran

    def _planes(self, layers, host_pages, snapshots):
        kv_host, states = 8 * layers * host_pages * PAGE, []
        if self.hybrid:
            region = Region(self.state.ctypes.data, self.state.nbytes, self.state)
            strides = self.state.strides[:2]
            states = [("state", 8, *strides, region, self.host.region(kv_host, 8 * snapshots))]
        region = Region(self.kv.ctypes.data, self.kv.nbytes, self.kv)
        return CopyPlanes(
            self.layers,
            pages=self.pages,
            page_tokens=self.page_tokens,
            host_pages=host_pages,
            host_page_tokens=PAGE,
            kv_planes=[("kv", 8, *self.kv.strides[:2], region, self.host.region(0, kv_host))],
            slots=self.state.shape[1] if self.hybrid else 0,
            snapshots=snapshots,
            state_planes=states,
        )

    def submit(self, prompt, max_tokens, priority="high"):
        spec = SamplingSpec(max_tokens=max_tokens)
        request_id = self.scheduler.submit(prompt, spec, priority=priority)
        hashes = np.zeros(self.max_context, np.uint64)
        hashes[: len(prompt)] = chain(prompt, len(prompt))
        self.live[request_id] = Live(list(prompt), max_tokens, hashes, len(prompt))
        return request_id

    def abort(self, request_id):
        aborted = self.scheduler.abort(request_id)
        if aborted:
            self.live[request_id].aborted = True
            self._end(request_id)
        elif request_id in self.live:  # ended already, and the commit will tell
            assert self.scheduler.poll(request_id).phase == "finished"
        return aborted

    def step(self, timeout=0.0, during=None):
        """Run and commit the step in flight, or a new one; returns its plan, None for no step.

        during: called between the forward and the commit.
        """
        if not self.flight and not self._launch(timeout):
            return None
        if len(self.flight) == 1 and self.random.random() < self.ahead:
            plan = self.scheduler.plan_ahead(self.flight[0][0])
            if plan is not None:
                assert not plan.has_copies
                self._fly(plan, None)
                self.ahead_steps += 1
                if during is not None:
                    during(plan)
        plan, gates = self.flight[0]
        good = self._forward(plan, gates)
        if gates is not None:
            gates.release()
            gates.finish()
        if during is not None:
            during(plan)
        rows = plan.request_ids.tolist()
        samples = plan.sample_rows.tolist()
        tokens = np.zeros(len(samples), np.int32)
        for i, row in enumerate(samples):
            live = self.live.get(rows[row])
            if live is not None:
                end = int(plan.starts[row]) + int(np.diff(plan.token_offsets)[row])
                token = next_token(live.upto(end)[-1])
                tokens[i] = token if good[row] else (token + 1) % VOCAB
        if self.settled and self.queue is not None:
            self.queue.drain()
        self.latest = tokens.astype(np.int64)
        stops = np.array([self.random.random() < self.stops for _ in samples], np.bool_)
        for newer, _ in self.flight[1:]:
            with pytest.raises(StalePlan):
                self.scheduler.fail(newer, "too early")
            assert self.scheduler.next_plan(0) is None
        finished, accepted = self.scheduler.commit(plan, tokens, stops)
        self.flight.pop(0)
        for i, row in enumerate(samples):
            if accepted[i] and rows[row] in self.live:
                self.live[rows[row]].tokens.append(int(tokens[i]))
        for request_id, _ in finished:
            self._end(request_id)
        if self.queue is not None:
            self.scheduler.start_stores(self.queue)
            if self.settled:
                self.queue.drain()
        return plan

    def _launch(self, timeout):
        plan = self.scheduler.next_plan(timeout)
        if plan is None:
            return False
        gates = None
        if self.queue is not None:
            self.scheduler.start_stores(self.queue)
            if plan.has_copies:
                try:
                    gates = self.scheduler.start_step(plan, self.queue)
                except HeadraceError:
                    assert not self.strict
        self._fly(plan, gates)
        return True

    def _fly(self, plan, gates):
        """Put a plan in flight; nobody may be given what the row of another writes."""
        for other, _ in self.flight:
            for one, two in ((plan, other), (other, plan)):
                for row, written in _written(one):
                    for stranger, table in _tables(two):
                        if one.request_ids[row] != two.request_ids[stranger]:
                            assert not written & table
        self.flight.append((plan, gates))

    def run(self, limit=100_000, during=None):
        """Step until all requests have ended; returns the number of steps."""
        steps = idle = 0
        while self.live:
            idle = 0 if self.step(0.02, during) is not None else idle + 1
            assert idle < 500, f"stuck: {self.scheduler.stats()} {self.scheduler.memory_stats()}"
            steps += 1
            assert steps < limit, "no progress"
        return steps

    def drain(self):
        """Wait for all copies and check that nothing is held by anyone but the tree."""
        while self.flight:
            self.step()
        while True:
            if self.queue is not None:
                self.queue.drain()
            # Looks at the outcomes: the end of a copy may let a further store go.
            plan = self.step()
            if plan is None:
                break
            assert not plan.num_rows
        if self.queue is not None:
            assert not self.scheduler.start_stores(self.queue), "due without a step"
        assert_conserved(self.stats())
        self.scheduler.check()

    def stats(self):
        return {
            **self.scheduler.stats(),
            "slots": self.table.stats(),
            "memory": self.scheduler.memory_stats(),
            "copies": None if self.queue is None else self.queue.stats(),
        }

    def close(self):
        self.scheduler.close()
        if self.queue is not None:
            self.queue.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def _end(self, request_id):
        live = self.live.pop(request_id)
        result = self.scheduler.take_result(request_id)
        if self.keep_results:
            self.results[request_id] = result
        right = answer(live.prompt, len(result.token_ids)) if result.token_ids else []
        assert result.token_ids == right, f"request {request_id}: {result.token_ids} not {right}"
        if result.finish_reason == "length":
            room = self.max_context - len(live.prompt)
            assert len(right) == min(live.max_tokens, room)
            cached = sum(result.cached_tokens)
            assert cached % PAGE == 0
            assert result.computed_prompt_tokens + cached == len(live.prompt)
            assert result.computed_prompt_tokens > 0
        else:
            assert live.aborted == (result.finish_reason == "abort"), result.message

    def _forward(self, plan, gates):
        offsets, tables = plan.token_offsets.tolist(), plan.table_offsets.tolist()
        rows = []
        for row, (request_id, start) in enumerate(
            zip(plan.request_ids.tolist(), plan.starts.tolist(), strict=True)
        ):
            live = self.live.get(request_id)
            first, last = offsets[row : row + 2]
            end = start + last - first
            decode = row < plan.num_decode
            sources = plan.token_sources[first:last]
            tokens = plan.token_ids[first:last]
            if sources[0] >= 0:
                assert tokens.tolist() == [0]
                tokens = self.latest[sources]
            if live is not None:
                # Prompt tokens are prefilled and generated ones decoded, whatever happened.
                assert decode == (start >= len(live.prompt)), (request_id, start)
                known = [*live.prompt, *live.tokens]
                assert tokens.tolist() == known[start:end]
            table = plan.block_tables[tables[row] : tables[row + 1]]
            rows.append((live, start, end, slice(first, last), table))
        good = [live is not None for live, *_ in rows]
        at = 0
        for layer, kind in enumerate(self.layers):
            if gates is not None:
                gates.before_layer(layer)
            for row, (live, start, end, span, table) in enumerate(rows):
                slot = int(plan.slots[row])
                if live is None:  # aborted, or ended by the step before: nobody asks for its tokens
                    if kind == "state":
                        self.state[0, slot, 0] = _NOBODY
                    else:
                        pages, at_token = plan.token_pages[span], plan.positions[span]
                        self.kv[at, pages, at_token % self.page_tokens, 0] = _NOBODY
                    continue
                if kind == "state":
                    held = self.state[0, slot, 0]
                    good[row] &= self._right(start == 0 or held == live.upto(start)[-1], row, plan)
                    self.state[0, slot, 0] = live.upto(end)[-1]
                else:
                    good[row] &= self._attend(plan, live, end, span, table, at, row)
            at += kind == "kv"
            if gates is not None:
                gates.after_layer(layer)
        for source, staging in plan.snapshots:
            self.state[0, staging] = self.state[0, source]
        return good

    def _attend(self, plan, live, end, span, table, layer, row):
        pages, offsets = plan.token_pages[span], plan.positions[span] % self.page_tokens
        hashes = live.upto(end)
        with np.errstate(over="ignore"):
            values = hashes + _LAYER[layer]
        new = plan.positions[span]
        self.kv[layer, pages, offsets, 0] = values[new]
        count = -(-end // self.page_tokens)
        window = Window(plan.stream_k0, self.width)
        flats = flat_pages(entries_of(table, count), layer, self.pages, window)
        found = self.kv.reshape(-1, self.page_tokens)[flats].reshape(-1)[:end]
        return self._right(bool((found == values).all()), row, plan)

    def _right(self, right, row, plan):
        if not right:
            self.wrong_reads += 1
            message = f"request {plan.request_ids[row]} read what is not its own"
            assert not self.strict, message
        return bool(right)


def _written(plan):
    """Pages that each row writes to."""
    for row, (first, last) in enumerate(itertools.pairwise(plan.token_offsets.tolist())):
        yield row, set(plan.token_pages[first:last].tolist())


def _tables(plan):
    """Block table of each row."""
    for row, (first, last) in enumerate(itertools.pairwise(plan.table_offsets.tolist())):
        yield row, set(plan.block_tables[first:last].tolist())


def assert_conserved(stats):
    """With nothing live: no leases, no jobs, and every page is free or the tree's."""
    memory = stats["memory"]
    assert (stats["waiting"], stats["running"], memory["jobs"]) == (0, 0, 0)
    assert stats["slots"]["free"] == stats["slots"]["total"]
    tree = memory["tree"] or {"leases": 0, "full_pages": 0, "host_pages": 0, "snapshots": 0}
    assert tree["leases"] == 0
    assert memory["host_free"] + tree["host_pages"] == memory["host_total"]
    assert memory["snapshots_free"] + tree["snapshots"] == memory["snapshots_total"]
    if memory["pages"] is not None:
        pages = memory["pages"]
        high, low = pages["high"], pages["low"]
        assert pages["free"] + tree["full_pages"] == pages["total"]
        assert (high["tree"], low["used"]) == (tree["full_pages"], 0)
        held = [pool[owner] for pool in (high, low) for owner in ("request", "copy", "pending")]
        assert held == [0] * 6
    if stats["copies"] is not None:
        assert stats["copies"]["outstanding"] == 0


class Traffic:
    """Random requests that share prefixes: trees of prompts, a new one now and then."""

    def __init__(self, seed, longest, *, families=6, low=0.0):
        self.random = random.Random(seed)
        self.longest, self.low = longest, low
        self.families = [self._tokens(longest) for _ in range(families)]

    def _tokens(self, n):
        return [self.random.randrange(VOCAB) for _ in range(n)]

    def request(self):
        """(prompt, max_tokens, priority)."""
        rng = self.random
        if rng.random() < 0.05:
            self.families[rng.randrange(len(self.families))] = self._tokens(self.longest)
        shared = rng.choice(self.families)[: rng.randrange(self.longest)]
        own = self._tokens(rng.choice((1, 1, 5, 70, 130)))
        prompt = (shared + own)[: self.longest]
        priority = "low" if rng.random() < self.low else "high"
        return prompt, rng.choice((1, 2, 5, 20, 70)), priority


def soak(shadow, traffic, total, *, aborts=0.1, check_every=97, sample_memory=None):
    """Drive `total` random requests through a shadow; returns the results by reason."""
    rng = traffic.random
    submitted, used = 0, []

    def maybe_abort(_plan):
        if shadow.live and rng.random() < aborts:
            shadow.abort(rng.choice(list(shadow.live)))

    idle = steps = 0
    while submitted < total or shadow.live:
        while submitted < total and len(shadow.live) < 2 * shadow.slots:
            shadow.submit(*traffic.request())
            submitted += 1
            if sample_memory and submitted % sample_memory == 0:
                used.append(anonymous_bytes())
        maybe_abort(None)
        idle = 0 if shadow.step(0.02, maybe_abort) is not None else idle + 1
        assert idle < 200, f"stuck: {shadow.stats()}"
        steps += 1
        if steps % check_every == 0:
            shadow.scheduler.check()
    return used


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) * 1024
