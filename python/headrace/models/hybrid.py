"""The linear mixer of hybrid models: a gated delta net with a short causal convolution.

Source: Gated Delta Networks (arXiv 2412.06464), in the form of the qwen3_5 releases.
A prompt is computed in blocks of 64 tokens and generated tokens one by one. The two are equal up to
rounding, not in bits: a state says nothing of how it was reached, so whoever saves one records it.
"""

import torch

from headrace.backends.base import Backend, DeltaWeights
from headrace.kv.state import StatePool
from headrace.models.batch import PrefillSegment
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
        self._weights = DeltaWeights(
            taps=weights.tensor("linear_attn.conv1d.weight", torch.float32).squeeze(1).clone(),
            a_log=weights.tensor("linear_attn.A_log", torch.float32).clone(),
            dt_bias=weights.tensor("linear_attn.dt_bias", torch.float32).clone(),
            norm=weights.tensor("linear_attn.norm.weight").clone(),
            eps=config.rms_norm_eps,
        )
        self._output = weights.linear("linear_attn.out_proj")

    def forward(self, x: torch.Tensor, step: Step, residual: torch.Tensor) -> torch.Tensor:
        """`residual` plus the mixer over `x`, both `[T, hidden]`; advances every state."""
        pool = step.state
        assert pool is not None, "checked by the decoder"
        sizes, rows = self._sizes, step.batch.num_decode
        projected = self._qkv_z.forward(x, decode_rows=rows)
        qkv, z = torch.split(projected, [sizes.channels, sizes.value_size], dim=1)
        b, a = self._b_a.forward(x, decode_rows=rows, same_input=True).chunk(2, dim=1)
        parts = []
        if rows:
            parts.append(
                self._backend.delta_mix_step(
                    qkv[:rows],
                    z[:rows],
                    b[:rows],
                    a[:rows],
                    self._weights,
                    pool.conv[self._state_layer],
                    pool.recurrent[self._state_layer],
                    step.batch.state_slots,
                )
            )
        for segment in step.batch.segments:
            span = slice(segment.offset, segment.offset + segment.length)
            parts.append(self._run(qkv[span], z[span], b[span], a[span], segment, pool))
        mixed = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._output.forward(mixed, decode_rows=rows, residual=residual)

    def _run(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        segment: PrefillSegment,
        pool: StatePool,
    ) -> torch.Tensor:
        """New tokens of one request -> `[n, Hv * dv]`."""
        sizes, weights, tokens = self._sizes, self._weights, segment.length
        initial = segment.start > 0
        beta, g = self._backend.delta_gates(b, a, weights.a_log, weights.dt_bias)  # [n, Hv]
        mixed = self._backend.conv_prefill(
            qkv,
            weights.taps,
            pool.conv[self._state_layer],
            segment.state_slot,
            has_initial_state=initial,
        )
        q, k, v = torch.split(mixed, [sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
        out = self._backend.gated_delta_prefill(
            q.reshape(tokens, sizes.key_heads, sizes.key_head_dim),
            k.reshape(tokens, sizes.key_heads, sizes.key_head_dim),
            v.reshape(tokens, sizes.value_heads, sizes.value_head_dim),
            g,
            beta,
            pool.recurrent[self._state_layer],
            segment.state_slot,
            segment.start,
            has_initial_state=initial,
        )
        normed = self._backend.gated_rms_norm(out, z.view(out.shape), weights.norm, weights.eps)
        return normed.reshape(tokens, sizes.value_size)
