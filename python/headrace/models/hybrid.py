"""The linear mixer of hybrid models: a gated delta net with a short causal convolution.

Source: Gated Delta Networks (arXiv 2412.06464), in the form of the qwen3_5 releases.
A prompt is computed in blocks of 64 tokens and generated tokens one by one. The two are equal up to
rounding, not in bits: a state says nothing of how it was reached, so whoever saves one records it.
"""

import torch

from headrace.backends.base import Backend
from headrace.kv.state import StatePool
from headrace.models.config import ModelConfig
from headrace.models.step import Step
from headrace.models.tensors import WeightReader


class LinearMixer:
    """Mixer of one layer; `state_layer` is its running number over the layers with a state."""

    def __init__(
        self, config: ModelConfig, state_layer: int, weights: WeightReader, backend: Backend
    ) -> None:
        assert config.linear is not None  # checked by the configuration
        self._sizes = config.linear
        self._state_layer = state_layer
        self._backend = backend
        self._qkv_z = weights.linear("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
        self._b_a = weights.linear("linear_attn.in_proj_b", "linear_attn.in_proj_a")
        # The decay is an exponential of an exponential: fp32 from the file on.
        self._a_log = weights.tensor("linear_attn.A_log", torch.float32).clone()  # [Hv]
        self._dt_bias = weights.tensor("linear_attn.dt_bias", torch.float32).clone()  # [Hv]
        taps = weights.tensor("linear_attn.conv1d.weight", torch.float32)
        self._taps = taps.squeeze(1).clone()  # [channels, 4]
        self._norm = weights.gated_norm("linear_attn.norm", config)
        self._output = weights.linear("linear_attn.out_proj")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """`x [T, hidden]` -> `[T, hidden]`; advances the state of every request of the batch."""
        assert step.state is not None  # checked by the decoder
        sizes = self._sizes
        projected = self._qkv_z.forward(x)
        qkv, z = torch.split(projected, [sizes.channels, sizes.value_size], dim=1)
        b, a = self._b_a.forward(x).chunk(2, dim=1)
        beta, g = self._backend.delta_gates(b, a, self._a_log, self._dt_bias)  # [T, Hv]
        mixed = self._convolved(qkv, step, step.state)
        out = self._recurred(mixed, beta, g, step, step.state)  # [T, Hv, dv]
        normed = self._norm.forward(out, z.reshape(out.shape))
        return self._output.forward(normed.view(x.shape[0], sizes.value_size))

    def _convolved(self, qkv: torch.Tensor, step: Step, pool: StatePool) -> torch.Tensor:
        batch, rows = step.batch, step.batch.num_decode
        state = pool.conv[self._state_layer]
        parts = []
        if rows:
            slots = batch.state_slots
            parts.append(self._backend.conv_step(qkv[:rows], self._taps, state, slots))
        for segment in batch.segments:
            run = qkv[segment.offset : segment.offset + segment.length]
            parts.append(
                self._backend.conv_prefill(
                    run, self._taps, state, segment.state_slot, has_initial_state=segment.start > 0
                )
            )
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _recurred(
        self,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        g: torch.Tensor,
        step: Step,
        pool: StatePool,
    ) -> torch.Tensor:
        batch, rows, sizes = step.batch, step.batch.num_decode, self._sizes
        q, k, v = torch.split(mixed, [sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
        q = q.reshape(-1, sizes.key_heads, sizes.key_head_dim)
        k = k.reshape(-1, sizes.key_heads, sizes.key_head_dim)
        v = v.reshape(-1, sizes.value_heads, sizes.value_head_dim)
        state = pool.recurrent[self._state_layer]
        parts = []
        if rows:
            parts.append(
                self._backend.gated_delta_step(
                    q[:rows],
                    k[:rows],
                    v[:rows],
                    g[:rows],
                    beta[:rows],
                    state,
                    batch.state_slots,
                )
            )
        for segment in batch.segments:
            span = slice(segment.offset, segment.offset + segment.length)
            parts.append(
                self._backend.gated_delta_prefill(
                    q[span],
                    k[span],
                    v[span],
                    g[span],
                    beta[span],
                    state,
                    segment.state_slot,
                    segment.start,
                    has_initial_state=segment.start > 0,
                )
            )
        return torch.cat(parts) if len(parts) > 1 else parts[0]
