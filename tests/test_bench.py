"""Benchmarks count what happened, say what they ran on, and fail on wrong tokens (BEN)."""

import csv
import dataclasses
import io
import json
import subprocess
import sys

import pytest

from headrace import cli
from headrace.bench.batch import Shape, add_floor, bench_batch, make_row, make_shapes, room
from headrace.bench.drive import Run, Step, drive, random_prompts
from headrace.bench.env import machine
from headrace.bench.floor import Floor
from headrace.bench.latency import bench_latency
from headrace.bench.loadback import _overlap_by_steps, bench_loadback, serve
from headrace.bench.loadback import room as loadback_room
from headrace.bench.output import Report, emit
from headrace.bench.stats import median, percentile, rate
from headrace.bench.stream import bench_stream
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.errors import ConfigError

ROW_KEYS = {
    "pp", "tg", "b", "n_kv", "t_pp_s", "s_pp_tps", "t_tg_s", "s_tg_tps", "t_s", "s_tps",
    "step_ms_median", "step_ms_p95", "speedup_vs_b1", "parity", "valid", "reason",
    "concurrency", "concurrency_asked", "cached_tokens", "device_ms_median", "prefill_device_s",
    "step_ms_floor", "floor_ratio", "prefill_ms_floor", "prefill_floor_ratio",
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


# 10 GB/s and 1 TFLOP/s; 4 MB of weights.
FLOOR = Floor(
    bytes_per_s=1e10,
    flops_per_s=1e12,
    fixed_bytes=4_000_000,
    row_bytes=100_000,
    token_bytes=1_000,
    token_flops=4_000_000,
    row_flops=500_000,
    pair_flops=2_000,
)


def test_the_floor_of_a_step_is_its_bytes_and_that_of_a_prompt_its_products():
    assert FLOOR.step_ms(1, 0) == pytest.approx(0.41)
    assert FLOOR.step_ms(8, 100) == pytest.approx(0.4 + 8 * (0.01 + 0.01))
    pairs = 100 * 101 / 2
    flops = 2 * (100 * 4e6 + 5e5 + pairs * 2_000)
    assert FLOOR.prefill_ms(2, 100) == pytest.approx(flops / 1e12 * 1e3)
    # One token reads the weights for nearly nothing.
    assert FLOOR.prefill_ms(1, 1) == FLOOR.step_ms(1, 1)


def test_every_row_has_its_floors_and_how_far_off_it_is():
    steps = [Step(0.05, 0, 2), *[Step(0.002, 2, 2, device_s=0.001)] * 20]
    run = Run(wall_s=0.1, steps=steps, results=[FakeResult([1] * 21) for _ in range(2)])
    shape = Shape(70, 21, 2)
    row = make_row(shape, [run], [[1] * 21] * 2)
    assert row["floor_ratio"] is row["prefill_floor_ratio"] is None
    add_floor(row, shape, None)
    assert row["step_ms_floor"] is None
    add_floor(row, shape, FLOOR)
    assert row["step_ms_floor"] == FLOOR.step_ms(2, 70 + 10.5)
    assert row["floor_ratio"] == pytest.approx(2.0 / row["step_ms_floor"])
    assert row["device_ms_median"] == pytest.approx(1.0)
    assert row["prefill_ms_floor"] == FLOOR.prefill_ms(2, 70)
    assert row["prefill_floor_ratio"] == pytest.approx(60 / row["prefill_ms_floor"])


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
    # A CPU has no clock and no floor of its own, and says so in every row.
    for row in report.rows:
        assert row["device_ms_median"] is row["step_ms_floor"] is row["floor_ratio"] is None
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


PAGE = 64


def loadback_config(model, prompt, gen, **options):
    asked = EngineConfig(
        model=str(model.path), **{"kv_layout": "paged", "host_bytes": 1, **options}
    )
    extra = {**loadback_room(asked, prompt, gen), "skip_tokenizer": True}
    return dataclasses.replace(asked, **extra)


def kv_and_state_bytes(config):
    with Engine(config) as engine:
        return engine.kv.bytes_per_token, engine.model_config.state_bytes_per_slot(4)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny_qwen3", "paged"),
        ("tiny_qwen3", "slots"),
        ("tiny_hybrid", "paged"),
        ("tiny_hybrid", "slots"),
    ],
)
def test_loadback_counts_tokens_and_bytes_by_source(tiny, name, layout):
    """BEN-01, BEN-05: every byte that moved is that of a cached token, or of a state."""
    prompt, gen = 200, 4
    config = loadback_config(tiny(name), prompt, gen, kv_layout=layout)
    report = bench_loadback(config, prompt_len=prompt, gen_len=gen, repeat=1, warmup=1)
    token, state = kv_and_state_bytes(config)
    hit = 3 * PAGE
    rows = {row["source"]: row for row in report.rows}
    assert list(rows) == (
        ["cold", "device", "host", "low"] if layout == "paged" else ["cold", "host"]
    )
    assert report.parity
    assert [row["reason"] for row in report.rows] == [None] * len(rows)
    cached = ("cached_device", "cached_host", "cached_streamed")
    for row in report.rows:
        assert (row["pp"], row["tg"]) == (prompt, gen)
        assert row["computed_tokens"] + sum(row[name] for name in cached) == prompt
        assert row["step_ms"] == pytest.approx(row["compute_ms"] + row["gate_wait_ms"])
        assert len(row["stall_ms_by_layer"].split()) == (4 if name == "tiny_qwen3" else 8)
        assert row["ttft_ms_median"] >= row["ttft_ms_min"] > 0
        assert (row["link"], row["concurrency"]) == ("memcpy of 64 MiB, best of 5", 1.0)
    assert rows["cold"]["computed_tokens"] == prompt
    assert rows["cold"]["h2d_bytes"] == 0
    assert rows["cold"]["overlap"] is rows["cold"]["h2d_gb_s"] is None
    assert rows["cold"]["d2h_bytes"] == hit * token + state
    assert rows["host"]["cached_host"] == hit
    assert rows["host"]["h2d_bytes"] == hit * token + state
    assert rows["host"]["d2h_bytes"] == 0
    assert rows["host"]["overlap"] <= 1
    assert rows["host"]["h2d_gb_s"] > 0
    if layout == "paged":
        assert rows["device"]["cached_device"] == hit
        assert rows["device"]["h2d_bytes"] == state
        assert rows["low"]["cached_streamed"] == hit
        assert rows["low"]["h2d_bytes"] == hit * token + state
        assert rows["low"]["decode_h2d_bytes"] == hit * token
        assert rows["low"]["decode_ms_min"] > 0
        assert rows["low"]["decode_bound_ms"] > 0


def test_loadback_over_a_slow_link_waits_at_the_gates(tiny_qwen3):
    prompt, gen = 200, 2
    rate = 5_000_000
    config = loadback_config(tiny_qwen3, prompt, gen, link_bytes_per_s=rate)
    report = bench_loadback(config, prompt_len=prompt, gen_len=gen, repeat=1, warmup=0)
    row = next(row for row in report.rows if row["source"] == "host")
    assert (row["link"], row["link_gb_s"]) == ("imitated", rate / 1e9)
    least = row["h2d_bytes"] / rate * 1e3
    assert row["load_ms"] >= least
    assert row["h2d_gb_s"] <= rate / 1e9
    # The step cannot end before the copies have, and the last layer waits for its own.
    assert row["step_ms"] >= least
    assert row["gate_wait_ms"] > 0
    assert row["overlap"] == pytest.approx(1 - row["gate_wait_ms"] / row["load_ms"])


def test_overlap_on_a_gpu_is_what_the_steps_do_not_take_longer():
    def row(source, load_ms, step_ms):
        return {"source": source, "load_ms": load_ms, "step_ms": step_ms, "overlap": 0.5}

    rows = [row("cold", 0.0, 9.0), row("device", 0.0, 3.0), row("host", 4.0, 4.0)]
    _overlap_by_steps(rows)
    assert [one["overlap"] for one in rows] == [None, None, 0.75]
    slots = [row("cold", 0.0, 9.0), row("host", 4.0, 4.0)]
    _overlap_by_steps(slots)
    assert [one["overlap"] for one in slots] == [None, None]


def test_loadback_with_wrong_tokens_exits_with_1(tiny_qwen3, capsys, monkeypatch):
    """BEN-01."""

    def broken(engine, scheduler, prompt, gen_len, *, priority="high"):
        one = serve(engine, scheduler, prompt, gen_len, priority=priority)
        if priority == "high" or gen_len == 2:
            return one  # the LOW request of two tokens prepares the row
        result = FakeResult([0] * gen_len, len(prompt), 8)
        result.cached_tokens = one.result.cached_tokens
        result.first_token_ns = result.submitted_ns = 0
        return dataclasses.replace(one, run=dataclasses.replace(one.run, results=[result]))

    argv = ["bench", "loadback", "--model", str(tiny_qwen3.path), "--prompt", "200"]
    argv += ["-ntg", "3", "--repeat", "1", "--warmup", "0", "--skip-tokenizer", "-o", "jsonl"]
    assert cli.main(argv) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["source"] for row in rows] == ["cold", "device", "host", "low"]
    assert all(row["env"]["kv_layout"] == "paged" for row in rows)
    assert not ENV_KEYS - set(rows[0]["env"])
    monkeypatch.setattr("headrace.bench.loadback.serve", broken)
    assert cli.main(argv) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["parity"] for row in rows] == [True, True, True, False]


def test_loadback_streams_a_prompt_that_ends_with_a_page(tiny_qwen3):
    """The page that holds the token to be computed must not keep the others on the device."""
    config = loadback_config(tiny_qwen3, 3 * PAGE, 2)
    report = bench_loadback(config, prompt_len=3 * PAGE, gen_len=2, repeat=1, warmup=0)
    assert [row["reason"] for row in report.rows] == [None] * 4
    assert report.rows[3]["cached_streamed"] == 2 * PAGE
    assert report.rows[3]["computed_tokens"] == PAGE


def test_loadback_says_when_the_prefix_was_not_where_the_row_wants_it(tiny_qwen3):
    """A prefix that was hit once is not stored yet under this policy, so eviction loses it."""
    config = loadback_config(tiny_qwen3, 200, 2, write_policy="write_through_selective")
    report = bench_loadback(config, prompt_len=200, gen_len=2, repeat=1, warmup=0)
    host = next(row for row in report.rows if row["source"] == "host")
    assert (host["valid"], host["cached_host"], host["computed_tokens"]) == (False, 0, 200)
    assert "cached tokens of row host" in host["reason"]
    assert report.parity


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--prompt", "64"], "prompt 64"),
        (["--prompt", "1020"], "prompt 1020 + gen-len 16"),
        (["--prompt", "200", "--max-context", "200"], "max_context is 200"),
        (["--prompt", "200", "--write-policy", "none"], "write_policy='none'"),
        (["--prompt", "200", "--host-bytes", "0"], "host_bytes=0"),
    ],
)
def test_loadback_refuses_what_cannot_be_measured(capsys, tiny_qwen3, argv, named):
    assert cli.main(["bench", "loadback", "--model", str(tiny_qwen3.path), *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err


def test_a_batch_with_a_host_tier_stores_and_reads_through_the_copies(tiny_qwen3):
    shapes = make_shapes([130], [17], [1, 2])
    config = config_for(tiny_qwen3, shapes, kv_layout="paged", host_bytes=8 * 2**20, policy="fcfs")
    report = bench_batch(config, shapes, repeat=1, warmup=0)
    assert report.parity
    assert all(row["valid"] for row in report.rows)
    assert report.env["pool_tokens"] == 2 * 192


def test_stream_steps_are_bounded_below_by_their_slower_half():
    """HST-10 on the clock: no step can beat the bound, and each layer reads its own bytes."""
    report = bench_stream([0.5, 2.0], layers=6, layer_ms=6.0, repeat=2, warmup=0)
    assert report.parity
    for row, ratio in zip(report.rows, (0.5, 2.0), strict=True):
        assert row["ratio"] == ratio
        assert row["load_ms"] == pytest.approx(6.0 * min(1.0, ratio), rel=1e-3)
        assert row["compute_ms"] >= 6.0 * min(1.0, 1 / ratio)
        assert row["step_ms_min"] >= 6 * 6.0
        assert row["step_per_bound"] >= row["step_per_bound_min"] > 0.9
        assert row["claimed"] == 1.1
        assert row["claim_holds"] == (row["step_per_bound"] <= 1.1)


def test_one_buffer_cannot_overlap_and_the_ratio_shows_it():
    [row] = bench_stream([1.0], layers=6, width=1, layer_ms=6.0, repeat=2, warmup=0).rows
    # Load and compute take turns: 6 x (6 + 6) ms beside 6 x 6 + 6.
    assert row["step_ms_min"] >= 6 * 12
    assert row["step_per_bound_min"] > 1.1
    assert row["claim_holds"] is False
    assert row["parity"]


def test_stream_with_other_bytes_exits_with_1(capsys, monkeypatch):
    """BEN-01."""
    argv = ["bench", "stream", "--ratio", "1", "--layers", "2", "--layer-ms", "1"]
    argv += ["--repeat", "1", "--warmup", "0", "-o", "json"]
    assert cli.main(argv) == 0
    monkeypatch.setattr("headrace.bench.stream.np.array_equal", lambda a, b: False)
    assert cli.main(argv) == 1
    out = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["rows"][0]["parity"] for line in out] == [True, False]


def test_stream_refuses_a_window_beyond_the_layers():
    with pytest.raises(ConfigError, match="width=3"):
        bench_stream([1.0], layers=2, width=3)
    with pytest.raises(ConfigError, match="ratio=0"):
        bench_stream([0])
