"""The decoder of all families: embedding, layers of a mixer and an MLP, norm, head.

Owns the weights. Decides nothing: what to run is in the `ForwardBatch`, where KV and state live is
in their pools, how an operation runs is in the backend. Dense and hybrid models differ in the mixer
of a layer and in the norm.
"""

import torch

from headrace.backends.base import Backend
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.layers import rope
from headrace.layers.linear import Linear
from headrace.models.attention import Attention
from headrace.models.batch import ForwardBatch
from headrace.models.config import ModelConfig
from headrace.models.hybrid import LinearMixer
from headrace.models.hybrid_config import FULL_ATTENTION
from headrace.models.step import Gates, Step
from headrace.models.tensors import TensorSource, WeightReader


class _Mlp:
    def __init__(self, weights: WeightReader, backend: Backend) -> None:
        self._backend = backend
        self._gate_up = weights.linear("mlp.gate_proj", "mlp.up_proj")
        self._down = weights.linear("mlp.down_proj")

    def forward(self, x: torch.Tensor, step: Step, residual: torch.Tensor) -> torch.Tensor:
        rows = step.batch.num_decode
        gate_up = self._gate_up.weights
        if len(gate_up) == 1:
            down = self._down.weights[0]
            return self._backend.mlp(x, gate_up[0], down, decode_rows=rows, residual=residual)
        product = self._backend.silu_mul(self._gate_up.forward(x, decode_rows=rows))
        return self._down.forward(product, decode_rows=rows, residual=residual)


class _Layer:
    def __init__(
        self, config: ModelConfig, layer: int, weights: WeightReader, backend: Backend
    ) -> None:
        kind = config.layer_type(layer)
        # KV and state pools count only the layers that use them.
        index = sum(config.layer_type(before) == kind for before in range(layer))
        self._input_norm = weights.norm("input_layernorm", config)
        self._mixer: Attention | LinearMixer
        if kind == FULL_ATTENTION:
            self._mixer = Attention(config, index, weights, backend)
        else:
            self._mixer = LinearMixer(config, index, weights, backend)
        self._mlp_norm = weights.norm("post_attention_layernorm", config)
        self._mlp = _Mlp(weights, backend)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        x = self._mixer.forward(self._input_norm.forward(x), step, x)
        return self._mlp.forward(self._mlp_norm.forward(x), step, x)


class DecoderModel:
    """A decoder with its weights on one device.

    Weights are read tensor by tensor; matrices over the same input are fused on the way, so at most
    one layer's matrix exists twice at a time.

    Raises
    ------
    ConfigError
        The backend does not support the model or the dtype.
    """

    def __init__(
        self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, backend: Backend
    ) -> None:
        backend.check_model(config, dtype)
        self.config = config
        self.dtype = dtype
        self.backend = backend
        root = WeightReader(source, "model.", dtype, backend)
        # Cloned for the same reason as the norms; the table is read a row at a time.
        self._embedding = root.tensor("embed_tokens.weight").clone()  # [vocab, hidden]
        self._layers = [
            _Layer(
                config,
                layer,
                WeightReader(source, f"model.layers.{layer}.", dtype, backend),
                backend,
            )
            for layer in range(config.num_layers)
        ]
        self._norm = root.norm("norm", config)
        if config.tie_word_embeddings:
            self._head = Linear([self._embedding], backend)
        else:
            self._head = WeightReader(source, "", dtype, backend).linear("lm_head")
        rotary_dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
        self._rope = rope.RotaryEmbedding(
            rotary_dim, config.rope_theta, config.max_position, backend.device
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv: KVCache,
        state: StatePool | None = None,
        gates: Gates | None = None,
    ) -> torch.Tensor:
        """Run all tokens of the batch once, append their KV and advance their states.

        state: needed by hybrid models, ignored by dense ones. A segment that starts at position 0
        starts from a zero state, whatever its slot holds. A decode row of length 0 is padding: it
        reads and writes no KV and no state, and its logits mean nothing. gates: called around every
        layer.

        Returns fp32 logits `[S, vocab]`, one row for each entry of `batch.sample_index`, in order,
        or for every token.

        Raises
        ------
        ConfigError
            The model is hybrid and there is no state pool.
        """
        if self.config.linear is not None and state is None:
            raise ConfigError("a hybrid model needs a StatePool beside its KV cache")
        step = Step(batch, kv, state, self.backend.rotary(self._rope, batch.positions))
        x = self.backend.embed(batch.token_ids, self._embedding, batch.feed)  # [T, hidden]
        for index, layer in enumerate(self._layers):
            if gates is not None:
                gates.before_layer(index)
            x = layer.forward(x, step)
            if gates is not None:
                gates.after_layer(index)
        # Only sampled rows reach the head, the largest matrix of small models.
        if batch.sample_index is not None:
            x = x[batch.sample_index]
        return self._head.forward(self._norm.forward(x), decode_rows=x.shape[0], wide=True)
