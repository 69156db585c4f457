"""Linear layer without bias: one place that knows how its weight is stored."""

from collections.abc import Sequence

import torch

from headrace.backends.base import Backend, Weight
from headrace.layers import block_fp8
from headrace.layers.block_fp8 import BlockFp8Weight


class Linear:
    """`y = x W^T` with a weight `[out, in]`, dense or fp8, in the backend's own storage.

    Several weights over the same input may be fused: the result has their outputs side by side, in
    order. They become one matrix where their storage allows it, and stay apart otherwise.
    """

    def __init__(self, weights: Sequence[Weight], backend: Backend) -> None:
        merged = _merged(weights)
        self.out_features = sum(weight.shape[0] for weight in merged)
        self.in_features = merged[0].shape[1]
        self.weights = [backend.pack_linear(weight) for weight in merged]
        self._backend = backend

    def forward(
        self,
        x: torch.Tensor,
        *,
        decode_rows: int = 0,
        residual: torch.Tensor | None = None,
        wide: bool = False,
        same_input: bool = False,
    ) -> torch.Tensor:
        """`[rows, in] -> [rows, out]`; options as in `Backend.linear`."""
        if len(self.weights) == 1:
            return self._backend.linear(
                x,
                self.weights[0],
                decode_rows=decode_rows,
                residual=residual,
                wide=wide,
                same_input=same_input,
            )
        assert residual is None, "only a single matrix writes to the residual stream"
        parts = [
            self._backend.linear(x, weight, decode_rows=decode_rows, wide=wide)
            for weight in self.weights
        ]
        return torch.cat(parts, dim=-1)


def _merged(weights: Sequence[Weight]) -> list[Weight]:
    if len(weights) == 1:
        return list(weights)
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(dense) == len(weights):
        return [torch.cat(dense)]
    coded = [weight for weight in weights if isinstance(weight, BlockFp8Weight)]
    stacked = block_fp8.stack(coded) if len(coded) == len(weights) else None
    return list(weights) if stacked is None else [stacked]
