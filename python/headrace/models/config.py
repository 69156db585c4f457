"""What a decoder looks like: sizes, norms, rotary base, special tokens.

`ModelConfig.from_hf` is the only reader of Hugging Face style configuration dicts. It refuses by
name whatever the forward pass does not implement: a key that is silently ignored gives wrong text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import ModelError

SUPPORTED_ARCHITECTURES = ("llama", "qwen3")
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

# Biases and quantised weights would need code we do not have; a true value changes the maths.
_REFUSED_IF_SET = ("attention_bias", "mlp_bias", "qkv_bias", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one dense decoder; validated once, read-only after.

    Raises
    ------
    ModelError
        A size is not a positive integer, the heads do not divide, or a name is unknown.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_word_embeddings: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_architecture(self.architecture)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            value = getattr(self, name)
            if not _is_int(value) or value <= 0:
                raise ModelError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ModelError(f"{name} must be a positive number, got {value!r}")
        for name in ("tie_word_embeddings", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary pairs, got {self.head_dim}")
        if self.dtype not in SUPPORTED_DTYPES:
            raise ModelError(f"dtype {self.dtype!r} is not one of {', '.join(SUPPORTED_DTYPES)}")

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read a `config.json`; the stop tokens of a `generation_config.json` win.

        Raises
        ------
        ModelError
            A field is missing, has a wrong type, or asks for something that is not implemented;
            the message names the key.
        """
        architecture = _required(config, "model_type")
        _check_architecture(architecture)
        _refuse_unsupported(config)
        num_heads = _positive(config, "num_attention_heads")
        hidden_size = _positive(config, "hidden_size")
        num_layers = _positive(config, "num_hidden_layers")
        _check_layer_types(config, num_layers)
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ModelError(
                    f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads "
                    f"({num_heads}) and head_dim is not given"
                )
            head_dim = hidden_size // num_heads
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is None and architecture != "llama":
            raise ModelError("config has no field 'num_key_value_heads'")
        generation = generation_config or {}
        return cls(
            architecture=architecture,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            # Llama files from before grouped queries have no key: every head has its own K and V.
            num_kv_heads=num_heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps"),
            rope_theta=_rope_theta(config),
            max_position=_positive(config, "max_position_embeddings"),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=architecture == "qwen3",
            eos_token_ids=_token_ids(
                "eos_token_id", generation.get("eos_token_id", config.get("eos_token_id"))
            ),
            bos_token_id=_token_id("bos_token_id", config.get("bos_token_id")),
            dtype=_dtype_name(config),
        )

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def parameter_count(self) -> int:
        """Number of weights in the checkpoint; a tied head counts once."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + embeddings + self.hidden_size


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _required(config: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - a JSON value
    if config.get(key) is None:
        raise ModelError(f"config has no field {key!r}")
    return config[key]


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = _required(config, key)
    if not _is_int(value) or value <= 0:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return int(value)


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _required(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{key} must be a number, got {value!r}")
    return float(value)


def _token_id(key: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{key} must be a token id, got {value!r}")
    return value


def _token_ids(key: str, value: object) -> tuple[int, ...]:
    entries = value if isinstance(value, list | tuple) else [value]
    ids = (_token_id(key, entry) for entry in entries)
    return tuple(token for token in ids if token is not None)


def _check_architecture(architecture: object) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"model_type {architecture!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key in _REFUSED_IF_SET:
        if config.get(key):
            raise ModelError(f"{key} = {config[key]!r} is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    # Qwen3 files carry a window size beside a flag that says it is off.
    window = config.get("sliding_window")
    if config.get("use_sliding_window", window is not None) and window is not None:
        raise ModelError(f"sliding_window = {window!r} is in use and is not supported")


def _check_layer_types(config: Mapping[str, Any], num_layers: int) -> None:
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list | tuple) or len(layer_types) != num_layers:
        raise ModelError(f"layer_types must list {num_layers} layers, got {layer_types!r}")
    for kind in layer_types:
        if kind != "full_attention":
            raise ModelError(f"layer_types entry {kind!r} is not supported; only 'full_attention'")


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Rotary base from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ModelError(f"{key} must be an object, got {rope!r}")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ModelError(f"{key}: rope_type {rope_type!r} is not supported; only 'default' is")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            factor = rope["partial_rotary_factor"]
            raise ModelError(f"{key}: partial_rotary_factor = {factor!r} is not supported")
        if "rope_theta" in rope:
            return _number(rope, "rope_theta")
    return _number(config, "rope_theta")


def _dtype_name(config: Mapping[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")
