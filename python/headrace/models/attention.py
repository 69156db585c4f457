"""Full attention of all families: optional q and k norms, partial rotary, optional output gate."""

import torch

from headrace.backends.base import Backend
from headrace.layers import rope
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
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._gated = config.attn_output_gate
        self._qkv = weights.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = weights.linear("self_attn.o_proj")
        self._q_norm = self._k_norm = None
        if config.qk_norm:
            self._q_norm = weights.norm("self_attn.q_norm", config)
            self._k_norm = weights.norm("self_attn.k_norm", config)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x [T, hidden]` -> `[T, hidden]`; appends K and V of all T tokens."""
        batch, kv = step.batch, step.kv
        heads, gate = self._split_gate(self._qkv.forward(x))
        q, k, v = self._rotated(heads, step)
        self._backend.kv_append(self._kv_layer, kv, batch.token_pages, batch.token_offsets, k, v)
        attended = self._attend(q, step).view(x.shape[0], -1)  # [T, Hq * D]
        if gate is not None:
            attended = self._backend.sigmoid_gate(attended, gate)
        return self._output.forward(attended)

    def _split_gate(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Heads of q, k, v `[T, Hq + 2 Hkv, D]`, and the gate `[T, Hq * D]` if there is one."""
        tokens = projected.shape[0]
        if not self._gated:
            return projected.view(tokens, sum(self._heads), self._head_dim), None
        # q_proj holds [q | gate] for each head, so both stay together when heads are split.
        q_size = self._heads[0] * self._head_dim
        pairs = projected[:, : 2 * q_size].view(tokens, self._heads[0], 2, self._head_dim)
        kv_heads = projected[:, 2 * q_size :].view(tokens, 2 * self._heads[1], self._head_dim)
        gate = pairs[:, :, 1].reshape(tokens, q_size)
        return torch.cat((pairs[:, :, 0], kv_heads), dim=1), gate

    def _rotated(
        self, heads: torch.Tensor, step: Step
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

    def _attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        batch, kv = step.batch, step.kv
        rows = batch.num_decode
        if not batch.segments:
            return self._backend.attention_decode(
                q, self._kv_layer, kv, batch.tables, batch.decode_lengths, batch.window
            )
        assert step.mask is not None  # made whenever there are segments
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if rows:
            out[:rows] = self._backend.attention_decode(
                q[:rows], self._kv_layer, kv, batch.tables, batch.decode_lengths, batch.window
            )
        for segment in batch.segments:
            span = slice(segment.offset, segment.offset + segment.length)
            out[span] = self._backend.attention_prefill(
                q[span], self._kv_layer, kv, segment.table, segment.start, step.mask, batch.window
            )
        return out
