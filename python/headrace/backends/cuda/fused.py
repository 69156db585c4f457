"""Norms, gates and the embedding of a decode step, one launch each.

They give what the operations of the same name of the torch backend give; products and roundings
come in the same places. Each starts while the kernel ahead of it ends, see `kernel`. No state, no
locks.
"""

import functools

import numpy as np
import torch

from headrace.backends.cuda.gemm import ELEMENTS
from headrace.backends.cuda.kernel import Argument, Kernel
from headrace.backends.cuda.loader import Variant, load_kernel
from headrace.errors import ConfigError

_NAMES = ("rms_norm", "rms_norm_wide", "silu_mul", "sigmoid_gate", "embed")
_VECTOR_BYTES = 16
_THREADS = 256
# A thread of a norm holds four vectors, a block has at most 1024 threads.
_NORM_PASSES = 4


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    addend: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm of `x [rows, width]`: cast to its dtype, then times `weight [width]`.

    With an addend of the same shape, `x + addend` is stored in `total` (x itself if None) and
    normed. Rows may be strided. The weight is read before what is ahead on the stream has ended.

    Raises
    ------
    ConfigError
        A dtype, a width, stride or address that is no multiple of 16 bytes, a strided weight.
    """
    return _norm("rms_norm", x.dtype, x, weight, eps, addend, total, out)


def rms_norm_wide(
    x: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    *,
    addend: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `rms_norm` with an fp32 `scale [width]`, cast once."""
    return _norm("rms_norm_wide", torch.float32, x, scale, eps, addend, total, out)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`[rows, 2 * n]` (gate, then up) -> `silu(gate) * up`. Raises as `rms_norm`."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    vector = _check("silu_mul", n, gate_up)
    if out is None:
        out = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _launch(
            gate_up.dtype,
            "silu_mul",
            (rows, -(-n // (vector * _THREADS))),
            _THREADS,
            (gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0), n),
        )
    return out


def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x [rows, heads * D] * sigmoid(gate [rows, heads, D])`. Raises as `rms_norm`.

    The gate may be the strided half of a projection `[rows, heads, 2, D]`.
    """
    rows, n = x.shape
    _, heads, head_dim = gate.shape
    vector = _check("sigmoid_gate", head_dim, x, gate)
    if gate.shape[0] != rows or heads * head_dim != n or gate.dtype != x.dtype:
        raise ConfigError(f"sigmoid_gate: x {list(x.shape)} and gate {list(gate.shape)}")
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows:
        _launch(
            x.dtype,
            "sigmoid_gate",
            (rows, -(-n // (vector * _THREADS))),
            _THREADS,
            (
                x.data_ptr(),
                x.stride(0),
                gate.data_ptr(),
                gate.stride(0),
                head_dim,
                gate.stride(1),
                out.data_ptr(),
                out.stride(0),
                n,
            ),
        )
    return out


def embed(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    sources: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows `ids [T]` int64 of `table [vocab, width]`; zeros for an id outside the table.

    With `sources [T]` and `tokens`, both int32, the id is `tokens[source]` where the source is not
    negative; the caller answers for sources beyond the tokens. Raises as `rms_norm`.
    """
    vocab, width = table.shape
    vector = _check("embed", width, table)
    if ids.dtype != torch.int64 or ids.ndim != 1 or not table.is_contiguous():
        raise ConfigError(f"embed: ids are {ids.dtype} {list(ids.shape)}, expected int64 [T]")
    if (sources is None) != (tokens is None):
        raise ConfigError("embed: sources go with tokens")
    for name, fed in (("sources", sources), ("tokens", tokens)):
        if fed is not None and (fed.dtype != torch.int32 or not fed.is_contiguous()):
            raise ConfigError(f"embed: {name} are {fed.dtype}, expected contiguous int32")
    if sources is not None and sources.shape != ids.shape:
        raise ConfigError(f"embed: {list(sources.shape)} sources for {list(ids.shape)} ids")
    if out is None:
        out = torch.empty((ids.shape[0], width), dtype=table.dtype, device=table.device)
    if ids.shape[0]:
        _launch(
            table.dtype,
            "embed",
            (ids.shape[0], -(-width // (vector * _THREADS))),
            _THREADS,
            (
                table.data_ptr(),
                ids.data_ptr(),
                0 if sources is None else sources.data_ptr(),
                0 if tokens is None else tokens.data_ptr(),
                out.data_ptr(),
                out.stride(0),
                vocab,
                width,
            ),
        )
    return out


def _norm(
    name: str,
    weight_dtype: torch.dtype,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    addend: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    rows, width = x.shape
    if total is None:
        total = x
    vector = _check(name, width, x, total, *(t for t in (addend, out) if t is not None))
    packed = weight.stride() == (1,) and weight.data_ptr() % _VECTOR_BYTES == 0
    if weight.shape != (width,) or weight.dtype != weight_dtype or not packed:
        raise ConfigError(
            f"{name}: weight is {weight.dtype} {list(weight.shape)}, strides {weight.stride()}; "
            f"accepted is a packed {weight_dtype} [{width}] at a multiple of {_VECTOR_BYTES} bytes"
        )
    # As many threads as there are vectors, so that the order depends on the width alone.
    threads = min(1024, -(-width // (vector * 32)) * 32)
    if width > threads * vector * _NORM_PASSES:
        raise ConfigError(f"{name}: width {width} exceeds {1024 * vector * _NORM_PASSES}")
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _launch(
            x.dtype,
            name,
            (rows,),
            threads,
            (
                x.data_ptr(),
                x.stride(0),
                0 if addend is None else addend.data_ptr(),
                0 if addend is None else addend.stride(0),
                total.data_ptr(),
                total.stride(0),
                weight.data_ptr(),
                out.data_ptr(),
                out.stride(0),
                np.float32(eps),
                width,
            ),
        )
    return out


def _check(name: str, width: int, *tensors: torch.Tensor) -> int:
    """Elements of a vector; refuse what cannot be read by vectors."""
    dtype = tensors[0].dtype
    if dtype not in ELEMENTS:
        raise ConfigError(f"{name}: dtype {dtype} is not supported")
    vector = _VECTOR_BYTES // dtype.itemsize
    for x in tensors:
        aligned = x.data_ptr() % _VECTOR_BYTES == 0 and x.stride(-1) == 1
        if x.dtype != dtype or not aligned or any(stride % vector for stride in x.stride()[:-1]):
            raise ConfigError(
                f"{name}: {x.dtype} {list(x.shape)} with strides {list(x.stride())}; rows start at "
                f"multiples of {_VECTOR_BYTES} bytes"
            )
    if width % vector:
        raise ConfigError(f"{name}: width {width} is no multiple of {vector}")
    return vector


def _source(dtype: torch.dtype) -> Variant:
    return Variant(file="fused.cu", names=_NAMES, defines=(("ELEMENT", ELEMENTS[dtype]),))


def _launch(
    dtype: torch.dtype,
    name: str,
    grid: tuple[int, ...],
    block: int,
    args: tuple[Argument, ...],
) -> None:
    _kernel(dtype, name, torch.cuda.current_device()).launch(grid, block, args)


@functools.cache
def _kernel(dtype: torch.dtype, name: str, device: int) -> Kernel:
    return load_kernel(_source(dtype), name, device, early=True)


VARIANTS = tuple(_source(dtype) for dtype in ELEMENTS)
