"""What only hybrid configurations have: layer kinds, sizes of the linear layers, nesting.

A linear layer keeps a state of fixed size instead of keys and values of every token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.errors import ModelError
from headrace.models.fields import is_int, positive, required

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

# The convolution state has three columns in every pool and kernel; no release has another width.
CONV_WIDTH = 4

# Tokens of one block of the chunked delta rule; blocks stand at absolute multiples of it. Another
# size gives other bits, and so does a cut of a prompt elsewhere, so that it is not an option.
DELTA_CHUNK = 64

# The whole configuration nests the text part; these of its own fields describe text as well.
_OUTER_WINS = ("tie_word_embeddings", "quantization_config")
_OUTER_IF_ABSENT = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype")

# Values that the forward pass has built in. A missing key means the same in every release.
_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mamba_ssm_dtype": ("float32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Sizes of the gated delta rule layers.

    Raises
    ------
    ModelError
        A size is not a positive integer, or the value heads are no multiple of the key heads.
    """

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_int(value) or value <= 0:
                raise ModelError(f"linear {field.name} must be a positive integer, got {value!r}")
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.key_heads})"
            )

    @property
    def key_size(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of v, and of z."""
        return self.value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels that go through the convolution: q, k, v side by side."""
        return 2 * self.key_size + self.value_size

    def state_bytes(self, itemsize: int) -> int:
        """Bytes one layer keeps of one request: fp32 matrices, and the last convolution inputs."""
        recurrent = self.value_heads * self.value_head_dim * self.key_head_dim * 4
        return recurrent + self.channels * (CONV_WIDTH - 1) * itemsize

    @property
    def parameters(self) -> int:
        """Weights of one layer besides those that read or write the residual stream."""
        return self.channels * CONV_WIDTH + 2 * self.value_heads + self.value_head_dim


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a nested configuration as a flat one."""
    text = required(config, "text_config")
    if not isinstance(text, Mapping):
        raise ModelError(f"text_config must be an object, got {text!r}")
    if text.get("model_type") != "qwen3_5_text":
        raise ModelError(f"text_config: model_type {text.get('model_type')!r} is not supported")
    outer = {key: config[key] for key in _OUTER_WINS if config.get(key) is not None}
    inherited = {
        key: config[key]
        for key in _OUTER_IF_ABSENT
        if text.get(key) is None and config.get(key) is not None
    }
    return {**text, **inherited, **outer}


def check_built_in(config: Mapping[str, Any]) -> None:
    """Refuse values other than those the forward pass of hybrid layers has built in."""
    for key, accepted in _ONLY_VALUES.items():
        value = config.get(key)
        if value is not None and value not in accepted:
            raise ModelError(f"{key} = {value!r} is not supported; only {accepted[0]!r} is")
    width = positive(config, "linear_conv_kernel_dim")
    if width != CONV_WIDTH:
        raise ModelError(f"linear_conv_kernel_dim = {width} is not supported; only {CONV_WIDTH} is")


def linear_attention(config: Mapping[str, Any]) -> LinearAttention:
    """Read the sizes of the linear layers."""
    return LinearAttention(
        key_heads=positive(config, "linear_num_key_heads"),
        value_heads=positive(config, "linear_num_value_heads"),
        key_head_dim=positive(config, "linear_key_head_dim"),
        value_head_dim=positive(config, "linear_value_head_dim"),
    )


def layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Kind of every layer, from the explicit list or from `full_attention_interval`."""
    listed = config.get("layer_types")
    if listed is None:
        interval = positive(config, "full_attention_interval")
        return tuple(
            LINEAR_ATTENTION if (layer + 1) % interval else FULL_ATTENTION
            for layer in range(num_layers)
        )
    return check_layer_types(listed, num_layers, (FULL_ATTENTION, LINEAR_ATTENTION))


def check_layer_types(
    listed: object, num_layers: int, accepted: tuple[str, ...]
) -> tuple[str, ...]:
    """Check an explicit list of layer kinds."""
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        raise ModelError(f"layer_types must list {num_layers} layers, got {listed!r}")
    for kind in listed:
        if kind not in accepted:
            raise ModelError(
                f"layer_types entry {kind!r} is not supported; only {', '.join(accepted)}"
            )
    return tuple(listed)
