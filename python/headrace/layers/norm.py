"""RMS norms over the last axis: plain and zero-centred.

They differ in where they round to the model dtype, and that is what makes them two.
"""

from typing import Protocol

import torch

from headrace.backends.base import Backend


class Norm(Protocol):
    """Norm of one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width] -> [..., width]`, same dtype."""
        ...


class RMSNorm:
    """Of llama and qwen3: normalise in fp32, cast to the model dtype, then multiply by w."""

    def __init__(self, weight: torch.Tensor, eps: float, backend: Backend) -> None:
        self.weight = weight
        self.eps = eps
        self._backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width] -> [..., width]`, same dtype."""
        return self._backend.rms_norm(x, self.weight, self.eps)


class ZeroCentredRMSNorm:
    """Of hybrid models: normalise and multiply by 1 + w in fp32, then cast once."""

    def __init__(self, weight: torch.Tensor, eps: float, backend: Backend) -> None:
        self.scale = 1.0 + weight.float()
        self.eps = eps
        self._backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width] -> [..., width]`, same dtype."""
        return self._backend.rms_norm_wide(x, self.scale, self.eps)
