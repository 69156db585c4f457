"""Compiling a file of `cuda/` with NVRTC, without a GPU and without CuPy.

The library and the headers are those of the pip packages that a CUDA build of torch depends on
(`nvidia-cuda-nvrtc`, `nvidia-cuda-runtime`), so that CI compiles with what serves. Own headers are
inlined before the compiler sees the text: one string is the whole program, and its hash a cache
key. No state but the loaded library; no locks.
"""

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import HeadraceError

ARCH = "sm_90"
_BASE_OPTIONS = ("--std=c++17", "-default-device")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


class KernelError(HeadraceError, RuntimeError):
    """A kernel that cannot be compiled or loaded. Carries the compiler's log."""


class CudaUnavailable(HeadraceError, RuntimeError):
    """No GPU, no CuPy or no NVRTC on this machine. Says which and what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One program for the compiler: a file, its instantiations and its options.

    file: name in `cuda/`. names: C++ name expressions of the kernels wanted. defines: pairs for
    `-D`. options: further NVRTC options. arch: `sm_90`, or `sm_90a` for wgmma.
    """

    file: str
    names: tuple[str, ...]
    defines: tuple[tuple[str, str | int], ...] = ()
    options: tuple[str, ...] = ()
    arch: str = ARCH

    @property
    def flags(self) -> tuple[str, ...]:
        """Every option but the include folder, in a fixed order."""
        macros = tuple(f"-D{name}={value}" for name, value in self.defines)
        return (f"--gpu-architecture={self.arch}", *_BASE_OPTIONS, *self.options, *macros)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of a variant, and the symbol of each of its name expressions."""

    cubin: bytes
    symbols: dict[str, str]
    log: str


def source_folder() -> Path:
    """Folder of the kernel sources: in the installed package, or beside it in a repository.

    Raises
    ------
    KernelError
        Neither exists.
    """
    package = Path(__file__).parents[2]
    for folder in (package / "cuda", package.parents[1] / "cuda"):
        if folder.is_dir():
            return folder
    raise KernelError(f"no kernel sources: neither {package / 'cuda'} nor {folder} exists")


def read_source(file: str) -> str:
    """Text of a kernel file with own `#include "..."` lines replaced by the files, each once.

    Raises
    ------
    KernelError
        A file is missing.
    """
    return "\n".join(_inlined(source_folder(), file, set()))


def _inlined(folder: Path, file: str, seen: set[str]) -> Iterator[str]:
    seen.add(file)
    try:
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise KernelError(f"kernel source {file}: {error}") from error
    yield f'#line 1 "{file}"'
    for number, line in enumerate(lines, start=1):
        found = _INCLUDE.match(line)
        if found is None:
            yield line
        elif found[1] not in seen:
            yield from _inlined(folder, found[1], seen)
            yield f'#line {number + 1} "{file}"'


def compile_variant(variant: Variant, source: str | None = None) -> Compiled:
    """Compile to machine code; `source` is the inlined text if the caller has it already.

    Raises
    ------
    KernelError
        The compiler refuses it; the message holds its log.
    CudaUnavailable
        NVRTC or the CUDA headers are not installed.
    """
    text = read_source(variant.file) if source is None else source
    library = _library()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), variant.file.encode(), 0, None, None
        )
    )
    try:
        for name in variant.names:
            _check(library.nvrtcAddNameExpression(program, name.encode()))
        flags = [*variant.flags, *(f"-I{folder}" for folder in _include_folders())]
        array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), array)
        log = _text(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if status:
            raise KernelError(f"{variant.file} {' '.join(variant.flags)}: NVRTC says\n{log}")
        return Compiled(
            cubin=_text(library, "CUBIN", program),
            symbols={name: _symbol(library, program, name) for name in variant.names},
            log=log,
        )
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def nvrtc_version() -> str:
    """Version of the compiler, part of a cache key. Raises as `compile_variant`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _symbol(library: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> str:
    symbol = ctypes.c_char_p()
    _check(library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(symbol)))
    assert symbol.value is not None, "a compiled name expression has a symbol"
    return symbol.value.decode()


def _check(status: int) -> None:
    if status:
        raise KernelError(f"NVRTC call failed with status {status}")


def _pip_folders(part: str) -> Iterator[Path]:
    """Folders `part` of the CUDA 13 pip packages, which share the namespace package `nvidia`."""
    found = importlib.util.find_spec("nvidia")
    locations: Sequence[str] = () if found is None else found.submodule_search_locations or ()
    for location in locations:
        folder = Path(location) / "cu13" / part
        if folder.is_dir():
            yield folder


@functools.cache
def _include_folders() -> tuple[Path, ...]:
    folders = [*_pip_folders("include"), Path("/usr/local/cuda/include")]
    usable = tuple(folder for folder in folders if (folder / "cuda_fp8.h").is_file())
    if not usable:
        raise CudaUnavailable("no CUDA headers: install nvidia-cuda-runtime 13")
    return usable[:1]


@functools.cache
def _library() -> ctypes.CDLL:
    for folder in _pip_folders("lib"):
        for builtins in sorted(folder.glob("libnvrtc-builtins.so.13*")):
            # NVRTC looks for it by name only, and finds it if it is loaded already.
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        path = folder / "libnvrtc.so.13"
        if path.is_file():
            return ctypes.CDLL(str(path))
    try:
        return ctypes.CDLL("libnvrtc.so.13")
    except OSError as error:
        raise CudaUnavailable(f"no NVRTC 13: install nvidia-cuda-nvrtc ({error})") from error
