"""The dense decoder of llama and qwen3: one class, per-head q and k norms by flag.

Owns the weights. Decides nothing: what to run is in the `ForwardBatch`, where the KV lives is in
the `SlotKVCache`, how an operation runs is in the backend.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.backends.base import PREFILL_TILE, Backend
from headrace.errors import ConfigError
from headrace.kv.slots import SlotKVCache
from headrace.layers import rope
from headrace.layers.linear import Linear
from headrace.layers.norm import RMSNorm
from headrace.models.batch import ForwardBatch
from headrace.models.config import ModelConfig


class TensorSource(Protocol):
    """Where weights come from: a folder, a GGUF file or a random generator."""

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor by its Hugging Face name, in the dtype of the source."""
        ...


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this configuration holds."""
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inter, hidden),
        "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }
    if config.qk_norm:
        layer_shapes |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in layer_shapes.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of one forward pass share."""

    batch: ForwardBatch
    kv: SlotKVCache
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None  # None without prefill segments


class _WeightReader:
    """Fetches tensors of one layer in the dtype and on the device of the model."""

    def __init__(
        self, source: TensorSource, prefix: str, dtype: torch.dtype, backend: Backend
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._dtype = dtype
        self._backend = backend

    def tensor(self, name: str) -> torch.Tensor:
        source = self._source.get(f"{self._prefix}{name}.weight")
        return source.to(device=self._backend.device, dtype=self._dtype)

    def linear(self, *names: str) -> Linear:
        return Linear([self.tensor(name) for name in names], self._backend)

    def norm(self, name: str, eps: float) -> RMSNorm:
        # Cloned: a view would keep the whole mapped file alive for a few hundred numbers.
        return RMSNorm(self.tensor(name).clone(), eps, self._backend)


class _Attention:
    def __init__(
        self, config: ModelConfig, layer: int, weights: _WeightReader, backend: Backend
    ) -> None:
        self._layer = layer
        self._backend = backend
        self._head_dim = config.head_dim
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._qkv = weights.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = weights.linear("self_attn.o_proj")
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            self._q_norm = weights.norm("self_attn.q_norm", config.rms_norm_eps)
            self._k_norm = weights.norm("self_attn.k_norm", config.rms_norm_eps)

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        """`x [T, hidden]` -> `[T, hidden]`; appends K and V of all T tokens."""
        batch, kv = step.batch, step.kv
        heads = self._qkv.forward(x).view(x.shape[0], sum(self._heads), self._head_dim)
        q, k, v = self._rotated(heads, step)
        self._backend.kv_append(kv.k, kv.v, self._layer, batch.token_slots, batch.positions, k, v)
        attended = self._attend(q, step)  # [T, Hq, D]
        return self._output.forward(attended.view(x.shape[0], -1))

    def _rotated(
        self, heads: torch.Tensor, step: _Step
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._q_norm is not None and self._k_norm is not None:
            q, k, v = torch.split(heads, list(self._heads), dim=1)
            q = rope.apply(self._q_norm.forward(q), step.cos, step.sin)
            return q, rope.apply(self._k_norm.forward(k), step.cos, step.sin), v
        # Without norms q and k turn alike, so one call does both.
        q_heads, k_heads, v_heads = self._heads
        qk, v = torch.split(heads, [q_heads + k_heads, v_heads], dim=1)
        turned = rope.apply(qk, step.cos, step.sin)
        return turned[:, :q_heads], turned[:, q_heads:], v

    def _attend(self, q: torch.Tensor, step: _Step) -> torch.Tensor:
        batch, kv = step.batch, step.kv
        rows = batch.num_decode
        if not batch.segments:
            return self._backend.attention_decode(
                q, self._layer, kv, batch.decode_slots, batch.decode_lengths
            )
        assert step.mask is not None  # made whenever there are segments
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows:
            out[:rows] = self._backend.attention_decode(
                q[:rows], self._layer, kv, batch.decode_slots, batch.decode_lengths
            )
        for segment in batch.segments:
            span = slice(segment.offset, segment.offset + segment.length)
            out[span] = self._backend.attention_prefill(
                q[span], self._layer, kv, segment.slot, segment.start, step.mask
            )
        return out


class _Mlp:
    def __init__(self, weights: _WeightReader, backend: Backend) -> None:
        self._backend = backend
        self._gate_up = weights.linear("mlp.gate_proj", "mlp.up_proj")
        self._down = weights.linear("mlp.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.forward(self._backend.silu_mul(self._gate_up.forward(x)))


class _Layer:
    def __init__(
        self, config: ModelConfig, layer: int, weights: _WeightReader, backend: Backend
    ) -> None:
        self._input_norm = weights.norm("input_layernorm", config.rms_norm_eps)
        self._attention = _Attention(config, layer, weights, backend)
        self._mlp_norm = weights.norm("post_attention_layernorm", config.rms_norm_eps)
        self._mlp = _Mlp(weights, backend)

    def forward(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        x = x + self._attention.forward(self._input_norm.forward(x), step)
        return x + self._mlp.forward(self._mlp_norm.forward(x))


class DecoderModel:
    """A dense decoder with its weights on one device.

    Weights are read tensor by tensor; the q, k, v and the gate, up matrices are fused on the way,
    so at most one layer's matrix exists twice at a time.

    Raises
    ------
    ConfigError
        The backend does not support the dtype.
    """

    def __init__(
        self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, backend: Backend
    ) -> None:
        if dtype not in backend.supported_dtypes:
            supported = ", ".join(sorted(str(entry) for entry in backend.supported_dtypes))
            raise ConfigError(f"dtype {dtype} is not supported by {backend.name}; use {supported}")
        self.config = config
        self.dtype = dtype
        self.backend = backend
        root = _WeightReader(source, "model.", dtype, backend)
        # Cloned for the same reason as the norms; the table is read a row at a time.
        self._embedding = root.tensor("embed_tokens").clone()  # [vocab, hidden]
        self._layers = [
            _Layer(
                config,
                layer,
                _WeightReader(source, f"model.layers.{layer}.", dtype, backend),
                backend,
            )
            for layer in range(config.num_layers)
        ]
        self._norm = root.norm("norm", config.rms_norm_eps)
        if config.tie_word_embeddings:
            self._head = Linear([self._embedding], backend)
        else:
            self._head = _WeightReader(source, "", dtype, backend).linear("lm_head")
        self._rope = rope.RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position, backend.device
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: SlotKVCache) -> torch.Tensor:
        """Run all tokens of the batch once and append their KV.

        Returns fp32 logits `[S, vocab]`, one row for each entry of `batch.sample_index`, in order.
        """
        cos, sin = self._rope.at(batch.positions)
        mask = None
        if batch.segments:
            last = max(segment.start + segment.length - 1 for segment in batch.segments)
            mask = self.backend.prefill_mask(last - last % PREFILL_TILE, self.dtype)
        step = _Step(batch, kv, cos, sin, mask)
        x = F.embedding(batch.token_ids, self._embedding)  # [T, hidden]
        for layer in self._layers:
            x = layer.forward(x, step)
        # Only sampled rows reach the head, the largest matrix of small models.
        sampled = self._norm.forward(x[batch.sample_index])
        return self._head.forward(sampled).float()
