"""`bench alloc`: what one operation of the core costs, inside Rust and called from Python."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from headrace import _core
from headrace.bench.env import Value, machine
from headrace.bench.output import Report
from headrace.bench.stats import median
from headrace.errors import ConfigError

# Most nanoseconds of an operation inside Rust; the plan is that of 256 decode rows, pages are
# counted one by one.
TARGET_NS = {
    "slot_allocate_free": 200,
    "submit": 2_000,
    "plan": 50_000,
    "page_alloc_1000": 100,
    "page_free_1000": 100,
    "page_alloc_32": 100,
    "page_free_32": 100,
    "tree_match_32k": 100_000,
    "tree_insert": 2_000,
    "tree_evict_1k": 5_000,
    "tree_evict_100k": 5_000,
}
TARGET_ROWS = 256
MAX_ROWS = 2**20

_PAIRS = 1_000
_PROMPT = 64
_PAGE = 64
_MATCH_TOKENS = 32_768
_LEAVES = 1_000

# The pool of the page targets: 90 % full after random frees.
_POOL_PAGES = 65_536
_POOL_LAYERS = 36
_POOL_WIDTH = 2
_PAGE_CALLS = (1_000, 32)


def bench_alloc(*, rows: int = TARGET_ROWS, repeat: int = 101) -> Report:
    """Median nanoseconds of each operation.

    A target is shown, and whether it is met, only at the number of rows it was set for. Raises
    `ConfigError` for more rows than the slot table can have.
    """
    if rows > MAX_ROWS:
        raise ConfigError(f"rows={rows}: accepted is 1 to {MAX_ROWS:,}, the largest slot table")
    inside = _core.bench_core(rows=rows, repeat=repeat)
    from_python = {
        "slot_allocate_free": _slot_pair_ns(repeat),
        **_step_ns(rows, repeat),
        **_page_ns(repeat),
        **_tree_ns(repeat),
    }
    targets = TARGET_NS if rows == TARGET_ROWS else {}
    table: list[dict[str, Value]] = [
        {
            "operation": name,
            "rust_ns": nanoseconds,
            "python_ns": from_python.get(name),
            "target_ns": targets.get(name),
            "meets_target": nanoseconds <= targets[name] if name in targets else None,
        }
        for name, nanoseconds in inside.items()
    ]
    return Report({**machine(), "rows": rows, "repeat": repeat}, table, tuple(table[0]))


def _slot_pair_ns(repeat: int) -> float | None:
    slots = _core.SlotAllocator(_PAIRS)

    def pairs() -> None:
        for request_id in range(_PAIRS):
            slots.allocate(request_id)
            slots.free(request_id)

    return median([_timed(pairs) / _PAIRS for _ in range(repeat)])


def _step_ns(rows: int, repeat: int) -> dict[str, float | None]:
    """Submit `rows` requests, prefill them in one step, then time decode steps."""
    scheduler = _core.Scheduler(
        _core.SlotAllocator(rows),
        max_context=2**20,
        vocab_size=2**16,
        max_batch_tokens=_PROMPT * rows,
        max_waiting=rows,
    )
    prompt = np.ones(_PROMPT, dtype=np.int64)
    spec = _core.SamplingSpec(max_tokens=2**19)
    submit = [_timed(lambda: scheduler.submit(prompt, spec)) for _ in range(rows)]
    plan_ns: list[int] = []
    commit_ns: list[int] = []
    for _ in range(repeat + 1):
        start = time.perf_counter_ns()
        plan = scheduler.next_plan(0.0)
        plan_ns.append(time.perf_counter_ns() - start)
        assert plan is not None, "every request has tokens left"
        tokens = np.ones(len(plan.sample_rows), dtype=np.int32)
        start = time.perf_counter_ns()
        scheduler.commit(plan, tokens)
        commit_ns.append(time.perf_counter_ns() - start)
    scheduler.close()
    # The first step is the prefill.
    return {"submit": median(submit), "plan": median(plan_ns[1:]), "commit": median(commit_ns[1:])}


def _page_ns(repeat: int) -> dict[str, float | None]:
    """Alloc and free, a page, in calls of each of `_PAGE_CALLS`; the frees are random."""
    pool = _core.PageAllocator(
        _POOL_PAGES, _POOL_LAYERS, 64, slot_widths=_POOL_WIDTH, cap_low=_POOL_PAGES
    )
    rng = np.random.default_rng(1)
    held = np.stack(pool.alloc(pool.available("low"), "low"))
    rng.shuffle(held, axis=1)
    tenth = held.shape[1] // 10
    pool.free(*held[:, :tenth])
    held = held[:, tenth:]
    times: dict[str, float | None] = {}
    for n in _PAGE_CALLS:
        alloc_ns, free_ns = [], []
        for _ in range(repeat):
            home = _POOL_WIDTH * int(rng.integers(_POOL_LAYERS // _POOL_WIDTH))
            start = time.perf_counter_ns()
            got = pool.alloc(n, "low", home)
            alloc_ns.append((time.perf_counter_ns() - start) / n)
            gone = rng.choice(held.shape[1], n, replace=False)
            pages, starts = held[:, gone]
            free_ns.append(_timed(partial(pool.free, pages, starts)) / n)
            held[:, gone] = got
        times |= {f"page_alloc_{n}": median(alloc_ns), f"page_free_{n}": median(free_ns)}
    return times


def _tree_ns(repeat: int) -> dict[str, float | None]:
    """Look up 32,768 tokens in pages of 64, publish page by page, evict from 1,000 leaves."""
    tree = _core.PrefixTree(_PAGE, policy="none")
    prompt = np.arange(_MATCH_TOKENS + 1)
    insert_ns: list[float] = []
    match_ns: list[float] = []
    for _ in range(repeat):
        lease = tree.match_prefix(0, [])
        for page, start in enumerate(range(0, _MATCH_TOKENS, _PAGE)):
            tokens = prompt[start : start + _PAGE]
            begin = time.perf_counter_ns()
            tree.insert(lease, tokens, [page])
            insert_ns.append(time.perf_counter_ns() - begin)
        lease.release()
        begin = time.perf_counter_ns()
        lease = tree.match_prefix(0, prompt)
        match_ns.append(time.perf_counter_ns() - begin)
        lease.release()
        tree.clear()
    for leaf in range(_LEAVES):
        lease = tree.match_prefix(0, [])
        tree.insert(lease, prompt[leaf : leaf + _PAGE], [leaf])
        lease.release()
    evict_ns = [_timed(lambda: tree.evict_device(1)) for _ in range(min(repeat, _LEAVES))]
    return {
        "tree_match_32k": median(match_ns),
        "tree_insert": median(insert_ns),
        "tree_evict_1k": median(evict_ns),
    }


def _timed(call: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start
