"""Launches that may start before the kernel ahead of them on the stream has ended.

Only for kernels that wait, by `griddepcontrol.wait`, before they write anything or read what an
earlier kernel wrote, and that read it past the first-level cache: a kernel that starts early may
find lines there from before. What an earlier step of an engine left may be read before the wait
("settled"): a step begins with a copy to the device, which waits for all kernels ahead of it and
for which all others wait. CuPy cannot ask for an early start, so this calls the driver. No state,
no locks.
"""

import ctypes
import functools
from collections.abc import Sequence

import torch

from headrace.backends.cuda.loader import KernelError, Variant, cached_cubin, require_gpu
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

    def __init__(self, cubin: bytes, symbol: str, shared_bytes: int = 0) -> None:
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

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        args: Sequence[int | bytes],
        *,
        shared: int | None = None,
    ) -> None:
        """Launch on torch's current stream; integers are passed as eight bytes each.

        A float is passed by its bytes. shared: bytes of dynamic shared memory, if they are fewer
        than the kernel was made for.

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
            grid=(*grid, 1, 1)[:3],
            block=(block, 1, 1),
            shared=self._shared_bytes if shared is None else shared,
            stream=stream,
            attributes=ctypes.pointer(self._attribute),
            count=1,
        )
        _check(driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


@functools.cache
def early_kernel(variant: Variant, name: str, shared_bytes: int, _device: int) -> EarlyKernel:
    """The kernel of a name expression of a variant, loaded once a device. Raises as `load`."""
    require_gpu()
    path, symbols = cached_cubin(variant)
    return EarlyKernel(path.read_bytes(), symbols[name], shared_bytes)


def _check(status: int) -> None:
    if status:
        raise KernelError(f"early launch: driver status {status}")
