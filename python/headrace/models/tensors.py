"""Names, shapes and sources of a model's weights.

Names are those of a text-only Hugging Face checkpoint, whatever the file calls them.
"""

from typing import Protocol

import torch

from headrace.backends.base import Backend, Weight
from headrace.errors import CheckpointError
from headrace.layers.block_fp8 import blocks_of
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm, RMSNorm, ZeroCentredRMSNorm
from headrace.models.config import ModelConfig
from headrace.models.hybrid_config import CONV_WIDTH, FULL_ATTENTION, LinearAttention
from headrace.models.quantization import FP8_BLOCK

_SCALE_ITEMSIZE = 4  # scales are fp32 in memory, whatever the file holds

# Read a row at a time, or too small to gain: never stored as codes.
_ALWAYS_DENSE = (
    "embed_tokens.weight",
    "lm_head.weight",
    "conv1d.weight",
    "in_proj_a.weight",
    "in_proj_b.weight",
)


class TensorSource(Protocol):
    """Where weights come from: a folder, a GGUF file or a random generator."""

    def get(self, name: str) -> Weight:
        """Return one tensor by its name, in the dtype of the source, or as fp8 codes."""
        ...


class WeightReader:
    """Fetches tensors of one layer in the dtype and on the device of the model."""

    def __init__(
        self, source: TensorSource, prefix: str, dtype: torch.dtype, backend: Backend
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._dtype = dtype
        self._backend = backend

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor that is dense, in `dtype` or the dtype of the model."""
        weight = self._source.get(self._prefix + name)
        if not isinstance(weight, torch.Tensor):
            raise CheckpointError(f"{self._prefix}{name} is stored as fp8, which it never is")
        return weight.to(device=self._backend.device, dtype=dtype or self._dtype)

    def linear(self, *names: str) -> Linear:
        """Return the fused linear of one or several matrices, without their `.weight`."""
        return Linear([self._matrix(f"{name}.weight") for name in names], self._backend)

    def norm(self, name: str, config: ModelConfig) -> Norm:
        """Return the norm of this configuration."""
        kind = ZeroCentredRMSNorm if config.norm_zero_centred else RMSNorm
        # Cloned: a view would keep the whole mapped file alive for a few hundred numbers.
        return kind(self.tensor(f"{name}.weight").clone(), config.rms_norm_eps, self._backend)

    def _matrix(self, name: str) -> Weight:
        weight = self._source.get(self._prefix + name)
        if isinstance(weight, torch.Tensor):
            return weight.to(device=self._backend.device, dtype=self._dtype)
        return weight.to(self._backend.device)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this configuration holds, scales left out."""
    hidden, inter = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    common: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inter, hidden),
        "mlp.up_proj.weight": (inter, hidden),
        "mlp.down_proj.weight": (hidden, inter),
    }
    for layer in range(config.num_layers):
        if config.layer_type(layer) == FULL_ATTENTION:
            mixer = _attention_tensors(config)
        else:
            assert config.linear is not None  # checked by the configuration
            mixer = _linear_tensors(config.linear, hidden)
        for name, shape in (common | mixer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def may_be_fp8(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a quantised checkpoint stores this tensor as codes."""
    return len(shape) == 2 and not name.endswith(_ALWAYS_DENSE)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights in memory, matrices of an fp8 checkpoint kept as codes and scales."""
    total = 0
    for name, shape in expected_tensors(config).items():
        size = 1
        for extent in shape:
            size *= extent
        if config.weight_format == FP8_BLOCK and may_be_fp8(name, shape):
            total += size + blocks_of(shape[0]) * blocks_of(shape[1]) * _SCALE_ITEMSIZE
        else:
            total += size * itemsize
    return total


def _attention_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * q_size if config.attn_output_gate else q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _linear_tensors(linear: LinearAttention, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "linear_attn.in_proj_qkv.weight": (linear.channels, hidden),
        "linear_attn.in_proj_z.weight": (linear.value_size, hidden),
        "linear_attn.in_proj_b.weight": (linear.value_heads, hidden),
        "linear_attn.in_proj_a.weight": (linear.value_heads, hidden),
        "linear_attn.conv1d.weight": (linear.channels, 1, CONV_WIDTH),
        "linear_attn.A_log": (linear.value_heads,),
        "linear_attn.dt_bias": (linear.value_heads,),
        "linear_attn.norm.weight": (linear.value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, linear.value_size),
    }
