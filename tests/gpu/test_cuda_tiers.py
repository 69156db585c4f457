"""Whole engines with a host tier on a GPU: every source of KV gives the bits of a miss.

HST-03, HST-07, HST-10, KVD-01. Whatever nobody wrote is poisoned.
"""

import random

import pytest
import torch

from headrace import EngineConfig, SamplingParams
from headrace.bench.loadback import bench_loadback, room
from tier_cases import (
    FORMATS,
    LONG,
    MODELS,
    NOISE,
    PAGE,
    SHORT,
    params,
    plain_engines,
    prompt,
    run,
    settle,
)


@pytest.fixture(scope="module")
def plain(tiny):
    yield from plain_engines(tiny, device="cuda", dtype="bfloat16")


def poisoned(llm):
    """The engine with NaN in everything that nobody wrote."""
    engine = llm.engine
    engine.kv.fill_poison()
    if engine.state is not None:
        engine.state.fill_poison()
    torch.cuda.synchronize()
    return llm


def delays(llm, seed, count=60):
    """Delay copies of all streams at random."""
    draw = random.Random(seed)
    for stream in ("load", "window", "store"):
        for nth in range(count):
            seconds = draw.choice((0.0, 0.0, 2e-4, 2e-3))
            llm.engine.tier.device.inject(stream, nth, "delay", seconds=seconds)


@pytest.mark.parametrize("delayed", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_device_hit_host_hit_and_stream_have_the_bits_of_a_miss(plain, model, name, delayed):
    """KVD-01, HST-03: cold, device, host and LOW, tokens and log-probabilities."""
    one = plain(model, name)
    with one.tiered(host_pages=60, num_pages=12, low_pages=6, policy="priority") as llm:
        poisoned(llm)
        if delayed:
            delays(llm, 3)
        [miss] = run(llm, one, [LONG], SHORT)
        assert miss.cached_tokens.device + miss.cached_tokens.host == 0
        # A state is found once it is on the host.
        late = "hybrid" in model and llm.stats()["memory"]["jobs"] > 0
        [hit] = run(llm, one, [LONG], SHORT)
        found = hit.cached_tokens.device
        assert hit.cached_tokens.host == 0
        assert found == 5 * PAGE or (late and found > 0)
        settle(llm)
        for other in NOISE:
            run(llm, one, [other], SHORT)
        settle(llm)
        if delayed:
            delays(llm, 4)
        [back] = run(llm, one, [LONG], SHORT)
        assert back.cached_tokens.host > 0
        assert back.cached_tokens.host + back.cached_tokens.device >= found
        settle(llm)
        for _ in range(2):
            [low] = run(llm, one, [LONG], SHORT, "low")
            settle(llm)
        assert low.cached_tokens.host_streamed > 0
        copies = llm.stats()["copies"]
        assert min(copies[stream]["bytes"] for stream in ("load", "window", "store")) > 0
        assert copies["failures"] == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_slots_copy_a_prefix_from_the_host(plain, model, name):
    one = plain(model, name)
    with one.tiered(host_pages=40, kv_layout="slots", max_batch_size=2) as llm:
        poisoned(llm)
        run(llm, one, [LONG], SHORT)
        settle(llm)
        first, second = run(llm, one, [LONG, LONG + [7] * 70], SHORT)
        assert (first.cached_tokens.host, second.cached_tokens.host) == (5 * PAGE, 5 * PAGE)
        settle(llm)


@pytest.mark.parametrize("preemption", ["recompute", "park"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_a_request_that_was_preempted_goes_on_as_if_never(
    plain, model, name, preemption, monkeypatch
):
    one = plain(model, name)
    prompts = [prompt(2 * PAGE + 7), prompt(40, 2), prompt(PAGE, 3)]
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", "3")
    options = {"preemption": preemption, "max_batch_size": 2, "max_batch_tokens": 64}
    with one.tiered(host_pages=40, num_pages=10, **options) as llm:
        poisoned(llm)
        delays(llm, 5)
        run(llm, one, prompts, params(9))
        settle(llm)
        stats = llm.stats()
    assert stats["preemptions"] > 0
    if preemption == "park":
        assert stats["memory"]["resumed"] > 0


@pytest.mark.parametrize("width", [1, 2, 3])
def test_more_kv_than_the_device_has_streams(plain, width):
    """HST-10: 3 does not divide the layers, so the parity runs on over the steps."""
    one = plain("tiny_qwen3")
    text = prompt(9 * PAGE + 20)
    raw = -(-10 // (one.llm.engine.model_config.kv_layers // width))
    options = {"num_pages": raw + 3, "low_pages": raw, "slot_widths": width, "policy": "priority"}
    with one.tiered(host_pages=60, **options) as llm:
        poisoned(llm)
        delays(llm, 6, 200)
        run(llm, one, [text], params(5), "low")
        settle(llm)
        [again] = run(llm, one, [text], params(5), "low")
        assert again.cached_tokens.host_streamed > 0
        settle(llm)
        stats = llm.stats()
        streamed = stats["memory"]["streamed_pages"] * one.page_bytes
        assert stats["copies"]["window"]["bytes"] == streamed > 0


def test_high_and_low_rows_share_a_batch(plain):
    one = plain("tiny_hybrid", "int8")
    low = [LONG[: 4 * PAGE + 9], LONG[: 4 * PAGE + 30]]
    with one.tiered(host_pages=60, num_pages=16, policy="priority", max_batch_tokens=128) as llm:
        poisoned(llm)
        delays(llm, 7, 200)
        handles = [llm.loop.submit(tokens, params(12), priority="low") for tokens in low]
        run(llm, one, [NOISE[0][:70], NOISE[0][: 2 * PAGE]], params(6))
        for handle, tokens in zip(handles, low, strict=True):
            one.check(handle.future.result(120), tokens, params(12))
        assert llm.stats()["memory"]["streamed_pages"] > 0
        settle(llm)


@pytest.mark.parametrize("stream", ["load", "store"])
def test_a_copy_that_fails_serves_nobody(plain, stream):
    """HST-07: the tokens are computed again; the next hit is good."""
    one = plain("tiny_hybrid")
    with one.tiered(host_pages=60, kv_layout="slots", max_batch_size=2) as llm:
        poisoned(llm)
        if stream == "store":
            llm.engine.tier.device.inject(stream, 0, "fail")
        run(llm, one, [LONG], SHORT)
        settle(llm)
        if stream == "load":
            llm.engine.tier.device.inject(stream, 0, "fail")
        run(llm, one, [LONG, prompt(90, 8)], SHORT)
        assert llm.stats()["memory"]["copies_failed"] >= 1
        settle(llm)
        [good] = run(llm, one, [LONG], SHORT)
        assert good.cached_tokens.host > 0
        settle(llm)


def test_many_requests_over_a_small_pool(plain):
    """Prefixes come, go and come back while others decode; graphs replay between."""
    one = plain("tiny_qwen3", "fp8")
    prompts = [LONG[: 1 + (37 * i) % 300] for i in range(24)]
    options = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    with one.tiered(host_pages=12, num_pages=8, preemption="park") as llm:
        poisoned(llm)
        delays(llm, 8, 200)
        for _ in range(2):
            run(llm, one, prompts, options)
        settle(llm)
        assert llm.engine.runner.replays > 0
        assert llm.stats()["copies"]["failures"] == 0


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("model", MODELS)
def test_bench_loadback_finds_every_source_and_the_same_tokens(tiny, model, layout):
    length, answer = 200, 4
    options = {"model": str(tiny(model).path), "device": "cuda", "kv_layout": layout}
    sizes = room(EngineConfig(host_bytes=1, **options), length, answer)
    config = EngineConfig(**(options | sizes), skip_tokenizer=True)
    report = bench_loadback(config, prompt_len=length, gen_len=answer, repeat=2, warmup=1)
    assert report.parity
    assert [row["reason"] for row in report.rows] == [None] * len(report.rows)
    for row in report.rows:
        assert row["link"].startswith("copy of 64 MiB from pinned memory")
        # A device hit of a hybrid loads the state that belongs to it.
        if row["source"] != "device":
            assert (row["h2d_bytes"] > 0) == (row["source"] != "cold")
