"""Pages, prefixes and a host tier through the whole engine: the tokens are those of plain slots.

KVD-01, PFX-02, PFX-10, PFX-11, HST-07, HST-08, HST-13, SLT-04, BAT-08 on the CPU. Log-probabilities
are compared to the bit: the engines run with `deterministic`.
"""

import threading

import pytest

from headrace import ConfigError, SamplingParams
from headrace.errors import HeadraceError, OutOfPages
from headrace.llm import LLM
from tier_cases import (
    FORMATS,
    LONG,
    MODELS,
    NOISE,
    PAGE,
    POLICIES,
    SHORT,
    Plain,
    params,
    plain_engines,
    prompt,
    run,
    settle,
    wait_for,
)


@pytest.fixture(scope="module")
def plain(tiny):
    yield from plain_engines(tiny)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    one = Plain(smollm2_dir, dtype="float32", max_context=512, skip_tokenizer=False)
    yield one
    one.llm.close()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_device_hit_and_host_hit_have_the_bits_of_a_miss(plain, model, name):
    """KVD-01, PFX-02, in every KV format."""
    one = plain(model, name)
    with one.tiered(host_pages=40, num_pages=7) as llm:
        [miss] = run(llm, one, [LONG], SHORT)
        assert miss.cached_tokens.device + miss.cached_tokens.host == 0
        [hit] = run(llm, one, [LONG], SHORT)
        assert (hit.cached_tokens.device, hit.cached_tokens.host) == (5 * PAGE, 0)
        settle(llm)
        for noise in NOISE:
            run(llm, one, [noise], SHORT)
        settle(llm)
        [back] = run(llm, one, [LONG], SHORT)
        assert back.cached_tokens.host > 0
        assert back.cached_tokens.host + back.cached_tokens.device == 5 * PAGE
        settle(llm)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_slots_copy_a_prefix_from_the_host(plain, model, name):
    one = plain(model, name)
    with one.tiered(host_pages=40, kv_layout="slots", max_batch_size=2) as llm:
        run(llm, one, [LONG], SHORT)
        settle(llm)
        first, second = run(llm, one, [LONG, LONG + [7] * 70], SHORT)
        assert (first.cached_tokens.host, second.cached_tokens.host) == (5 * PAGE, 5 * PAGE)
        settle(llm)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("admission", ["reserve", "estimate"])
def test_every_policy_and_admission_keeps_the_tokens(plain, policy, admission):
    one = plain()
    prompts = [LONG[: PAGE * n + 5] for n in (1, 2, 4)] + [NOISE[0]]
    options = {"write_policy": policy, "admission": admission, "admission_ratio": 0.2}
    with one.tiered(host_pages=30, num_pages=9, **options) as llm:
        for _ in range(3):
            run(llm, one, prompts, params(12))
        settle(llm)
        tree = llm.stats()["memory"]["tree"]
        assert (tree["stored_pages"] > 0) == (policy != "none")


@pytest.mark.parametrize("model", MODELS)
def test_the_edges_of_a_hit(plain, model):
    """PFX-11: kP and kP + 1 tokens; at least one token is computed. PFX-10: many at once."""
    one = plain(model)
    with one.tiered(host_pages=40, num_pages=20) as llm:
        for length, cached in ((2 * PAGE, 1), (2 * PAGE + 1, 2), (2 * PAGE + 2, 2)):
            run(llm, one, [LONG[:length]], SHORT)
            settle(llm)
            [again] = run(llm, one, [LONG[:length]], SHORT)
            found = again.cached_tokens.device + again.cached_tokens.host
            assert found == cached * PAGE, length
        same = run(llm, one, [NOISE[0]] * 4, SHORT)
        assert len({tuple(output.token_ids) for output in same}) == 1
        settle(llm)


@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize("slots", [1, 2])
def test_the_last_state_of_a_prompt_is_saved_however_slow_copies_are(plain, slots, layout):
    """Those before it may find no buffer: the steps of a prompt do not wait for copies."""
    one = plain("tiny_hybrid")
    rate = 8 * (one.state_bytes + one.page_bytes)
    options = {"kv_layout": layout, "max_batch_size": slots, "link_bytes_per_s": rate}
    with one.tiered(host_pages=40, **options) as llm:
        run(llm, one, [LONG], SHORT)
        assert llm.stats()["memory"]["snapshots_skipped"] > 0, "the link is too fast"
        settle(llm)
        [hit] = run(llm, one, [LONG], SHORT)
        assert hit.cached_tokens.device + hit.cached_tokens.host == 5 * PAGE


def test_a_high_request_loads_what_fits_beside_a_low_one(plain):
    """Partial load-back: the host prefix is longer than the free part of the device pool."""
    one = plain()
    with one.tiered(host_pages=40, num_pages=7, policy="priority") as llm:
        run(llm, one, [LONG], SHORT)
        settle(llm)
        low = params(100)
        handle = llm.loop.submit(NOISE[0], low, priority="low")
        scheduler = llm.loop.scheduler
        wait_for(lambda: len(scheduler.poll(handle.request_id).token_ids) > 2)
        [partial] = run(llm, one, [LONG], SHORT)
        found = partial.cached_tokens
        assert found.host + found.device <= 5 * PAGE
        assert llm.loop.abort(handle.request_id)
        right = one.answer(NOISE[0], low).token_ids
        output = handle.future.result(30)
        assert output.token_ids == right[: len(output.token_ids)]
        settle(llm)


@pytest.mark.parametrize("model", MODELS)
def test_a_pool_of_the_least_size_serves_what_fits(plain, model):
    one = plain(model)
    with one.tiered(host_pages=2, num_pages=2, max_batch_size=2) as llm:
        for _ in range(2):
            run(llm, one, [prompt(100, 5), prompt(60, 6), prompt(40, 7)], SHORT)
        with pytest.raises(OutOfPages, match="3"):
            llm.generate([prompt(2 * PAGE + 1)], SHORT)
        run(llm, one, [prompt(100, 5)], SHORT)
        settle(llm)


BAD_OPTIONS = {
    "page_size": ({"page_size": 96}, ConfigError, "page_size=96"),
    "page_size_small": ({"page_size": 32}, ConfigError, "page_size=32"),
    "slot_widths": ({"slot_widths": 5}, ConfigError, "slot_widths|width"),
    "slot_widths_zero": ({"slot_widths": 0}, ConfigError, "slot_widths"),
    "no_pages": ({"num_pages": 0}, ConfigError, "num_pages"),
    "little_host": ({"host_bytes": 1000}, ConfigError, "host_bytes=1000"),
    "much_host": ({"host_bytes": 2**50}, (ConfigError, OutOfPages), "memory|bytes|free"),
    "park": ({"preemption": "park", "host_bytes": 0}, ConfigError, "park"),
    "low_pages": ({"num_pages": 4, "low_pages": 5}, ConfigError, "low"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_memory_that_cannot_be_is_refused(plain, name):
    options, error, names = BAD_OPTIONS[name]
    one = plain()
    with pytest.raises(error, match=names):
        LLM(str(one.path), skip_tokenizer=True, **{"kv_layout": "paged", **options})


def test_no_host_tier_and_no_cache(plain):
    """A budget of zero is no tier; without a cache nothing is found."""
    one = plain()
    with one.tiered(num_pages=12) as llm:
        assert llm.engine.tier is None
        run(llm, one, [LONG], SHORT)
        [hit] = run(llm, one, [LONG], SHORT)
        assert hit.cached_tokens.device == 5 * PAGE
    with one.tiered(num_pages=12, prefix_cache="off") as llm:
        run(llm, one, [LONG], SHORT)
        [miss] = run(llm, one, [LONG], SHORT)
        assert miss.cached_tokens.device == 0
        settle(llm)


MOMENTS = ("waiting", "loading", "prefilling", "decoding", "preempted", "storing")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_abort_in_every_state_of_a_transfer(plain, model, moment, monkeypatch):
    """SLT-04: the neighbour is equal to solo, everything comes back."""
    one = plain(model)
    if moment == "preempted":
        monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", "3")
    options = {"preemption": "park", "max_batch_tokens": 64, "max_batch_size": 2}
    with one.tiered(host_pages=40, num_pages=14, **options) as llm:
        scheduler = llm.loop.scheduler
        run(llm, one, [LONG], SHORT)
        for noise in NOISE:
            run(llm, one, [noise, noise[:70]], SHORT)
        settle(llm)
        if moment in ("loading", "storing", "preempted"):
            for nth in range(6):
                stream = "load" if moment == "loading" else "store"
                llm.engine.tier.device.inject(stream, nth, "delay", seconds=0.05)
        neighbour = llm.loop.submit(NOISE[1], params(20))
        others = [llm.loop.submit(NOISE[0], params(20))] if moment == "waiting" else []
        text = prompt(300, 9) if moment in ("prefilling", "storing") else LONG
        handle = llm.loop.submit(text, params(60))

        def reached():
            status = scheduler.poll(handle.request_id)
            memory = llm.stats()["memory"]
            return {
                "waiting": status.phase == "waiting",
                "loading": memory["tree"]["loading_pages"] > 0 or status.phase != "waiting",
                "prefilling": status.phase == "prefilling",
                "decoding": len(status.token_ids) > 3,
                "preempted": status.phase == "preempted",
                "storing": memory["jobs"] > 0 and status.phase != "waiting",
            }[moment]

        wait_for(reached)
        assert llm.loop.abort(handle.request_id)
        assert handle.future.result(5).finish_reason == "abort"
        assert not llm.loop.abort(handle.request_id)
        one.check(neighbour.future.result(60), NOISE[1], params(20))
        for other in others:
            one.check(other.future.result(60), NOISE[0], params(20))
        settle(llm)
        run(llm, one, [LONG], SHORT)


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("model", MODELS)
def test_a_load_that_fails_is_computed_again(plain, model, layout):
    """HST-07: never wrong tokens, the neighbour is untouched, the engine goes on."""
    one = plain(model)
    pages = {"num_pages": 14} if layout == "paged" else {}
    with one.tiered(host_pages=60, kv_layout=layout, **pages) as llm:
        run(llm, one, [LONG], SHORT)
        for noise in [*NOISE, prompt(300, 3), prompt(300, 4)]:
            run(llm, one, [noise], SHORT)
        settle(llm)
        llm.engine.tier.device.inject("load", 0, "fail")
        run(llm, one, [LONG, prompt(90, 8)], SHORT)
        stats = llm.stats()
        assert stats["memory"]["copies_failed"] >= 1
        assert stats["failed_copy_rows"] >= 1
        settle(llm)
        [good] = run(llm, one, [LONG], SHORT)
        assert good.cached_tokens.device + good.cached_tokens.host > 0


def test_a_request_whose_loads_always_fail_ends_with_a_copy_error(plain):
    one = plain()
    with one.tiered(host_pages=60, kv_layout="slots") as llm:
        run(llm, one, [LONG], SHORT)
        settle(llm)
        for nth in range(30):
            llm.engine.tier.device.inject("load", nth, "fail")
        [output] = llm.generate([LONG], SHORT)
        assert (output.finish_reason, output.token_ids) == ("error", [])
        assert "CopyError" in output.error
        run(llm, one, [prompt(90, 8)], SHORT)
        settle(llm)


@pytest.mark.parametrize("model", MODELS)
def test_slow_stores_go_on_when_no_request_is_left(plain, model):
    """A node follows once its parent is stored, also if nothing runs by then."""
    with plain(model).tiered(host_pages=40) as llm:
        for nth in range(40):
            llm.engine.tier.device.inject("store", nth, "delay", seconds=0.1)
        run(llm, plain(model), [LONG], SHORT)
        assert llm.stats()["memory"]["tree"]["host_pages"] < 5
        settle(llm)
        assert llm.stats()["memory"]["tree"]["host_pages"] == 5


def test_a_store_that_fails_is_not_a_hit(plain):
    one = plain()
    with one.tiered(host_pages=60, kv_layout="slots") as llm:
        llm.engine.tier.device.inject("store", 0, "fail")
        run(llm, one, [LONG], SHORT)
        settle(llm)
        assert llm.stats()["memory"]["copies_failed"] == 1
        assert llm.stats()["memory"]["host_free"] == llm.stats()["memory"]["host_total"]
        [miss] = run(llm, one, [LONG], SHORT)
        assert miss.cached_tokens.host == 0
        settle(llm)
        [hit] = run(llm, one, [LONG], SHORT)
        assert hit.cached_tokens.host == 5 * PAGE


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("stream", ["load", "store"])
def test_a_copy_that_never_ends_ends_nobody_else(plain, stream, layout):
    """HST-08: told within the deadline, others go on, `close` returns."""
    one = plain()
    pages = {"num_pages": 14} if layout == "paged" else {}
    options = {"copy_timeout_s": 0.5, "kv_layout": layout, **pages}
    with one.tiered(host_pages=60, **options) as llm:
        run(llm, one, [LONG], SHORT)
        for noise in [*NOISE, prompt(300, 3), prompt(300, 4)]:
            run(llm, one, [noise], SHORT)
        settle(llm)
        llm.engine.tier.device.inject(stream, 0, "hang")
        texts = [LONG, prompt(200, 8)]
        outputs = llm.generate(texts, SHORT)
        for output, text in zip(outputs, texts, strict=True):
            if output.finish_reason == "error":
                assert "CopyError" in output.error
            else:
                one.check(output, text, SHORT)
        run(llm, one, [prompt(120, 9)], SHORT)
        wait_for(lambda: llm.stats()["memory"]["copies_abandoned"] >= 1)
        run(llm, one, [prompt(130, 9)], SHORT)
        closer = threading.Thread(target=llm.close)
        closer.start()
        closer.join(30)
        assert not closer.is_alive()


@pytest.mark.parametrize("model", MODELS)
def test_a_store_that_never_ends_does_not_keep_the_only_slot(plain, model):
    one = plain(model)
    options = {"copy_timeout_s": 0.3, "kv_layout": "slots", "max_batch_size": 1}
    with one.tiered(host_pages=20, **options) as llm:
        llm.engine.tier.device.inject("store", 0, "hang")
        run(llm, one, [LONG], SHORT)
        run(llm, one, [LONG[:90]], SHORT)


def test_a_stream_shows_nothing_of_a_step_that_failed(smollm2, smollm2_fixture):
    """Text, tokens and stop strings are those of an undisturbed run, each once."""
    case = smollm2_fixture["prompts"][0]
    tokens = case["prompt_ids"] + case["greedy_ids"]
    options = SamplingParams(max_tokens=8, ignore_eos=True, stop=("never said",))
    right = smollm2.answer(tokens, options)
    with smollm2.tiered(host_pages=8, kv_layout="slots", max_batch_size=1) as llm:
        llm.generate([tokens], options)
        settle(llm)
        llm.engine.tier.device.inject("load", 0, "fail")
        *chunks, output = llm.stream(tokens, options)
        assert llm.stats()["failed_copy_rows"] == 1
    streamed = [token for chunk in chunks for token in chunk.token_ids]
    assert output.token_ids == right.token_ids == streamed
    assert output.text == right.text
    assert right.text.startswith("".join(chunk.text for chunk in chunks))


def test_bytes_agree_everywhere(plain):
    """KVD-02: pool, host tier and configuration count the same bytes of a page."""
    for name in FORMATS:
        one = plain(name=name)
        with one.tiered(host_pages=10, num_pages=6) as llm:
            kv, tier = llm.engine.kv, llm.engine.tier
            held = sum(t.nbytes for t in kv.pool.tensors.values())
            assert held == 6 * one.page_bytes == kv.bytes_total
            assert llm.stats()["memory"]["host_total"] == 10
            assert 10 * one.page_bytes <= tier.memory.nbytes <= 10 * one.page_bytes + 4096


def test_ids_from_many_threads_over_a_small_pool(plain):
    """REQ-09: one output each, in order, right tokens, whatever happens beside."""
    one = plain()
    prompts = [LONG[: 1 + (37 * i) % 300] for i in range(24)]
    options = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
    with one.tiered(host_pages=12, num_pages=8, preemption="park") as llm:
        outputs = {}

        def work(part):
            outputs[part] = llm.generate(prompts[part::3], options)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for part in range(3):
            for output, tokens in zip(outputs[part], prompts[part::3], strict=True):
                one.check(output, tokens, options)
        settle(llm)


def test_smollm2_hits_on_every_tier(smollm2, smollm2_fixture):
    """Device hit, host hit, streamed hit; prompts are conversations of the fixture."""
    cases = smollm2_fixture["prompts"]
    talks = [case["prompt_ids"] + case["greedy_ids"] for case in cases]
    first, second = talks[0] + talks[1], talks[2] + talks[3]
    options = params(6)
    with smollm2.tiered(host_pages=40, num_pages=6, policy="priority", slot_widths=3) as llm:
        found = [
            run(llm, smollm2, [tokens], options, priority)[0].cached_tokens
            for tokens, priority in (
                (first, "high"),
                (first, "high"),
                (second, "high"),
                (first, "high"),
                (second, "low"),
            )
        ]
        settle(llm)
    assert found[1].device == (len(first) - 1) // PAGE * PAGE
    assert found[3].host > 0
    assert found[4].device + found[4].host_streamed == (len(second) - 1) // PAGE * PAGE
    assert found[4].host_streamed > 0


def test_errors_of_a_closed_engine_are_typed(plain):
    llm = plain().tiered(host_pages=8, num_pages=8)
    llm.close()
    llm.close()
    with pytest.raises(HeadraceError):
        llm.generate([[1, 2, 3]], SHORT)
