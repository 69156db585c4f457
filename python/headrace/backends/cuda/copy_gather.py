"""The copy device of a GPU: machine code for its gather copies, and the folder for its thresholds.

The copies themselves are made by `headrace._core`, which launches the kernel without Python. No
state, no locks.
"""

from pathlib import Path

import torch

from headrace._core import CudaDevice
from headrace.backends.cuda.loader import Variant, cached_cubin, kernel_folder

_SOURCE = Variant(file="copy_gather.cu", names=("copy_gather",))
VARIANTS = (_SOURCE,)


def copy_device(
    stream: torch.cuda.Stream,
    *,
    thresholds: tuple[int, int | None] | None = None,
    cache: Path | None = None,
) -> CudaDevice:
    """Return a device whose compute stream is `stream`; it keeps the stream alive.

    thresholds: as `CudaDevice` takes them. cache: folder for machine code and for what was
    measured, `~/.cache/headrace/kernels` by default.

    Raises
    ------
    ConfigError
        A default stream, or no NVIDIA driver.
    DeviceError
        The driver refuses something.
    CudaUnavailable, KernelError
        The kernel cannot be compiled.
    """
    folder = cache or kernel_folder()
    path, symbols = cached_cubin(_SOURCE, folder)
    return CudaDevice(
        stream.device_index,
        stream.cuda_stream,
        path.read_bytes(),
        symbols["copy_gather"],
        owner=stream,
        thresholds=thresholds,
        cache=folder,
    )
