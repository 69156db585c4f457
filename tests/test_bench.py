"""Benchmarks count what happened, say what they ran on, and fail on wrong tokens (BEN)."""

import csv
import dataclasses
import io
import json
import subprocess
import sys

import pytest

from headrace import cli
from headrace.bench.batch import Shape, bench_batch, make_shapes, room
from headrace.bench.drive import Run, Step, drive, random_prompts
from headrace.bench.env import machine
from headrace.bench.latency import bench_latency
from headrace.bench.output import Report, emit
from headrace.bench.stats import median, percentile, rate
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.errors import ConfigError

ROW_KEYS = {
    "pp", "tg", "b", "n_kv", "t_pp_s", "s_pp_tps", "t_tg_s", "s_tg_tps", "t_s", "s_tps",
    "step_ms_median", "step_ms_p95", "speedup_vs_b1", "parity", "valid", "reason",
    "concurrency", "concurrency_asked", "cached_tokens",
}  # fmt: skip
# BEN-07 by name.
ENV_KEYS = {
    "device", "cpu", "torch", "headrace", "python", "commit", "dtype", "kv_dtype", "slots",
    "max_context", "pool_tokens", "threads", "seed",
}  # fmt: skip


def config_for(tiny, shapes, **options):
    return EngineConfig(model=str(tiny.path), skip_tokenizer=True, **{**room(shapes), **options})


@dataclasses.dataclass
class FakeResult:
    """What the core reports of one request."""

    token_ids: list
    prompt_len: int = 70
    computed_prompt_tokens: int = 70
    finish_reason: str = "length"


def with_results(run, change):
    """Return the run with every result changed by `change(index, token_ids)`."""
    results = [
        FakeResult(change(i, list(r.token_ids)), r.prompt_len, r.computed_prompt_tokens)
        for i, r in enumerate(run.results)
    ]
    return dataclasses.replace(run, results=results)


def batch_of_json(capsys, model, *argv):
    code = cli.main(["bench", "batch", "--model", str(model), *argv])
    return code, capsys.readouterr()


def test_report_counts_real_tokens_and_compares_them(capsys, tiny_qwen3):
    """BEN-01, BEN-02, BEN-07: one JSON object with parity, real counts and the environment."""
    argv = ["-npp", "70,5", "-ntg", "18", "-npl", "1,3", "--repeat", "2", "-o", "json"]
    code, captured = batch_of_json(capsys, tiny_qwen3.path, *argv)
    report = json.loads(captured.out)
    assert (code, captured.err) == (0, "")
    assert report["env"].keys() >= ENV_KEYS
    assert report["env"]["slots"] == 3
    assert report["env"]["pool_tokens"] == 3 * 88
    assert [(row["pp"], row["b"]) for row in report["rows"]] == [(70, 1), (70, 3), (5, 1), (5, 3)]
    for row in report["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["parity"] is True
        assert row["valid"] is True
        assert row["n_kv"] == row["b"] * (row["pp"] + row["tg"])
        # Decode steps alone: the first token of each request comes from its prefill.
        assert row["step_samples"] == 2 * 17
        assert row["s_tg_tps"] == pytest.approx(row["b"] * 17 / row["t_tg_s"])
        assert row["concurrency"] == pytest.approx(row["concurrency_asked"])
        assert row["cached_tokens"] == 0
    assert report["rows"][0]["speedup_vs_b1"] == 1.0
    assert report["rows"][1]["speedup_vs_b1"] > 0


def test_wrong_token_of_one_row_fails_the_report(tiny_qwen3):
    """BEN-01: one token of one row in one run is enough."""
    shapes = make_shapes([70], [18], [1, 2])

    def broken(engine, prompts, gen_len):
        run = drive(engine, prompts, gen_len)
        if len(prompts) == 1:
            return run
        return with_results(run, lambda i, ids: [*ids[:-1], ids[-1] + (i == 1)])

    report = bench_batch(config_for(tiny_qwen3, shapes), shapes, drive=broken, repeat=1, warmup=0)
    assert [row["parity"] for row in report.rows] == [True, False]
    assert not report.parity


def test_failed_parity_exits_1(capsys, monkeypatch, tiny_qwen3):
    """BEN-01: a fast wrong answer is no success."""

    def broken(*args, **options):
        report = bench_batch(*args, **options)
        report.rows[0]["parity"] = False
        return report

    monkeypatch.setattr("headrace.bench.batch.bench_batch", broken)
    argv = ["-npp", "5", "-ntg", "2", "-npl", "1", "--repeat", "1", "--warmup", "0", "-o", "json"]
    code, captured = batch_of_json(capsys, tiny_qwen3.path, *argv)
    assert code == 1
    assert json.loads(captured.out)["rows"][0]["parity"] is False


def test_answer_that_ends_early_is_counted_as_it_was(tiny_qwen3):
    """BEN-02: lengths are those measured, and the row says that it is not what was asked."""
    shapes = [Shape(70, 18, 2)]

    def early(engine, prompts, gen_len):
        return with_results(drive(engine, prompts, gen_len), lambda i, ids: ids[:10])

    report = bench_batch(config_for(tiny_qwen3, shapes), shapes, drive=early, repeat=1, warmup=0)
    [row] = report.rows
    assert (row["tg"], row["n_kv"], row["valid"]) == (10, 160, False)
    assert "asked were 70 + 18" in row["reason"]


def test_few_new_tokens_make_no_decode_rate(tiny_qwen3):
    """BEN-03: below 16 new tokens the row is marked; p95 needs 20 samples."""
    shapes = make_shapes([5], [15, 16, 21], [1])
    report = bench_batch(config_for(tiny_qwen3, shapes), shapes, repeat=1, warmup=0)
    assert [row["valid"] for row in report.rows] == [False, True, True]
    assert "16 new tokens" in report.rows[0]["reason"]
    assert [row["step_ms_p95"] is None for row in report.rows] == [True, True, False]
    assert all(row["speedup_vs_b1"] == 1.0 for row in report.rows)


def test_single_token_has_no_decode_rate(tiny_qwen3):
    """BEN-03: a request of one token leaves no time per token behind."""
    shapes = [Shape(5, 1, 2)]
    [row] = bench_batch(config_for(tiny_qwen3, shapes), shapes, repeat=1, warmup=0).rows
    assert (row["s_tg_tps"], row["step_ms_median"], row["speedup_vs_b1"]) == (None, None, None)


def test_steps_that_also_prefill_are_no_decode_steps(tiny_qwen3):
    """BEN-02: with a small step the first request decodes while the second still prefills."""
    shapes = [Shape(70, 18, 2)]
    config = config_for(tiny_qwen3, shapes, max_batch_tokens=64)
    [row] = bench_batch(config, shapes, repeat=1, warmup=0).rows
    assert row["parity"] is True
    assert row["step_samples"] < 17
    assert row["concurrency"] < row["concurrency_asked"]


def test_percentiles_need_samples():
    """BEN-03: P99 needs 100 samples, P95 20, P90 10."""
    for percent, least in ((99, 100), (95, 20), (90, 10)):
        assert percentile(range(least - 1), percent) is None
        assert percentile(range(least), percent) == least * percent // 100 - 1
    assert median([]) is None
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert rate(0, 1.0) is None
    assert rate(3, None) is None
    assert rate(3, 2.0) == 1.5


def test_concurrency_is_weighted_by_time():
    """BEN-07: one row for three seconds and four rows for one are 1.75 rows."""
    run = Run(wall_s=5.0, steps=[Step(3.0, 1, 1), Step(1.0, 3, 4)])
    assert run.concurrency == 1.75
    assert (run.decode_s, run.prefill_s, run.decode_tokens) == (3.0, 2.0, 1)
    assert run.step_ms(1) == [3000.0]
    assert run.step_ms(3) == []


def test_shape_beyond_the_context_fails_before_anything_runs(tiny_qwen3, capsys, monkeypatch):
    monkeypatch.setattr("headrace.bench.batch.Engine", None)
    code, captured = batch_of_json(capsys, tiny_qwen3.path, "-npp", "1000", "-ntg", "64")
    assert (code, captured.out) == (2, "")
    assert "1000 + gen-len 64 = 1064 tokens" in captured.err
    shapes = [Shape(8, 8, 4)]
    with pytest.raises(ConfigError, match="max_context is 12"):
        bench_batch(config_for(tiny_qwen3, shapes, max_context=12), shapes)
    with pytest.raises(ConfigError, match="max_batch_size is 2"):
        bench_batch(config_for(tiny_qwen3, shapes, max_batch_size=2), shapes)


def test_prompts_depend_on_the_seed_and_have_no_special_tokens(tiny_qwen3):
    with Engine(config_for(tiny_qwen3, [Shape(8, 8, 1)])) as engine:
        config = dataclasses.replace(engine.model_config, eos_token_ids=(3,), bos_token_id=4)
        engine.model_config = config
        prompts = random_prompts(engine, 3, 5000, seed=1)
        again = random_prompts(engine, 1, 5000, seed=1)
        other = random_prompts(engine, 1, 5000, seed=2)
    assert (prompts[0] == again[0]).all()
    assert (prompts[0] != prompts[1]).any()
    assert (prompts[0] != other[0]).any()
    assert {int(token) for token in prompts[0]}.isdisjoint({3, 4})
    assert max(prompts[0]) < config.vocab_size


def test_latency_compares_two_engines_and_says_so(tiny_qwen3):
    """BEN-04, BEN-07: two engines in one process are in the report."""
    config = EngineConfig(model=str(tiny_qwen3.path), max_batch_size=8, max_context=64)
    report = bench_latency(config, prompt_len=16, gen_len=24, repeat=2, warmup=1)
    assert report.env["engines_in_process"] == 2
    assert [row["max_batch_size"] for row in report.rows] == [1, 8]
    assert report.parity
    assert report.rows[1]["lone_ratio"] > 0
    assert report.rows[1]["lone_ratio_claimed"] == 1.05
    assert all(row["step_samples"] == 2 * 23 for row in report.rows)
    assert all(row["ttft_ms_median"] > 0 for row in report.rows)
    with pytest.raises(ConfigError, match="max_batch_size=1"):
        bench_latency(dataclasses.replace(config, max_batch_size=1))


def test_latency_with_wrong_tokens_has_no_parity(tiny_qwen3):
    """BEN-01: the engines must agree."""
    config = EngineConfig(model=str(tiny_qwen3.path), max_batch_size=2, max_context=64)

    def broken(engine, prompts, gen_len):
        run = drive(engine, prompts, gen_len)
        if engine.config.max_batch_size == 1:
            return run
        results = [
            _LatencyResult(
                [0] * len(r.token_ids), r.prompt_len, r.computed_prompt_tokens, "length", 1, 2
            )
            for r in run.results
        ]
        return dataclasses.replace(run, results=results)

    report = bench_latency(config, prompt_len=8, gen_len=4, repeat=1, warmup=0, drive=broken)
    assert not report.parity


@dataclasses.dataclass
class _LatencyResult(FakeResult):
    submitted_ns: int = 0
    first_token_ns: int = 0


def test_alloc_has_targets_beside_what_was_measured(capsys):
    assert cli.main(["bench", "alloc", "--repeat", "3", "-o", "json"]) == 0
    rows = {row["operation"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    targets = {"slot_allocate_free": 200, "submit": 2_000, "plan": 50_000, "commit": None}
    targets |= {f"page_{call}_{n}": 100 for n in (1000, 32) for call in ("alloc", "free")}
    targets |= {"tree_match_32k": 100_000, "tree_insert": 2_000}
    targets |= {"tree_evict_1k": 5_000, "tree_evict_100k": 5_000}
    assert {name: row["target_ns"] for name, row in rows.items()} == targets
    assert all(row["rust_ns"] > 0 for row in rows.values())
    from_rust_only = rows.pop("tree_evict_100k")
    assert from_rust_only["python_ns"] is None
    assert all(row["python_ns"] > 0 for row in rows.values())
    # A target is that of 256 rows.
    assert cli.main(["bench", "alloc", "--rows", "8", "--repeat", "3", "-o", "json"]) == 0
    assert all(row["target_ns"] is None for row in json.loads(capsys.readouterr().out)["rows"])


@pytest.fixture
def report():
    rows = [
        {"b": 1, "rate": 1234.5, "parity": True, "reason": None},
        {"b": 2, "rate": None, "parity": False, "reason": "a | b"},
    ]
    return Report({"device": "cpu", "seed": 0}, rows, ("b", "rate", "parity"))


def written(report, output_format):
    stream = io.StringIO()
    emit(report, output_format, stream)
    return stream.getvalue()


def test_csv_carries_the_environment_in_every_row(report):
    """BEN-07."""
    rows = list(csv.DictReader(io.StringIO(written(report, "csv"))))
    assert [(row["b"], row["rate"], row["env_device"]) for row in rows] == [
        ("1", "1234.5", "cpu"),
        ("2", "", "cpu"),
    ]


def test_jsonl_carries_the_environment_in_every_row(report):
    """BEN-07."""
    rows = [json.loads(line) for line in written(report, "jsonl").splitlines()]
    assert [row["b"] for row in rows] == [1, 2]
    assert all(row["env"] == report.env for row in rows)


def test_md_is_a_table_below_the_environment(report):
    """BEN-07."""
    text = written(report, "md")
    assert text.startswith("- device: cpu\n- seed: 0\n\n| b | rate | parity | reason |\n| --- |")
    assert "| 1 | 1,234 | yes | n/a |" in text
    assert r"| 2 | n/a | no | a \| b |" in text


def test_table_names_the_environment_and_what_is_not_valid(report):
    text = written(report, "table")
    assert "device cpu, seed 0" in text
    assert "not valid: a | b" in text


def test_environment_names_versions_and_commit():
    """BEN-07."""
    env = machine()
    assert env["torch"].startswith("2.")
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["cpu"]
    assert "commit" in env


def test_progress_is_silent_when_piped(tiny_qwen3):
    argv = ["-npp", "5", "-ntg", "2", "-npl", "1", "--repeat", "1", "-o", "jsonl"]
    command = [sys.executable, "-m", "headrace.cli", "bench", "batch"]
    done = subprocess.run(
        [*command, "--model", str(tiny_qwen3.path), *argv],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
