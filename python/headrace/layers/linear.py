"""Linear layer without bias: one place that knows how its weight is stored."""

from collections.abc import Sequence

import torch

from headrace.backends.base import Backend


class Linear:
    """`y = x W^T` with a weight `[out, in]` in the backend's own storage.

    Several weights over the same input may be fused: they are stacked by rows, and the result has
    their outputs side by side, in order.
    """

    def __init__(self, weights: Sequence[torch.Tensor], backend: Backend) -> None:
        dense = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.out_features, self.in_features = dense.shape
        self.weight = backend.pack_linear(dense)
        self._backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in] -> [rows, out]`, same dtype."""
        return self._backend.linear(x, self.weight)
