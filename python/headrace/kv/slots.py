"""Fixed-slot KV pools: one slot holds the keys and values of one request over all layers.

Owns the two pool tensors; who holds which slot is the scheduler's business. The pools are not
initialised, so their pages cost nothing before first use and stale memory may hold NaN: whoever
reads stays within the length of the request.
"""

import os
from pathlib import Path

import torch

from headrace.errors import ConfigError
from headrace.models.config import ModelConfig

# An index of torch is a signed 64-bit number; a larger pool cannot be addressed.
_MAX_BYTES = 2**63 - 1


class SlotKVCache:
    """K and V pools `[layers, slots, max_context, kv_heads, head_dim]`.

    Raises
    ------
    ConfigError
        A size is not positive, or the pools do not fit in the memory that is free now. Nothing
        has been allocated then.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots = slots
        self.max_context = max_context
        self.dtype = dtype
        self.device = torch.device(device)
        self.bytes_per_token = config.kv_bytes_per_token(dtype.itemsize)
        self.bytes_total = slot_pool_bytes(config, slots, max_context, dtype.itemsize)
        available = available_bytes(self.device)
        if self.bytes_total > available:
            raise ConfigError(
                f"KV pools need {self.bytes_total:,} bytes ({slots} slots x {max_context} tokens x "
                f"{self.bytes_per_token:,} bytes), {available:,} are free on {self.device}; lower "
                f"max_batch_size or max_context"
            )
        shape = (config.num_layers, slots, max_context, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=self.device)
        self.v = torch.empty(shape, dtype=dtype, device=self.device)

    def view(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First `length` tokens of a slot: views of K and V, `[length, kv_heads, head_dim]`."""
        return self.k[layer, slot, :length], self.v[layer, slot, :length]


def slot_pool_bytes(config: ModelConfig, slots: int, max_context: int, itemsize: int) -> int:
    """Bytes of both pools, in exact integers.

    Raises
    ------
    ConfigError
        A size is not positive, or the result does not fit a signed 64-bit number.
    """
    for name, value in (("slots", slots), ("max_context", max_context)):
        if value <= 0:
            raise ConfigError(f"{name} must be positive, got {value}")
    total = slots * max_context * config.kv_bytes_per_token(itemsize)
    if total > _MAX_BYTES:
        raise ConfigError(
            f"{slots} slots x {max_context} tokens need {total:,} bytes, more than 64-bit addresses"
        )
    return total


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # The kernel's own estimate counts reclaimable file cache as free; sysconf's free pages do not,
    # and a machine that has just read a checkpoint would look full.
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
