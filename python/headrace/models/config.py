"""What a decoder looks like: sizes, norms, rotary base, special tokens.

`ModelConfig.from_hf` is the only reader of Hugging Face style configuration dicts. It refuses by
name whatever the forward pass does not implement: a key that is silently ignored gives wrong text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import ModelError
from headrace.models import hybrid_config
from headrace.models.fields import is_int, number, positive, required, token_id, token_ids
from headrace.models.hybrid_config import FULL_ATTENTION, LINEAR_ATTENTION, LinearAttention
from headrace.models.quantization import DENSE, WEIGHT_FORMATS, weight_format

SUPPORTED_ARCHITECTURES = ("llama", "qwen3", "qwen3_5")
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

# A text-only checkpoint of a hybrid model names its part of the nested configuration.
_MODEL_TYPES = {"qwen3_5_text": "qwen3_5"}
_CLASSES = {
    "llama": ("LlamaForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
}
# Biases and experts would need code we do not have; a true value changes the maths.
_REFUSED_IF_SET = ("attention_bias", "mlp_bias", "qkv_bias", "num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one decoder; validated once, read-only after.

    layer_types: kind of every layer; empty if all have full attention. linear: sizes of the linear
    layers, None without any. rotary_dim: leading dims of a head that turn; None is all of them.
    attn_output_gate: q_proj holds a gate beside each head. norm_zero_centred: norms scale by 1 + w.
    weight_format: how matrices are stored in the checkpoint.

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
    layer_types: tuple[str, ...] = ()
    linear: LinearAttention | None = None
    rotary_dim: int | None = None
    attn_output_gate: bool = False
    norm_zero_centred: bool = False
    weight_format: str = DENSE

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
            if not is_int(value) or value <= 0:
                raise ModelError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ModelError(f"{name} must be a positive number, got {value!r}")
        for name in ("tie_word_embeddings", "qk_norm", "attn_output_gate", "norm_zero_centred"):
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
        if self.weight_format not in WEIGHT_FORMATS:
            raise ModelError(
                f"weight_format {self.weight_format!r} is not one of {', '.join(WEIGHT_FORMATS)}"
            )
        self._check_hybrid()

    def _check_hybrid(self) -> None:
        rotary = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if not is_int(rotary) or not 0 < rotary <= self.head_dim or rotary % 2:
            raise ModelError(
                f"rotary_dim must be even and at most head_dim ({self.head_dim}), got {rotary!r}"
            )
        if self.layer_types:
            kinds = (FULL_ATTENTION, LINEAR_ATTENTION)
            hybrid_config.check_layer_types(self.layer_types, self.num_layers, kinds)
        if (LINEAR_ATTENTION in self.layer_types) != (self.linear is not None):
            raise ModelError("layer_types and linear must both describe linear layers, or neither")
        if not self.kv_layers:
            raise ModelError("layer_types has no 'full_attention' layer, which is not supported")

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
        if config.get("model_type") == "qwen3_5":
            config = hybrid_config.text_part(config)
        architecture = _architecture(config)
        _refuse_unsupported(config)
        num_heads = positive(config, "num_attention_heads")
        hidden_size = positive(config, "hidden_size")
        num_layers = positive(config, "num_hidden_layers")
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
            vocab_size=positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            # Llama files from before grouped queries have no key: every head has its own K and V.
            num_kv_heads=num_heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(config, "rms_norm_eps"),
            max_position=positive(config, "max_position_embeddings"),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=architecture != "llama",
            eos_token_ids=token_ids(
                "eos_token_id", generation.get("eos_token_id", config.get("eos_token_id"))
            ),
            bos_token_id=token_id("bos_token_id", config.get("bos_token_id")),
            dtype=_dtype_name(config),
            weight_format=weight_format(config),
            **_kind_of_layers(config, architecture, num_layers, head_dim),
        )

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values; KV pools are indexed by a running number over these."""
        return self.layer_types.count(FULL_ATTENTION) if self.layer_types else self.num_layers

    @property
    def linear_layers(self) -> int:
        """Layers with a state; state pools are indexed by a running number over these."""
        return self.num_layers - self.kv_layers

    def layer_type(self, layer: int) -> str:
        """Kind of one layer."""
        return self.layer_types[layer] if self.layer_types else FULL_ATTENTION

    def state_bytes_per_slot(self, itemsize: int) -> int:
        """Bytes of state of one request over all linear layers; 0 for a dense model.

        itemsize: bytes of one element of the model dtype.
        """
        return 0 if self.linear is None else self.linear_layers * self.linear.state_bytes(itemsize)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token takes over all layers that have them."""
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def parameter_count(self) -> int:
        """Number of weights in the checkpoint; a tied head counts once."""
        tables = 1 if self.tie_word_embeddings else 2
        return self.layer_parameters + (tables * self.vocab_size + 1) * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Number of weights of all layers, without embeddings, head and last norm."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * ((3 if self.attn_output_gate else 2) * q_size + 2 * kv_size)
        attention += 2 * self.head_dim if self.qk_norm else 0
        mixers = self.kv_layers * attention
        if self.linear is not None:
            # qkv, z and the output, then a and b.
            rows = self.linear.channels + 2 * self.linear.value_size + 2 * self.linear.value_heads
            mixers += self.linear_layers * (self.hidden_size * rows + self.linear.parameters)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return mixers + self.num_layers * (mlp + 2 * self.hidden_size)


def _check_architecture(architecture: object) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"model_type {architecture!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    model_type = required(config, "model_type")
    architecture = _MODEL_TYPES.get(model_type, model_type)
    _check_architecture(architecture)
    for name in config.get("architectures") or ():
        if name not in _CLASSES[architecture]:
            raise ModelError(
                f"architectures entry {name!r} is not supported; for {architecture}: "
                f"{', '.join(_CLASSES[architecture])}"
            )
    return str(architecture)


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


def _kind_of_layers(
    config: Mapping[str, Any], architecture: str, num_layers: int, head_dim: int
) -> dict[str, Any]:
    """Fields of `ModelConfig` that differ between dense and hybrid models."""
    theta, factor = _rope(config)
    if architecture != "qwen3_5":
        if factor not in (None, 1.0):
            raise ModelError(f"partial_rotary_factor = {factor!r} is not supported")
        listed = config.get("layer_types")
        if listed is not None:
            hybrid_config.check_layer_types(listed, num_layers, (FULL_ATTENTION,))
        return {"rope_theta": theta}
    if factor is None:
        raise ModelError("config has no field 'partial_rotary_factor'")
    hybrid_config.check_built_in(config)
    kinds = hybrid_config.layer_types(config, num_layers)
    return {
        "rope_theta": theta,
        "rotary_dim": int(head_dim * factor),
        "layer_types": kinds,
        "linear": hybrid_config.linear_attention(config) if LINEAR_ATTENTION in kinds else None,
        "attn_output_gate": True,
        "norm_zero_centred": True,
    }


def _rope(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Rotary base and factor from `rope_parameters` (newer files), or from the keys before it.

    Text has equal positions on all three axes of a multimodal rotary embedding, so its sections
    do not matter.
    """
    factor = config.get("partial_rotary_factor")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ModelError(f"{key} must be an object, got {rope!r}")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ModelError(f"{key}: rope_type {rope_type!r} is not supported; only 'default' is")
        factor = rope.get("partial_rotary_factor", factor)
        if "rope_theta" in rope:
            return number(rope, "rope_theta"), _rotary_factor(factor)
    return number(config, "rope_theta"), _rotary_factor(factor)


def _rotary_factor(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ModelError(f"partial_rotary_factor must be above 0 and at most 1, got {value!r}")
    return float(value)


def _dtype_name(config: Mapping[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(value).removeprefix("torch.")
