"""LOW requests: more KV than the device has, streamed through windows of every width.

HST-10, KVD-04, BAT-04 on the CPU; tokens and log-probabilities are those of plain slots.
"""

import pytest

from tier_cases import FORMATS, PAGE, Plain, params, prompt, refused, run, settle, wait_for

LONG = prompt(9 * PAGE + 20)
OTHER = prompt(6 * PAGE + 1, 3)


@pytest.fixture(scope="module")
def plain(tiny):
    made = {}

    def get(model="tiny_qwen3", name="auto"):
        if (model, name) not in made:
            made[model, name] = Plain(tiny(model).path, **FORMATS[name])
        return made[model, name]

    yield get
    for one in made.values():
        one.llm.close()


@pytest.mark.parametrize(
    ("model", "width"),
    [("tiny_qwen3", 1), ("tiny_qwen3", 2), ("tiny_qwen3", 3), ("tiny_qwen3", 4)]
    + [("tiny_hybrid", 1), ("tiny_hybrid", 2)],
)
def test_a_prefix_larger_than_the_device_pool_streams(plain, model, width):
    """Widths 1, 2, 3 and L; 3 does not divide L, so the parity runs on over the steps."""
    one = plain(model)
    layers = one.llm.engine.model_config.kv_layers
    # As many raw pages as the windows of ten pages take, and three for new tokens.
    raw = -(-10 // (layers // width))
    pages = raw + 3
    options = {"num_pages": pages, "low_pages": raw, "slot_widths": width, "policy": "priority"}
    with one.tiered(host_pages=60, **options) as llm:
        if pages < 10:
            assert "10" in refused(lambda: llm.generate([LONG], params(5)))
        [first] = run(llm, one, [LONG], params(5), priority="low")
        assert sum((first.cached_tokens.device, first.cached_tokens.host)) == 0
        settle(llm)
        streamed = llm.stats()["memory"]["streamed_pages"]
        assert streamed > 0
        [again] = run(llm, one, [LONG], params(5), priority="low")
        assert again.cached_tokens.host_streamed > 0
        assert again.cached_tokens.host_streamed + again.cached_tokens.device == 9 * PAGE
        settle(llm)
        stats = llm.stats()
        assert stats["memory"]["streamed_pages"] > streamed
        assert stats["copies"]["window"]["bytes"] > 0
        # What the window loads moved is what the scheduler counted, to the byte.
        pages_moved = stats["memory"]["streamed_pages"]
        assert stats["copies"]["window"]["bytes"] == pages_moved * one.page_bytes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", ["tiny_qwen3", "tiny_hybrid"])
def test_high_and_low_rows_share_a_batch(plain, model, name):
    """All formats; two LOW rows share their prefix, HIGH rows come and go beside them."""
    one = plain(model, name)
    with one.tiered(host_pages=60, num_pages=16, policy="priority", max_batch_tokens=128) as llm:
        low = [LONG[: 5 * PAGE + 9], LONG[: 5 * PAGE + 30]]
        handles = [llm.loop.submit(tokens, params(12), priority="low") for tokens in low]
        run(llm, one, [OTHER[:70], OTHER[: 2 * PAGE]], params(6))
        for handle, tokens in zip(handles, low, strict=True):
            one.check(handle.future.result(120), tokens, params(12))
        assert llm.stats()["memory"]["streamed_pages"] > 0
        settle(llm)


def test_a_low_request_grows_through_many_pages(plain):
    """Its tail goes to the host page by page while it decodes; then a HIGH one needs the room."""
    one = plain()
    with one.tiered(host_pages=40, num_pages=8, policy="priority") as llm:
        options = params(150)
        handle = llm.loop.submit(prompt(PAGE - 3, 5), options, priority="low")
        scheduler = llm.loop.scheduler
        wait_for(lambda: len(scheduler.poll(handle.request_id).token_ids) > 20)
        run(llm, one, [OTHER], params(5))
        one.check(handle.future.result(120), prompt(PAGE - 3, 5), options)
        assert llm.stats()["copies"]["window"]["bytes"] > 0
        settle(llm)


def test_a_link_that_is_too_slow_defers_low_rows_and_not_high_ones(plain):
    one = plain()
    options = {"link_bytes_per_s": 60_000_000, "low_step_ms": 5.0, "policy": "priority"}
    with one.tiered(host_pages=60, num_pages=16, **options) as llm:
        handle = llm.loop.submit(OTHER, params(6), priority="low")
        scheduler = llm.loop.scheduler
        wait_for(lambda: len(scheduler.poll(handle.request_id).token_ids) > 1)
        run(llm, one, [prompt(80, 4)], params(30))
        one.check(handle.future.result(120), OTHER, params(6))
        assert llm.stats()["deferred_rows"] > 0
        settle(llm)


@pytest.mark.parametrize("what", ["fail", "delay"])
def test_a_window_load_that_fails_is_not_read(plain, what):
    one = plain()
    with one.tiered(host_pages=40, num_pages=12, policy="priority") as llm:
        for nth in (2, 9):
            llm.engine.tier.device.inject("window", nth, what, seconds=0.05)
        handle = llm.loop.submit(OTHER, params(8), priority="low")
        run(llm, one, [prompt(80, 4)], params(20))
        one.check(handle.future.result(120), OTHER, params(8))
        assert (llm.stats()["failed_copy_rows"] > 0) == (what == "fail")
        settle(llm)
