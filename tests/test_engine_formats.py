"""Every KV format and the hybrid model through the whole engine: no way of running changes tokens.

kv_formats.md section 7 and cases KVD-03, PFX-03, PFX-06, BAT-03: alone, batched, chunked and in a
reused slot full of NaN, the tokens of a request are the same (fp32 compute).
"""

from dataclasses import replace

import pytest
import torch

from headrace import BatchedRequest, ConfigError, Engine, EngineConfig, SamplingParams
from headrace.bench.quality import bench_quality
from headrace.kv.state import SnapshotPoint
from headrace.llm import LLM
from headrace.models.known import KNOWN_CONFIGS

FORMATS = {
    "auto": {},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "fp8_block": {"kv_dtype": "fp8_e4m3", "fp8_block": 64},
    "int8": {"kv_dtype": "int8_per_token_head"},
    "int8_rotated": {"kv_dtype": "int8_per_token_head", "int8_rotate": True},
    "k8v4": {"kv_dtype": "turboquant_k8v4"},
}
PROMPTS = [[(7 * i + 3 * j) % 500 for j in range(n)] for i, n in enumerate((1, 5, 64, 100, 200))]
PARAMS = [SamplingParams(max_tokens=6 + i, ignore_eos=True) for i in range(len(PROMPTS))]
MODELS = ("tiny_qwen3", "tiny_hybrid")


def make(path, **options):
    options = {"max_context": 256, "max_batch_size": 5, "max_batch_tokens": 256} | options
    return LLM(str(path), skip_tokenizer=True, **options)


def tokens(outputs):
    assert {output.finish_reason for output in outputs} == {"length"}
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("deterministic", ["off", "on"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_do_not_depend_on_how_a_request_is_run(tiny, model, name, deterministic):
    options = FORMATS[name] | {"deterministic": deterministic}
    path = tiny(model).path
    with make(path, **options) as llm:
        alone = [tokens(llm.generate([p], o))[0] for p, o in zip(PROMPTS, PARAMS, strict=True)]
        assert llm.engine.capabilities.kv_dtype == llm.engine.kv.format.label
        llm.engine.kv.fill_poison()
        if llm.engine.state is not None:
            llm.engine.state.fill_poison()
        assert tokens(llm.generate(PROMPTS, PARAMS)) == alone
        order = [3, 0, 4, 2, 1]
        outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
        assert tokens(outputs) == [alone[i] for i in order]
    with make(path, max_batch_tokens=64, max_batch_size=3, **options) as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS)) == alone


@pytest.mark.parametrize("model", MODELS)
def test_the_first_request_leaves_no_trace_in_the_second(tiny, model):
    """KVD-03: no scale is frozen by earlier traffic."""
    for options in FORMATS.values():
        with make(tiny(model).path, **options) as llm:
            expected = tokens(llm.generate([PROMPTS[3]], PARAMS[3]))
        with make(tiny(model).path, **options) as llm:
            llm.generate([[499] * 13], PARAMS[0])
            assert tokens(llm.generate([PROMPTS[3]], PARAMS[3])) == expected


def test_hybrid_tokens_equal_transformers(tiny):
    """Through scheduler, slots and chunks; the margins are asserted by the model tests."""
    model = tiny("tiny_hybrid")
    with make(model.path, max_batch_tokens=64) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    for prompt, params, output in zip(PROMPTS, PARAMS, outputs, strict=True):
        ids = torch.tensor([prompt])
        generated = model.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=params.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.token_ids == generated[0, len(prompt) :].tolist()


def test_aborted_neighbours_and_shrinking_batches_of_a_hybrid(tiny):
    """BAT-03, SLT-01."""
    with make(tiny("tiny_hybrid").path) as llm:
        alone = tokens(llm.generate([PROMPTS[4]], SamplingParams(max_tokens=40, ignore_eos=True)))
        handles = [
            llm.loop.submit(p, SamplingParams(max_tokens=40, ignore_eos=True)) for p in PROMPTS
        ]
        for handle in handles[:3]:
            llm.loop.abort(handle.request_id)
        assert handles[4].future.result(60).token_ids == alone[0]
        assert handles[3].future.result(60).finish_reason == "length"


@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", "fp8"])
def test_an_option_of_another_format_is_refused(tiny, kv_dtype):
    """KVD-04: a combination nobody implements fails at construction."""
    path = tiny("tiny_qwen3").path
    with pytest.raises(ConfigError, match="int8_rotate"):
        make(path, kv_dtype=kv_dtype, int8_rotate=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_runs_in_slots_and_pages(tiny, name, dtype):
    """KVD-04: prefill and batched decode; LOW windows: test_low_streaming, kernels: tests/gpu."""
    options = FORMATS[name] | {"dtype": dtype, "deterministic": "on"}
    answers = []
    for layout in ("slots", "paged"):
        with make(tiny("tiny_qwen3").path, kv_layout=layout, **options) as llm:
            assert llm.engine.capabilities.kv_layouts == (layout,)
            answers.append(tokens(llm.generate(PROMPTS, PARAMS)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("layout", ["slots", "paged"])
@pytest.mark.parametrize(
    ("words", "head_dim", "options"),
    [
        ("turboquant_k8v4 with head_dim 96", 96, {"kv_dtype": "turboquant_k8v4"}),
        ("rotated with head_dim 96", 96, {"kv_dtype": "int8_per_token_head", "int8_rotate": True}),
        ("block 64 with head_dim 96", 96, {"kv_dtype": "fp8_e4m3", "fp8_block": 64}),
        ("fp8_e4m3 with head_dim 24", 24, {"kv_dtype": "fp8_e4m3"}),
    ],
)
def test_a_combination_nobody_has_is_refused_by_name(monkeypatch, words, head_dim, options, layout):
    """KVD-04: at construction."""
    small = replace(KNOWN_CONFIGS["smollm2-135m"], num_layers=2, vocab_size=512, head_dim=head_dim)
    monkeypatch.setitem(KNOWN_CONFIGS, "small-odd", small)
    with pytest.raises(ConfigError, match=words):
        make("small-odd", load_format="dummy", kv_layout=layout, **options)


def decode_to_end(engine, request):
    while not request.finished:
        engine.batch_decode_step([request])
    return request.generated_tokens


@pytest.mark.parametrize("name", FORMATS)
def test_a_preempted_hybrid_request_resumes_with_the_same_tokens(tiny, name):
    """PRE-01, PRE-03: from a snapshot of KV and state, and by recomputing, in another slot."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    config = EngineConfig(
        model=str(tiny("tiny_hybrid").path), max_context=256, max_batch_size=2, **FORMATS[name]
    )

    def request(i):
        return BatchedRequest(request_id=i, prompt_tokens=PROMPTS[3], sampling=params)

    with Engine(config) as engine:
        engine.allocate_slot(0)
        undisturbed = request(0)
        engine.batch_prefill([undisturbed])
        expected = decode_to_end(engine, undisturbed)
        engine.free_slot(0)

        engine.allocate_slot(1)
        preempted = request(1)
        engine.batch_prefill([preempted])
        for _ in range(9):
            engine.batch_decode_step([preempted])
        length = preempted.seq_len
        saved = {k: t[:, 0, :length].clone() for k, t in engine.kv.pool.tensors.items()}
        snapshot = engine.state.snapshot(0, length, owner=1, point=SnapshotPoint.DECODE)
        engine.free_slot(1)

        engine.kv.fill_poison()
        engine.state.fill_poison()
        engine.allocate_slot(2)  # takes slot 0, so the resumed request gets slot 1
        other = BatchedRequest(request_id=2, prompt_tokens=PROMPTS[4], sampling=params)
        engine.batch_prefill([other])

        engine.allocate_slot(1)
        for plane, tensor in engine.kv.pool.tensors.items():
            tensor[:, 1, :length] = saved[plane]
        engine.state.restore(1, snapshot)
        preempted.slot_generation = None  # what was saved is in the new slot
        while not preempted.finished:
            engine.batch_decode_step([other, preempted])
        assert preempted.generated_tokens == expected
        engine.free_slot(1)

        engine.allocate_slot(3)
        recomputed = request(3)
        engine.batch_prefill([recomputed])
        for token in expected[:9]:  # replayed as decode steps, whatever they would sample
            assert recomputed.last_token == token
            engine.batch_decode_step([recomputed])
        assert decode_to_end(engine, recomputed) == expected


def test_every_format_meets_its_quality_gate_on_real_activations(smollm2_dir):
    """kv_formats.md section 7; `headrace bench quality` prints the same report."""
    with Engine(EngineConfig(model=str(smollm2_dir), max_context=512)) as engine:
        report = bench_quality(engine)
    assert len(report.rows) == 5
    for row in report.rows:
        assert row["meets_gate"] is True, row
        assert row["kl_mean"] > 0, "a format that changes nothing was not used"
