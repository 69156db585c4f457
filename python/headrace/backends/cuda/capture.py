"""Capture of CUDA graphs, one at a time in a process, as torch asks for.

Owns the lock that this takes. A thread that captures waits for nothing that needs the lock.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from headrace.errors import StepTimeout

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_capturing = threading.Lock()
# A capture takes about a second: one that takes so long waits for a step that is stuck.
_PATIENCE_S = 300.0


@contextlib.contextmanager
def captured(
    pool: "_POOL_HANDLE | None" = None, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is enqueued inside; see `torch.cuda.graph` for pool and stream.

    Other threads go on. No garbage is collected inside: a finalizer that gives memory or an event
    back to the driver calls what this thread may not call then, which would end the capture. Raises
    `StepTimeout` if a capture of another thread does not end.
    """
    with nobody_captures():
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                yield graph
        finally:
            if collects:
                gc.enable()


@contextlib.contextmanager
def nobody_captures() -> Iterator[None]:
    """For what touches a GPU as a whole. Raises as `captured`."""
    if not _capturing.acquire(timeout=_PATIENCE_S):
        raise StepTimeout(
            f"another engine of this process has captured graphs for {_PATIENCE_S:g} s: its GPU is "
            "stuck; start over in a new process"
        )
    try:
        yield
    finally:
        _capturing.release()
