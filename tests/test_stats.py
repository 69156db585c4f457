"""`llm.stats()`: after a scripted run every counter has the value that the script implies."""

import numpy as np
import pytest

from headrace import SamplingParams
from headrace.llm import LLM

PAGE = 64
LAYERS = 4  # of tiny_qwen3
PAGE_BYTES = LAYERS * PAGE * 2 * 2 * 64 * 4  # K and V, 2 KV heads of 64 floats
GEN = 3
LENGTH = 200  # 3 full pages and 8 tokens
HIT = 192
COMMON = {"max_batch_size": 1, "max_context": 256, "skip_tokenizer": True}


def prompt(seed, length=LENGTH):
    return np.random.default_rng(seed).integers(0, 512, length).tolist()


def serve(llm, seed, *, priority="high", gen=GEN):
    """One request to its end, and the copies it caused to theirs."""
    params = SamplingParams(max_tokens=gen, ignore_eos=True)
    [output] = llm.generate([prompt(seed)], params, priority=priority)
    if llm.engine.tier is not None:
        llm.engine.tier.queue.drain()
    return output


@pytest.fixture
def make(tiny_qwen3):
    made = []

    def build(**options):
        options = {"kv_layout": "paged", "num_pages": 5, "host_bytes": 64 * PAGE_BYTES} | options
        made.append(LLM(str(tiny_qwen3.path), **COMMON, **options))
        return made[-1]

    yield build
    for llm in made:
        llm.close()


def pick(stats, *names):
    return {name: stats[name] for name in names}


def test_a_cold_run_a_device_hit_an_eviction_and_a_host_hit(make):
    llm = make()
    serve(llm, 1)  # cold: 3 pages to the tree and to the host
    serve(llm, 1)  # the device has all 3
    serve(llm, 2)  # needs 4 of 5 pages, of which 2 are free: 2 of the first prompt leave
    serve(llm, 1)  # the device has 1, the host the other 2; needs 3, of which 1 is free
    stats = llm.stats()
    assert pick(stats, "waiting", "running", "submitted", "finished_length", "preemptions") == {
        "waiting": 0,
        "running": 0,
        "submitted": 4,
        "finished_length": 4,
        "preemptions": 0,
    }
    assert stats["slots"] == {"free": 1, "in_use": 0, "finishing": 0, "total": 1}
    assert stats["computed_tokens"] == stats["prompt_tokens"] == 2 * LENGTH + 2 * (LENGTH - HIT)
    assert stats["cached_tokens"] == {"device": HIT + PAGE, "host": 2 * PAGE, "host_streamed": 0}
    assert stats["computed_tokens"] + sum(stats["cached_tokens"].values()) == 4 * LENGTH
    assert stats["generated_tokens"] == 4 * GEN
    assert stats["steps"] == 4 * GEN
    assert stats["recomputed_tokens"] == stats["failed_copy_rows"] == stats["deferred_rows"] == 0
    assert stats["evictions"] == {
        "demoted_pages": 4,  # 2 of the first prompt, then 2 of the second
        "removed_pages": 0,
        "host_pages": 0,
        "snapshots": 0,
    }
    assert stats["rollbacks"] == 0
    memory = stats["memory"]
    assert (memory["pages"]["total"], memory["pages"]["free"]) == (5, 1)
    assert memory["pages"]["high"] == {
        "cap": 5, "used": 4, "request": 0, "tree": 4, "copy": 0, "pending": 0, "partial": 0,
    }  # fmt: skip
    assert memory["pages"]["low"] == {
        "cap": 2, "used": 0, "request": 0, "tree": 0, "copy": 0, "pending": 0, "partial": 0,
    }  # fmt: skip
    assert memory["tree"]["host_pages"] == 6
    assert memory["host_total"] - memory["host_free"] == 6
    assert (memory["jobs"], memory["streamed_pages"]) == (0, 0)
    copies = stats["copies"]
    assert copies["to_device"]["bytes"] == copies["load"]["bytes"] == 2 * PAGE_BYTES
    assert copies["to_host"]["bytes"] == copies["store"]["bytes"] == 6 * PAGE_BYTES
    assert copies["window"] == {
        "bytes": 0, "jobs": 0, "runs_before": 0, "runs_after": 0, "plain": 0, "batch": 0,
        "gather": 0, "busy_ns": 0, "in_flight": 0, "gb_s": None,
    }  # fmt: skip
    for name, stream in (("to_device", "load"), ("to_host", "store")):
        expected = copies[stream]["bytes"] / copies[stream]["busy_ns"]
        assert copies[name]["gb_s"] == copies[stream]["gb_s"] == pytest.approx(expected)
    assert copies["load"]["jobs"] == 1
    assert copies["steps"] == 1  # only one step had copies to wait for
    assert len(copies["stall_ms_by_layer"]) == LAYERS
    assert all(wait > 0 for wait in copies["stall_ms_by_layer"])
    assert copies["stall_ms_by_layer"] == [ns / 1e6 for ns in copies["gate_wait_ns"]]


def test_a_slow_link_shows_as_stalls_and_in_the_rate(make):
    rate = 20_000_000
    llm = make(link_bytes_per_s=rate)
    serve(llm, 1)
    serve(llm, 2)
    before = llm.stats()["copies"]
    assert before["stall_ms_by_layer"] == [0.0] * LAYERS
    assert before["to_device"]["gb_s"] is None
    serve(llm, 1)
    after = llm.stats()["copies"]
    moved = after["to_device"]["bytes"]
    assert moved == 2 * PAGE_BYTES
    assert after["to_device"]["gb_s"] <= rate / 1e9
    assert sum(after["stall_ms_by_layer"]) > 0
    assert after["load"]["busy_ns"] >= moved / rate * 1e9


@pytest.mark.parametrize("stream", ["store", "load"])
def test_a_failed_copy_is_a_rollback_whose_pages_went_back(make, stream):
    llm = make()
    device = llm.engine.tier.device
    if stream == "store":
        device.inject("store", 0, "fail")
        serve(llm, 1)
    else:
        serve(llm, 1)
        serve(llm, 2)
        device.inject("load", 0, "fail")
    output = serve(llm, 1)
    assert output.finish_reason == "length"
    stats = llm.stats()
    assert stats["rollbacks"] == stats["copies"]["failures"] == 1
    assert stats["memory"]["copies_abandoned"] == stats["copies"]["unsettled"] == 0
    memory = stats["memory"]
    assert memory["pages"]["high"]["copy"] == memory["pages"]["high"]["request"] == 0
    assert memory["host_total"] - memory["host_free"] == memory["tree"]["host_pages"]
    if stream == "store":
        assert memory["tree"]["host_pages"] == 3  # stored by the second request
        assert stats["copies"]["store"]["jobs"] == 2
        assert stats["cached_tokens"] == {"device": HIT, "host": 0, "host_streamed": 0}
    else:
        assert memory["tree"]["host_pages"] == 6
        assert stats["failed_copy_rows"] == 1
        assert stats["generated_tokens"] == 3 * GEN


def test_a_low_request_streams_its_pages_in_every_step(make):
    llm = make(num_pages=12)
    serve(llm, 1)
    # The pages are on the device and in host memory. Nobody else reads them, so the first LOW
    # request gives the device pages up, and both requests stream.
    serve(llm, 1, priority="low")
    serve(llm, 1, priority="low")
    stats = llm.stats()
    assert stats["cached_tokens"] == {"device": 0, "host": 0, "host_streamed": 2 * HIT}
    pages = 2 * GEN * (HIT // PAGE)
    assert stats["memory"]["streamed_pages"] == pages
    assert stats["copies"]["window"]["bytes"] == pages * PAGE_BYTES
    assert stats["copies"]["to_device"]["bytes"] == pages * PAGE_BYTES
    assert stats["copies"]["steps"] == 2 * GEN
    assert stats["memory"]["pages"]["low"]["used"] == 0
    assert stats["memory"]["stream_overruns"] == 0


def test_evictions_without_a_host_tier_remove_pages(make):
    llm = make(host_bytes=0)
    serve(llm, 1)
    serve(llm, 2)  # needs 4 of 5 pages, of which 2 are free
    stats = llm.stats()
    assert stats["copies"] is None
    assert stats["evictions"] == {
        "demoted_pages": 0,
        "removed_pages": 2,
        "host_pages": 0,
        "snapshots": 0,
    }
    assert stats["memory"]["pages"]["high"]["tree"] == 4


def test_a_full_host_tier_evicts_what_is_nowhere_else(make):
    room = 4
    llm = make(host_bytes=room * PAGE_BYTES + 2 * 256)
    serve(llm, 1)
    serve(llm, 2)  # 2 pages of the first leave the device; 1 is free on the host, 3 are wanted
    serve(llm, 3)  # 4 are needed on the device and 1 is free; none is free on the host
    stats = llm.stats()
    assert stats["evictions"] == {
        "demoted_pages": 2 + 3,
        "removed_pages": 2 + 3,
        "host_pages": 2 + 3,
        "snapshots": 0,
    }
    memory = stats["memory"]
    assert (memory["host_total"], memory["host_free"]) == (room, 0)
    assert memory["tree"]["host_pages"] == room
    assert memory["stores_dropped"] == 0
    assert stats["copies"]["to_host"]["bytes"] == 3 * (HIT // PAGE) * PAGE_BYTES


def test_preemptions_and_what_they_compute_again_are_counted_apart(make, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", "4")
    llm = make(num_pages=12, prefix_cache=False)
    serve(llm, 1, gen=10)
    stats = llm.stats()
    # Before steps 4, 8 and 16, with 3, 4 and 8 tokens generated; those before 12, 20 and 24 find
    # it no further than it was. All but the newest token had KV, which decode steps make again.
    assert stats["preemptions"] == 3
    assert stats["recomputed_tokens"] == 3 * LENGTH + 2 + 3 + 7
    assert stats["steps"] == 10 + 3 + 2 + 3 + 7
    assert stats["computed_tokens"] == LENGTH
    assert stats["generated_tokens"] == 10


def test_slots_keep_prefixes_in_host_memory_alone(make):
    llm = make(kv_layout="slots", num_pages=None)
    serve(llm, 1)
    serve(llm, 1)
    stats = llm.stats()
    assert stats["memory"]["pages"] is None
    assert stats["cached_tokens"] == {"device": 0, "host": HIT, "host_streamed": 0}
    assert stats["copies"]["to_device"]["bytes"] == HIT // PAGE * PAGE_BYTES
    assert stats["copies"]["to_host"]["bytes"] == HIT // PAGE * PAGE_BYTES


def test_states_of_a_hybrid_model_are_counted_with_the_copies(tiny):
    model = tiny("tiny_hybrid")
    with LLM(
        str(model.path),
        **COMMON,
        host_bytes=64 * 2**20,
    ) as llm:
        serve(llm, 1)
        serve(llm, 1)
        stats = llm.stats()
        config, layout = llm.engine.model_config, llm.engine.kv.pool.layout
        state = config.state_bytes_per_slot(4)
        page = PAGE * layout.bytes_per_token
    taken = 1  # at the last multiple of 64
    assert stats["memory"]["tree"]["snapshots_taken"] == taken
    memory = stats["memory"]
    assert memory["snapshots_total"] - memory["snapshots_free"] == taken
    assert stats["copies"]["to_host"]["bytes"] == HIT // PAGE * page + taken * state
    assert stats["copies"]["to_device"]["bytes"] == HIT // PAGE * page + state
    assert stats["cached_tokens"]["host"] == HIT


def test_the_names_in_the_docstring_are_those_of_the_result(make):
    from headrace.stats import collect

    stats = make().stats()
    documented = collect.__doc__
    named = [*stats, *stats["slots"], *stats["copies"], *stats["evictions"]]
    named += [*stats["memory"]]
    named += [*stats["memory"]["pages"], *stats["memory"]["pages"]["high"]]
    named = [name for name in named if not name.startswith("cached_") or name == "cached_tokens"]
    assert [name for name in named if f"`{name}`" not in documented] == []
    assert len(named) > 60
