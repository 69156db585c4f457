"""What a prompt needs between matrix products: convolution, gated norm, activations as e4m3 codes.

They give what the operations of the torch backend give. No state, no locks.
"""

import functools

import numpy as np
import torch

from headrace.backends.cuda.gemm import ELEMENTS
from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.loader import Variant, load_kernel
from headrace.backends.cuda.segments import DeviceSegments
from headrace.errors import ConfigError

GROUP = 128  # columns of an activation that share a scale
_NAMES = ("conv_prefill", "conv_keep", "gated_norm", "quantise_rows", "quantise_silu_mul")
_VECTOR, _CONV_THREADS = 8, 128
# Tokens of a thread of the convolution, for steps of up to so many tokens; it reads three more.
_RUNS = ((128, 4), (256, 8), (2048, 16), (1 << 31, 32))
_THREADS, _WARPS = 256, 8
_WIDEST_HEAD = 128
# Rows of a thread of the kernels that give codes; it has eight neighbouring columns.
_ROWS_EACH = {"quantise_rows": 4, "quantise_silu_mul": 2}
_ROW_ALIGNMENT = 16


def conv_prefill(
    x: torch.Tensor,
    taps: torch.Tensor,
    state: torch.Tensor,
    segments: DeviceSegments,
    *,
    out: torch.Tensor,
) -> None:
    """Causal convolution and silu of the segments' rows of `x [T, channels]`, into those of `out`.

    x: rows may be strided; taps: fp32 `[channels, 4]`; state: one layer of the pool,
    `[slots, channels, 3]`, read for segments that do not start at 0, left as their last inputs;
    out: `[T, channels]`, contiguous. Other rows and slots are left alone.

    Raises
    ------
    ConfigError
        A shape, dtype or layout, or channels or a stride that are no multiple of 8.
    """
    channels = x.shape[1]
    aligned = not (channels % _VECTOR or x.stride(0) % _VECTOR or x.data_ptr() % 16)
    if x.dtype not in ELEMENTS or state.dtype != x.dtype or x.stride(1) != 1 or not aligned:
        raise ConfigError(f"conv prefill: x is {x.dtype} {list(x.shape)}, strides {x.stride()}")
    if state.shape[1:] != (channels, 3) or not state.is_contiguous():
        raise ConfigError(f"conv prefill: state is {list(state.shape)}, strides {state.stride()}")
    if out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ConfigError(f"conv prefill: out is {out.dtype} {list(out.shape)}")
    run, keep = _kernel(x.dtype, "conv_prefill"), _kernel(x.dtype, "conv_keep")
    source, target = (x.data_ptr(), x.stride(0)), state.data_ptr()
    for group in segments.groups:
        tokens = next(run for most, run in _RUNS if group.tokens <= most)
        run.launch(
            (-(-channels // (_VECTOR * _CONV_THREADS)), group.tokens // tokens + group.count),
            _CONV_THREADS,
            (*source, taps.data_ptr(), target, out.data_ptr(), channels, group.address, tokens),
        )
        keep.launch(
            (-(-channels // _THREADS), group.count),
            _THREADS,
            (*source, target, channels, group.address),
        )


def gated_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor
) -> None:
    """Norm of fp32 `x [n, heads, width]` times `weight * silu(z)`, into `out`.

    z, out: `[n, heads * width]`, z with strided rows; weight: `[width]`.

    Raises
    ------
    ConfigError
        A shape, dtype or layout, or a width that is no multiple of 32 up to 128.
    """
    tokens, heads, width = x.shape
    packed = x.is_contiguous() and z.stride(1) == 1 and out.is_contiguous()
    flat = (tokens, heads * width)
    typed = x.dtype == torch.float32 and z.dtype in ELEMENTS and out.dtype == z.dtype
    if not typed or not packed or z.shape != flat or out.shape != flat:
        raise ConfigError(
            f"gated norm: x is {x.dtype} {list(x.shape)}, z {z.dtype} {list(z.shape)} with strides "
            f"{z.stride()}, out {out.dtype} {list(out.shape)}"
        )
    if width % 32 or width > _WIDEST_HEAD:
        raise ConfigError(f"gated norm: width {width}; accepted is 32, 64, 96 or 128")
    if tokens:
        _kernel(z.dtype, "gated_norm").launch(
            (-(-tokens * heads // _WARPS),),
            _THREADS,
            (
                x.data_ptr(),
                z.data_ptr(),
                z.stride(0),
                weight.data_ptr(),
                out.data_ptr(),
                np.float32(eps),
                tokens,
                heads,
                width,
            ),
        )


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 `[n, columns]` and fp32 scales `[n, columns / 128]` with strides (1, n).

    Raises
    ------
    ConfigError
        A dtype, rows that do not start at multiples of 16 bytes, or columns that are no multiple
        of 128.
    """
    return _quantise("quantise_rows", x, x.shape[1])


def quantise_silu_mul(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise_rows(silu_mul(gate_up))` in one launch; `gate_up [n, 2 * columns]`.

    Raises as `quantise_rows`.
    """
    return _quantise("quantise_silu_mul", gate_up, gate_up.shape[1] // 2)


def _quantise(name: str, x: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0]
    aligned = (x.data_ptr() | x.stride(0) * x.itemsize) % _ROW_ALIGNMENT == 0
    if x.dtype not in ELEMENTS or columns % GROUP or x.stride(1) != 1 or not aligned:
        raise ConfigError(f"{name}: x is {x.dtype} {list(x.shape)}, strides {x.stride()}")
    codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((columns // GROUP, rows), dtype=torch.float32, device=x.device)
    if rows:
        _kernel(x.dtype, name).launch(
            (-(-columns // (_VECTOR * _THREADS)), -(-rows // _ROWS_EACH[name])),
            _THREADS,
            (x.data_ptr(), x.stride(0), codes.data_ptr(), scales.data_ptr(), rows, columns),
        )
    return codes, scales.t()


def _source(dtype: torch.dtype) -> Variant:
    return Variant(file="prefill.cu", names=_NAMES, defines=(("ELEMENT", ELEMENTS[dtype]),))


def _kernel(dtype: torch.dtype, name: str) -> Kernel:
    return _loaded(dtype, name, torch.cuda.current_device())


@functools.cache
def _loaded(dtype: torch.dtype, name: str, device: int) -> Kernel:
    return load_kernel(_source(dtype), name, device)


VARIANTS = tuple(_source(dtype) for dtype in ELEMENTS)
