"""Rotary position embedding over the first R dims of a head, dim j paired with dim j + R/2.

The tables are made once for every position: taken from a table, the sine of a position has the
same bits whatever else is in the step.
"""

import torch


class RotaryEmbedding:
    """fp32 tables of `cos` and `sin`, `[max_position, rotary_dim / 2]`."""

    def __init__(
        self, rotary_dim: int, theta: float, max_position: int, device: torch.device | str
    ) -> None:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        inverse_frequency = 1.0 / (theta**exponents)  # [R/2]
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequency)  # [max_position, R/2]
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin for `positions [T]`, shaped `[T, 1, R/2]` to go over the heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dims of `x [T, heads, D]`, R being twice the width of cos.

    Computed in fp32 and rounded once to the dtype of x; the other dims pass through.
    """
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if rotary_dim == x.shape[-1]:
        return turned.to(x.dtype)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)
