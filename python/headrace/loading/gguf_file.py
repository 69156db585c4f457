"""Reader of GGUF files of llama and qwen3: config and tensors under Hugging Face names.

Any type that `gguf.quants.dequantize` knows is read to fp32 (bf16 and fp16 stay as they are).
The library reports damage with whatever exception it happens to hit; all leave here as ours.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.errors import CheckpointError, ModelError
from headrace.models.config import ModelConfig

if TYPE_CHECKING:
    import gguf

_MAGIC = b"GGUF"
_ARCHITECTURES = ("llama", "qwen3")

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """Config, tensors and metadata of one GGUF file.

    Raises
    ------
    CheckpointError
        Not a GGUF file, truncated, or damaged.
    ModelError
        The architecture, or something it uses, is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._config = self._hf_config()
        self._tensors = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}

    @property
    def hf_config(self) -> dict[str, Any]:
        """The model as a `config.json` would describe it."""
        return dict(self._config)

    def config(self) -> ModelConfig:
        """Return the validated configuration."""
        return ModelConfig.from_hf(self._config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape `(out, in)` of every tensor; the file lists axes in reverse."""
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def fp8_names(self) -> frozenset[str]:
        """Names of tensors stored as e4m3 codes: none, as every type of GGUF is dequantised."""
        return frozenset()

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, dequantised, rows in Hugging Face order.

        Raises
        ------
        CheckpointError
            No such tensor, or a type that cannot be dequantised.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        values = self._dequantised(tensor)
        if self._config["model_type"] == "llama":
            if name.endswith("self_attn.q_proj.weight"):
                return unpermute(values, self._config["num_attention_heads"])
            if name.endswith("self_attn.k_proj.weight"):
                return unpermute(values, self._config["num_key_value_heads"])
        return values

    def metadata(self, key: str) -> Any:  # noqa: ANN401 - GGUF values have many types
        """Value of a metadata key, or None."""
        field = self._reader.fields.get(key)
        if field is None:
            return None
        try:
            return field.contents()
        except Exception as error:  # the library raises what it happens to hit
            raise CheckpointError(f"{self.path}: cannot read key {key}: {error}") from error

    def _dequantised(self, tensor: "gguf.ReaderTensor") -> torch.Tensor:
        import gguf.quants

        kind = gguf.GGMLQuantizationType(tensor.tensor_type)
        if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            # Copied: the map is read-only, which torch does not know.
            return torch.from_numpy(np.array(tensor.data))
        if kind == gguf.GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(tensor.data).view(np.int16)).view(torch.bfloat16)
        try:
            return torch.from_numpy(gguf.quants.dequantize(tensor.data, kind))
        except Exception as error:  # the library raises what it happens to hit
            raise CheckpointError(
                f"{self.path}: cannot dequantise {tensor.name} ({kind.name}): {error}"
            ) from error

    def _hf_config(self) -> dict[str, Any]:
        architecture = self.metadata("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{self.path}: GGUF architecture {architecture!r} is not supported; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )

        def required(key: str) -> Any:  # noqa: ANN401 - GGUF values have many types
            value = self.metadata(f"{architecture}.{key}")
            if value is None:
                raise ModelError(f"{self.path} has no key {architecture}.{key}")
            return value

        scaling = self.metadata(f"{architecture}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise ModelError(
                f"{self.path}: {architecture}.rope.scaling.type {scaling!r} is not supported"
            )
        names = {tensor.name for tensor in self._reader.tensors}
        heads = required("attention.head_count")
        head_dim = self.metadata(f"{architecture}.attention.key_length")
        if head_dim is None:
            head_dim = required("embedding_length") // heads
        rotary = self.metadata(f"{architecture}.rope.dimension_count")
        if rotary not in (None, head_dim):
            raise ModelError(
                f"{self.path}: {architecture}.rope.dimension_count {rotary} differs from head "
                f"dimension {head_dim}; partial rotary embedding is not supported"
            )
        theta = self.metadata(f"{architecture}.rope.freq_base")
        return {
            "architectures": [
                "LlamaForCausalLM" if architecture == "llama" else "Qwen3ForCausalLM"
            ],
            "model_type": architecture,
            "vocab_size": self._vocab_size(architecture),
            "hidden_size": required("embedding_length"),
            "intermediate_size": required("feed_forward_length"),
            "num_hidden_layers": required("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.metadata(f"{architecture}.attention.head_count_kv")
            or heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": _shortest(required("attention.layer_norm_rms_epsilon")),
            "rope_theta": 10_000.0 if theta is None else _shortest(theta),
            "max_position_embeddings": required("context_length"),
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self.metadata("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.metadata("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
        }

    def _vocab_size(self, architecture: str) -> int:
        # The embedding table may have more rows than the tokenizer has tokens.
        for tensor in self._reader.tensors:
            if tensor.name == "token_embd.weight":
                return int(tensor.shape[-1])
        raise CheckpointError(f"{self.path} ({architecture}) has no tensor token_embd.weight")


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of llama q and k weights in GGUF.

    GGUF interleaves the two halves of each rotary pair; Hugging Face keeps them D/2 apart.
    """
    out_features, in_features = rows.shape
    paired = rows.view(heads, out_features // heads // 2, 2, in_features)
    return paired.transpose(1, 2).reshape(out_features, in_features)


def _open(path: Path) -> "gguf.GGUFReader":
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if magic != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}")
    import gguf  # half a second, and only for such files

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the library raises what it happens to hit
        raise CheckpointError(f"{path} is truncated or damaged: {error}") from error


def _hf_name(name: str) -> str:
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    # Left as it is: the comparison with the expected tensors reports it by this name.
    return name


def _shortest(value: float) -> float:
    """Return the shortest decimal of the same fp32 number: 9.99999975e-06 is 1e-05."""
    return float(str(np.float32(value)))
