"""Captured graphs and padding by the ids of their cases: GRF-02 to GRF-05 (GRF-01: the engine's).

What differs from step to step is data: tables, lengths and slots that are wrong are padding, or are
cut, and a graph has the bits of the same launches made one by one.
"""

import itertools

import numpy as np
import pytest
import torch
from kv_setup import DEVICE, NOWHERE, build, new_pool, noise, run_decode
from test_cuda_engine import SMALL, STEPS, alone, assert_same, make, prompts_of, run
from test_kv_kernels import BF16, all_formats, checksums, kernels_of

from headrace import LLM, SamplingParams
from headrace.backends.cuda.kv import KVKernels
from headrace.kv.planes import PlanePool
from kv_cases import every_format
from tiny_models import random_prompt

LAYOUTS = ("slots", "paged")


@pytest.mark.parametrize("graphs", [True, False])
def test_a_full_pool_is_served_by_graphs(tiny, graphs):
    """GRF-02: with every page in a table of the step, the step is a replay like any other."""
    prompts = [random_prompt(100, seed=i) for i in range(3)]  # padded to four rows
    pages, seen = 6, []
    with make(
        tiny("tiny_qwen3_d128"),
        dtype="bfloat16",
        kv_layout="paged",
        prefix_cache=False,
        max_batch_size=4,
        max_context=128,
        num_pages=pages,
        cuda_graphs=graphs,
    ) as engine:

        def watch(plan, step):
            del step
            full = set(plan.block_tables.tolist()) == set(range(pages))
            seen.append((engine.runner.replays, full and plan.num_decode == plan.num_rows))

        tokens, logits = run(engine, prompts, 28, between=watch)
        seen.append((engine.runner.replays, False))
    assert sum(full for _, full in seen) > 20
    for (before, full), (after, _) in itertools.pairwise(seen):
        assert after - before == int(full and graphs)
    assert [len(row) for row in tokens] == [28] * 3
    assert all(row.isfinite().all() for row in logits)


@all_formats
def test_lengths_that_are_wrong_are_no_addresses(kv_format):
    """GRF-03: a negative length is padding, a stale one is cut to the context."""
    case = build(kv_format, 128, 2, [300, 40, 170])
    kernels = KVKernels(case.pool, query_heads=8, max_rows=8, max_context=300)
    q = noise(3, 8, 128, seed=2, dtype=kv_format.model_dtype).float()
    expected, before = run_decode(case, kernels, q), checksums(case.pool)
    q[1] = torch.nan
    case.table[1] = NOWHERE
    for negative in (-1, -40, -(2**31)):
        for stale in (301, 2**30, 2**31 - 1):
            case.lengths[0], case.lengths[1] = stale, negative
            out = run_decode(case, kernels, q)
            assert torch.equal(out[[0, 2]], expected[[0, 2]])
            assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert checksums(case.pool) == before


@every_format
def test_an_append_of_fewer_rows_than_its_arrays_writes_only_these(kv_format):
    """GRF-03: the rest keeps its poison, the last row of the last page too (-1 must not wrap)."""
    width, live, pages, page_tokens = 8, 3, 5, 32
    pool = new_pool(
        kv_format, layers=2, kv_heads=2, head_dim=128, pages=pages, page_tokens=page_tokens
    )
    wanted = PlanePool.allocate(pool.layout, pages=pages, page_tokens=page_tokens)
    for one in (pool, wanted):
        one.fill_poison()
    where = torch.tensor([3, 0, 2, *[-1] * (width - live)])
    offsets = torch.tensor([31, 0, 7, *[-1] * (width - live)])
    k, v = noise(width, 2, 128, dtype=BF16), noise(width, 2, 128, seed=1, dtype=BF16)
    q = noise(width, 4, 128, seed=2, dtype=BF16)
    for x in (k, v, q):
        x[live:] = torch.nan
    q_out = torch.full_like(q, 7.0)
    on_device = where.to(DEVICE), offsets.to(DEVICE)
    kernels_of(pool, group=2).append_fused(
        1, *on_device, on_device[1], q, k, v, q_out=q_out, norm=None, rotary=None
    )
    wanted.append(1, where[:live], offsets[:live], k[:live].cpu(), v[:live].cpu())
    for name, tensor in wanted.tensors.items():
        ours = pool.tensors[name].cpu().view(torch.uint8)
        assert torch.equal(ours, tensor.view(torch.uint8)), name
    assert torch.equal(q_out[:live], q[:live])
    assert (q_out[live:] == 7.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_ends_at_exactly_max_context(tiny, layout):
    """GRF-04: the block table is wide enough, the last token right, the end is `length`."""
    context = 128
    prompts = [random_prompt(length, seed=length) for length in (100, 127, 65, 126)]
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    options = SMALL | {"max_context": context, "dtype": "float32", "kv_layout": layout}
    answers = []
    for more in ({"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", "cuda_graphs": False}):
        with LLM(str(tiny("tiny_qwen3_d128").path), **(options | more)) as llm:
            outputs = llm.generate(prompts, params)
            answers.append([output.token_ids for output in outputs])
            assert {output.finish_reason for output in outputs} == {"length"}
            if more == {"device": "cuda"}:
                assert llm.engine.runner.replays > 0
    for prompt, tokens in zip(prompts, answers[0], strict=True):
        assert len(prompt) + len(tokens) == context
    assert answers[1] == answers[2] == answers[0]


class Moved:
    """A plan whose pages and state slots have other numbers; everything else is the plan's."""

    def __init__(self, plan, pages, slots):
        self._plan = plan
        self.token_pages = pages[plan.token_pages]
        self.block_tables = pages[plan.block_tables].astype(np.uint32)
        self.slots = slots[plan.slots]

    def __getattr__(self, name):
        return getattr(self._plan, name)


class Mover:
    """Moves everything in the pools somewhere else before every step."""

    def __init__(self, engine, seed):
        self._engine, self._rng = engine, np.random.default_rng(seed)
        self._pages = np.arange(engine.kv.pages)
        self._slots = np.arange(engine.config.max_batch_size)
        self._forward = engine.runner.forward

    def forward(self, plan, gates=None):
        kv, state = self._engine.kv.pool.tensors, self._engine.state
        self._pages = self._move(kv, self._pages)
        self._slots = self._move({} if state is None else state.tensors, self._slots)
        return self._forward(Moved(plan, self._pages, self._slots), gates)

    def _move(self, tensors, old):
        new = self._rng.permutation(len(old))
        source, target = (torch.from_numpy(where).to(self._engine.device) for where in (old, new))
        for tensor in tensors.values():
            tensor[:, target] = tensor[:, source]
        return new


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
def test_new_block_tables_in_every_step_change_no_bit(tiny, monkeypatch, name, layout, graphs):
    """GRF-05: B = 1..8, every page and state at a new random place in every step."""
    prompts = prompts_of(8, longest=200)
    options = {"dtype": "bfloat16", "kv_layout": layout, "max_batch_tokens": 1024}
    with make(tiny(name), **options) as engine:
        expected = alone(engine, prompts)
    with make(tiny(name), cuda_graphs=graphs, **options) as engine:
        monkeypatch.setattr(engine.runner, "forward", Mover(engine, seed=1).forward)
        for count in (3, 5, 6, 7, 1, 2, 4, 8):
            part = (expected[0][:count], expected[1][:count])
            before = engine.runner.replays
            assert_same(run(engine, prompts[:count]), part)
            # All decode rows go together after one step of prefill.
            assert engine.runner.replays - before == (STEPS - 1 if graphs else 0)
