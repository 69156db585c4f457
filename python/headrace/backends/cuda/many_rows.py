"""Matrix products of a prompt: library kernels, cut so that a row has the same bits in any step.

A library chooses its kernel by the number of rows, and another kernel may add in another order. So
each matrix is asked once, with random rows, which sizes of a block give the bits of one chosen size
at every place in the block; products are then made of such blocks, the last one padded. This is a
measurement, not a proof: it holds for the library, device and matrix it was made with.

Owns the sizes by shape. No locks.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from headrace.backends.base import Weight
from headrace.backends.cuda.fused import silu_mul
from headrace.backends.cuda.prefill import GROUP, quantise_rows, quantise_silu_mul
from headrace.layers.block_fp8 import BLOCK, BlockFp8Weight

# Rows of a block. 1024 sets the bits: below it products are bounded by the weights as much as by
# arithmetic, above it little is gained.
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CHOSEN = 1024
# One period of the probe; a smaller block repeats nothing.
_PROBE_ROWS = SIZES[0]
# A block may be padded by this part of itself instead of being cut again.
_PADDING = 0.25


def cut(rows: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Blocks (size, rows used) for so many rows, all but the last full; sizes ascending."""
    blocks = []
    while rows > 0:
        above = next((size for size in sizes if size >= rows), None)
        if above is not None and (above == sizes[0] or above - rows <= _PADDING * above):
            blocks.append((above, rows))
            break
        size = max(size for size in sizes if size <= rows)
        blocks.append((size, size))
        rows -= size
    return blocks


class ManyRows:
    """Products of any number of rows with a weight in the storage of `SkinnyGemm`.

    fixed: whether the bits of a row may not depend on the others, at the price of blocks.
    """

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._sizes: dict[tuple[object, ...], tuple[int, ...]] = {}

    def probe(self, weight: Weight) -> tuple[int, ...]:
        """Sizes of blocks that give the same bits for a matrix like this one."""
        coded = isinstance(weight, BlockFp8Weight)
        dtype = torch.bfloat16 if isinstance(weight, BlockFp8Weight) else weight.dtype
        key = (*weight.shape, dtype, coded)
        if key not in self._sizes:
            self._sizes[key] = _equal_sizes(weight, dtype) if self._fixed else SIZES
        return self._sizes[key]

    def linear(self, x: torch.Tensor, weight: Weight, *, gated: bool = False) -> torch.Tensor:
        """`x [rows, in]` times `weight [out, in]` -> `[rows, out]` in the dtype of x.

        gated: x is `[rows, 2 * in]`, of which `silu_mul` is multiplied; the bits are the same.
        """
        if gated and not (isinstance(weight, BlockFp8Weight) and takes_codes(weight)):
            x, gated = silu_mul(x), False
        rows = x.shape[0]
        if not self._fixed and not isinstance(weight, BlockFp8Weight):
            return F.linear(x, weight)
        blocks = cut(rows, self.probe(weight))
        if blocks == [(rows, rows)]:
            return _product(x, weight, gated=gated)
        out = torch.empty((rows, weight.shape[0]), dtype=x.dtype, device=x.device)
        first = 0
        for size, used in blocks:
            block = x[first : first + used]
            if used < size:
                block = F.pad(block, (0, 0, 0, size - used))
            out[first : first + used] = _product(block, weight, gated=gated)[:used]
            first += used
        return out


def takes_codes(weight: BlockFp8Weight) -> bool:
    """Whether the library's block-scaled product has this shape; its scales come in fours."""
    rows, columns = weight.shape
    return rows % BLOCK == 0 and columns % (4 * BLOCK) == 0


def _product(x: torch.Tensor, weight: Weight, *, gated: bool = False) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight)
    if not takes_codes(weight):
        return F.linear(x, weight.dequantise(x.dtype))
    codes, scales = quantise_silu_mul(x) if gated else quantise_rows(x)
    return F.scaled_mm(
        codes,
        weight.codes.t(),
        scales,
        ScalingType.BlockWise1x128,
        weight.scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )


def _equal_sizes(weight: Weight, dtype: torch.dtype) -> tuple[int, ...]:
    device = weight.codes.device if isinstance(weight, BlockFp8Weight) else weight.device
    generator = torch.Generator(device).manual_seed(0)
    columns = weight.shape[1]
    rows = torch.randn((_PROBE_ROWS, columns), generator=generator, device=device).to(dtype)
    expected = _product(rows.repeat(_CHOSEN // _PROBE_ROWS, 1), weight)[:_PROBE_ROWS]

    def equal(size: int) -> bool:
        out = _product(rows.repeat(size // _PROBE_ROWS, 1), weight)
        return torch.equal(out, expected.repeat(size // _PROBE_ROWS, 1))

    # If the places of the chosen size itself differ, it stands alone: nothing fixes the bits then.
    return tuple(size for size in SIZES if size == _CHOSEN or equal(size))


assert GROUP == BLOCK, "activations and weights have the same groups along a row"
