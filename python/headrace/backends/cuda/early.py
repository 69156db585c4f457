"""Launches that may start before the kernel ahead of them on the stream has ended.

Only for kernels that wait, by `griddepcontrol.wait`, before they read what an earlier kernel wrote
or write anything. CuPy cannot ask for it, so this calls the driver. No state, no locks.
"""

import ctypes
from collections.abc import Sequence

import torch

from headrace.backends.cuda.loader import KernelError
from headrace.backends.cuda.tensor_map import driver

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class EarlyKernel:
    """A kernel of a machine code file, on the device that is current when it is made.

    Raises
    ------
    KernelError
        The driver refuses the file, the name or so much shared memory.
    """

    def __init__(self, cubin: bytes, symbol: str, shared_bytes: int) -> None:
        torch.cuda.current_stream()  # makes the context current
        self._shared_bytes = shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver().cuModuleLoadData(ctypes.byref(self._module), cubin))
        _check(
            driver().cuModuleGetFunction(
                ctypes.byref(self._function), self._module, symbol.encode()
            )
        )
        _check(driver().cuFuncSetAttribute(self._function, _DYNAMIC_SHARED, shared_bytes))
        self._attribute = _Attribute(id=_PROGRAMMATIC, value=1)

    def launch(self, grid: int | tuple[int, int], block: int, args: Sequence[int | bytes]) -> None:
        """Launch on torch's current stream; integers are passed as eight bytes each.

        A float is passed by its bytes.

        Raises
        ------
        KernelError
            The driver refuses the launch.
        """
        held = [
            ctypes.create_string_buffer(arg, len(arg))
            if isinstance(arg, bytes)
            else ctypes.c_int64(arg)
            for arg in args
        ]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(arg) for arg in held))
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        config = _Config(
            grid=(grid, 1, 1) if isinstance(grid, int) else (*grid, 1),
            block=(block, 1, 1),
            shared=self._shared_bytes,
            stream=stream,
            attributes=ctypes.pointer(self._attribute),
            count=1,
        )
        _check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


def _check(status: int) -> None:
    if status:
        raise KernelError(f"early launch: driver status {status}")
