"""Which device an engine runs on, and the backend that belongs to it."""

import torch

from headrace.backends.base import Backend
from headrace.backends.cuda.loader import CudaUnavailable, require_gpu
from headrace.backends.torch_ops import TorchBackend
from headrace.config import EngineConfig
from headrace.errors import ConfigError


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device of an engine; "auto" is a GPU that can run the kernels, else the CPU.

    Raises `ConfigError` for a GPU that is not there or cannot run them, or with an option that only
    copies of a CPU have.
    """
    name = config.device
    device = torch.device("cpu")
    if name.startswith("cuda") or (name == "auto" and torch.cuda.is_available()):
        try:
            gpu = torch.device("cuda", int(name.partition(":")[2] or 0))
            require_gpu(gpu)
            device = gpu
        except CudaUnavailable as error:
            if name != "auto":
                raise ConfigError(f"device={name!r}: {error}; or take cpu") from error
    if device.type == "cuda":
        cpu_only = {"copy_check": config.copy_check, "link_bytes_per_s": config.link_bytes_per_s}
        for name, value in cpu_only.items():
            if value:
                raise ConfigError(
                    f"{name}={value} with device {device}: the CPU alone does this; leave it out"
                )
    return device


def make_backend(device: torch.device, *, deterministic: bool) -> Backend:
    """Return the backend of a device. Raises `ConfigError` if it cannot be made."""
    if device.type != "cuda":
        return TorchBackend(device, deterministic=deterministic)
    from headrace.backends.cuda_ops import CudaBackend

    torch.cuda.set_device(device)
    return CudaBackend(device, deterministic=deterministic)
