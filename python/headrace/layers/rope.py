"""Rotary position embedding over whole heads, dim j paired with dim j + D/2.

The tables are made once for every position: taken from a table, the sine of a position has the
same bits whatever else is in the step.
"""

import torch


class RotaryEmbedding:
    """fp32 tables of `cos` and `sin`, `[max_position, head_dim / 2]`."""

    def __init__(
        self, head_dim: int, theta: float, max_position: int, device: torch.device | str
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse_frequency = 1.0 / (theta**exponents)  # [D/2]
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequency)  # [max_position, D/2]
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin for `positions [T]`, shaped `[T, 1, D/2]` to go over the heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x [T, heads, D]`; computed in fp32 and rounded once to the dtype of x."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
