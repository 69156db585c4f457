"""Capture of CUDA graphs, one at a time in a process, as torch asks for. No state, no locks."""

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@contextlib.contextmanager
def captured(
    pool: "_POOL_HANDLE | None" = None, stream: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is enqueued inside; see `torch.cuda.graph` for pool and stream.

    Other threads go on. No garbage is collected inside: a finalizer that gives memory or an event
    back to the driver calls what this thread may not call then, which would end the capture.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield graph
    finally:
        if collects:
            gc.enable()
