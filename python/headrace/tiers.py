"""The host tier of one engine: memory for pages and states, and the queue that copies them.

Owns the host memory and the copy queue. What is copied when is the scheduler's business; that a
layer waits for its bytes is the gates' (`StepHandle`). Copies iterate over the planes of the pools,
so that a plane cannot be forgotten.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from headrace._core import CopyPlanes, CopyQueue, CpuDevice, CudaDevice, HostMemory, Region
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.kv.formats import KVLayout
from headrace.kv.state import StatePool
from headrace.models.config import ModelConfig
from headrace.models.hybrid_config import FULL_ATTENTION

_LOG = logging.getLogger(__name__)
# States that may wait for their copy to the host at once.
_MAX_STAGING = 4
_ALIGNMENT = 256  # of a plane in host memory, as of a pool
# Stores of many requests may wait at once; each is a few hundred bytes.
_MAX_JOBS = 65_536
# First touch is bound by the kernel zeroing pages; more threads gain nothing (streaming.md).
_TOUCH_THREADS = 16
_Plane: TypeAlias = tuple[str, int, int, int, Region, Region]


@dataclass(frozen=True, slots=True)
class HostSizes:
    """What a budget of host memory holds."""

    pages: int
    snapshots: int
    nbytes: int


def staging_states(slots: int, host: HostSizes | None) -> int:
    """States on the device beside those of the slots, which wait for their copy to the host.

    Two at least: one is for the last states of prompts alone.
    """
    if host is None or not host.snapshots:
        return 0
    return min(max(slots, 2), _MAX_STAGING)


def host_sizes(
    budget_bytes: int,
    layout: KVLayout,
    *,
    page_size: int,
    state_bytes: int,
    snapshot_interval: int,
) -> HostSizes:
    """Divide a budget between pages and, for hybrid models, states.

    A cached prefix of a hybrid model is of use only up to a saved state, so both are sized
    together: one state every `snapshot_interval` tokens, and at least one.

    Raises
    ------
    ConfigError
        The budget does not hold one page (and one state).
    """
    page_bytes = page_size * layout.bytes_per_token
    planes = len(layout.planes) + (2 if state_bytes else 0)
    usable = budget_bytes - planes * _ALIGNMENT
    snapshots = 0
    if state_bytes:
        interval_bytes = snapshot_interval * layout.bytes_per_token
        snapshots = max(1, usable // (interval_bytes + state_bytes))
    pages = (usable - snapshots * state_bytes) // page_bytes
    if pages < 1:
        needed = page_bytes + state_bytes + planes * _ALIGNMENT
        raise ConfigError(
            f"host_bytes={budget_bytes}: accepted is 0 or at least {needed}, which is one page of "
            f"{page_size} tokens{' and one state' if state_bytes else ''}"
        )
    nbytes = pages * page_bytes + snapshots * state_bytes + planes * _ALIGNMENT
    return HostSizes(pages, snapshots, nbytes)


class HostTier:
    """Host memory of `sizes`, and a queue over the planes of an engine's pools.

    link_bytes_per_s: rate of an imitated link, or None; CPU only. copy_check: compare checksums of
    pages that come back; CPU only. stream: that of the forward, where the pools are on a GPU; the
    host memory is pinned then.

    Raises
    ------
    OutOfPages
        The machine has less memory than the tier needs.
    ConfigError
        `copy_check` on a GPU, or memory that cannot be pinned.
    DeviceError
        The driver of the GPU refuses something.
    """

    def __init__(
        self,
        config: ModelConfig,
        kv: KVCache,
        state: StatePool | None,
        sizes: HostSizes,
        *,
        page_size: int,
        timeout_s: float,
        link_bytes_per_s: int | None,
        copy_check: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        on_gpu = kv.device.type == "cuda"
        # Pinning makes pages resident one by one; touching them before is several times faster.
        threads = min(_TOUCH_THREADS, os.cpu_count() or 1) if on_gpu else 0
        start = time.perf_counter()
        self.memory = HostMemory(sizes.nbytes, touch_threads=threads)
        self._used = 0
        kinds = [
            "kv" if config.layer_type(layer) == FULL_ATTENTION else "state"
            for layer in range(config.num_layers)
        ]
        host_tokens = config.kv_layers * sizes.pages * page_size
        kv_planes = [
            self._plane(name, tensor, host_tokens)
            for name, tensor in _flattened(kv.pool.tensors, 3).items()
        ]
        states: Mapping[str, torch.Tensor] = {} if state is None else state.tensors
        host_states = config.linear_layers * sizes.snapshots
        state_planes = [
            self._plane(name, tensor, host_states) for name, tensor in _flattened(states, 2).items()
        ]
        self.planes = CopyPlanes(
            kinds,
            pages=kv.pages,
            page_tokens=kv.page_tokens,
            host_pages=sizes.pages,
            host_page_tokens=page_size,
            kv_planes=kv_planes,
            slots=0 if state is None else state.rows,
            snapshots=sizes.snapshots,
            state_planes=state_planes,
        )
        self.device: CpuDevice | CudaDevice
        if on_gpu:
            assert stream is not None, "the copies of a GPU are ordered against its forward"
            self.device = self._gpu(stream)
            seconds = time.perf_counter() - start
            _LOG.info("pinned %s bytes of host memory in %.2f s", f"{sizes.nbytes:,}", seconds)
        else:
            self.device = CpuDevice(link_bytes_per_s)
        self.queue = CopyQueue(
            self.device,
            self.planes,
            deadline=timeout_s,
            max_jobs=_MAX_JOBS,
            copy_check=copy_check,
        )

    def close(self, *, drain: bool = True) -> None:
        """End all copies, then let the memory go.

        drain: let those that run end, within the time limit of a copy; else they are given up.
        """
        self.queue.shutdown(None if drain else 0.0)

    def _gpu(self, stream: torch.cuda.Stream) -> CudaDevice:
        from headrace.backends.cuda.capture import nobody_captures
        from headrace.backends.cuda.copy_gather import copy_device

        # What was enqueued for the pools' memory before it was theirs must not run beside a copy.
        with nobody_captures():
            torch.cuda.synchronize(stream.device)
        device = copy_device(stream)
        device.register(self.memory)
        return device

    def _plane(self, name: str, tensor: torch.Tensor, units: int) -> _Plane:
        """A plane `[layers, pages or slots, ..., bytes]` and its part of the host memory."""
        unit_bytes = tensor.shape[-1] * tensor.itemsize
        layer, page = (stride * tensor.itemsize for stride in tensor.stride()[:2])
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        cuda = tensor.device.index if tensor.device.type == "cuda" else None
        device = Region(tensor.data_ptr(), extent * tensor.itemsize, tensor, cuda=cuda)
        nbytes = units * unit_bytes
        host = self.memory.region(self._used, nbytes)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return name, unit_bytes, layer, page, device, host


def _flattened(planes: Mapping[str, torch.Tensor], dims: int) -> dict[str, torch.Tensor]:
    """Views with the axes from `dims` on made one: what a copy moves as a unit."""
    return {name: tensor.flatten(dims) for name, tensor in planes.items()}
