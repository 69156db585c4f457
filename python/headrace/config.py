"""Engine options: one frozen object, checked once, and the only place that reads the environment.

Every field of `EngineConfig` has a variable `HEADRACE_<FIELD>`; `option_table` lists them all and
is what the README table and `--help` are made from. Explicit arguments win over variables.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from headrace.errors import ConfigError

ENV_PREFIX = "HEADRACE_"
ALIASES = {"QWEN_MAX_BATCH_SIZE": "max_batch_size", "HEADRACE_CACHE": "cache_dir"}
# Read by the test suite and by diagnostics, so they are no engine options but no typos either.
OTHER_VARIABLES = ("HEADRACE_CHECK", "HEADRACE_SOAK", "HEADRACE_REQUIRE_GPU", "HEADRACE_SMOLLM2")
TEST_PREFIX = "HEADRACE_TEST_"

CHUNK_TOKENS = 64  # a prefill is cut at multiples of this, in absolute position
MAX_BATCH_SIZE = 256
MAX_BATCH_TOKENS = 2**20
MAX_COUNT = 2**31 - 1  # positions and queue lengths travel as int32
MAX_THREADS = 1024
MAX_U64 = 2**64 - 1
MAX_BYTES = 2**62
KV_LAYOUTS = ("slots", "paged")
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back", "none")

DTYPES = ("auto", "float32", "bfloat16", "float16")
# `kv.formats` defines them; named here so that options can be checked without loading torch.
KV_DTYPES = (*DTYPES, "fp8_e4m3", "fp8", "int8_per_token_head", "turboquant_k8v4")
_DEVICE = r"auto|cpu|cuda(:(0|[1-9][0-9]{0,2}))?"
_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


def _option(default: Any, text: str) -> Any:  # noqa: ANN401  # stands for a value of any field type
    return field(default=default, metadata={"help": text})


def _invalid(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{name}={value!r}: accepted is {accepted}")


def _check_integer(name: str, value: object, low: int, high: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(name, value, f"an integer from {low} to {high}{also}")


def _check_number(name: str, value: object, above: float, most: float) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not above < value <= most:  # type: ignore[operator]  # a number, if we get here
        raise _invalid(name, value, f"a number above {above:g}, at most {most:g}")


def _check_text(name: str, value: object, accepted: str, pattern: str = r".*\S.*") -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.DOTALL):
        raise _invalid(name, value, accepted)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _invalid(name, value, "True or False")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise _invalid(name, value, " | ".join(choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine, fixed for its life.

    `option_table()` says what each field means. `deterministic` may be given as a bool and is
    stored as "on" or "off".

    Raises
    ------
    ConfigError
        If a field is of a wrong type or out of range, or two fields contradict each other.

    Examples
    --------
    >>> EngineConfig(model="smollm2", max_batch_size=8).max_batch_tokens
    512
    """

    model: str = field(metadata={"help": "model name, Hugging Face folder or GGUF file"})
    device: str = _option("auto", "auto | cpu | cuda | cuda:N; auto takes a GPU if there is one")
    dtype: str = _option("auto", "auto | float32 | bfloat16 | float16 for weights and activations")
    kv_dtype: str = _option(
        "auto", "auto (as dtype) | fp8_e4m3 | int8_per_token_head | turboquant_k8v4: KV in memory"
    )
    fp8_block: int = _option(0, "0 | 64: channels with one scale in an fp8_e4m3 KV; 0 is a head")
    int8_rotate: bool = _option(False, "rotate vectors before coding them in an int8 KV")
    fp8_weights: str = _option("keep", "keep | dequantize: FP8 checkpoints in memory")
    max_batch_size: int = _option(1, "requests in one step, 1 to 256; 1 is single-session mode")
    max_context: int | None = _option(
        None, "tokens of prompt and answer of one request; none: the model's limit"
    )
    max_batch_tokens: int = _option(
        512, "prefill tokens a step, a multiple of 64; decode rows come on top"
    )
    max_waiting: int = _option(4096, "requests that may wait before submit raises QueueFull")
    max_results: int = _option(16384, "finished results kept for callers that have not asked yet")
    policy: str = _option("fcfs", "fcfs | priority: order in which waiting requests start")
    kv_layout: str = _option(
        "slots", "slots | paged: a fixed place of max_context tokens a request, or pages"
    )
    page_size: int = _option(64, "tokens of a page, a power of two from 64; prefixes too")
    num_pages: int | None = _option(
        None, "pages on the device, paged only; none: what max_batch_size slots would take"
    )
    slot_widths: int = _option(2, "layers of the window through which a low request streams, paged")
    low_pages: int | None = _option(
        None, "pages that low requests may take for windows, paged; none: half of num_pages"
    )
    host_bytes: int = _option(0, "bytes of host memory for KV and states; 0 is no host tier")
    prefix_cache: str | bool = _option(
        "auto", "auto | on | off: reuse prefixes; auto is on with pages or a host tier"
    )
    write_policy: str = _option(
        "write_through",
        "write_through | write_through_selective | write_back | none: when pages go to the host",
    )
    admission: str = _option(
        "estimate", "estimate | reserve: a request starts if its predicted or worst case fits"
    )
    admission_ratio: float = _option(
        0.5, "part of its max_tokens a request is expected to generate, for estimate"
    )
    preemption: str = _option(
        "recompute", "recompute | park: what becomes of the KV of a preempted request"
    )
    snapshot_interval: int = _option(
        4096, "tokens between saved states of a hybrid model's prompt, a multiple of page_size"
    )
    load_back_threshold: int = _option(1, "pages from which a host hit is loaded, not recomputed")
    low_step_ms: float = _option(100.0, "time a step may stream for low requests, with no high one")
    copy_timeout_s: float = _option(30.0, "seconds until a copy counts as stuck and fails")
    copy_check: bool = _option(
        False, "CPU only: compare checksums of pages that come back from the host"
    )
    link_bytes_per_s: int = _option(0, "CPU only: imitate a host link of this rate; 0 is none")
    deterministic: str | bool = _option(
        "auto", "auto | on | off: tokens independent of the batch; auto is on for CUDA"
    )
    cuda_graphs: bool = _option(True, "capture decode rows and prompts in CUDA graphs; GPU only")
    step_timeout_s: float = _option(
        300.0,
        "GPU only: seconds until a step counts as stuck; its engine then runs no more. With a host "
        "tier more than twice copy_timeout_s",
    )
    load_format: str = _option("auto", "auto | dummy; dummy fills weights from the seed")
    seed: int = _option(0, "seed of dummy weights and of requests without their own seed")
    skip_tokenizer: bool = _option(False, "token ids in and out only; load no tokenizer")
    cache_dir: str | None = _option(None, "folder for fetched models; none: the user's cache")
    num_threads: int | None = _option(None, "threads of one torch operation; none: torch decides")

    def __post_init__(self) -> None:
        _check_text("model", self.model, "a model name, a folder or a GGUF file")
        _check_text("device", self.device, "auto | cpu | cuda | cuda:N", _DEVICE)
        _check_choice("dtype", self.dtype, DTYPES)
        self._check_kv_dtype()
        _check_integer("max_batch_size", self.max_batch_size, 1, MAX_BATCH_SIZE)
        if self.max_context is not None:
            # One prompt token and one generated token are the least a request can have.
            _check_integer("max_context", self.max_context, 2, MAX_COUNT, " or None")
        _check_integer("max_batch_tokens", self.max_batch_tokens, CHUNK_TOKENS, MAX_BATCH_TOKENS)
        if self.max_batch_tokens % CHUNK_TOKENS:
            raise _invalid(
                "max_batch_tokens", self.max_batch_tokens, f"a multiple of {CHUNK_TOKENS}"
            )
        _check_integer("max_waiting", self.max_waiting, 1, MAX_COUNT)
        _check_integer("max_results", self.max_results, 1, MAX_COUNT)
        if self.max_results < self.max_waiting + self.max_batch_size:
            raise ConfigError(
                f"max_results={self.max_results!r}: accepted is at least max_waiting plus "
                f"max_batch_size, which is {self.max_waiting + self.max_batch_size}: all requests "
                "may end at once"
            )
        _check_choice("policy", self.policy, ("fcfs", "priority"))
        self._check_memory()
        if isinstance(self.deterministic, bool):
            object.__setattr__(self, "deterministic", "on" if self.deterministic else "off")
        _check_choice("deterministic", self.deterministic, ("auto", "on", "off"))
        _check_bool("cuda_graphs", self.cuda_graphs)
        _check_number("step_timeout_s", self.step_timeout_s, 0.0, 1e6)
        _check_choice("load_format", self.load_format, ("auto", "dummy"))
        _check_choice("fp8_weights", self.fp8_weights, ("keep", "dequantize"))
        _check_integer("seed", self.seed, 0, MAX_U64)
        _check_bool("skip_tokenizer", self.skip_tokenizer)
        if self.cache_dir is not None:
            _check_text("cache_dir", self.cache_dir, "a folder or None")
        if self.num_threads is not None:
            _check_integer("num_threads", self.num_threads, 1, MAX_THREADS, " or None")

    def _check_memory(self) -> None:
        _check_choice("kv_layout", self.kv_layout, KV_LAYOUTS)
        _check_integer("page_size", self.page_size, CHUNK_TOKENS, MAX_BATCH_TOKENS)
        if self.page_size & (self.page_size - 1):
            raise _invalid("page_size", self.page_size, f"a power of two from {CHUNK_TOKENS}")
        for name in ("num_pages", "low_pages"):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, 1, MAX_COUNT, " or None")
                if self.kv_layout != "paged":
                    raise ConfigError(f"{name}={value}: belongs to kv_layout paged only")
        _check_integer("slot_widths", self.slot_widths, 1, MAX_COUNT)
        _check_integer("host_bytes", self.host_bytes, 0, MAX_BYTES)
        if isinstance(self.prefix_cache, bool):
            object.__setattr__(self, "prefix_cache", "on" if self.prefix_cache else "off")
        _check_choice("prefix_cache", self.prefix_cache, ("auto", "on", "off"))
        if self.prefix_cache == "on" and self.kv_layout == "slots" and not self.host_bytes:
            raise ConfigError(
                "prefix_cache='on' with kv_layout='slots' and host_bytes=0: a slot is private, so "
                "prefixes are kept in host memory; set host_bytes, or take kv_layout='paged'"
            )
        _check_choice("write_policy", self.write_policy, WRITE_POLICIES)
        _check_choice("admission", self.admission, ("estimate", "reserve"))
        _check_number("admission_ratio", self.admission_ratio, 0.0, 1.0)
        _check_choice("preemption", self.preemption, ("recompute", "park"))
        if self.preemption == "park" and (self.kv_layout != "paged" or not self.host_bytes):
            raise ConfigError(
                "preemption='park' keeps pages in host memory; it needs kv_layout='paged' and "
                "host_bytes"
            )
        _check_integer("snapshot_interval", self.snapshot_interval, self.page_size, MAX_COUNT)
        if self.snapshot_interval % self.page_size:
            raise _invalid(
                "snapshot_interval", self.snapshot_interval, f"a multiple of {self.page_size}"
            )
        _check_integer("load_back_threshold", self.load_back_threshold, 1, MAX_COUNT)
        _check_number("low_step_ms", self.low_step_ms, 0.0, 1e6)
        _check_number("copy_timeout_s", self.copy_timeout_s, 0.0, 1e6)
        _check_bool("copy_check", self.copy_check)
        _check_integer("link_bytes_per_s", self.link_bytes_per_s, 0, MAX_BYTES)

    def _check_kv_dtype(self) -> None:
        _check_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _check_bool("int8_rotate", self.int8_rotate)
        if self.fp8_block not in (0, 64) or isinstance(self.fp8_block, bool):
            raise _invalid("fp8_block", self.fp8_block, "0 or 64")
        if self.fp8_block and self.kv_dtype not in ("fp8", "fp8_e4m3"):
            raise ConfigError(f"fp8_block={self.fp8_block} belongs to kv_dtype fp8_e4m3 only")
        if self.int8_rotate and self.kv_dtype != "int8_per_token_head":
            raise ConfigError("int8_rotate belongs to kv_dtype int8_per_token_head only")
        if (
            self.kv_dtype in DTYPES
            and "auto" not in (self.kv_dtype, self.dtype)
            and self.kv_dtype != self.dtype
        ):
            raise ConfigError(
                f"kv_dtype={self.kv_dtype!r} with dtype={self.dtype!r}: an unquantised KV has the "
                "dtype of the model; accepted is auto, the same name or a quantised format"
            )

    @classmethod
    def make(cls, **options: object) -> Self:
        """Build from keywords; a missing model or an unknown keyword is a `ConfigError`."""
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"{name}={options[name]!r}: not an option{_hint(name, known)} "
                    f"(accepted: {', '.join(known)})"
                )
        if "model" not in options:
            raise ConfigError("model: missing; give a model name, a folder or a GGUF file")
        return cls(**options)  # type: ignore[arg-type]  # the constructor checks every type

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> Self:
        """Build from `HEADRACE_*` variables; `overrides` are explicit arguments and win.

        `environ` stands in for the process environment. Raises as `from_options`.
        """
        return cls.from_options(overrides, environ=environ)

    @classmethod
    def from_options(
        cls,
        overrides: Mapping[str, object],
        *,
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> Self:
        """Build from explicit options, then `HEADRACE_*` variables, then defaults.

        A variable whose field is given explicitly is not parsed. `environ` stands in for the
        process environment; `defaults` stand in for the defaults of the fields.

        Raises
        ------
        ConfigError
            If a value cannot be parsed or is out of range, two names of one field differ, or a
            variable that starts with `HEADRACE_` is unknown; the message names the variable.
        """
        variables = os.environ if environ is None else environ
        sources = _sources(variables)
        options: dict[str, object] = {}
        used: list[str] = []
        for name, candidates in sources.items():
            if name in overrides:
                continue
            parsed = [_parse(variable, name, variables[variable]) for variable in candidates]
            if any(value != parsed[0] for value in parsed):
                both = " and ".join(f"{v}={variables[v]!r}" for v in candidates)
                raise ConfigError(f"{both} contradict each other; set one of them")
            options[name] = parsed[0]
            used += candidates
        try:
            return cls.make(**{**(defaults or {}), **options, **overrides})
        except ConfigError as error:
            if not used:
                raise
            raise ConfigError(f"{error} (variables read: {', '.join(used)})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRow:
    """One line of the option table: a field, its variables (aliases last), default and meaning."""

    name: str
    variables: tuple[str, ...]
    default: str
    help: str


def option_table() -> list[OptionRow]:
    """Every option of `EngineConfig` in the order of its fields."""
    return [
        OptionRow(
            name=option.name,
            variables=_variables(option.name),
            default="required" if option.default is MISSING else _shown(option.default),
            help=option.metadata["help"],
        )
        for option in fields(EngineConfig)
    ]


def checks_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `HEADRACE_CHECK` asks for the invariants to be checked after every step.

    Raises `ConfigError` for a value that is neither on nor off.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("HEADRACE_CHECK", "0")
    return _parse_bool("HEADRACE_CHECK", text)


def preempt_every(environ: Mapping[str, str] | None = None) -> int:
    """Steps between forced preemptions, from `HEADRACE_TEST_PREEMPT_EVERY`; 0 is never."""
    variables = os.environ if environ is None else environ
    text = variables.get("HEADRACE_TEST_PREEMPT_EVERY", "0")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"HEADRACE_TEST_PREEMPT_EVERY={text!r}: accepted is a number of steps")
    return int(text)


def _shown(default: object) -> str:
    """Return a default as it would be written into a variable."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def _variables(name: str) -> tuple[str, ...]:
    own = ENV_PREFIX + name.upper()
    return (own, *(alias for alias, target in ALIASES.items() if target == name))


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _sources(variables: Mapping[str, str]) -> dict[str, list[str]]:
    """Variables that are set, by field. An unknown `HEADRACE_*` name is a `ConfigError`."""
    by_name = {variable: row.name for row in option_table() for variable in row.variables}
    for variable in sorted(variables):
        if not variable.startswith(ENV_PREFIX) or variable in by_name:
            continue
        if variable in OTHER_VARIABLES or variable.startswith(TEST_PREFIX):
            continue
        raise ConfigError(
            f"{variable}={variables[variable]!r}: not a variable of headrace"
            f"{_hint(variable, list(by_name))}"
        )
    sources: dict[str, list[str]] = {}
    for variable, name in by_name.items():
        if variable in variables:
            sources.setdefault(name, []).append(variable)
    return sources


_INTEGERS = (
    "max_batch_size",
    "max_batch_tokens",
    "max_waiting",
    "max_results",
    "seed",
    "fp8_block",
    "page_size",
    "slot_widths",
    "host_bytes",
    "snapshot_interval",
    "load_back_threshold",
    "link_bytes_per_s",
)
_NUMBERS = ("admission_ratio", "low_step_ms", "copy_timeout_s", "step_timeout_s")
_BOOLEANS = ("skip_tokenizer", "int8_rotate", "copy_check", "cuda_graphs")
_OPTIONAL_INTEGERS = ("max_context", "num_threads", "num_pages", "low_pages")


def _parse(variable: str, name: str, text: str) -> object:
    """Turn the text of a variable into a value of the field's type; ranges are checked later."""
    text = text.strip()
    if not text:
        raise ConfigError(f"{variable} is set but empty; unset it or give a value")
    if name in _OPTIONAL_INTEGERS and text.lower() == "none":
        return None
    if name in _INTEGERS or name in _OPTIONAL_INTEGERS:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise ConfigError(f"{variable}={text!r}: accepted is an integer")
        return int(text)
    if name in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r}: accepted is a number") from None
    if name in _BOOLEANS:
        return _parse_bool(variable, text)
    if name in ("deterministic", "prefix_cache") and text.lower() in _TRUE + _FALSE:
        return "on" if text.lower() in _TRUE else "off"
    return text


def _parse_bool(variable: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ConfigError(f"{variable}={text!r}: accepted is {' | '.join(_TRUE + _FALSE)}")
    return word in _TRUE
