"""Linear layers of a decode step: a few rows times a large matrix.

`SkinnyGemm` reads the plain `[out, in]` storage that prefill uses, so a weight exists once. How the
work is cut depends on the matrix and the device, never on the rows: a row has the same bits alone,
among others and at any place.

Owns the descriptions of the matrices for the copy engine. No scratch, no locks.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.loader import Variant, load_kernel
from headrace.backends.cuda.tensor_map import matrix_map, rows_map
from headrace.errors import ConfigError
from headrace.layers.block_fp8 import BlockFp8Weight
from headrace.models.config import ModelConfig
from headrace.models.known import KNOWN_CONFIGS
from headrace.models.quantization import FP8_BLOCK

# What `ELEMENT` in cuda/element.cuh stands for.
ELEMENTS: Mapping[torch.dtype, int] = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

# Rows of one launch; more rows are launches of so many each.
MAX_ROWS = 16
_BOX_COLUMN_BYTES = 1024  # of x, the widest box there is
_MOST_ROW_MAPS = 4096
# Bytes one CTA of an sm_90 device may have, less 1 KiB for what is not dynamic.
LARGEST_SHARED = 231_424


class Epilogue(IntEnum):
    """What happens to a product before it is stored."""

    NONE = 0
    RESIDUAL = 1
    """`residual + product`, the product rounded to the model dtype first."""
    SILU_MUL = 2
    """`silu(first half) * second half` of the output features, rounded as `silu_mul` does."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix is cut. Everything but `stages` is part of what decides the bits.

    tiles: row tiles of 16 a warp. row_warps, k_warps: a step of a CTA is `row_warps * tiles * 16`
    rows and `k_warps * 64` bytes of each. stages: steps in flight, fewer if memory is short.
    k_split: CTAs that share the columns of a group; above 1 all groups must run at once.
    """

    tiles: int
    row_warps: int
    k_warps: int
    stages: int
    k_split: int = 1

    @property
    def rows(self) -> int:
        """Rows of a group."""
        return self.row_warps * self.tiles * 16

    @property
    def threads(self) -> int:
        """Of a CTA: one warp more than compute feeds the copy engine."""
        return 32 * (self.row_warps * self.k_warps + 1)


# Stages as whole steps of 8B, 27B and 0.6B were fastest with them: what is in flight hides the
# latency of HBM and the end of the kernel before, but its memory keeps the next kernel waiting.
TILINGS = (
    Tiling(tiles=1, row_warps=1, k_warps=8, stages=7),
    Tiling(tiles=2, row_warps=1, k_warps=8, stages=9),
    Tiling(tiles=3, row_warps=1, k_warps=8, stages=6),
    Tiling(tiles=4, row_warps=1, k_warps=8, stages=3),
    Tiling(tiles=2, row_warps=3, k_warps=4, stages=6),
    Tiling(tiles=4, row_warps=2, k_warps=4, stages=3),
    Tiling(tiles=7, row_warps=1, k_warps=8, stages=3),
    Tiling(tiles=5, row_warps=1, k_warps=8, stages=3, k_split=2),
)
# A matrix that fits what is in flight at once is bounded by latency: half the multiprocessors do,
# and the next kernel fetches its weights on the others.
_SMALL_BYTES = 16 << 20
# What a byte of x costs beside one of the matrix: all of x comes from L2 once a group.
_COLUMN_COST = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmVariant:
    """One compilation of cuda/gemm_skinny.cu."""

    dtype: torch.dtype
    codes: bool
    column_tiles: int
    tiling: Tiling
    epilogue: Epilogue
    wide: bool
    same_input: bool

    @property
    def source(self) -> Variant:
        """What the compiler is asked for."""
        return Variant(
            file="gemm_skinny.cu",
            names=("gemm_skinny",),
            defines=(
                ("ELEMENT", ELEMENTS[self.dtype]),
                ("CODES", int(self.codes)),
                ("NT", self.column_tiles),
                ("TILES", self.tiling.tiles),
                ("ROW_WARPS", self.tiling.row_warps),
                ("K_WARPS", self.tiling.k_warps),
                ("STAGES", self.stages),
                ("K_SPLIT", self.tiling.k_split),
                ("EPILOGUE", int(self.epilogue)),
                ("WIDE", int(self.wide)),
                ("SAME_INPUT", int(self.same_input)),
            ),
        )

    @property
    def _stage_bytes(self) -> int:
        tiling = self.tiling
        stage = tiling.rows * tiling.k_warps * 64 + self.column_tiles * 8 * self.column_bytes
        return -(-stage // 1024) * 1024

    @property
    def column_bytes(self) -> int:
        """Bytes of a row of x in a step."""
        return self.tiling.k_warps * self.depth * 2

    @property
    def _other_bytes(self) -> int:
        tiling = self.tiling
        sums = tiling.k_warps + tiling.k_split - 1
        return 1024 + tiling.row_warps * sums * tiling.tiles * self.column_tiles * 512

    @property
    def stages(self) -> int:
        """Steps in flight."""
        fitting = (LARGEST_SHARED - self._other_bytes) // self._stage_bytes
        return min(self.tiling.stages, fitting)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA, as the head of the file states it."""
        return self._other_bytes + self.stages * self._stage_bytes

    @property
    def depth(self) -> int:
        """Elements of one row that a warp has in a unit."""
        return 64 if self.codes else 32

    @property
    def box_rows(self) -> int:
        """Rows of a box of the tensor map: gate and up are boxes of their own."""
        return self.tiling.rows // (2 if self.epilogue is Epilogue.SILU_MUL else 1)


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of product with a matrix of so many rows and columns."""

    matrix_rows: int
    matrix_columns: int
    codes: bool = False
    epilogue: Epilogue = Epilogue.NONE
    wide: bool = False
    same_input: bool = False

    def fits(self, tiling: Tiling, itemsize: int, processors: int) -> bool:
        """Whether the matrix can be cut so; itemsize: of an element of x."""
        if self.epilogue is Epilogue.SILU_MUL and (tiling.k_split > 1 or tiling.tiles % 2):
            return False  # gate and up share the tiles of a warp
        # CTAs that share a group wait for one another, and each has a step.
        groups = -(-self.matrix_rows // tiling.rows)
        steps = -(-self._row_bytes(itemsize) // (tiling.k_warps * 64))
        return tiling.k_split == 1 or (groups * tiling.k_split <= processors and steps > 1)

    def tiling(self, itemsize: int, processors: int) -> Tiling:
        """How the matrix is cut: the busiest multiprocessor decides the time."""
        small = self.matrix_rows * self._row_bytes(itemsize) <= _SMALL_BYTES
        busy = processors // 2 if small else processors
        element_bytes = 1 if self.codes else itemsize

        def cost(tiling: Tiling) -> float:
            groups = -(-self.matrix_rows // tiling.rows)
            busiest = -(-groups * tiling.k_split // busy) * tiling.rows / tiling.k_split
            return busiest * (1 + _COLUMN_COST * MAX_ROWS * 2 / (tiling.rows * element_bytes))

        return min((t for t in TILINGS if self.fits(t, itemsize, processors)), key=cost)

    def _row_bytes(self, itemsize: int) -> int:
        return self.matrix_columns * (1 if self.codes else itemsize)


def variant_of(
    product: Product,
    rows: int,
    dtype: torch.dtype,
    processors: int,
    tiling: Tiling | None = None,
) -> GemmVariant:
    """The program for a product of at most `MAX_ROWS` rows of x; `tiling` only for measurements."""
    return GemmVariant(
        dtype=dtype,
        codes=product.codes,
        column_tiles=1 if rows <= 8 else 2,
        tiling=tiling or product.tiling(dtype.itemsize, processors),
        epilogue=product.epilogue,
        wide=product.wide,
        same_input=product.same_input,
    )


class SkinnyGemm:
    """Products with any number of rows, 16 a launch, on the current device.

    The first call of a variant compiles and loads it, which a graph capture does not allow: run a
    step once before capturing it.

    early: start while the kernel before still runs, and read the matrix ahead of x: 1 to 2 us less
    a launch in a graph. The weights must not be written by the kernels just ahead of it then.

    Raises
    ------
    CudaUnavailable
        The machine cannot run the kernels.
    """

    def __init__(self, device: torch.device, *, early: bool = False) -> None:
        self._early = early
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._maps: dict[tuple[int, ...], bytes] = {}
        self._row_maps: dict[tuple[int, ...], bytes] = {}

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | BlockFp8Weight,
        *,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        wide: bool = False,
        same_input: bool = False,
        out: torch.Tensor | None = None,
        tiling: Tiling | None = None,
    ) -> torch.Tensor:
        """`x [rows, in]` times `weight [out, in]` -> `[rows, out]`, accumulated in fp32.

        x: bf16 or fp16 for a weight of the same dtype, bf16 for codes, or fp32 for fp32. Rows may
        be strided; addresses of rows are multiples of 16 bytes. residual: `[rows, out]`, added to
        the rounded product. silu_mul: the weight is gate and up, and the result
        `[rows, out / 2]`. wide: an fp32 result that was never rounded. same_input: the launch just
        ahead is a product with this x, too, and neither waits for the other. out: where to put it.
        tiling: only for measurements.

        Raises
        ------
        ConfigError
            The shape or dtype is none the kernels have; nothing was launched.
        """
        features = weight.shape[0] // 2 if silu_mul else weight.shape[0]
        if out is None:
            dtype = torch.float32 if wide else x.dtype
            out = torch.empty((x.shape[0], features), dtype=dtype, device=x.device)
        if x.dtype == torch.float32:
            return _plain(x, weight, residual, silu_mul, out)
        codes = isinstance(weight, BlockFp8Weight)
        matrix, scales = _parts(weight)
        _check(x, matrix, codes, silu_mul)
        epilogue = Epilogue.NONE if residual is None else Epilogue.RESIDUAL
        if silu_mul:
            epilogue = Epilogue.SILU_MUL
        beside = same_input and self._early
        product = Product(matrix.shape[0], matrix.shape[1], codes, epilogue, wide, beside)
        if tiling is not None and not product.fits(tiling, x.element_size(), self._processors):
            raise ConfigError(f"linear: {tiling} does not fit a weight {list(matrix.shape)}")
        for first in range(0, x.shape[0], MAX_ROWS):
            part = x[first : first + MAX_ROWS]
            variant = variant_of(
                product,
                part.shape[0],
                x.dtype,
                self._processors,
                tiling,
            )
            addend = None if residual is None else residual[first : first + MAX_ROWS]
            self._launch(variant, part, matrix, scales, addend, out[first : first + MAX_ROWS])
        return out

    def _launch(
        self,
        variant: GemmVariant,
        x: torch.Tensor,
        matrix: torch.Tensor,
        scales: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        rows, columns = matrix.shape
        tiling = variant.tiling
        groups = -(-rows // tiling.rows)
        # As few CTAs as give the busiest one no more groups.
        grid = -(-groups // -(-groups // self._processors)) * tiling.k_split
        w_map = self._matrix_map(matrix, variant.box_rows)
        x_map = self._rows_map(x, variant.column_tiles * 8, variant.column_bytes)
        args = (
            0 if scales is None else scales.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            0 if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            x.shape[0],
            rows,
            columns,
            0 if scales is None else scales.shape[1],
        )
        kernel = _kernel(variant, torch.cuda.current_device(), self._early)
        kernel.launch((grid,), tiling.threads, (w_map, x_map, *args))

    def _matrix_map(self, matrix: torch.Tensor, box_rows: int) -> bytes:
        """Made once for an address and a shape, which is all that is in it."""
        key = (matrix.data_ptr(), *matrix.shape, matrix.element_size(), box_rows)
        found = self._maps.get(key)
        if found is None:
            found = self._maps[key] = matrix_map(matrix, box_rows)
        return found

    def _rows_map(self, x: torch.Tensor, box_rows: int, column_bytes: int) -> bytes:
        """Kept as well: the allocator hands out the same addresses step after step."""
        key = (x.data_ptr(), *x.shape, x.stride(0), box_rows, column_bytes)
        found = self._row_maps.get(key)
        if found is None:
            if len(self._row_maps) == _MOST_ROW_MAPS:
                self._row_maps.clear()
            boxes = -(-column_bytes // _BOX_COLUMN_BYTES)
            found = self._row_maps[key] = rows_map(x, box_rows, column_bytes // boxes)
        return found


def _parts(weight: torch.Tensor | BlockFp8Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(weight, BlockFp8Weight):
        return weight.codes, weight.scales
    return weight, None


def _check(x: torch.Tensor, matrix: torch.Tensor, codes: bool, silu_mul: bool) -> None:
    rows, columns = matrix.shape
    expected = torch.bfloat16 if codes else matrix.dtype
    if x.dtype != expected or x.dtype not in ELEMENTS:
        raise ConfigError(f"linear: x is {x.dtype}, a weight of {matrix.dtype} takes {expected}")
    if x.shape[1] != columns or x.stride(1) != 1 or not matrix.is_contiguous():
        raise ConfigError(
            f"linear: x {list(x.shape)} with strides {list(x.stride())} does not fit a contiguous "
            f"weight [{rows}, {columns}]"
        )
    unit = 32 if silu_mul else 16
    if rows % unit or columns % 64:
        raise ConfigError(
            f"linear: weight [{rows}, {columns}] needs a multiple of {unit} rows and of 64 columns"
        )
    if x.stride(0) % 8 or x.data_ptr() % 16:
        raise ConfigError(f"linear: rows of x start at multiples of 16 bytes, not {x.stride(0)}")


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor | BlockFp8Weight,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    if isinstance(weight, BlockFp8Weight) or residual is not None or silu_mul:
        raise ConfigError("linear: fp32 has no codes and no fused epilogue; use bf16")
    rows, columns = weight.shape
    if weight.dtype != torch.float32 or x.shape[1] != columns or columns % 4:
        raise ConfigError(
            f"linear: x {list(x.shape)} fp32 does not fit a weight {weight.dtype} [{rows}, "
            f"{columns}] with a multiple of 4 columns"
        )
    if x.shape[0]:
        load_kernel(_PLAIN, "gemm_fp32", torch.cuda.current_device()).launch(
            (-(-rows // 8), -(-x.shape[0] // MAX_ROWS)),
            256,
            (
                weight.data_ptr(),
                x.data_ptr(),
                x.stride(0),
                out.data_ptr(),
                out.stride(0),
                x.shape[0],
                rows,
                columns,
            ),
        )
    return out


@functools.cache
def _kernel(variant: GemmVariant, device: int, early: bool) -> Kernel:
    shared = variant.shared_bytes
    return load_kernel(variant.source, "gemm_skinny", device, shared=shared, early=early)


_PLAIN = Variant(file="gemm_plain.cu", names=("gemm_fp32",))


def products_of(config: ModelConfig) -> set[Product]:
    """Products of a decode step of a model, as the layers fuse their matrices."""
    codes, hidden = config.weight_format == FP8_BLOCK, config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = {
        Product((1 + config.attn_output_gate) * q_size + 2 * kv_size, hidden, codes),
        Product(hidden, q_size, codes, Epilogue.RESIDUAL),
        Product(2 * config.intermediate_size, hidden, codes, Epilogue.SILU_MUL),
        Product(hidden, config.intermediate_size, codes, Epilogue.RESIDUAL),
        Product(config.vocab_size, hidden, wide=True),
    }
    linear = config.linear
    if linear is not None:
        products.add(Product(linear.channels + linear.value_size, hidden, codes))
        products.add(Product(hidden, linear.value_size, codes, Epilogue.RESIDUAL))
        # b and a, which are never codes
        products.add(Product(2 * linear.value_heads, hidden, same_input=True))
    return products


# Multiprocessors of the device the kernels are made for.
_PROCESSORS = 132


def _variants() -> tuple[Variant, ...]:
    """What the known models ask for. Others may ask for further tilings of the same kinds."""
    variants = (
        variant_of(product, rows, dtype, _PROCESSORS).source
        for config in KNOWN_CONFIGS.values()
        for product in sorted(products_of(config), key=lambda p: (p.matrix_rows, p.epilogue))
        for dtype in (torch.bfloat16, torch.float16)
        if not (product.codes and dtype != torch.bfloat16)
        for rows in (1, MAX_ROWS)
    )
    return (*dict.fromkeys(variants), _PLAIN)


VARIANTS = _variants()
