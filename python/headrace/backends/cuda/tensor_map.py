"""Descriptions of matrices for the copy engine, encoded by the driver. No state, no locks.

libcuda is opened when the first map is made, so importing this needs no driver.
"""

import ctypes
import functools

import torch

from headrace.backends.cuda.nvrtc import CudaUnavailable, KernelError

_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
BOX_BYTES = 128  # a row of a box, the width of the swizzle
# CUtensorMap enumerators.
_UINT8, _UINT32 = 0, 2
_NO_INTERLEAVE = 0
_NO_SWIZZLE, _SWIZZLE_128 = 0, 3
_PROMOTE_256 = 3  # what L2 reads ahead, in bytes
_ZEROS = 0  # outside


def matrix_map(matrix: torch.Tensor, box_rows: int) -> bytes:
    """Map of a contiguous matrix in boxes of `box_rows` rows times 128 bytes, swizzled.

    A kernel takes it by value. It holds the address of the matrix and does not keep it alive.

    Raises
    ------
    KernelError
        The driver refuses the matrix, as it does one whose rows are no multiple of 16 bytes.
    CudaUnavailable
        There is no driver.
    """
    row_bytes = matrix.shape[1] * matrix.element_size()
    box = (BOX_BYTES, box_rows)
    return _encoded(matrix, _UINT8, (row_bytes, matrix.shape[0]), row_bytes, box, _SWIZZLE_128)


def rows_map(x: torch.Tensor, box_rows: int, box_bytes: int) -> bytes:
    """Map of rows `[rows, columns]`, strided or not, in boxes of at most 1024 bytes a row.

    Raises as `matrix_map`.
    """
    itemsize = x.element_size()
    words = (x.shape[1] * itemsize // 4, x.shape[0])
    box = (box_bytes // 4, box_rows)
    return _encoded(x, _UINT32, words, x.stride(0) * itemsize, box, _NO_SWIZZLE)


def _encoded(
    x: torch.Tensor,
    kind: int,
    sizes: tuple[int, int],
    row_bytes: int,
    box: tuple[int, int],
    swizzle: int,
) -> bytes:
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    address = -(-ctypes.addressof(buffer) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        kind,
        ctypes.c_uint32(2),
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * 2)(*sizes),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(*box),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        swizzle,
        _PROMOTE_256,
        _ZEROS,
    )
    if status:
        raise KernelError(
            f"tensor map of {list(x.shape)} {x.dtype} with rows of {row_bytes} bytes in boxes of "
            f"{list(box)}: driver status {status}"
        )
    return ctypes.string_at(address, _MAP_BYTES)


@functools.cache
def driver() -> ctypes.CDLL:
    """Return libcuda. Raises CudaUnavailable without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailable(f"no CUDA driver ({error})") from error
