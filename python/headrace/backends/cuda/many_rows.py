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

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        residual: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """`x [rows, in]` times `weight [out, in]` -> `[rows, out]` in the dtype of x.

        residual: `[rows, out]`, added; it becomes the result. gated: x is `[rows, 2 * in]`, of
        which `silu_mul` is multiplied; the bits are the same.
        """
        if gated and not (isinstance(weight, BlockFp8Weight) and takes_codes(weight)):
            x, gated = silu_mul(x), False
        rows = x.shape[0]
        if not self._fixed and not isinstance(weight, BlockFp8Weight):
            return _product(x, weight, residual)
        blocks = cut(rows, self.probe(weight))
        if blocks == [(rows, rows)]:
            return _product(x, weight, residual, gated=gated)
        out = residual
        if out is None:
            out = torch.empty((rows, weight.shape[0]), dtype=x.dtype, device=x.device)
        first = 0
        for size, used in blocks:
            part = slice(first, first + used)
            block, addend = x[part], None if residual is None else residual[part]
            if used < size:
                block = _padded(block, size)
                addend = None if addend is None else _padded(addend, size)
            product = _product(block, weight, addend, gated=gated)
            if residual is None or used < size:
                out[part] = product[:used]
            first += used
        return out


def takes_codes(weight: BlockFp8Weight) -> bool:
    """Whether the library's block-scaled product has this shape; its scales come in fours."""
    rows, columns = weight.shape
    return rows % BLOCK == 0 and columns % (4 * BLOCK) == 0


def _padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The rows among so many; what the others hold is in no row but theirs."""
    block = rows.new_empty((size, rows.shape[1]))
    block[: rows.shape[0]] = rows
    return block


def _product(
    x: torch.Tensor, weight: Weight, residual: torch.Tensor | None, *, gated: bool = False
) -> torch.Tensor:
    """The product, added to the residual in place if there is one."""
    if isinstance(weight, BlockFp8Weight) and takes_codes(weight):
        codes, scales = quantise_silu_mul(x) if gated else quantise_rows(x)
        out = product_of_codes(codes, scales, weight, x.dtype)
        return out if residual is None else residual.add_(out)
    matrix = weight.dequantise(x.dtype) if isinstance(weight, BlockFp8Weight) else weight
    if residual is None:
        return F.linear(x, matrix)
    # In the epilogue of the product: a launch and two passes over the rows less, one rounding less.
    return residual.addmm_(x, matrix.t())


def product_of_codes(
    codes: torch.Tensor, scales: torch.Tensor, weight: BlockFp8Weight, dtype: torch.dtype
) -> torch.Tensor:
    """The library's product of rows as `quantise_rows` gives them, for a weight it takes."""
    return F.scaled_mm(
        codes,
        weight.codes.t(),
        scales,
        ScalingType.BlockWise1x128,
        weight.scales.t(),
        ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


def _equal_sizes(weight: Weight, dtype: torch.dtype) -> tuple[int, ...]:
    device = weight.codes.device if isinstance(weight, BlockFp8Weight) else weight.device
    generator = torch.Generator(device).manual_seed(0)
    columns = weight.shape[1]
    rows, addend = (
        torch.randn((_PROBE_ROWS, width), generator=generator, device=device).to(dtype)
        for width in (columns, weight.shape[0])
    )

    def products(size: int) -> list[torch.Tensor]:
        x, residual = (part.repeat(size // _PROBE_ROWS, 1) for part in (rows, addend))
        return [_product(x, weight, None), _product(x, weight, residual)]

    expected = [out[:_PROBE_ROWS] for out in products(_CHOSEN)]

    def equal(size: int) -> bool:
        return all(
            torch.equal(out, wanted.repeat(size // _PROBE_ROWS, 1))
            for out, wanted in zip(products(size), expected, strict=True)
        )

    # If the places of the chosen size itself differ, it stands alone: nothing fixes the bits then.
    return tuple(size for size in SIZES if size == _CHOSEN or equal(size))


assert GROUP == BLOCK, "activations and weights have the same groups along a row"
