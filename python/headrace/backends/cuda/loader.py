"""Kernels on the device: compiled once a machine, loaded by CuPy.

Machine code is kept in a folder under the hash of everything that decides it (whole source text,
options, architecture, names, compiler version), so a second process does not compile. CuPy loads
it with `RawModule(path=...)`; its own cache would compile again for every name expression.
No locks: a file appears under its name complete or not at all.
"""

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.backends.cuda.kernel import Kernel
from headrace.backends.cuda.nvrtc import (
    CudaUnavailable,
    KernelError,
    Variant,
    compile_variant,
    nvrtc_version,
    read_source,
)

__all__ = ["CudaUnavailable", "KernelError", "KernelModule", "Variant", "load_kernel"]

_CAPABILITY = (9, 0)


class KernelModule:
    """A loaded variant."""

    def __init__(self, raw: Any, symbols: Mapping[str, str]) -> None:  # noqa: ANN401 (CuPy's)
        self._raw = raw
        self._symbols = symbols

    def function(self, name: str, *, shared: int = 0, early: bool = False) -> Kernel:
        """The kernel of a name expression.

        shared: largest dynamic shared memory a launch will ask for, bytes. early: see `kernel`.

        Raises
        ------
        KernelError
            The variant has no such name.
        """
        if name not in self._symbols:
            raise KernelError(f"kernel {name!r}: the module has {', '.join(self._symbols)}")
        function = self._raw.get_function(self._symbols[name]).kernel
        return Kernel(function.ptr, function, shared, early=early)


def load_variant(variant: Variant) -> KernelModule:
    """Compile, or take from the cache, and load on the current device, once a process.

    Raises
    ------
    CudaUnavailable
        No GPU of compute capability 9.0, no CuPy or no NVRTC.
    KernelError
        The compiler refuses the source.
    """
    require_gpu()
    return _loaded(variant, torch.cuda.current_device())


@functools.cache
def _loaded(variant: Variant, _device: int) -> KernelModule:
    path, symbols = cached_cubin(variant)
    return KernelModule(_cupy().RawModule(path=str(path)), symbols)


def kernel_folder() -> Path:
    """Return the folder for machine code, unless a caller has one of its own."""
    return Path.home() / ".cache" / "headrace" / "kernels"


def cached_cubin(variant: Variant, folder: Path | None = None) -> tuple[Path, dict[str, str]]:
    """Path of the machine code in the cache and symbols by name; needs no GPU.

    Raises as `load_variant`.
    """
    folder = folder or kernel_folder()
    source = read_source(variant.file)
    key = json.dumps([nvrtc_version(), variant.flags, variant.names, source]).encode()
    stem = f"{Path(variant.file).stem}-{hashlib.sha256(key).hexdigest()[:32]}"
    path, index = folder / f"{stem}.cubin", folder / f"{stem}.json"
    if not index.is_file() or not path.is_file():
        compiled = compile_variant(variant, source)
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(path, compiled.cubin)
        # Last: whoever sees the index finds the code.
        _write_whole(index, json.dumps(compiled.symbols).encode())
        return path, compiled.symbols
    symbols: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))
    return path, symbols


def _write_whole(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(temporary).replace(path)


@functools.cache
def load_kernel(
    variant: Variant, name: str, _device: int, *, shared: int = 0, early: bool = False
) -> Kernel:
    """A kernel of a variant, made once for a device and its options.

    Raises as `load_variant`.
    """
    return load_variant(variant).function(name, shared=shared, early=early)


def require_gpu(device: torch.device | None = None) -> None:
    """Check that a GPU can run the kernels, once for each; the current one if none is named.

    Raises
    ------
    CudaUnavailable
        No such GPU, one that is not of compute capability 9.0, or no CuPy.
    """
    if not torch.cuda.is_available():
        raise CudaUnavailable("no CUDA device: torch.cuda.is_available() is False")
    index = None if device is None else device.index
    _require(torch.cuda.current_device() if index is None else index)


@functools.cache
def _require(index: int) -> None:
    count = torch.cuda.device_count()
    if index >= count:
        raise CudaUnavailable(f"no device cuda:{index}: accepted is cuda:0 to cuda:{count - 1}")
    found = torch.cuda.get_device_capability(index)
    if found != _CAPABILITY:
        raise CudaUnavailable(
            f"compute capability {found[0]}.{found[1]} of cuda:{index}: the kernels are built for "
            f"{_CAPABILITY[0]}.{_CAPABILITY[1]}"
        )
    _cupy()


def _cupy() -> Any:  # noqa: ANN401 (CuPy has no types)
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailable(
            f"no CuPy ({error}): install the extra headrace[cuda] (cupy-cuda13x)"
        ) from error
    return cupy
