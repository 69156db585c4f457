"""RMSNorm with a plain weight, in the rounding order of llama and qwen3."""

import torch

from headrace.backends.base import Backend


class RMSNorm:
    """Normalise the last axis in fp32, cast to the model dtype, then multiply by the weight."""

    def __init__(self, weight: torch.Tensor, eps: float, backend: Backend) -> None:
        self.weight = weight
        self.eps = eps
        self._backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width] -> [..., width]`, same dtype."""
        return self._backend.rms_norm(x, self.weight, self.eps)
