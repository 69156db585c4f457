"""The `headrace` command: errors are one line, arguments are strict, output has one shape."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace import Engine, EngineConfig, cli
from headrace.backends.cuda.memory import RESERVE_BYTES
from headrace.commands.options import engine_config
from headrace.config import option_table
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.models.known import KNOWN_CONFIGS
from headrace.plan import make_plan, rank_config, read_model_config


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Options of the machine the tests run on must not reach them."""
    for row in option_table():
        for variable in row.variables:
            if row.name != "cache_dir":
                monkeypatch.delenv(variable, raising=False)


def run(capsys, *argv):
    """Exit code, standard output and standard error of one command."""
    try:
        code = cli.main([str(argument) for argument in argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def config_of(*flags):
    args = cli.make_parser().parse_args(["generate", *flags])
    return engine_config(args)


def plan_json(capsys, *argv):
    code, out, err = run(capsys, "plan", *argv, "-o", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


BAD = {
    "no command": ([], "no command given"),
    "unknown flag": (["plan", "--bad"], "--bad"),
    "shortened flag": (["generate", "--max-tok", "3"], "--max-tok"),
    "zero slots": (["plan", "--slots", "0"], "--slots"),
    "not a number": (["plan", "--hbm-gib", "nan"], "--hbm-gib"),
    "bad list": (["bench", "batch", "-npl", "1,x"], "-npl"),
    "zero in a list": (["bench", "batch", "--gen-len", "0"], "--gen-len"),
    "bad ratio": (["bench", "stream", "--ratio", "1,nan"], "--ratio"),
    "bad link": (["plan", "--link-gbps", "inf"], "--link-gbps"),
    "page that is no power of two": (["plan", "--kv-layout", "paged", "--page-size", "96"], "96"),
    "pages with slots": (["plan", "--num-pages", "8"], "num_pages"),
    "window beyond the layers": (
        ["plan", "--model", "qwen3-8b", "--kv-layout", "paged", "--slot-widths", "37"],
        "36 layers",
    ),
    "host tier below a page": (["plan", "--model", "qwen3-8b", "--host-bytes", "1000"], "1000"),
    "bad format": (["bench", "alloc", "-o", "xml"], "xml"),
    "flags that contradict": (["plan", "--slots", "1", "--slots", "2"], "contradict"),
    "switches that contradict": (
        ["generate", "--prompt", "x", "--skip-tokenizer", "--no-skip-tokenizer"],
        "contradict",
    ),
    "options that contradict": (
        ["generate", "--prompt", "x", "--dtype", "float32", "--kv-dtype", "bfloat16"],
        "kv_dtype",
    ),
    "option out of range": (
        ["generate", "--prompt", "x", "--max-batch-size", "0"],
        "max_batch_siz",
    ),
    "sampling out of range": (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens=0"),
    "unknown model": (["plan", "--model", "nonsense"], "nonsense"),
    "model that cannot be pulled": (["pull", "nonsense"], "nonsense"),
    "quantised KV": (["plan", "--model", "qwen3-8b", "--kv-dtype", "int8"], "int8"),
    "KV of another type": (["plan", "--model", "qwen3-8b", "--kv-dtype", "float16"], "float16"),
    "context beyond the model": (["plan", "--model", "qwen3-8b", "--context", "50000"], "40960"),
}


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_arguments_are_one_line_that_names_them(capsys, argv, named):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_error_of_a_real_process_has_no_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "generate", "--model", tmp_path, "--prompt", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_exits_130(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    parser = cli.make_parser()
    parser.parse_args = lambda argv: type(
        "Args", (), {"version": False, "run": staticmethod(interrupted)}
    )
    monkeypatch.setattr(cli, "make_parser", lambda: parser)
    assert run(capsys) == (130, "", "")


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["bench", "batch", "--help"]])
def test_help_does_not_import_torch(argv):
    code = (
        "import sys\nfrom headrace.cli import main\n"
        f"try:\n    main({argv})\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'rich', 'gguf', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("headrace ")


def test_every_engine_option_has_a_flag(capsys):
    _, out, _ = run(capsys, "generate", "--help")
    for row in option_table():
        assert f"--{row.name.replace('_', '-')}" in out
        assert row.variables[0] in out


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch):
    monkeypatch.setenv("HEADRACE_MAX_BATCH_SIZE", "3")
    monkeypatch.setenv("HEADRACE_MAX_CONTEXT", "77")
    config = config_of("--max-batch-size", "5", "--skip-tokenizer", "--num-threads", "none")
    assert (config.max_batch_size, config.max_context, config.model) == (5, 77, "smollm2")
    assert config.skip_tokenizer
    assert config.num_threads is None
    assert config_of("--max-context", "none").max_context is None
    assert config_of("--no-skip-tokenizer").skip_tokenizer is False
    assert config_of("--seed", "4", "--seed", "4").seed == 4


def test_generate_takes_one_prompt_from_standard_input(capsys, monkeypatch, smollm2_dir):
    """The one test with real weights: text, chat, json, and what a stop string ends."""
    prompt = "The capital of France is"
    model = ["--model", smollm2_dir, "--max-tokens", 8]
    code, out, err = run(capsys, "generate", *model, "--prompt", prompt, "-o", "json")
    assert (code, err) == (0, "")
    [output] = json.loads(out)["outputs"]
    assert output["prompt"] == prompt
    assert "Paris" in output["text"]
    assert output["metrics"]["num_generated_tokens"] == len(output["token_ids"]) == 8

    monkeypatch.setattr("sys.stdin", _Pipe(prompt + "\n"))
    code, text, _ = run(capsys, "generate", *model)
    assert (code, text) == (0, output["text"] + "\n")

    code, out, _ = run(
        capsys, "generate", *model, "--chat", "--prompt", "Hi", "Bye", "--stop", "e", "-o", "jsonl"
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Hi", "Bye"]
    assert all("e" not in row["text"] for row in rows)


class _Pipe:
    def __init__(self, text):
        self.text = text

    def isatty(self):
        return False

    def read(self):
        return self.text


def test_generate_without_a_prompt_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", _Pipe(""))
    code, _, err = run(capsys, "generate")
    assert code == 2
    assert "standard input is empty" in err


@pytest.mark.parametrize(
    ("model", "dtype", "bytes_per_token"),
    [
        ("qwen3-8b", "bfloat16", 147_456),
        ("qwen3-0.6b", "bfloat16", 114_688),
        ("smollm2-135m", "bfloat16", 23_040),
        ("smollm2", "float32", 46_080),
    ],
)
def test_plan_bytes_of_known_models(capsys, model, dtype, bytes_per_token):
    """Expected numbers were computed by hand from the published configurations."""
    plan = plan_json(capsys, "--model", model, "--slots", 4, "--context", 1000)
    assert plan["dtype"] == dtype
    assert plan["kv_bytes_per_token"] == bytes_per_token
    assert plan["kv_bytes_per_slot"] == 1000 * bytes_per_token
    assert plan["kv_bytes_total"] == 4000 * bytes_per_token
    assert plan["state_bytes_per_slot"] == 0
    assert plan["max_slots_that_fit"] is None
    parts = ("weights_bytes", "kv_bytes_total", "workspace_bytes", "gpu_step_bytes")
    assert plan["total_bytes"] == sum(plan[name] for name in parts)


def test_plan_counts_the_bytes_of_the_real_pools():
    """KVD-02: plan and tensors agree, for one rank and for a share of two."""
    config = KNOWN_CONFIGS["qwen3-0.6b"]
    for tp in (1, 2):
        plan = make_plan(config, model="m", tp=tp, slots=2, context=32)
        rank = rank_config(config, tp)
        kv = KVCache(rank, pages=2, page_tokens=32, dtype=getattr(torch, plan.dtype))
        assert plan.kv_bytes_total == kv.k.nbytes + kv.v.nbytes
        assert plan.kv_bytes_per_token * tp == 114_688


def test_plan_counts_the_weights_of_a_folder_without_reading_them(capsys, tiny_qwen3):
    weights = tiny_qwen3.path / "model.safetensors"
    hidden = weights.rename(weights.with_suffix(".hidden"))
    try:
        plan = plan_json(capsys, "--model", tiny_qwen3.path, "--dtype", "float32")
    finally:
        hidden.rename(weights)
    assert plan["weights_bytes"] == 4 * sum(p.numel() for p in tiny_qwen3.hf.parameters())


def test_plan_refuses_what_does_not_fit_with_the_numbers(capsys):
    argv = ["plan", "--model", "qwen3-8b", "--slots", "8", "--hbm-gib", "24"]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    for number in ("16,381,470,720", "48,318,382,080", f"{24 * 2**30:,}"):
        assert number in err


def test_plan_limits_are_the_largest_that_fit(capsys):
    def fits(slots, context):
        argv = ["--slots", slots, "--context", context, "--hbm-gib", 24]
        return run(capsys, "plan", "--model", "qwen3-8b", *argv)[0] == 0

    argv = ["--slots", 2, "--context", 8192, "--hbm-gib", 24]
    plan = plan_json(capsys, "--model", "qwen3-8b", *argv)
    assert fits(plan["max_slots_that_fit"], 8192)
    assert not fits(plan["max_slots_that_fit"] + 1, 8192)
    assert fits(2, plan["max_context_that_fits"])
    assert not fits(2, plan["max_context_that_fits"] + 1)
    assert plan["left_bytes"] == plan["budget_bytes"] - plan["total_bytes"] > 0


def test_plan_of_two_ranks_halves_what_is_split(capsys):
    one = plan_json(capsys, "--model", "qwen3-8b")
    two = plan_json(capsys, "--model", "qwen3-8b", "--tp", 2)
    assert two["kv_bytes_total"] * 2 == one["kv_bytes_total"]
    assert one["weights_bytes"] / 2 < two["weights_bytes"] < one["weights_bytes"]
    with pytest.raises(ConfigError, match=r"num_key_value_heads \(8\); accepted is 1, 2, 4, 8"):
        rank_config(KNOWN_CONFIGS["qwen3-8b"], 3)
    with pytest.raises(ConfigError, match=r"num_key_value_heads \(3\); accepted is 1, 3"):
        rank_config(KNOWN_CONFIGS["smollm2-135m"], 2)


def test_plan_table_shows_the_numbers(capsys):
    code, out, _ = run(capsys, "plan", "--model", "qwen3-8b", "--hbm-gib", "80")
    assert code == 0
    assert "147,456" in out
    assert "fits: " in out
    steps = plan_json(capsys, "--model", "qwen3-8b", "--hbm-gib", 80)["gpu_step_bytes"]
    assert re.search(rf"GPU scratch, allowance .* {steps:,} ", out)


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```\n\$ headrace (plan .*)\n((?s:.*?))^```$", README, re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_plans_of_the_readme_are_what_their_commands_print(capsys, command, shown):
    code, out, _ = run(capsys, *command.split())
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()] == shown.splitlines()


def test_the_readme_shows_both_layouts():
    assert len(SHOWN) == 2


@pytest.mark.parametrize("layout", ["slots", "paged"])
def test_plan_counts_for_steps_what_the_engine_keeps_free(tiny, monkeypatch, layout):
    """HST-18: with the allowance for driver and libraries."""
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    path = str(tiny("tiny_hybrid").path)
    options = {"kv_layout": layout, "max_batch_tokens": 128}
    config = EngineConfig(model=path, max_batch_size=5, max_context=192, **options)
    with Engine(config) as engine:
        monkeypatch.setattr(engine, "device", torch.device("cuda", 0))
        kept = engine._step_bytes(engine.kv.format, engine.kv.page_tokens)
        plan = make_plan(
            engine.model_config, model="m", dtype="float32", slots=5, context=192, **options
        )
    assert plan.gpu_step_bytes > 0
    assert plan.workspace_bytes + plan.gpu_step_bytes == kept


def test_plan_of_two_ranks_splits_the_scratch_of_steps():
    one, two = (
        make_plan(KNOWN_CONFIGS["qwen3-8b"], model="m", tp=tp, slots=8).gpu_step_bytes
        for tp in (1, 2)
    )
    # On both: logits of decode rows and prompts, and the residual stream of the largest graph.
    whole = 2 * 8 * 151_936 * 4 + 512 * 4096 * (2 * 2 + 2 * 4) + RESERVE_BYTES
    assert (one - whole) / 2 < two - whole < (one - whole) / 2 + 100_000


@pytest.mark.parametrize(
    ("kv_dtype", "options", "per_token", "slot_gib_64k"),
    [
        ("auto", {}, 65_536, 4.000),
        ("fp8_e4m3", {}, 33_024, 2.016),
        ("int8_per_token_head", {}, 33_024, 2.016),
        ("fp8_e4m3", {"fp8_block": 64}, 33_792, 2.062),
        ("turboquant_k8v4", {}, 24_832, 1.516),
    ],
)
def test_plan_gives_the_numbers_of_the_27b_hybrid(kv_dtype, options, per_token, slot_gib_64k):
    """KVD-02; kv_formats.md section 5 and models.md section 3.4."""
    config = read_model_config("qwen3.5-27b-fp8")
    for tp in (1, 2):
        plan = make_plan(
            config, model="27b", tp=tp, kv_dtype=kv_dtype, slots=8, context=65_536, **options
        )
        assert plan.kv_layers == 16
        assert plan.kv_bytes_per_token * tp == per_token
        assert plan.kv_bytes_per_slot * tp / 2**30 == pytest.approx(slot_gib_64k, abs=1e-3)
        assert plan.kv_bytes_total == 8 * plan.kv_bytes_per_slot
        assert plan.state_bytes_per_slot * tp == 150_994_944 + 2_949_120
    weights = make_plan(config, model="27b", context=8192).weights_bytes
    assert weights / 1e9 == pytest.approx(29.46, abs=0.02)


def test_plan_refuses_ranks_that_split_a_linear_layer_unevenly():
    with pytest.raises(ConfigError, match=r"tp=3.*linear_num_key_heads"):
        make_plan(read_model_config("qwen3.5-27b"), model="27b", tp=3)


def test_a_flag_that_is_not_a_number_is_refused_for_what_it_is(capsys):
    """REQ-05: NaN is not equal to itself, which once looked like two flags that contradict."""
    assert cli.main(["generate", "--prompt", "x", "--temperature", "nan"]) == 2
    assert "temperature=nan" in capsys.readouterr().err


PAGED_27B = ("--model", "qwen3.5-27b-fp8", "--kv-layout", "paged", "--slots", 8)


def test_plan_shows_pages_windows_and_the_price_of_streaming(capsys):
    """allocator.md section 9 and streaming.md section 12: 16 KV layers, w = 2, sigma = 8."""
    plan = plan_json(capsys, *PAGED_27B, "--context", 65_536, "--link-gbps", 51)
    assert plan["kv_bytes_total"] == plan["pages"]["pool_bytes"] == 8 * 65_536 * 65_536
    assert plan["pages"] == {
        "pages": 8 * 1024,
        "page_tokens": 64,
        "width": 2,
        "raw_page_bytes": 64 * 65_536,
        "low_page_bytes": 64 * 65_536 // 8,
        "low_pages_per_raw_page": 8,
        "low_tokens_per_raw_page": 512,
        "pool_bytes": 8 * 65_536 * 65_536,
    }
    stream = plan["stream"]
    assert stream["bytes_per_token_step"] == 65_536
    assert stream["step_ms"] == pytest.approx(84.2, abs=0.1)
    assert stream["tokens_per_s_cap"] == pytest.approx(11.9, abs=0.05)
    assert stream["tokens_per_ms"] == pytest.approx(778, abs=1)
    assert plan["host"] is None
    slots = plan_json(capsys, "--model", "qwen3.5-27b-fp8", "--slots", 8, "--context", 65_536)
    assert slots["pages"] is slots["stream"] is slots["host"] is None
    assert slots["kv_bytes_total"] == plan["kv_bytes_total"]


def test_plan_sizes_the_host_tier_as_the_engine_does(capsys, tiny):
    """prefix_tree.md section 6: snapshots and KV are sized together."""
    host_bytes = 2**37
    host = plan_json(capsys, *PAGED_27B, "--context", 4096, "--host-bytes", host_bytes)["host"]
    snapshot = 150_994_944 + 2_949_120
    # Beside what aligns the planes: a state for every 4,096 tokens of KV.
    assert host["snapshots"] == (host_bytes - 4 * 256) // (4096 * 65_536 + snapshot)
    assert host["pages"] == (host_bytes - 4 * 256 - host["snapshots"] * snapshot) // (64 * 65_536)
    assert host["tokens"] == 64 * host["pages"] >= 4096 * host["snapshots"]
    assert host["used_bytes"] <= host["budget_bytes"] == host_bytes

    from headrace import Engine, EngineConfig

    model = tiny("tiny_hybrid").path
    capsys.readouterr()  # a model that is only now written shows its progress
    options = {"host_bytes": 2**24, "snapshot_interval": 256}
    flags = ["--host-bytes", 2**24, "--snapshot-interval", 256, "--dtype", "float32"]
    host = plan_json(capsys, "--model", model, *flags, "--context", 256)["host"]
    with Engine(EngineConfig(model=str(model), max_context=256, **options)) as engine:
        memory = engine.make_scheduler().memory_stats()
    assert (host["pages"], host["snapshots"]) == (memory["host_total"], memory["snapshots_total"])


def test_plan_with_pages_says_how_many_fit(capsys):
    argv = ["--model", "qwen3-8b", "--kv-layout", "paged", "--context", 8192, "--hbm-gib", 24]
    plan = plan_json(capsys, *argv, "--num-pages", 10)
    most = plan["max_pages_that_fit"]
    assert plan["max_slots_that_fit"] is None
    assert run(capsys, "plan", *argv, "--num-pages", most)[0] == 0
    code, out, err = run(capsys, "plan", *argv, "--num-pages", most + 1)
    assert (code, out) == (2, "")
    assert f"{most} pages" in err
    by_slots = plan_json(capsys, *argv)
    assert by_slots["max_pages_that_fit"] == most
    assert by_slots["max_slots_that_fit"] == most // (8192 // 64)


def test_plan_table_with_pages_is_readable_in_lines(capsys):
    code, out, _ = run(capsys, "plan", *PAGED_27B, "--context", 65_536, "--host-bytes", 2**37)
    assert code == 0
    for text in ("HIGH page, 64 tokens", "LOW page, 2 layers", "sigma = 8", "65,536 bytes per LOW"):
        assert text in out
