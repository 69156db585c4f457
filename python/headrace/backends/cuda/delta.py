"""The linear layers between their projections: one token a row in one launch, and many tokens.

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
        """`conv_step`, `delta_gates`, `gated_delta_step` and `gated_rms_norm` of a backend.

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
    """Gated delta rule over the tokens of one request, `max_chunks` chunks of 64 a pass.

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
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        start: int,
        *,
        has_initial_state: bool,
    ) -> torch.Tensor:
        """`gated_delta_prefill` of a backend for the state of one slot.

        q, k: `[n, Hk, dk]`; v: `[n, Hv, dv]`; g, beta: fp32 `[n, Hv]`; rows may be strided, q and
        k alike, g and beta alike, those of q, k and v at multiples of 16 bytes. state: fp32
        `[Hv, dv, dk]`, contiguous. Returns fp32 `[n, Hv, dv]`.

        Raises
        ------
        ConfigError
            A tensor of another shape, dtype or stride; nothing was launched.
        """
        self._check(q, k, v, g, beta, state)
        tokens = q.shape[0]
        out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
        first, chunks = 0, self._scratch.shape[0]
        while first < tokens:
            position = start + first
            last = min(tokens, first + chunks * DELTA_CHUNK - position % DELTA_CHUNK)
            rows = slice(first, last)
            self._pass(
                (q[rows], k[rows], v[rows], g[rows], beta[rows]),
                state,
                out[rows],
                position % DELTA_CHUNK,
                has_initial_state or first > 0,
            )
            first = last
        return out

    def _pass(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        state: torch.Tensor,
        out: torch.Tensor,
        offset: int,
        initial: bool,
    ) -> None:
        """Chunks that fit in the scratch; the first token stands `offset` tokens into its chunk."""
        q, k, v, g, beta = inputs
        sizes, tokens = self._sizes, q.shape[0]
        chunks = -(-(offset + tokens) // DELTA_CHUNK)
        group = sizes.value_heads // sizes.key_heads
        kernel = self._kernel
        parallel, serial = _prefill_kernels(kernel, torch.cuda.current_device())
        parallel.launch(
            (chunks, sizes.value_heads),
            _PREFILL_THREADS,
            (
                q.data_ptr(),
                k.data_ptr(),
                q.stride(0),
                g.data_ptr(),
                beta.data_ptr(),
                g.stride(0),
                self._scratch.data_ptr(),
                offset,
                tokens,
                group,
            ),
        )
        serial.launch(
            (sizes.value_head_dim // kernel.slice, sizes.value_heads),
            2 * kernel.slice,
            (
                q.data_ptr(),
                k.data_ptr(),
                q.stride(0),
                v.data_ptr(),
                v.stride(0),
                self._scratch.data_ptr(),
                state.data_ptr(),
                out.data_ptr(),
                offset,
                tokens,
                chunks,
                group,
                int(initial),
            ),
        )

    def _check(self, *tensors: torch.Tensor) -> None:
        sizes, tokens = self._sizes, tensors[0].shape[0]
        key = (tokens, sizes.key_heads, sizes.key_head_dim)
        value = (tokens, sizes.value_heads, sizes.value_head_dim)
        gate = (tokens, sizes.value_heads)
        expected = (
            ("q", key, self._dtype),
            ("k", key, self._dtype),
            ("v", value, self._dtype),
            ("g", gate, torch.float32),
            ("beta", gate, torch.float32),
            ("state", (sizes.value_heads, *value[2:], key[2]), torch.float32),
        )
        for (name, shape, dtype), x in zip(expected, tensors, strict=True):
            packed = not tokens or x.shape != shape or x[0].is_contiguous()
            if x.shape != shape or x.dtype != dtype or not packed:
                raise ConfigError(
                    f"delta prefill: {name} is {x.dtype} {list(x.shape)} with strides "
                    f"{list(x.stride())}, expected {dtype} {list(shape)} with packed rows"
                )
        q, k, _, g, beta, state = tensors
        if q.stride(0) != k.stride(0) or g.stride(0) != beta.stride(0):
            raise ConfigError("delta prefill: q and k, or g and beta, have different row strides")
        if not state.is_contiguous():
            raise ConfigError("delta prefill: the state of a slot is contiguous")
        for name, x in zip("qkv", tensors, strict=False):
            if (x.data_ptr() | x.stride(0) * x.itemsize) % _ROW_ALIGNMENT:
                raise ConfigError(
                    f"delta prefill: rows of {name} start at multiples of {_ROW_ALIGNMENT} bytes"
                )


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
