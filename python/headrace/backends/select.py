"""Which device an engine runs on, and the backend that belongs to it."""

import contextlib

import torch

from headrace.backends.base import Backend
from headrace.backends.cuda.loader import CudaUnavailable, require_gpu
from headrace.backends.torch_ops import TorchBackend
from headrace.config import EngineConfig
from headrace.errors import ConfigError

# A wait of the forward for its copies may take so many times the limit of one copy.
_GATE_COPIES = 2


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device of an engine; "auto" is the first GPU that can run the kernels, or the CPU.

    Raises `ConfigError` for a GPU that is not there or cannot run them, with an option that only
    copies of a CPU have, or if copies may take as long as a step.
    """
    name = config.device
    device = _first_gpu() if name == "auto" else torch.device("cpu")
    if name.startswith("cuda"):
        device = torch.device("cuda", int(name.partition(":")[2] or 0))
        try:
            require_gpu(device)
        except CudaUnavailable as error:
            raise ConfigError(f"device={name!r}: {error}; or take cpu") from error
    if device.type == "cuda":
        cpu_only = {"copy_check": config.copy_check, "link_bytes_per_s": config.link_bytes_per_s}
        for name, value in cpu_only.items():
            if value:
                raise ConfigError(
                    f"{name}={value} with device {device}: the CPU alone does this; leave it out"
                )
        _check_timeouts(config)
    return device


def _first_gpu() -> torch.device:
    """The first GPU that can run the kernels, else the CPU."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.device("cuda", index)
        with contextlib.suppress(CudaUnavailable):
            require_gpu(gpu)
            return gpu
    return torch.device("cpu")


def _check_timeouts(config: EngineConfig) -> None:
    """A step that waits for its copies must not count as stuck before they do."""
    least = _GATE_COPIES * config.copy_timeout_s
    if config.host_bytes and config.step_timeout_s <= least:
        raise ConfigError(
            f"step_timeout_s={config.step_timeout_s:g} with copy_timeout_s="
            f"{config.copy_timeout_s:g}: accepted is more than {least:g}, as one wait of a step "
            f"for copies may take {_GATE_COPIES} times copy_timeout_s; raise one or lower the other"
        )


def make_backend(device: torch.device, *, deterministic: bool) -> Backend:
    """Return the backend of a device. Raises `ConfigError` if it cannot be made."""
    if device.type != "cuda":
        return TorchBackend(device, deterministic=deterministic)
    from headrace.backends.cuda_ops import CudaBackend

    torch.cuda.set_device(device)
    return CudaBackend(device, deterministic=deterministic)
