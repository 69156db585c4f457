"""The linear layers between their projections: one token a row in one launch, and prompts.

`DeltaPrefill` owns scratch that launches on one stream take turns with. No locks.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from headrace.backends.base import DeltaWeights
from headrace.backends.cuda.gemm import ELEMENTS
from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.loader import Variant, load_kernel
from headrace.backends.cuda.segments import DeviceSegments
from headrace.errors import ConfigError
from headrace.models.hybrid_config import DELTA_CHUNK, LinearAttention

__all__ = ["DeltaPrefill", "DeltaStep", "DeltaWeights"]

# CTAs of a cluster, which all value heads of a key head share, and warps of a CTA.
_CLUSTER = 8
_MAX_SPLIT = 2
# Up to two rows more warps a CTA answer sooner, beyond that fewer warps keep more of the state in
# flight: 5.9 and 6.6 us at 1 row, 22.4 and 20.2 at 8. Bits do not depend on it.
_FEW_ROWS, _WARPS_OF_FEW, _WARPS_OF_MANY = 2, 8, 4
# Threads of the first prefill kernel, and most rows of the state that one CTA of the second carries
# along, two threads a row.
_PREFILL_THREADS = 256
_MAX_SLICE = 64
# Of a chunk and head between the kernels: two lower triangles of ten blocks of 16 x 16, three
# factors a token and one, padded, of the state; all of four bytes. See cuda/delta_prefill.cu.
_SCRATCH_BYTES = 4 * (2 * 10 * 16 * 16 + 3 * DELTA_CHUNK + 4)
# Chunks of the second kernel in shared memory.
_STAGES = 2
# Rows of q, k and v are read by such vectors.
_ROW_ALIGNMENT = 16
_HEAD_DIMS = (32, 64, 128)


class DeltaStep:
    """Step of the linear layers of a model with `sizes`, on the current device.

    Raises
    ------
    ConfigError
        A head width, a number of value heads a key head, or a dtype is none the kernel has.
    """

    def __init__(self, sizes: LinearAttention, dtype: torch.dtype) -> None:
        if dtype not in ELEMENTS:
            raise ConfigError(f"delta step: dtype {dtype} is not supported")
        if sizes.key_head_dim not in _HEAD_DIMS or sizes.value_head_dim not in _HEAD_DIMS:
            raise ConfigError(
                f"delta step: head widths {sizes.key_head_dim} and {sizes.value_head_dim}; "
                f"supported are {_HEAD_DIMS}"
            )
        group = sizes.value_heads // sizes.key_heads
        if group > _CLUSTER:
            raise ConfigError(f"delta step: {group} value heads a key head, at most {_CLUSTER}")
        self._sizes = sizes
        self._dtype = dtype
        widths = (sizes.key_head_dim, sizes.value_head_dim)
        self._few, self._many = (
            _Kernel(dtype, *widths, group, warps) for warps in (_WARPS_OF_FEW, _WARPS_OF_MANY)
        )

    def step(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: DeltaWeights,
        conv: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        settled: bool = False,
    ) -> torch.Tensor:
        """`delta_mix_step` of a backend.

        qkv: `[B, channels]`; z: `[B, Hv * dv]`; b, a: `[B, Hv]` with the same stride; columns
        contiguous, rows strided. conv, state: one layer of each pool, `[slots, channels, 3]` and
        fp32 `[slots, Hv, dv, dk]`; slots: int64 `[B]`, no slot twice, negative for padding.
        settled: both states were written before a copy or kernel that does not start early, see
        `kernel`. Returns `[B, Hv * dv]`, zeros for padding.

        Raises
        ------
        ConfigError
            A tensor of another shape or dtype; nothing was launched.
        """
        rows = qkv.shape[0]
        self._check(rows, qkv, z, b, a, conv, state, slots)
        if out is None:
            out = torch.empty((rows, self._sizes.value_size), dtype=self._dtype, device=qkv.device)
        kernel = self._few if rows <= _FEW_ROWS else self._many
        if rows:
            device = torch.cuda.current_device()
            load_kernel(kernel.source, "delta_step", device, early=True).launch(
                (kernel.group * kernel.split, self._sizes.key_heads, rows),
                32 * kernel.warps,
                (
                    qkv.data_ptr(),
                    qkv.stride(0),
                    z.data_ptr(),
                    z.stride(0),
                    b.data_ptr(),
                    a.data_ptr(),
                    b.stride(0),
                    weights.taps.data_ptr(),
                    weights.a_log.data_ptr(),
                    weights.dt_bias.data_ptr(),
                    weights.norm.data_ptr(),
                    np.float32(weights.eps),
                    conv.data_ptr(),
                    state.data_ptr(),
                    slots.data_ptr(),
                    out.data_ptr(),
                    out.stride(0),
                    int(settled),
                ),
            )
        return out

    def _check(self, rows: int, qkv: torch.Tensor, *others: torch.Tensor) -> None:
        z, b, a, conv, state, slots = others
        sizes = self._sizes
        widths = (sizes.channels, sizes.value_size, sizes.value_heads, sizes.value_heads)
        for name, x, width in zip(("qkv", "z", "b", "a"), (qkv, z, b, a), widths, strict=True):
            if x.shape != (rows, width) or x.dtype != self._dtype or x.stride(1) != 1:
                raise ConfigError(
                    f"delta step: {name} is {x.dtype} {list(x.shape)}, expected {self._dtype} "
                    f"[{rows}, {width}] with contiguous columns"
                )
        if rows and a.stride(0) != b.stride(0):
            raise ConfigError("delta step: a and b have different row strides")
        pool = (sizes.value_heads, sizes.value_head_dim, sizes.key_head_dim)
        if state.shape[1:] != pool or state.dtype != torch.float32 or not state.is_contiguous():
            raise ConfigError(f"delta step: state is {state.dtype} {list(state.shape)}")
        if conv.shape[1:] != (sizes.channels, 3) or conv.dtype != self._dtype:
            raise ConfigError(f"delta step: conv state is {conv.dtype} {list(conv.shape)}")
        if slots.shape != (rows,) or slots.dtype != torch.int64 or not conv.is_contiguous():
            raise ConfigError(f"delta step: slots are {slots.dtype} {list(slots.shape)}")


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One compilation of cuda/delta_step.cu."""

    dtype: torch.dtype
    key_dim: int
    value_dim: int
    group: int
    most_warps: int

    @property
    def split(self) -> int:
        """CTAs of one head's state."""
        return min(_MAX_SPLIT, _CLUSTER // self.group)

    @property
    def warps(self) -> int:
        """Warps of a CTA; each has four rows of the state at a time."""
        return math.gcd(self.most_warps, self.value_dim // self.split // 4)

    @property
    def source(self) -> Variant:
        """What the compiler is asked for."""
        return Variant(
            file="delta_step.cu",
            names=("delta_step",),
            defines=(
                ("ELEMENT", ELEMENTS[self.dtype]),
                ("DK", self.key_dim),
                ("DV", self.value_dim),
                ("GROUP", self.group),
                ("SPLIT", self.split),
                ("WARPS", self.warps),
                ("CTAS", 1 if self.split == 1 else 16 // self.warps),
            ),
        )


class DeltaPrefill:
    """Gates and delta rule over the prompts of a step, `max_chunks` chunks of 64 a pass.

    Raises
    ------
    ConfigError
        A head width or dtype is none the kernels have.
    """

    def __init__(
        self,
        sizes: LinearAttention,
        dtype: torch.dtype,
        device: torch.device,
        max_chunks: int = 32,
    ) -> None:
        if dtype not in ELEMENTS:
            raise ConfigError(f"delta prefill: dtype {dtype} is not supported")
        widths = (sizes.key_head_dim, sizes.value_head_dim)
        if any(width not in _HEAD_DIMS for width in widths):
            raise ConfigError(f"delta prefill: head widths {widths}; supported are {_HEAD_DIMS}")
        self._sizes = sizes
        self._dtype = dtype
        self._kernel = _PrefillKernel(dtype, *widths)
        self._scratch = torch.empty(
            (max_chunks, sizes.value_heads, _SCRATCH_BYTES), dtype=torch.uint8, device=device
        )

    def prefill(
        self,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: DeltaWeights,
        state: torch.Tensor,
        segments: DeviceSegments,
        *,
        out: torch.Tensor,
    ) -> None:
        """`delta_gates` and `gated_delta_prefill` of the torch backend for all segments.

        mixed: `[T, channels]` as the convolution leaves it, rows at multiples of 16 bytes; b, a:
        `[T, Hv]` with the same stride; columns contiguous, rows strided. state: one layer of the
        pool, fp32 `[slots, Hv, dv, dk]`; out: fp32 `[T, Hv, dv]`, contiguous. Rows and slots of no
        segment are left alone.

        Raises
        ------
        ConfigError
            A tensor of another shape, dtype or stride; nothing was launched.
        """
        self._check(mixed, b, a, state, out)
        sizes, kernel, most = self._sizes, self._kernel, self._scratch.shape[0]
        value_heads, slices = sizes.value_heads, sizes.value_head_dim // kernel.slice
        heads_each = value_heads // sizes.key_heads
        parallel, serial = _prefill_kernels(kernel, torch.cuda.current_device())
        rows, scratch = (mixed.data_ptr(), mixed.stride(0)), self._scratch.data_ptr()
        gates = (
            b.data_ptr(),
            a.data_ptr(),
            b.stride(0),
            weights.a_log.data_ptr(),
            weights.dt_bias.data_ptr(),
        )
        targets = (state.data_ptr(), out.data_ptr())
        for group in segments.groups:
            for first in range(0, group.chunks, most):
                parallel.launch(
                    (min(most, group.chunks - first), value_heads),
                    _PREFILL_THREADS,
                    (*rows, *gates, scratch, group.address, first, heads_each),
                )
                serial.launch(
                    (slices, value_heads, group.count),
                    2 * kernel.slice,
                    (*rows, scratch, *targets, group.address, first, most, heads_each),
                )

    def _check(
        self,
        mixed: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        state: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        sizes, tokens = self._sizes, mixed.shape[0]
        heads = sizes.value_heads
        for name, x, width in (("qkv", mixed, sizes.channels), ("b", b, heads), ("a", a, heads)):
            if x.shape != (tokens, width) or x.dtype != self._dtype or x.stride(1) != 1:
                raise ConfigError(
                    f"delta prefill: {name} is {x.dtype} {list(x.shape)} with strides "
                    f"{list(x.stride())}, expected {self._dtype} [{tokens}, {width}] with "
                    "contiguous columns"
                )
        if a.stride(0) != b.stride(0):
            raise ConfigError("delta prefill: a and b have different row strides")
        if (mixed.data_ptr() | mixed.stride(0) * mixed.itemsize) % _ROW_ALIGNMENT:
            raise ConfigError(
                f"delta prefill: rows of qkv start at multiples of {_ROW_ALIGNMENT} bytes"
            )
        pool = (heads, sizes.value_head_dim, sizes.key_head_dim)
        if state.shape[1:] != pool or state.dtype != torch.float32 or not state.is_contiguous():
            raise ConfigError(f"delta prefill: state is {state.dtype} {list(state.shape)}")
        values = (tokens, heads, sizes.value_head_dim)
        if out.shape != values or out.dtype != torch.float32 or not out.is_contiguous():
            raise ConfigError(f"delta prefill: out is {out.dtype} {list(out.shape)}")


@dataclass(frozen=True, slots=True)
class _PrefillKernel:
    """One compilation of cuda/delta_prefill.cu."""

    dtype: torch.dtype
    key_dim: int
    value_dim: int

    @property
    def source(self) -> Variant:
        """What the compiler is asked for."""
        return Variant(
            file="delta_prefill.cu",
            names=("delta_chunks", "delta_states"),
            defines=(
                ("ELEMENT", ELEMENTS[self.dtype]),
                ("DK", self.key_dim),
                ("DV", self.value_dim),
            ),
        )

    @property
    def slice(self) -> int:
        """Rows of the state in one CTA of the second kernel."""
        return min(_MAX_SLICE, self.value_dim)

    @property
    def shared_bytes(self) -> tuple[int, int]:
        """Dynamic shared memory of both kernels, as they state it."""
        keys = self._rows_bytes(self.key_dim)
        stage = _SCRATCH_BYTES + 2 * keys + self._rows_bytes(self.slice)
        return 2 * keys + 4 * DELTA_CHUNK * (DELTA_CHUNK + 4), _STAGES * stage

    def _rows_bytes(self, width: int) -> int:
        """Rows of a chunk in shared memory: bf16 as it is, other types as padded fp32."""
        return DELTA_CHUNK * (2 * width if self.dtype == torch.bfloat16 else 4 * (width + 4))


@functools.cache
def _prefill_kernels(kernel: _PrefillKernel, device: int) -> tuple[Kernel, Kernel]:
    parallel, serial = kernel.shared_bytes
    return (
        load_kernel(kernel.source, "delta_chunks", device, shared=parallel),
        load_kernel(kernel.source, "delta_states", device, shared=serial),
    )


# Narrow heads leave both numbers of warps the same program.
VARIANTS = tuple(
    dict.fromkeys(
        (
            *(
                _Kernel(dtype, dim, dim, group, warps).source
                for dtype in ELEMENTS
                for dim in _HEAD_DIMS
                for group in (1, 2, 3, 4, 8)
                for warps in (_WARPS_OF_FEW, _WARPS_OF_MANY)
            ),
            # Seconds each for the compiler: heads that no known model has, in one dtype.
            *(_PrefillKernel(dtype, 128, 128).source for dtype in ELEMENTS),
            *(_PrefillKernel(torch.bfloat16, dim, dim).source for dim in _HEAD_DIMS),
        )
    )
)
