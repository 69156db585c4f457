"""Launches of loaded kernels on torch's current stream, with little work for the host.

CuPy loads the code. It cannot ask for an early start, and a prompt of a small model is bound by
launches; so the call goes to the driver, with memory for the parameters that is made once.

An early kernel may start before the one ahead of it on the stream has ended. It waits, by
`griddepcontrol.wait`, before it writes anything or reads what an earlier kernel wrote, and reads
that past the first-level cache: a kernel that starts early may find lines there from before. What
an earlier step of an engine left may be read before the wait ("settled"): a step begins with a copy
to the device, which waits for all kernels ahead of it and for which all others wait.

Owns the memory of the parameters of a kernel, which the driver copies at the launch. One lock a
kernel, held while it is launched.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from headrace.backends.cuda.nvrtc import KernelError
from headrace.backends.cuda.tensor_map import driver

# An address or integer (the kernel takes the low bytes of its parameter), an fp32, or a struct.
Argument: TypeAlias = int | np.float32 | bytes
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STRUCT_ALIGNMENT = 128  # of a tensor map


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


class Parameters:
    """Memory for the arguments of one kernel: structs first, then eight bytes for each of the rest.

    addresses: what the driver is given. The first arguments fix the layout: all later ones have the
    same number, and structs of the same size in the same places.
    """

    def __init__(self, args: Sequence[Argument]) -> None:
        structs = [arg for arg in args if isinstance(arg, bytes)]
        sizes = [-(-len(arg) // _STRUCT_ALIGNMENT) * _STRUCT_ALIGNMENT for arg in structs]
        plain = len(args) - len(structs)
        self._memory = ctypes.create_string_buffer(sum(sizes) + 8 * plain + _STRUCT_ALIGNMENT)
        start = self._start = ctypes.addressof(self._memory)
        self._pack = struct.Struct(f"<{plain}q")
        self._structs: list[tuple[int, int, int]] = []  # argument, offset, size
        offset, places = -start % _STRUCT_ALIGNMENT, {}
        for index, arg in enumerate(args):
            if isinstance(arg, bytes):
                places[index] = offset
                self._structs.append((index, offset, len(arg)))
                offset += -(-len(arg) // _STRUCT_ALIGNMENT) * _STRUCT_ALIGNMENT
        self._plain = offset
        for index, arg in enumerate(args):
            if not isinstance(arg, bytes):
                places[index] = offset
                offset += 8
        self.count = len(args)
        self.addresses = (ctypes.c_void_p * max(1, len(args)))(
            *(start + places[index] for index in range(len(args)))
        )

    def write(self, args: Sequence[Argument]) -> None:
        """Store the arguments of a launch."""
        if len(args) != self.count:
            raise KernelError(f"{len(args)} arguments for a kernel with {self.count}")
        for index, offset, size in self._structs:
            value = args[index]
            if not isinstance(value, bytes) or len(value) != size:
                raise KernelError(f"argument {index} is not a struct of {size} bytes")
            ctypes.memmove(self._start + offset, value, size)
        self._pack.pack_into(
            self._memory,
            self._plain,
            *(arg if type(arg) is int else _word(arg) for arg in args if type(arg) is not bytes),
        )


def _word(arg: Argument) -> int:
    if isinstance(arg, np.float32):
        return int(arg.view(np.uint32))
    if not isinstance(arg, int):
        raise KernelError(f"argument {arg!r}: accepted is an int, a numpy.float32 or bytes")
    return int(arg)


class Kernel:
    """A loaded kernel.

    handle: of the driver, valid as long as `owner` lives. shared_bytes: most dynamic shared memory
    of a launch. early: it starts before the kernel ahead of it has ended.

    Raises
    ------
    KernelError
        The driver refuses so much shared memory.
    """

    def __init__(self, handle: int, owner: object, shared_bytes: int, *, early: bool) -> None:
        torch.cuda.current_stream()  # makes the context current
        self._owner = owner
        self._handle = ctypes.c_void_p(handle)
        self._shared_bytes = shared_bytes
        # The limit belongs to the code, which kernels of other engines share: it only grows.
        with _LIMITS:
            _raise_limit(self._handle, shared_bytes)
        self._attribute = _Attribute(id=_PROGRAMMATIC, value=1)
        self._config = _Config(attributes=ctypes.pointer(self._attribute), count=int(early))
        self._config_pointer = ctypes.pointer(self._config)
        self._launch = driver().cuLaunchKernelEx
        self._parameters: Parameters | None = None
        self._lock = threading.Lock()

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        args: Sequence[Argument],
        *,
        shared: int | None = None,
    ) -> None:
        """Launch on torch's current stream, also while a CUDA graph captures it.

        The caller keeps the memory behind addresses alive. shared: bytes of dynamic shared memory,
        if they are fewer than the kernel was made for.

        Raises
        ------
        KernelError
            The driver refuses the launch.
        """
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        with self._lock:
            parameters = self._parameters or Parameters(args)
            parameters.write(args)
            self._parameters = parameters
            config = self._config
            config.grid[:] = (*grid, 1, 1)[:3]
            config.block[:] = (block, 1, 1)
            config.shared = self._shared_bytes if shared is None else shared
            config.stream = stream
            status = self._launch(self._config_pointer, self._handle, parameters.addresses, None)
        _check(status)


# Held while the limit of a kernel is read and set.
_LIMITS = threading.Lock()


def _raise_limit(handle: ctypes.c_void_p, shared_bytes: int) -> None:
    limit = ctypes.c_int()
    _check(driver().cuFuncGetAttribute(ctypes.byref(limit), _DYNAMIC_SHARED, handle))
    if shared_bytes > limit.value:
        _check(driver().cuFuncSetAttribute(handle, _DYNAMIC_SHARED, shared_bytes))


def _check(status: int) -> None:
    if status:
        raise KernelError(f"kernel: driver status {status}")
