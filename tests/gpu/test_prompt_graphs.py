"""Prompts by captured graphs: the bits of eager steps, whatever their number, sizes and cuts."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_cuda_engine import assert_same, make, run

from headrace import SamplingParams
from headrace.backends.cuda.prefill_attention import most_captured
from headrace.backends.cuda.step_arrays import PROMPT_TOKENS, WHOLE
from headrace.backends.cuda_ops import CudaBackend
from headrace.pipeline import Pipeline
from tiny_models import random_prompt, relative

MODELS = ("tiny_llama", "tiny_qwen3_d128", "tiny_hybrid", "tiny_hybrid_27")
CONTEXT = 448
# Sums on both sides of the sizes of graphs; more prompts than one has; one token; a whole context.
GROUPS = (
    (1,),
    (63,),
    (64,),
    (65,),
    (CONTEXT - 4,),
    (1, 2, 1),
    (100, 3, 64, 129),
    (200, 200, 200, 168),
    (400, 400, 224),
    (400, 400, 225),
    (400, 440, 440, 440, 329),
    (CONTEXT - 4,) * 8,
    (5, 6, 7, 8, 9, 10, 11, 12),
    (5, 6, 7, 8, 9, 10, 11, 12, 13),
    (2,),
)
OPTIONS = {"max_batch_size": 12, "max_context": CONTEXT, "prefix_cache": False}


def prompts_of(lengths):
    return [random_prompt(length, seed=1000 * length + i) for i, length in enumerate(lengths)]


def by_graphs(engine, plan):
    """Whether the prompts of a plan are for a graph, as far as their number and sizes tell."""
    prompts, tokens = plan.num_rows - plan.num_decode, len(plan.token_ids) - plan.num_decode
    return 0 < prompts <= most_captured(engine.kv.format) and tokens <= PROMPT_TOKENS[-1]


def counted(engine, prompts, steps=3, **options):
    """The run, in which the prompts that fit a graph were replays and no others."""
    expected, before = [0], engine.runner.prompt_replays

    def between(plan, step):
        del step
        expected[0] += by_graphs(engine, plan)

    result = run(engine, prompts, steps, between=between, **options)
    graphs = engine.config.cuda_graphs
    assert engine.runner.prompt_replays - before == (expected[0] if graphs else 0)
    assert all(row.isfinite().all() for row in result[1])
    return result


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_all_sizes_have_the_bits_of_eager_steps(tiny, name, layout, dtype):
    options = OPTIONS | {"dtype": dtype, "kv_layout": layout}
    results = []
    for graphs, tokens in ((False, 4096), (True, 4096), (True, 1024), (True, 64), (True, 320)):
        with make(tiny(name), cuda_graphs=graphs, max_batch_tokens=tokens, **options) as engine:
            results.append([counted(engine, prompts_of(lengths)) for lengths in GROUPS])
            # Again, in memory that other prompts have left.
            results.append([counted(engine, prompts_of(lengths)) for lengths in GROUPS])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same(one, two)


@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
def test_more_tokens_than_a_graph_has(tiny, name):
    options = {"dtype": "bfloat16", "max_batch_size": 8, "max_context": 1024}
    lengths, results = (1000, 1001, 1002, 93, 1000, 1), []
    assert sum(lengths) > PROMPT_TOKENS[-1]
    for graphs, tokens in ((False, 8192), (True, 8192), (True, 1024)):
        with make(tiny(name), cuda_graphs=graphs, max_batch_tokens=tokens, **options) as engine:
            results.append(counted(engine, prompts_of(lengths)))
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
@pytest.mark.parametrize("layout", ["slots", "paged"])
def test_prompts_beside_decode_rows(tiny, name, layout):
    """Both kinds of rows keep their bits, whichever of them a graph runs (BAT-04)."""
    lengths, arrive = (70, 5, 300, 64, 1, 130, 33), [0, 2, 3, 3, 5, 6, 8]
    options = OPTIONS | {"dtype": "bfloat16", "kv_layout": layout}
    results = []
    for graphs, tokens in ((False, 1024), (True, 1024), (True, 64)):
        with make(tiny(name), cuda_graphs=graphs, max_batch_tokens=tokens, **options) as engine:
            alone = [counted(engine, [prompt], 9) for prompt in prompts_of(lengths)]
            # A cut makes later prompts arrive later, which changes nothing but the steps.
            together = counted(engine, prompts_of(lengths), 9, arrive=arrive)
            for row, (tokens_alone, logits_alone) in enumerate(alone):
                assert together[0][row] == tokens_alone[0]
                assert torch.equal(together[1][row], logits_alone[0])
            results.append(together)
    for other in results[1:]:
        assert_same(results[0], other)


def test_without_fixed_bits_prompts_are_replayed_too(tiny, monkeypatch):
    """More prompts than a graph has are one eager step with the decode rows in it."""
    options = OPTIONS | {"dtype": "bfloat16", "deterministic": "off", "max_batch_tokens": 2048}
    groups = (((70, 5, 300, 64), [0, 2, 3, 3]), ((1, *[40] * 9), [0, *[1] * 9]))
    results, parts = [], []
    for graphs in (False, True):
        with make(tiny("tiny_qwen3_d128"), cuda_graphs=graphs, **options) as engine:
            eager = engine.runner._eager

            def watched(plan, part, *rest, eager=eager):
                parts.append((part, plan.num_decode))
                return eager(plan, part, *rest)

            parts.clear()
            monkeypatch.setattr(engine.runner, "_eager", watched)
            for lengths, arrive in groups:
                results.append(counted(engine, prompts_of(lengths), 4, arrive=arrive)[1])
    assert parts == [(WHOLE, 1)]
    for exact, replayed in zip(results[:2], results[2:], strict=True):
        for one, two in zip(exact, replayed, strict=True):
            # Of the prompts; later tokens may differ.
            assert relative(two[0], one[0]) < 0.05


@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8_per_token_head", "turboquant_k8v4"])
@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
def test_prompts_over_codes(tiny, name, kv_dtype, layout):
    """They are decoded into a workspace, in a graph as well: four prompts of one."""
    options = OPTIONS | {"dtype": "bfloat16", "kv_layout": layout, "kv_dtype": kv_dtype}
    results = []
    for graphs, tokens in ((False, 1024), (True, 2048), (True, 128)):
        with make(tiny(name), cuda_graphs=graphs, max_batch_tokens=tokens, **options) as engine:
            results.append([counted(engine, prompts_of(lengths)) for lengths in GROUPS])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert_same(one, two)


def test_what_cannot_be_captured_is_launched(tiny):
    """Exact fp32 goes tile by tile of every prompt."""
    with make(tiny("tiny_qwen3_d128"), dtype="float32", **OPTIONS) as engine:
        run(engine, prompts_of((70, 5)), 3)
        assert engine.runner.prompt_replays == 0
        assert engine.runner.replays > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
def test_tokens_of_launched_steps(tiny, name, temperature):
    """The places of tokens on the device: prompts beside decode rows, and steps that run ahead."""
    prompts = prompts_of((70, 5, 300, 64, 1, 130))
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
    results = []
    for graphs in (False, True):
        options = OPTIONS | {"dtype": "bfloat16", "max_batch_tokens": 1024}
        with make(tiny(name), cuda_graphs=graphs, **options) as engine:
            scheduler, waiting = engine.make_scheduler(), list(enumerate(prompts))
            spec, pipeline = engine.sampling_spec(params), Pipeline(engine, scheduler)
            mixed = steps = 0
            while True:
                if waiting:
                    index, prompt = waiting.pop(0)
                    scheduler.submit(prompt, spec, request_id=index)
                plan = scheduler.next_plan(0.0)
                if plan is None:
                    break
                for ended in pipeline.run(plan):
                    assert ended.result is not None
                    scheduler.commit(ended.plan, ended.result.token_ids)
                    mixed += 0 < ended.plan.num_decode < ended.plan.num_rows
                    steps += 1
                    if waiting and steps % 3 == 0:
                        index, prompt = waiting.pop(0)
                        scheduler.submit(prompt, spec, request_id=index)
            results.append([scheduler.take_result(i).token_ids for i in range(len(prompts))])
            scheduler.close()
            assert mixed > 2
            assert (engine.runner.ahead_steps > 0) == graphs
    assert results[0] == results[1]


class Unsafe:
    """Garbage whose end calls what a thread that captures may not call."""

    ended = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Unsafe.ended += 1
        torch.cuda.synchronize()


def test_no_garbage_is_collected_while_a_graph_is_captured(tiny, monkeypatch):
    embed, old = CudaBackend.embed, gc.get_threshold()

    def leaves_garbage(self, *args):
        Unsafe()
        return embed(self, *args)

    monkeypatch.setattr(CudaBackend, "embed", leaves_garbage)
    gc.set_threshold(1)
    try:
        with make(tiny("tiny_qwen3_d128"), dtype="bfloat16", **OPTIONS) as engine:
            counted(engine, prompts_of((70, 5)))
    finally:
        gc.set_threshold(*old)
    assert gc.isenabled()
    assert Unsafe.ended > 0


def test_engines_made_at_the_same_time(tiny):
    """Each of a thread of its own: nothing that touches the whole GPU runs while one captures."""
    tiers = ({}, {"kv_layout": "paged", "host_bytes": 32 << 20})
    names = ("tiny_qwen3_d128", "tiny_hybrid_27")
    cases = [
        (tiny(name), OPTIONS | {"dtype": "bfloat16"} | tier) for name in names for tier in tiers
    ]

    def tokens(case):
        model, options = case
        with make(model, **options) as engine:
            return counted(engine, prompts_of((70, 5)))[0]

    with ThreadPoolExecutor(len(cases)) as threads:
        together = [list(threads.map(tokens, cases)) for _ in range(3)]
    alone = [tokens(case) for case in cases]
    assert together == [alone] * 3
