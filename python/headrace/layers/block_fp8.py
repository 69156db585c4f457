"""A matrix as e4m3 codes with one scale for every 128 x 128 block; ragged edges have blocks too.

Dequantised values are `code * scale`: the "inv" in the checkpoints' names does not mean a division.
With bf16 scales the product is exact in fp32 (4 and 8 significand bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK = 128
E4M3_MAX = 448.0
# e4m3 has no infinity and one NaN of either sign, whose low seven bits are all set.
_NAN_CODE = 0x7F


def blocks_of(size: int) -> int:
    """Blocks that cover `size` rows or columns."""
    return -(-size // BLOCK)


@dataclass(frozen=True, slots=True, eq=False)
class BlockFp8Weight:
    """Codes `[out, in]` float8_e4m3fn and fp32 scales `[out blocks, in blocks]`.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.float8_e4m3fn or self.codes.ndim != 2:
            raise ValueError(f"codes are {self.codes.dtype} of {self.codes.ndim} axes")
        rows, columns = self.codes.shape
        expected = (blocks_of(rows), blocks_of(columns))
        if self.scales.dtype != torch.float32 or self.scales.shape != expected:
            raise ValueError(
                f"scales of a [{rows}, {columns}] matrix must be float32 {list(expected)}, got "
                f"{self.scales.dtype} {list(self.scales.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.codes.shape

    def to(self, device: torch.device | str) -> "BlockFp8Weight":
        """Return the same weight on another device."""
        return BlockFp8Weight(self.codes.to(device), self.scales.to(device))

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return `[out, in]` in `dtype`: the product in fp32, rounded once."""
        rows, columns = self.codes.shape
        scales = self.scales.repeat_interleave(BLOCK, 0)[:rows]
        scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
        return self.codes.float().mul_(scales).to(dtype)

    def has_nan(self) -> bool:
        """Whether a code or a scale is not a finite number."""
        codes = self.codes.contiguous().view(torch.uint8)
        return bool((codes & _NAN_CODE).eq(_NAN_CODE).any()) or not bool(
            self.scales.isfinite().all()
        )


def quantise(weight: torch.Tensor) -> BlockFp8Weight:
    """Code a matrix `[out, in]`, the largest value of each block as the largest code."""
    rows, columns = weight.shape
    padding = (0, -columns % BLOCK, 0, -rows % BLOCK)
    blocks = F.pad(weight.float(), padding).view(blocks_of(rows), BLOCK, blocks_of(columns), BLOCK)
    # bf16, as checkpoints store it. A block of zeros keeps the scale 1.
    largest = (blocks.abs().amax((1, 3)) / E4M3_MAX).bfloat16().float()
    scales = torch.where(largest > 0, largest, 1.0)
    scaled = (blocks / scales[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(blocks_of(rows) * BLOCK, -1)
    return BlockFp8Weight(codes[:rows, :columns].contiguous(), scales)


def stack(weights: Sequence[BlockFp8Weight]) -> BlockFp8Weight | None:
    """Stack by rows, or None where a block would then hold rows of two matrices."""
    if any(weight.shape[0] % BLOCK for weight in weights[:-1]):
        return None
    return BlockFp8Weight(
        torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(torch.float8_e4m3fn),
        torch.cat([weight.scales for weight in weights]),
    )
