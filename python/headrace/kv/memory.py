"""How much memory is left, asked before a pool is allocated."""

import os
from pathlib import Path

import torch


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
