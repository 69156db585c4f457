"""Cases whose level is GPU through the whole engine: BAT, HST-18, KVD, LEK, PFX, PRE, SLT.

Those of kernels alone are beside the kernels, those of graphs in `test_graph_cases.py`, those of
the host tier in a file of their own.
"""

import copy
import gc
import itertools
import json
import os
import random
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_cuda_engine import (
    FORMATS,
    SMALL,
    STEPS,
    assert_same,
    make,
    names_of,
    prompts_of,
    run,
)

from headrace import LLM, BatchedRequest, Engine, EngineConfig, SamplingParams
from headrace.backends.cuda.memory import RESERVE_BYTES
from headrace.errors import ConfigError
from headrace.models.known import KNOWN_CONFIGS
from headrace.models.tensors import weight_bytes
from tiny_models import random_prompt, relative

PAGE = 64
BOTH = ("tiny_qwen3_d128", "tiny_hybrid_27")
LAYOUTS = ("slots", "paged")
every_format = pytest.mark.parametrize("options", FORMATS, ids=names_of)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
dense_and_hybrid = pytest.mark.parametrize("name", BOTH)


@pytest.fixture
def longer(tiny, tmp_path):
    """A tiny model that takes as many tokens as are asked for."""

    def get(name, max_position):
        path = tmp_path / name
        shutil.copytree(tiny(name).path, path)
        file = path / "config.json"
        config = json.loads(file.read_text())
        for part in (config, config.get("text_config", {})):
            if "max_position_embeddings" in part:
                part["max_position_embeddings"] = max_position
        file.write_text(json.dumps(config))
        return SimpleNamespace(path=path)

    return get


def serve(engine, requests, *, abort=(), between=None):
    """Tokens and logits `[count, vocab]` of each request (prompt, new tokens), by its index.

    abort: (step, index) pairs. between(plan, step): called before a step runs.
    """
    scheduler = engine.make_scheduler()
    logits = {i: [] for i in range(len(requests))}
    for i, (prompt, count) in enumerate(requests):
        spec = engine.sampling_spec(SamplingParams(max_tokens=count, ignore_eos=True))
        scheduler.submit(prompt, spec, request_id=i)
    due, aborted = sorted(abort), set()
    for step in itertools.count():
        while due and due[0][0] <= step:
            index = due.pop(0)[1]
            if scheduler.abort(index):
                aborted.add(index)
        plan = scheduler.next_plan(0.0)
        if plan is None:
            break
        if between is not None:
            between(plan, step)
        out = engine.runner.forward(plan)
        for row, values in zip(plan.request_ids[plan.sample_rows].tolist(), out, strict=True):
            logits[row].append(values)
        scheduler.commit(plan, out.argmax(-1).to(torch.int32).cpu().numpy())
        scheduler.check()
    results = [scheduler.take_result(i) for i in range(len(requests))]
    scheduler.close()
    for i, result in enumerate(results):
        assert result.finish_reason == ("abort" if i in aborted else "length")
    return [result.token_ids for result in results], logits


# ---- a row and its neighbours ------------------------------------------------------------------


# Relative L2 of the logits of one token. Activations are rounded to 8 or 11 bits a dozen times a
# layer; a CPU in the same dtype is at 0.02 to 0.04 on average, and at 0.003 to 0.005 in fp16.
LOGITS = {"bfloat16": (0.05, 0.12), "float16": (0.008, 0.025)}
_IN_FP32 = ("A_log", "dt_bias", "conv1d.weight")


def in_float64(hf, dtype):
    """The oracle with the weights that an engine has in `dtype`, computing in float64."""
    exact = copy.deepcopy(hf)
    with torch.no_grad():
        for name, weight in exact.named_parameters():
            if not name.endswith(_IN_FP32):
                weight.copy_(weight.to(getattr(torch, dtype)))
    return exact.double()


@pytest.mark.parametrize("dtype", LOGITS)
@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_qwen3_g5", *BOTH])
def test_logits_against_float64(tiny, name, dtype):
    """The promise of issue and models.md: prefill and decode, against transformers in float64."""
    model = tiny(name)
    prompts = [random_prompt(length, seed=length) for length in (5, 64, 130, 200)]
    with make(model, dtype=dtype) as engine:
        tokens, logits = run(engine, prompts)
    oracle = in_float64(model.hf, dtype)
    errors = []
    for prompt, own, ours in zip(prompts, tokens, logits, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + own[:-1]])
            expected = oracle(input_ids=ids).logits[0, -STEPS:]
        errors += [relative(a.cpu(), b) for a, b in zip(ours, expected, strict=True)]
    mean, largest = LOGITS[dtype]
    assert sum(errors) / len(errors) < mean
    assert max(errors) < largest


@dense_and_hybrid
def test_ragged_batches_end_row_by_row(longer, name):
    """BAT-03: positions and lengths in every step, counts exact, equal to solo."""
    lengths = (1, 2, 63, 64, 65, 700, 1024, 2049)
    requests = [(random_prompt(length, seed=length), i + 1) for i, length in enumerate(lengths)]
    options = {"dtype": "bfloat16", "max_context": 2304, "max_batch_tokens": 1024}
    with make(longer(name, 4096), **options) as engine:
        solo = [serve(engine, [request]) for request in requests]
        made = [0] * len(requests)

        def watch(plan, step):
            del step
            for row in range(plan.num_rows):
                request, first = int(plan.request_ids[row]), int(plan.token_offsets[row])
                count = int(plan.token_offsets[row + 1]) - first
                start = int(plan.starts[row])
                span = plan.positions[first : first + count]
                assert span.tolist() == list(range(start, start + count))
                if row < plan.num_decode:
                    assert (start, count) == (lengths[request] + made[request] - 1, 1)
            for row in plan.sample_rows.tolist():
                made[int(plan.request_ids[row])] += 1

        tokens, logits = serve(engine, requests, between=watch)
    assert made == [len(row) for row in tokens] == [count for _, count in requests]
    for i, ([own], own_logits) in enumerate(solo):
        assert tokens[i] == own
        assert torch.equal(torch.stack(logits[i]), torch.stack(own_logits[0]))


@dense_and_hybrid
def test_one_forward_a_step_as_wide_as_its_rows(tiny, name):
    """BAT-06: eight rows are one replay; a lone row in an engine for eight has width 1.

    The time of the lone row is measured by `headrace bench latency`.
    """
    widths = []
    with make(tiny(name), dtype="bfloat16", max_batch_tokens=1024) as engine:

        def watch(plan, step):
            widths.append((step, plan.num_decode, plan.decode_width, engine.runner.replays))

        for count in (8, 1, 3):
            widths.clear()
            before = engine.runner.replays
            run(engine, prompts_of(count), between=watch)
            decode = widths[1:]
            assert len(decode) == STEPS - 1
            wide = {8: 8, 1: 1, 3: 4}[count]
            assert {(rows, width) for _, rows, width, _ in decode} == {(count, wide)}
            replays = [done for *_, done in decode] + [engine.runner.replays]
            assert replays == list(range(before, before + STEPS))


SPLIT_STEPS = 600


def test_split_rows_in_scattered_slots(longer):
    """BAT-07: slots 1, 3, 5, 6, far positions, 600 steps over every edge, equal to solo."""
    lengths = {1: 4096, 3: 5000, 5: 6144, 6: 7500}
    prompts = {slot: random_prompt(length, seed=slot) for slot, length in lengths.items()}
    params = SamplingParams(max_tokens=SPLIT_STEPS, ignore_eos=True)
    model = longer("tiny_qwen3_d128", 8192)
    options = {"dtype": "bfloat16", "max_context": 8192, "max_batch_tokens": 8192}

    def generate(engine, slots):
        requests = [
            BatchedRequest(request_id=slot, prompt_tokens=prompts[slot], sampling=params)
            for slot in slots
        ]
        logits = [engine.batch_prefill(requests, return_logits=True).logits]
        logits += (
            engine.batch_decode_step(requests, return_logits=True).logits
            for _ in range(SPLIT_STEPS - 1)
        )
        return torch.stack(logits), [request.slot_id for request in requests]

    with make(model, **options) as engine:
        solo = []
        for slot in lengths:
            assert engine.allocate_slot(slot) == 0
            solo.append(generate(engine, [slot])[0])
            engine.free_slot(slot)
        engine.kv.fill_poison()
        assert [engine.allocate_slot(i) for i in range(7)] == list(range(7))
        for empty in (0, 2, 4):
            engine.free_slot(empty)
        together, slots = generate(engine, list(lengths))
        assert slots == list(lengths)
        assert torch.equal(together, torch.cat(solo, dim=1))
    requests = [(prompt, SPLIT_STEPS) for prompt in prompts.values()]
    with make(model, kv_layout="paged", num_pages=4 * 128, **options) as engine:
        # New pages are handed out in turn, so that tables are fragments of one another.
        logits = serve(engine, requests)[1]
        for row in range(4):
            assert torch.equal(torch.stack(logits[row]), together[:, row])


@every_layout
@dense_and_hybrid
def test_a_cancel_storm_changes_nothing(tiny, name, layout):
    """SLT-10: solo, among 45 neighbours, and after all of them were aborted at random steps."""
    rng = random.Random(7)
    neighbours = [(random_prompt(3 + 7 * i % 120, seed=i), 2 + i % 9) for i in range(45)]
    own, place = (random_prompt(150, seed=99), 30), 20
    crowd = [*neighbours[:place], own, *neighbours[place:]]
    others = [i for i in range(len(crowd)) if i != place]
    with make(tiny(name), dtype="bfloat16", kv_layout=layout) as engine:
        tokens, logits = serve(engine, [own])
        for abort in ((), [(rng.randrange(1, 40), i) for i in others]):
            found = serve(engine, crowd, abort=abort)
            assert found[0][place] == tokens[0]
            assert torch.equal(torch.stack(found[1][place]), torch.stack(logits[0]))


# ---- preemption, prefixes, reuse ---------------------------------------------------------------


@pytest.mark.parametrize("every", range(1, 8))
@dense_and_hybrid
def test_preempted_every_few_steps(tiny, monkeypatch, name, every):
    """PRE-01: tokens that were generated come back as decode steps, and no bit changes."""
    requests = [(prompt, 9) for prompt in prompts_of(3, longest=150)]
    options = {"dtype": "bfloat16", "kv_layout": "paged", "max_batch_tokens": 64}
    with make(tiny(name), **options) as engine:
        tokens, logits = serve(engine, requests)
    monkeypatch.setenv("HEADRACE_TEST_PREEMPT_EVERY", str(every))
    with make(tiny(name), preemption="recompute", **options) as engine:
        found = serve(engine, requests)
        assert found[0] == tokens
        for i in range(len(requests)):
            assert torch.equal(torch.stack(found[1][i]), torch.stack(logits[i]))
    options |= SMALL | {"device": "cuda", "preemption": "recompute", "slot_widths": 1}
    with LLM(str(tiny(name).path), **options) as llm:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        outputs = llm.generate([prompt for prompt, _ in requests], params)
        assert [output.token_ids for output in outputs] == tokens
        assert llm.stats()["preemptions"] > 0


@every_format
def test_a_device_hit_has_the_bits_of_a_miss(tiny, options):
    """KVD-01, PFX-02: one prompt six times; the first computes it, the others find its pages."""
    prompt = random_prompt(5 * PAGE + 10, seed=3)
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=3)
    path = str(tiny("tiny_qwen3_d128").path)
    common = SMALL | {"device": "cuda", "dtype": "bfloat16"} | options
    with LLM(path, **common) as llm:
        [expected] = llm.generate([prompt], params)
    with LLM(path, kv_layout="paged", **common) as llm:
        outputs = [llm.generate([prompt], params)[0] for _ in range(6)]
        # Beside others, one of which has half of it.
        outputs += llm.generate([prompt, prompt[: 3 * PAGE] + [1] * 40, prompt], params)[::2]
    cached = [output.cached_tokens.device for output in outputs]
    assert cached == [0, *[5 * PAGE] * 7]
    for output in outputs:
        assert output.token_ids == expected.token_ids
        assert output.logprobs == expected.logprobs


@every_layout
@dense_and_hybrid
def test_a_slot_full_of_nan_starts_anew(tiny, name, layout):
    """PFX-06: whatever the last tenant left in KV and state, the next one starts from zero."""
    prompts = prompts_of(8, longest=150)
    with make(tiny(name), dtype="bfloat16", kv_layout=layout) as engine:
        expected = run(engine, prompts)
        for _ in range(2):
            engine.kv.fill_poison()
            if engine.state is not None:
                engine.state.fill_poison()
            assert_same(run(engine, prompts), expected)


@every_format
def test_a_probe_with_extreme_values_leaves_no_trace(tiny, options):
    """KVD-03: no scale is frozen by earlier traffic."""
    model, prompt = tiny("tiny_qwen3_d128"), random_prompt(150, seed=1)
    with make(model, dtype="bfloat16", **options) as engine:
        expected = run(engine, [prompt])
    with make(model, dtype="bfloat16", **options) as engine:
        run(engine, [[499] * 13])
        kv, config = engine.kv, engine.model_config
        rows = torch.arange(13, device=engine.device)
        for value in (65504.0, 1e-7, torch.inf, torch.nan, -3e38):
            x = torch.full((13, config.num_kv_heads, config.head_dim), value, device=engine.device)
            for layer in range(config.kv_layers):
                pair = (x.to(kv.dtype),) * 2
                engine.backend.kv_append(layer, kv, torch.zeros_like(rows), rows, *pair)
        assert_same(run(engine, [prompt]), expected)


@every_format
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_format_in_every_layout_and_dtype(tiny, dtype, options):
    """KVD-04: prefill and batched decode; bf16 is tested elsewhere, LOW windows by kernels."""
    model, prompts = tiny("tiny_qwen3_d128"), prompts_of(5, longest=150)
    results = []
    for layout in LAYOUTS:
        with make(model, dtype=dtype, kv_layout=layout, **options) as engine:
            results.append(run(engine, prompts, 4))
    assert_same(*results)
    assert all(row.isfinite().all() for row in results[0][1])


@pytest.mark.parametrize(
    ("words", "changes", "options"),
    [
        ("head_dim 96", {"head_dim": 96}, {}),
        ("16 query heads a KV head", {"num_heads": 16, "num_kv_heads": 1}, {}),
        ("turboquant_k8v4 with head_dim 96", {"head_dim": 96}, {"device": "cpu"}),
        ("rotary_dim 18", {"rotary_dim": 18}, {}),
    ],
)
def test_a_combination_nobody_has_is_refused_by_name(monkeypatch, words, changes, options):
    """KVD-04: at construction, on either backend."""
    small = replace(
        KNOWN_CONFIGS["smollm2-135m"], num_layers=2, vocab_size=512, max_position=512, **changes
    )
    monkeypatch.setitem(KNOWN_CONFIGS, "small-odd", small)
    config = {"model": "small-odd", "load_format": "dummy", "kv_dtype": "turboquant_k8v4"}
    with pytest.raises(ConfigError, match=words):
        Engine(EngineConfig(**(SMALL | {"device": "cuda"} | config | options)))


# ---- memory ------------------------------------------------------------------------------------


def settled():
    """Bytes of tensors on the device, after everything that can go has gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


# What cuBLAS keeps for the streams of a process, 32 MiB each.
LIBRARIES = 128 << 20


@every_layout
@dense_and_hybrid
def test_steps_take_no_more_than_was_declared(tiny, name, layout):
    """HST-18: peak of full steps against weights, pools and the declared bytes of a step."""
    options = {"dtype": "bfloat16", "kv_layout": layout, "max_context": 1024}
    prompts = [random_prompt(1000, seed=i) for i in range(8)]
    before = settled()
    with make(tiny(name), max_batch_tokens=8192, **options) as engine:
        pools = engine.kv.bytes_total + (engine.state.bytes_total if engine.state else 0)
        weights = weight_bytes(engine.model_config, 2)
        # The constant part is for what torch does not count.
        declared = engine.step_bytes - RESERVE_BYTES
        assert declared > 0
        kept, peaks = [], []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            tokens = run(engine, prompts)[0]
            assert [len(row) for row in tokens] == [STEPS] * 8
            peaks.append(torch.cuda.max_memory_allocated() - before)
            kept.append(settled() - before)
        assert max(peaks) - weights - pools <= declared + LIBRARIES
        # What steps allocate they give back.
        assert kept[2] <= kept[1]
        assert peaks[2] <= peaks[1]


def test_pools_beyond_the_memory_of_the_device_are_refused(tiny):
    """HST-18: by needed and free bytes, before anything is allocated for them."""
    before = settled()
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(ConfigError, match=r"KV pools need [\d,]+ bytes .* [\d,]+ are free"):
        make(tiny("tiny_qwen3_d128"), kv_layout="paged", num_pages=total // (PAGE * 3 * 1024))
    assert settled() <= before + LIBRARIES
    # What others hold counts.
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - (3 << 28), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match="are free beside"):
        make(tiny("tiny_qwen3_d128"))
    del hog
    settled()
    with make(tiny("tiny_qwen3_d128")) as engine:
        assert engine.kv.bytes_total == sum(t.nbytes for t in engine.kv.pool.tensors.values())


def open_files():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (names alone)


def test_fifty_engines_leave_nothing_behind(tiny):
    """LEK-03: device bytes, pinned bytes, graphs, threads and files are those of before."""
    path = str(tiny("tiny_qwen3_g5").path)
    options = SMALL | {"device": "cuda", "dtype": "bfloat16", "max_batch_size": 1}
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    seen = []
    for cycle in range(50):
        with LLM(path, **options) as llm:
            llm.generate([[1, 2, 3]], params)
            assert llm.engine.runner.replays > 0
        if cycle in (4, 49):
            # The names `llm` and what hangs on it are still there: closing is enough.
            bytes_now = settled()
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            free = torch.cuda.mem_get_info()[0]
            seen.append((bytes_now, pinned, threading.active_count(), open_files(), free))
    first, last = seen
    for early, late in zip(first[:-1], last[:-1], strict=True):
        assert late <= early
    assert last[-1] >= first[-1] - (64 << 20)  # what the driver rounds up
