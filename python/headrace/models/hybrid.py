"""The linear mixer of hybrid models: a gated delta net with a short causal convolution.

Source: Gated Delta Networks (arXiv 2412.06464), in the form of the qwen3_5 releases.
A prompt is computed in blocks of 64 tokens and generated tokens one by one. The two are equal up to
rounding, not in bits: a state says nothing of how it was reached, so whoever saves one records it.
"""

import torch

from headrace.backends.base import Backend, DeltaWeights
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
        pool, batch = step.state, step.batch
        assert pool is not None, "checked by the decoder"
        sizes, rows = self._sizes, batch.num_decode
        projected = self._qkv_z.forward(x, decode_rows=rows)
        qkv, z = torch.split(projected, [sizes.channels, sizes.value_size], dim=1)
        b, a = self._b_a.forward(x, decode_rows=rows, same_input=True).chunk(2, dim=1)
        states = (pool.conv[self._state_layer], pool.recurrent[self._state_layer])
        out = qkv.new_empty((len(x), sizes.value_size)) if batch.segments else None
        mixed = None
        if rows:
            mixed = self._backend.delta_mix_step(
                qkv[:rows],
                z[:rows],
                b[:rows],
                a[:rows],
                self._weights,
                *states,
                batch.state_slots,
                out=None if out is None else out[:rows],
            )
        if out is not None:
            self._backend.delta_mix_prefill(
                qkv, z, b, a, self._weights, *states, batch.segments, out=out
            )
            mixed = out
        assert mixed is not None, "a batch has tokens"
        return self._output.forward(mixed, decode_rows=rows, residual=residual)
