"""Where a request takes its next page: PAG-10, on the scheduler alone."""

import numpy as np
import pytest

from headrace._core import MemoryConfig, SamplingSpec, Scheduler, SlotAllocator

NEW = 70  # more than a page of 64 away from any prompt


def spec(max_tokens):
    return SamplingSpec(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        frequency_penalty=0.0, presence_penalty=0.0, seed=0, logprobs=None,
        max_tokens=max_tokens, min_tokens=0, stop_token_ids=[],
    )  # fmt: skip


@pytest.mark.parametrize("page", [64, 128, 256])
@pytest.mark.parametrize("edge", ["-1", "+0", "+1", "x2", "x3"])
def test_a_lone_request_takes_a_page_exactly_at_its_edges(page, edge):
    """PAG-10: exactly max_new tokens, no hang, a new page only when the last one is full."""
    length = page * int(edge[1:]) if edge[0] == "x" else page + int(edge)
    pages = -(-(length + NEW) // page)
    scheduler = Scheduler(
        SlotAllocator(1),
        max_context=length + NEW,
        vocab_size=100,
        max_batch_tokens=128,
        memory=MemoryConfig(
            num_pages=pages, num_layers=4, page_size=page, snapshot_interval=page, prefix_cache=True
        ),
    )
    request = scheduler.submit([at % 97 for at in range(length)], spec(NEW))
    held = 0
    for _ in range(length + NEW):
        plan = scheduler.next_plan(timeout=0)
        if plan is None:
            break
        start, tokens = int(plan.starts[0]), len(plan.token_ids)
        table = plan.block_tables
        assert len(table) == -(-(start + tokens) // page)
        if plan.num_decode:
            assert (len(table) > held) == (start % page == 0)
        assert set(plan.token_pages) <= set(table.astype(np.int64))
        held = len(table)
        scheduler.commit(plan, np.full(len(plan.sample_rows), 7, np.int32))
        scheduler.check()
    result = scheduler.take_result(request)
    assert (result.finish_reason, len(result.token_ids)) == ("length", NEW)
    assert scheduler.memory_stats()["pages"]["high"]["request"] == 0
