"""Engine options: bad values are refused by name, every variable has its effect (REQ-07)."""

import math
from pathlib import Path

import pytest

from headrace.config import ALIASES, EngineConfig, checks_enabled, option_table
from headrace.errors import ConfigError

BAD_VALUES = {
    "model": ["", "  ", None, 5],
    "device": ["gpu", "cuda:-1", "cuda:x", "CPU", "cuda:", None, 0],
    "dtype": ["fp16", "int8", None],
    "kv_dtype": ["fp16", "int4", "turboquant4", "half", None],
    "fp8_block": [32, -1, True, "64", None],
    "int8_rotate": [1, "on", None],
    "fp8_weights": ["drop", None, True],
    "max_batch_size": [0, 257, -1, 1.0, True, None, "4"],
    "max_context": [0, 1, -5, 2**31, 8.0, True],
    "max_batch_tokens": [0, 63, 65, 100, 2**20 + 64, 512.0, True],
    "max_waiting": [0, -1, 2**31, True],
    "max_results": [0, -1, 2**31, None],
    "policy": ["lifo", None, "FCFS"],
    "kv_layout": ["page", None, "Slots"],
    "page_size": [0, 32, 96, 100, 64.0, True, None],
    "num_pages": [0, -1, 2**31, 8.0, True],
    "slot_widths": [0, -1, True, None, "2"],
    "low_pages": [0, -1, 2**31, True],
    "host_bytes": [-1, 2**62 + 1, 1.5, None, True],
    "prefix_cache": ["yes", 1, None],
    "write_policy": ["through", None],
    "admission": ["guess", None],
    "admission_ratio": [0.0, 1.5, math.nan, None, True, "0.5"],
    "preemption": ["swap", None],
    "snapshot_interval": [0, 32, 100, None, True],
    "load_back_threshold": [0, -1, None, True],
    "low_step_ms": [0.0, -1.0, math.inf, math.nan, None, True],
    "copy_timeout_s": [0.0, -1.0, math.nan, None, "30"],
    "copy_check": [1, "on", None],
    "link_bytes_per_s": [-1, 0.5, None, True],
    "deterministic": ["yes", 1, None],
    "cuda_graphs": [0, "on", None],
    "step_timeout_s": [0.0, -1.0, math.nan, math.inf, None, True, "300"],
    "load_format": ["gguf", None],
    "seed": [-1, 2**64, 0.5, None, True],
    "skip_tokenizer": [1, "on", None],
    "cache_dir": ["", " ", 3],
    "num_threads": [0, -1, 1025, 2.0, True, math.nan],
}
CASES = [(name, value) for name, values in BAD_VALUES.items() for value in values]
# A text for each field's variable and the value it must lead to, different from the default.
FLIPS = {
    "model": ("other", "other"),
    "device": ("cpu", "cpu"),
    "dtype": ("bfloat16", "bfloat16"),
    "kv_dtype": ("float32", "float32"),
    "fp8_block": ("64", 64),
    "int8_rotate": ("on", True),
    "fp8_weights": ("dequantize", "dequantize"),
    "max_batch_size": ("8", 8),
    "max_context": ("4096", 4096),
    "max_batch_tokens": ("1024", 1024),
    "max_waiting": ("7", 7),
    "max_results": ("9999", 9999),
    "policy": ("priority", "priority"),
    "kv_layout": ("paged", "paged"),
    "page_size": ("128", 128),
    "num_pages": ("12", 12),
    "slot_widths": ("3", 3),
    "low_pages": ("5", 5),
    "host_bytes": ("1048576", 1048576),
    "prefix_cache": ("off", "off"),
    "write_policy": ("write_back", "write_back"),
    "admission": ("reserve", "reserve"),
    "admission_ratio": ("0.25", 0.25),
    "preemption": ("park", "park"),
    "snapshot_interval": ("128", 128),
    "load_back_threshold": ("3", 3),
    "low_step_ms": ("12.5", 12.5),
    "copy_timeout_s": ("1.5", 1.5),
    "copy_check": ("on", True),
    "link_bytes_per_s": ("1000000", 1000000),
    "deterministic": ("1", "on"),
    "cuda_graphs": ("off", False),
    "step_timeout_s": ("0.5", 0.5),
    "load_format": ("dummy", "dummy"),
    "seed": ("18446744073709551615", 2**64 - 1),
    "skip_tokenizer": ("true", True),
    "cache_dir": ("/models", "/models"),
    "num_threads": ("2", 2),
}
# What must be set beside a field for it to mean something.
PARTNERS = {
    "num_pages": {"kv_layout": "paged"},
    "low_pages": {"kv_layout": "paged"},
    "preemption": {"kv_layout": "paged", "host_bytes": 1 << 20},
    "fp8_block": {"kv_dtype": "fp8_e4m3"},
    "int8_rotate": {"kv_dtype": "int8_per_token_head"},
}
VARIABLES = [(row.name, variable) for row in option_table() for variable in row.variables]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_bad_value_is_refused_by_field_and_value(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", name: value})
    assert str(caught.value).startswith(f"{name}={value!r}")
    assert "accepted is" in str(caught.value)


def test_every_field_is_in_these_tables():
    """REQ-07."""
    names = set(EngineConfig.__dataclass_fields__)
    assert set(BAD_VALUES) == set(FLIPS) == names
    assert [row.name for row in option_table()] == list(EngineConfig.__dataclass_fields__)
    assert all(row.help for row in option_table())


@pytest.mark.parametrize(("name", "variable"), VARIABLES)
def test_variable_changes_its_field_and_only_that(name, variable):
    """REQ-07."""
    text, expected = FLIPS[name]
    base = {} if name == "model" else {"HEADRACE_MODEL": "m"}
    partners = PARTNERS.get(name, {})
    config = EngineConfig.from_env({**base, variable: text}, **partners)
    plain = EngineConfig(model="m", **partners)
    assert getattr(config, name) == expected != getattr(plain, name)
    others = [field for field in EngineConfig.__dataclass_fields__ if field not in (name, "model")]
    assert all(getattr(config, field) == getattr(plain, field) for field in others)


@pytest.mark.parametrize(("name", "variable"), VARIABLES)
def test_explicit_argument_wins(name, variable):
    """REQ-07."""
    text, expected = FLIPS[name]
    default = getattr(EngineConfig(model="m"), name)
    explicit = {"model": "m", name: default}
    assert getattr(EngineConfig.from_env({variable: text}, **explicit), name) == default
    options = {"model": "m", **PARTNERS.get(name, {}), name: expected}
    assert EngineConfig.from_env({}, **options) == EngineConfig(**options)


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_alias_must_agree_with_the_variable_it_stands_for(alias, name):
    """REQ-07."""
    own = f"HEADRACE_{name.upper()}"
    env = {"HEADRACE_MODEL": "m", own: "4", alias: "4"}
    assert str(getattr(EngineConfig.from_env(env), name)) == "4"
    with pytest.raises(ConfigError, match=f"{own}.*{alias}.*contradict"):
        EngineConfig.from_env({**env, alias: "5"})
    assert getattr(EngineConfig.from_env({**env, alias: "5"}, **{name: FLIPS[name][1]}), name)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HEADRACE_MAX_BATCH_SIZE", "many"),
        ("HEADRACE_MAX_BATCH_SIZE", ""),
        ("QWEN_MAX_BATCH_SIZE", "4.0"),
        ("HEADRACE_MAX_CONTEXT", "0x10"),
        ("HEADRACE_SEED", "9" * 5000),
        ("HEADRACE_SKIP_TOKENIZER", "2"),
        ("HEADRACE_DEVICE", " "),
        ("HEADRACE_MAX_BATCH_TOKENS", "100"),
        ("HEADRACE_DTYPE", "fp16"),
        ("HEADRACE_MAX_BATCHSIZE", "4"),
        ("HEADRACE_NEW_THING", "1"),
    ],
)
def test_bad_variable_is_named(variable, text):
    """REQ-07."""
    with pytest.raises(ConfigError, match=variable):
        EngineConfig.from_env({"HEADRACE_MODEL": "m", variable: text})


def test_misspelt_variable_gets_a_hint():
    with pytest.raises(ConfigError, match="did you mean 'HEADRACE_MAX_BATCH_SIZE'"):
        EngineConfig.from_env({"HEADRACE_MAX_BATCHSIZE": "4"}, model="m")


def test_variables_of_tests_and_strangers_are_let_pass():
    env = {
        "HEADRACE_CHECK": "1",
        "HEADRACE_SOAK": "1",
        "HEADRACE_SMOLLM2": "folder",
        "HEADRACE_TEST_WEIGHTS": "/w",
        "PATH": "/bin",
        "QWEN_OTHER": "x",
    }
    assert EngineConfig.from_env(env, model="m") == EngineConfig(model="m")
    assert checks_enabled(env)
    assert not checks_enabled({})
    with pytest.raises(ConfigError, match="HEADRACE_CHECK"):
        checks_enabled({"HEADRACE_CHECK": "maybe"})


def test_process_environment_is_the_default(monkeypatch):
    """REQ-07."""
    monkeypatch.setenv("HEADRACE_MAX_BATCH_SIZE", "3")
    assert EngineConfig.from_env(model="m").max_batch_size == 3


def test_optional_number_can_be_set_to_none():
    env = {"HEADRACE_MAX_CONTEXT": "none", "HEADRACE_NUM_THREADS": "none"}
    config = EngineConfig.from_env(env, model="m")
    assert config.max_context is None
    assert config.num_threads is None


def test_missing_model_and_unknown_keyword_are_refused():
    with pytest.raises(ConfigError, match="model: missing"):
        EngineConfig.from_env({})
    with pytest.raises(ConfigError, match=r"max_batch=4.*did you mean 'max_batch_"):
        EngineConfig.make(model="m", max_batch=4)
    with pytest.raises(ConfigError, match="nonsense="):
        EngineConfig.from_env({}, model="m", nonsense=1)


def test_kv_type_other_than_the_models_is_a_contradiction():
    """REQ-07."""
    assert EngineConfig(model="m", dtype="float16", kv_dtype="float16").kv_dtype == "float16"
    assert EngineConfig(model="m", kv_dtype="float16").kv_dtype == "float16"
    with pytest.raises(ConfigError, match=r"kv_dtype='float16' with dtype='float32'"):
        EngineConfig(model="m", dtype="float32", kv_dtype="float16")
    for options in (
        {"fp8_block": 64},
        {"fp8_block": 64, "kv_dtype": "int8_per_token_head"},
        {"int8_rotate": True, "kv_dtype": "fp8_e4m3"},
    ):
        with pytest.raises(ConfigError, match="belongs to kv_dtype"):
            EngineConfig(model="m", **options)


@pytest.mark.parametrize(("value", "stored"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_deterministic_takes_a_bool(value, stored):
    assert EngineConfig(model="m", deterministic=value).deterministic == stored


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_good_devices(device):
    assert EngineConfig(model="m", device=device).device == device


def test_the_table_of_the_readme_is_the_option_table():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = []
    for row in option_table():
        variables = ", ".join(f"`{variable}`" for variable in row.variables)
        cells = (f"`{row.name}`", variables, row.default, row.help)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    assert "\n".join(rows) in text
