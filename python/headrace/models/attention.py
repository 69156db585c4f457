"""Full attention of all families: optional q and k norms, partial rotary, optional output gate."""

import torch

from headrace.backends.base import Backend
from headrace.layers.norm import Norm
from headrace.models.config import ModelConfig
from headrace.models.step import Step
from headrace.models.tensors import WeightReader


class Attention:
    """Attention of one layer; `kv_layer` is its running number over the layers with KV."""

    def __init__(
        self, config: ModelConfig, kv_layer: int, weights: WeightReader, backend: Backend
    ) -> None:
        self._kv_layer = kv_layer
        self._backend = backend
        self._head_dim = config.head_dim
        self._heads = (config.num_heads, config.num_kv_heads)
        self._gated = config.attn_output_gate
        self._qkv = weights.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = weights.linear("self_attn.o_proj")
        self._norms: tuple[Norm, Norm] | None = None
        if config.qk_norm:
            names = ("self_attn.q_norm", "self_attn.k_norm")
            q_norm, k_norm = (weights.norm(name, config) for name in names)
            self._norms = (q_norm, k_norm)

    def forward(self, x: torch.Tensor, step: Step, residual: torch.Tensor) -> torch.Tensor:
        """`residual` plus attention over `x`, both `[T, hidden]`; appends K and V of all tokens."""
        rows = step.batch.num_decode
        q, k, v, gate = self._split(self._qkv.forward(x, decode_rows=rows))
        q = self._backend.rotate_append(
            self._kv_layer, step.kv, step.batch, q, k, v, self._norms, step.rotary
        )
        attended = self._attend(q, step).view(x.shape[0], -1)  # [T, Hq * D]
        if gate is not None:
            attended = self._backend.sigmoid_gate(attended, gate)
        return self._output.forward(attended, decode_rows=rows, residual=residual)

    def _split(
        self, projected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Views of q, k, v `[T, heads, D]`, and of the gate `[T, Hq, D]` if there is one."""
        tokens, (q_heads, kv_heads) = projected.shape[0], self._heads
        if not self._gated:
            heads = projected.view(tokens, q_heads + 2 * kv_heads, self._head_dim)
            q, k, v = torch.split(heads, [q_heads, kv_heads, kv_heads], dim=1)
            return q, k, v, None
        # q_proj holds [q | gate] for each head, so both stay together when heads are split.
        q_size = 2 * q_heads * self._head_dim
        pairs = projected[:, :q_size].view(tokens, q_heads, 2, self._head_dim)
        k, v = projected[:, q_size:].view(tokens, 2, kv_heads, self._head_dim).unbind(1)
        return pairs[:, :, 0], k, v, pairs[:, :, 1]

    def _attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        batch, kv = step.batch, step.kv
        rows = batch.num_decode
        if not batch.segments:
            return self._backend.attention_decode(
                q, self._kv_layer, kv, batch.tables, batch.decode_lengths, batch.window
            )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows:
            out[:rows] = self._backend.attention_decode(
                q[:rows], self._kv_layer, kv, batch.tables, batch.decode_lengths, batch.window
            )
        self._backend.attention_prefill(
            q, self._kv_layer, kv, batch.segments, batch.window, out=out
        )
        return out
