"""What an engine has done and holds, under names that stay.

Only reads: the counts are the core's, what is added here follows from them.
"""

from typing import Any

from headrace._core import CopyQueue, Scheduler, SlotAllocator

_TO_DEVICE = ("load", "window")
_TO_HOST = ("store",)
_MS_NS = 1e6


def collect(
    scheduler: Scheduler, slots: SlotAllocator, copies: CopyQueue | None
) -> dict[str, object]:
    """Counters since the start, and gauges. Each nested dict is of one instant.

    Requests:
        `waiting`, `running` (gauges); `submitted`; `finished_stop`, `finished_length`,
        `finished_abort`, `finished_error`; `results` kept and `results_dropped`; `preemptions`;
        `slots`: `free`, `in_use`, `finishing`, `total`.
    Tokens:
        `computed_tokens`: prompt tokens that went through the model, each once (`prompt_tokens` is
        the same number); `cached_tokens`: those that did not, by tier: `device`, `host` (loaded
        back), `host_streamed` (read by a LOW request, layer by layer). These four add up to the
        tokens of all prompts that ran. `generated_tokens`. `recomputed_tokens`: computed again
        after a preemption or a failed copy.
    Steps:
        `steps`; `deferred_rows`: running requests that had no row in a step; `failed_copy_rows`:
        rows that ran for nothing, as a copy of theirs had failed.
    Eviction:
        `evictions`: `demoted_pages` (left the device, their host copy stays), `removed_pages` (left
        the cache), `host_pages` (the only copy was in host memory), `snapshots`. `rollbacks`:
        copies that failed or were cancelled and whose destination went back to its pool, nothing
        published.
    `memory`:
        `pages`: raw pages `total` and `free`, and by class, `high` and `low`: `cap` and `used` raw
        pages; pages in state `request`, `tree` (cached), `copy`, `pending` (freed, a step may still
        read them), `partial` (free parts of used raw pages). None with slots.
        `tree`: lookups, hits, pages by state; `host_pages` are complete host copies.
        `host_free`, `host_total`, `snapshots_free`, `snapshots_total`: room of the host tier.
        `jobs`: copies under way. `copies_failed` (or cancelled), `copies_abandoned` (never ended;
        their pages are lost), `stores_dropped`, `snapshots_skipped`: for want of room. `parked`,
        `resumed`: requests. `streamed_pages`: LOW pages, counted in each step; `stream_overruns`:
        steps that streamed beyond their budget.
    `copies` (None without a host tier):
        `load`, `window` (to the device), `store` (to the host): `bytes`, `jobs`, runs, `busy_ns`
        with a copy in flight, `in_flight` now, and `gb_s`, which is bytes over busy time: None
        before the first copy, and while one is in flight whose time is not counted yet.
        `to_device`, `to_host`: `bytes` and `gb_s` of a direction. `gate_wait_ns` and
        `stall_ms_by_layer`: time the forward has waited at the gate of each model layer.
        `failures`, `cancels`, `time_outs`, `unsettled`; `outstanding` now; `steps` handed over and
        the time of it, `handover_ns` and `handover_max_ns`; `outcomes_dropped`.
    """
    counts: dict[str, Any] = scheduler.stats()
    memory = scheduler.memory_stats()
    tree = memory["tree"] or {}
    return {
        **counts,
        "computed_tokens": counts["prompt_tokens"],
        "cached_tokens": {
            "device": counts["cached_device_tokens"],
            "host": counts["cached_host_tokens"],
            "host_streamed": counts["cached_streamed_tokens"],
        },
        "evictions": {
            "demoted_pages": tree.get("demoted_pages", 0),
            "removed_pages": tree.get("removed_pages", 0),
            "host_pages": tree.get("evicted_host_pages", 0),
            "snapshots": tree.get("evicted_snapshots", 0),
        },
        "rollbacks": memory["copies_failed"] - memory["copies_abandoned"],
        "slots": slots.stats(),
        "memory": memory,
        "copies": None if copies is None else _copies(copies.stats()),
    }


def _copies(stats: dict[str, Any]) -> dict[str, Any]:
    for name in (*_TO_DEVICE, *_TO_HOST):
        stats[name]["gb_s"] = _gb_s([stats[name]])
    for name, streams in (("to_device", _TO_DEVICE), ("to_host", _TO_HOST)):
        of_direction = [stats[stream] for stream in streams]
        stats[name] = {
            "bytes": sum(stream["bytes"] for stream in of_direction),
            "gb_s": _gb_s(of_direction),
        }
    stats["stall_ms_by_layer"] = [wait / _MS_NS for wait in stats["gate_wait_ns"]]
    return stats


def _gb_s(streams: list[dict[str, Any]]) -> float | None:
    """Bytes a nanosecond, which is GB/s, over the times of all streams."""
    busy_ns: int = sum(stream["busy_ns"] for stream in streams)
    moved: int = sum(stream["bytes"] for stream in streams)
    if not busy_ns or any(stream["in_flight"] for stream in streams):
        return None
    return moved / busy_ns
