"""The engine on a GPU: the tokens of the CPU in fp32, and bits that depend on nothing but a row.

Models are tiny and random; the same files are loaded on both devices.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, BatchedRequest, Engine, EngineConfig, SamplingParams
from headrace.backends.cuda import many_rows
from headrace.bench.kv import bench_kv
from headrace.errors import ConfigError, DownloadError
from headrace.loading.pull import pull
from headrace.models.hybrid_config import LinearAttention
from headrace.models.known import KNOWN_CONFIGS
from tiny_models import HYBRID_NAMES, random_prompt, relative

DENSE = ("tiny_llama", "tiny_qwen3", "tiny_qwen3_d128", "tiny_qwen3_g5", "tiny_qwen3_g8")
FORMATS = (
    {},
    {"kv_dtype": "fp8_e4m3"},
    {"kv_dtype": "fp8_e4m3", "fp8_block": 64},
    {"kv_dtype": "int8_per_token_head"},
    {"kv_dtype": "int8_per_token_head", "int8_rotate": True},
    {"kv_dtype": "turboquant_k8v4"},
)
STEPS = 12
SMALL = {"max_batch_size": 8, "max_context": 512, "skip_tokenizer": True, "seed": 3}


def names_of(options):
    return "-".join(str(value) for value in options.values()) or "auto"


def make(model, **options):
    options.setdefault("slot_widths", 1)  # some models have one layer with KV
    return Engine(EngineConfig(model=str(model.path), **(SMALL | {"device": "cuda"} | options)))


def prompts_of(count, longest=90):
    return [random_prompt(3 + (37 * i) % longest, seed=i) for i in range(count)]


def run(engine, prompts, steps=STEPS, *, between=None, arrive=None):
    """Greedy tokens and logits `[steps, vocab]` of every prompt, through the scheduler.

    arrive: step at which each prompt is submitted. between(plan, step): called before a step runs.
    """
    scheduler = engine.make_scheduler()
    spec = engine.sampling_spec(SamplingParams(max_tokens=steps, ignore_eos=True))
    logits = {i: [] for i in range(len(prompts))}
    waiting = list(enumerate(prompts))
    arrive = arrive or [0] * len(prompts)
    step = 0
    while True:
        while waiting and arrive[waiting[0][0]] <= step:
            index, prompt = waiting.pop(0)
            scheduler.submit(prompt, spec, request_id=index)
        plan = scheduler.next_plan(0.0)
        if plan is None:
            if not waiting:
                break
            step += 1
            continue
        if between is not None:
            between(plan, step)
        out = engine.runner.forward(plan)
        for row, values in zip(plan.request_ids[plan.sample_rows].tolist(), out, strict=True):
            logits[row].append(values)
        scheduler.commit(plan, out.argmax(-1).to(torch.int32).cpu().numpy())
        scheduler.check()
        step += 1
    tokens = [scheduler.take_result(i).token_ids for i in range(len(prompts))]
    scheduler.close()
    return tokens, [torch.stack(logits[i]) for i in range(len(prompts))]


def assert_same(one, other):
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a, b)


def alone(engine, prompts, steps=STEPS):
    runs = [run(engine, [prompt], steps) for prompt in prompts]
    return [tokens[0] for tokens, _ in runs], [logits[0] for _, logits in runs]


@pytest.mark.parametrize("name", [*DENSE, *HYBRID_NAMES])
def test_fp32_gives_the_tokens_of_the_cpu(tiny, name):
    model, prompts = tiny(name), prompts_of(5)
    with make(model, device="cpu", dtype="float32") as engine:
        tokens, logits = run(engine, prompts)
    for options in ({}, {"kv_layout": "paged"}, {"cuda_graphs": False}):
        with make(model, dtype="float32", **options) as engine:
            ours = run(engine, prompts)
            assert ours[0] == tokens
            for a, b in zip(ours[1], logits, strict=True):
                assert relative(a.cpu(), b) < 1e-4
            assert_same(alone(engine, prompts), ours)
            assert bool(engine.runner.replays) == engine.config.cuda_graphs


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_d128", "tiny_hybrid_27"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_to_fp32_as_on_the_cpu(tiny, name, dtype):
    model, prompts = tiny(name), prompts_of(4)
    results = []
    for options in (
        {"device": "cpu", "dtype": "float32"},
        {"device": "cpu", "dtype": dtype},
        {"dtype": dtype},
    ):
        with make(model, **options) as engine:
            results.append([rows[0].cpu() for rows in run(engine, prompts, 1)[1]])
    exact, cpu, ours = (torch.stack(rows) for rows in results)
    assert relative(ours, exact) < 1.3 * relative(cpu, exact)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3_d128", "tiny_hybrid", "tiny_hybrid_27"])
@pytest.mark.parametrize("layout", ["slots", "paged"])
def test_bits_of_a_row_do_not_depend_on_the_batch(tiny, name, layout):
    """BAT-01, BAT-04, GRF-05: B = 1..8, graphs and eager, arriving together and in turn."""
    model, prompts = tiny(name), prompts_of(8, longest=300)
    with make(model, dtype="bfloat16", kv_layout=layout) as engine:
        expected = alone(engine, prompts)
        for count in range(1, 9):
            part = (expected[0][:count], expected[1][:count])
            assert_same(run(engine, prompts[:count]), part)
        # Decode rows beside one prompt, and beside several (BAT-04).
        assert_same(run(engine, prompts, arrive=[2 * i for i in range(8)]), expected)
        assert_same(run(engine, prompts, arrive=[0, 0, 3, 3, 3, 6, 6, 6]), expected)
        backwards = run(engine, prompts[::-1])
        assert_same((backwards[0][::-1], backwards[1][::-1]), expected)
        assert engine.runner.replays > 0
    with make(model, dtype="bfloat16", kv_layout=layout, cuda_graphs=False) as engine:
        assert_same(run(engine, prompts), expected)
        assert engine.runner.replays == 0


@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
@pytest.mark.parametrize("options", FORMATS, ids=names_of)
def test_every_kv_format(tiny, name, options):
    """Slots and pages have the same bits; the CPU in fp32 is close."""
    model, prompts = tiny(name), prompts_of(5, longest=200)
    with make(model, dtype="bfloat16", **options) as engine:
        slots = run(engine, prompts)
        assert_same(alone(engine, prompts), slots)
    with make(model, dtype="bfloat16", kv_layout="paged", num_pages=40, **options) as engine:
        assert_same(run(engine, prompts), slots)
    if options.get("kv_dtype") == "turboquant_k8v4":
        return  # its error on a random model says nothing about the code
    steps = 2  # the second one reads what was stored
    with make(model, device="cpu", dtype="float32", **options) as engine:
        _, logits = run(engine, prompts, steps)
    with make(model, dtype="float32", **options) as engine:
        for a, b in zip(run(engine, prompts, steps)[1], logits, strict=True):
            assert relative(a[0].cpu(), b[0]) < 0.02


@pytest.fixture
def fp8_model(monkeypatch):
    """A small model with the shapes that FP8 products need, made of random weights."""
    config = replace(
        KNOWN_CONFIGS["qwen3.5-27b-fp8"],
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2048,
        num_layers=4,
        num_heads=12,
        num_kv_heads=2,
        layer_types=KNOWN_CONFIGS["qwen3.5-27b-fp8"].layer_types[:4],
        linear=LinearAttention(key_heads=4, value_heads=12, key_head_dim=128, value_head_dim=128),
        eos_token_ids=(),
    )
    monkeypatch.setitem(KNOWN_CONFIGS, "small-fp8", config)
    return {"model": "small-fp8", "load_format": "dummy", "device": "cuda", "dtype": "bfloat16"}


@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27", "fp8"])
def test_cuts_of_a_prompt_are_invisible(tiny, name, fp8_model):
    """PFX-03: alone, together, and cut at multiples of 64."""
    options = fp8_model if name == "fp8" else {"model": str(tiny(name).path), "device": "cuda"}
    prompts = [random_prompt(400, seed=1), random_prompt(333, seed=2)]
    whole = None
    for budget in (64, 128, 192, 256, 1024):
        config = SMALL | {"dtype": "bfloat16"} | options | {"max_batch_tokens": budget}
        with Engine(EngineConfig(**config)) as engine:
            whole = whole or alone(engine, prompts, 4)
            assert_same(run(engine, prompts, 4), whole)


def test_fp8_weights(fp8_model, monkeypatch):
    """The noise of coded activations is that of the format, measured with exact products of codes.

    No tighter: the least difference moves codes by an eighth, so that the logits of two ways to sum
    are as far apart as two roundings. The products themselves are held to 4e-3 elsewhere.
    """
    prompts = prompts_of(8, longest=200)
    config = EngineConfig(**(SMALL | fp8_model))

    def logits():
        with Engine(config) as engine:
            return torch.stack([row[0] for row in alone(engine, prompts, 1)[1]])

    with Engine(config) as engine:
        assert_same(run(engine, prompts), alone(engine, prompts))
    coded = logits()

    def exact(codes, scales, weight, dtype):
        x = codes.float().unflatten(1, (-1, many_rows.GROUP)) * scales.unsqueeze(-1)
        return (x.flatten(1) @ weight.dequantise(torch.float32).T).to(dtype)

    with monkeypatch.context() as patched:
        patched.setattr(many_rows, "product_of_codes", exact)
        emulated = logits()
    monkeypatch.setattr(many_rows, "takes_codes", lambda weight: False)
    dense = logits()
    noise_of_format = relative(emulated, dense)
    assert noise_of_format > 0.01  # the codes were used
    assert relative(coded, dense) < 1.25 * noise_of_format


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
def test_nan_neighbours(tiny, name, layout, graphs):
    """BAT-01: KV and state of all rows but one turn to NaN in the middle of a run."""
    prompts = prompts_of(8)
    with make(tiny(name), dtype="bfloat16", kv_layout=layout, cuda_graphs=graphs) as engine:
        tokens, logits = alone(engine, prompts)
        for count, kept in ((2, 0), (3, 2), (4, 1), (5, 3), (6, 5), (7, 0), (8, 4), (8, 7)):

            def poison(plan, step, engine=engine, kept=kept):
                if step != 3:
                    return
                for row, request in enumerate(plan.request_ids.tolist()):
                    if request == kept:
                        continue
                    first, end = plan.table_offsets[row : row + 2]
                    pages = torch.from_numpy(plan.block_tables[first:end].astype(np.int64))
                    for tensor in engine.kv.pool.tensors.values():
                        tensor[:, pages.to(engine.device)] = torch.nan
                    if engine.state is not None:
                        for tensor in engine.state.tensors.values():
                            tensor[:, plan.slots[row]] = torch.nan

            poisoned = run(engine, prompts[:count], between=poison)
            assert poisoned[0][kept] == tokens[kept]
            assert torch.equal(poisoned[1][kept], logits[kept])
            for row in range(count):
                assert row == kept or poisoned[1][row][-1].isnan().all()


def checksums(engine, except_pages, except_slots):
    """Bits of everything that no live row owns."""
    parts = []
    for tensor in engine.kv.pool.tensors.values():
        keep = [page for page in range(tensor.shape[1]) if page not in except_pages]
        parts.append(tensor[:, keep].clone().view(torch.uint8))
    if engine.state is not None:
        for tensor in engine.state.tensors.values():
            keep = [slot for slot in range(tensor.shape[1]) if slot not in except_slots]
            parts.append(tensor[:, keep].clone().view(torch.uint8))
    return parts


@pytest.mark.parametrize("name", ["tiny_qwen3_d128", "tiny_hybrid_27"])
@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize("rows", [3, 5, 7])
def test_padding_rows_touch_nothing(tiny, name, layout, rows):
    """GRF-01: what no live row writes has the same bits after every step, the last slot too."""
    with make(tiny(name), dtype="bfloat16", kv_layout=layout) as engine:
        engine.kv.fill_poison()
        if engine.state is not None:
            engine.state.fill_poison()
        seen = {}

        def watch(plan, step):
            if "before" in seen:
                after = checksums(engine, seen["pages"], seen["slots"])
                for a, b in zip(after, seen["before"], strict=True):
                    assert torch.equal(a, b)
            if layout == "slots":
                assert engine.kv.pages - 1 not in plan.slots
            seen["plan"] = plan
            seen["pages"] = set(plan.token_pages.tolist())
            seen["slots"] = set(plan.slots.tolist())
            seen["before"] = checksums(engine, seen["pages"], seen["slots"])

        logits = run(engine, prompts_of(rows), between=watch)[1]
        watch(seen["plan"], None)  # after the last step
        assert all(row.isfinite().all() for row in logits)
        assert engine.runner.replays > 0


def test_graphs_serve_a_pool_that_is_full(tiny):
    """GRF-02, GRF-04: all pages taken, and rows that end at max_context."""
    model, context = tiny("tiny_qwen3_d128"), 128
    prompts = [random_prompt(100, seed=i) for i in range(4)]
    expected = None
    for graphs in (True, False):
        with make(
            model,
            dtype="bfloat16",
            kv_layout="paged",
            prefix_cache=False,
            max_batch_size=4,
            max_context=context,
            num_pages=8,
            cuda_graphs=graphs,
        ) as engine:
            result = run(engine, prompts, 28)
            assert [len(tokens) for tokens in result[0]] == [28] * 4
            expected = expected or result
            assert_same(result, expected)
            assert (engine.runner.replays > 0) == graphs


@pytest.mark.parametrize("graphs", [True, False])
def test_sampling_draws_the_same_alone_and_together(tiny, graphs):
    params = SamplingParams(max_tokens=STEPS, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    prompts = prompts_of(5)
    model = str(tiny("tiny_qwen3").path)
    with LLM(model, device="cuda", dtype="bfloat16", cuda_graphs=graphs, **SMALL) as llm:
        together = [out.token_ids for out in llm.generate(prompts, params)]
        assert [llm.generate([p], params)[0].token_ids for p in prompts] == together
        greedy = SamplingParams(max_tokens=STEPS, logprobs=3, ignore_eos=True)
        plain = SamplingParams(max_tokens=STEPS, ignore_eos=True)
        with_logprobs = llm.generate(prompts, greedy)
        assert [out.token_ids for out in with_logprobs] == [
            out.token_ids for out in llm.generate(prompts, plain)
        ]
        assert all(len(out.logprobs) == STEPS for out in with_logprobs)


def test_nondeterministic_mode_is_close(tiny):
    model, prompts = tiny("tiny_hybrid_27"), prompts_of(4, longest=300)
    with make(model, device="cpu", dtype="float32") as engine:
        _, logits = run(engine, prompts, 1)
    with make(model, dtype="bfloat16", deterministic=False) as engine:
        for a, b in zip(run(engine, prompts, 1)[1], logits, strict=True):
            assert relative(a.cpu(), b) < 0.05


def test_batch_api(tiny):
    prompts = prompts_of(3)
    with make(tiny("tiny_qwen3"), dtype="bfloat16") as engine:
        tokens, logits = run(engine, prompts, 4)
        requests = [BatchedRequest(request_id=i, prompt_tokens=p) for i, p in enumerate(prompts)]
        for request in requests:
            request.sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            engine.allocate_slot(request.request_id)
        first = engine.batch_prefill(requests, return_logits=True)
        steps = [engine.batch_decode_step(requests, return_logits=True) for _ in range(3)]
        assert [request.generated_tokens for request in requests] == tokens
        for row in range(3):
            assert torch.equal(first.logits[row], logits[row][0])
            for step, out in enumerate(steps, start=1):
                assert torch.equal(out.logits[row], logits[row][step])


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("copy_check", {"copy_check": True}),
        ("link_bytes_per_s", {"link_bytes_per_s": 10**9}),
        ("cuda:99", {"device": "cuda:99"}),
        ("fp8_weights", {"model": "qwen3.5-27b-fp8", "load_format": "dummy", "dtype": "float32"}),
    ],
)
def test_what_no_kernel_has_is_refused_at_construction(tiny, message, options):
    options = {"model": str(tiny("tiny_qwen3").path), "device": "cuda", **options}
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(max_context=512, skip_tokenizer=True, **options))


def test_dummy_weights_are_made_on_the_device():
    start = time.perf_counter()
    with Engine(
        EngineConfig(
            model="qwen3-0.6b", load_format="dummy", device="cuda", max_context=256,
            max_batch_size=2, skip_tokenizer=True,
        )
    ) as engine:  # fmt: skip
        assert time.perf_counter() - start < 30
        prompts = [np.random.default_rng(i).integers(0, 9999, 70).tolist() for i in range(2)]
        expected = alone(engine, prompts)
        assert_same(run(engine, prompts), expected)


def test_bench_kv_measures_the_kernels():
    report = bench_kv(contexts=(1024,), repeat=3, device="cuda")
    on_cpu = bench_kv(contexts=(1024,), repeat=1)
    for ours, theirs in zip(report.rows, on_cpu.rows, strict=True):
        assert ours["rel_l2"] < 1.1 * theirs["rel_l2"] + 5e-3
        for name in ("attention", "append_one", "append"):
            kinds = {"attention": "ms_median", "append_one": "us", "append": "us_per_token"}
            wall, device = (ours[f"{name}_{on}{kinds[name]}"] for on in ("", "device_"))
            assert 0 < device <= wall
        assert ours["parity"] is True
        # Cold memory is not read faster than a copy by much.
        assert ours["floor_ratio"] > 0.8
        assert ours["append_floor_ratio"] > 0.5


@pytest.fixture(scope="module")
def smollm2(cache_dir):
    """Unlike elsewhere no weights are no failure: a GPU machine may have no network."""
    given = os.environ.get("HEADRACE_SMOLLM2")
    try:
        return Path(given) if given else pull("smollm2", cache_dir)
    except DownloadError as error:
        pytest.skip(f"HEADRACE_SMOLLM2 is not set, and no weights: {error}")


@pytest.mark.parametrize("options", [{}, {"kv_layout": "paged"}, {"cuda_graphs": False}])
def test_smollm2_gives_the_ids_of_the_fixture(smollm2, smollm2_fixture, options):
    """BAT-08: the reference is transformers in fp32 on a CPU."""
    prompts = [prompt["prompt_ids"] for prompt in smollm2_fixture["prompts"]]
    expected = [prompt["greedy_ids"] for prompt in smollm2_fixture["prompts"]]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with LLM(
        str(Path(smollm2)), device="cuda", dtype="float32", max_context=256, max_batch_size=12,
        **options,
    ) as llm:  # fmt: skip
        assert [out.token_ids for out in llm.generate(prompts, params)] == expected
        assert [llm.generate([p], params)[0].token_ids for p in prompts] == expected
