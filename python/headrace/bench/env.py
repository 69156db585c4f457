"""What a measurement depends on besides the code: printed with every result (BEN-07)."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import torch

from headrace._core import __version__
from headrace.engine import Engine

Value: TypeAlias = str | int | float | bool | None

_GIT_TIMEOUT_S = 5.0


def machine() -> dict[str, Value]:
    """Processor, versions, and the commit if this is a checkout (`+` if files are changed)."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "headrace": __version__,
        "commit": _commit(),
    }


def describe(engine: Engine, *, engines_in_process: int = 1) -> dict[str, Value]:
    """Return `machine()` and the configuration of an engine.

    engines_in_process: above 1 it tells a reader that engines shared caches and memory (BEN-04).
    """
    able = engine.capabilities
    device = torch.device(able.device)
    return {
        **machine(),
        "model": engine.config.model,
        "load_format": engine.config.load_format,
        "device": able.device,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "dtype": able.dtype,
        "kv_dtype": able.kv_dtype,
        "deterministic": able.deterministic,
        "slots": able.max_batch_size,
        "max_context": able.max_context,
        "kv_layout": engine.config.kv_layout,
        "page_size": engine.config.page_size,
        "pool_tokens": engine.kv.pages * engine.kv.page_tokens,
        "host_bytes": engine.config.host_bytes,
        "link_bytes_per_s": engine.config.link_bytes_per_s or None,
        "max_batch_tokens": engine.config.max_batch_tokens,
        "threads": torch.get_num_threads(),
        "seed": engine.config.seed,
        "engines_in_process": engines_in_process,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    # An installed package may lie inside a checkout of something else, which does not track it.
    if head is None or _git(folder, "ls-files", "--error-unmatch", str(folder.parent)) is None:
        return None
    return f"{head}+" if _git(folder, "status", "--porcelain") else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
