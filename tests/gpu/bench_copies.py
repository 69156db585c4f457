"""Time copies by mechanism, direction and size: `python tests/gpu/bench_copies.py [name ...]`.

Each number is GB/s of the best of a few jobs through the copy queue, bytes compared once a line.
Pieces are scattered: the order on the host is a permutation of that on the device, so none merge.
Loads are timed on the host from the hand-over to the end on the compute stream, stores to their
acknowledgement, which the worker looks for every 200 us: that is part of small jobs.
"""

import itertools
import sys
import time

import numpy as np
import torch

from headrace._core import CopyPlanes, CopyQueue, HostMemory, Region
from headrace.backends.cuda.copy_gather import copy_device

DEVICE = torch.device("cuda", 0)
NEVER = 2**62
MECHANISMS = {"plain": (0, None), "batch": (NEVER, 0), "gather": (NEVER, None)}
SIZES = [1 << power for power in range(12, 27, 2)]  # 4 KiB to 64 MiB
POOL_BYTES = 1 << 30
# Small pieces are slow one by one: no need to wait for a GiB of them.
MOST_PIECES = 16_384
TRIES = 5


class Pieces:
    """Two planes of one layer, pages of one token of `size` bytes, and a queue over them."""

    def __init__(self, device, memory, size):
        self.count = min(POOL_BYTES // size, MOST_PIECES)
        self.nbytes = self.count * size
        self.tensor = torch.zeros((1, self.count, size), dtype=torch.uint8, device=DEVICE)
        region = Region(self.tensor.data_ptr(), self.nbytes, self.tensor, cuda=DEVICE.index)
        self.host = torch.from_numpy(memory.array(0, self.nbytes).reshape(self.count, size))
        plane = ("bytes", size, self.nbytes, size, region, memory.region(0, self.nbytes))
        self.planes = CopyPlanes(
            ["kv"], pages=self.count, page_tokens=1, host_pages=self.count, kv_planes=[plane]
        )
        self.queue = CopyQueue(device, self.planes)
        order = np.random.default_rng(0).permutation(self.count)
        columns = (np.arange(self.count), np.zeros(self.count), order, np.ones(self.count))
        self.pieces = np.stack(columns, 1).astype(np.uint32)
        self.order = torch.from_numpy(order)
        self.jobs = itertools.count()

    def load(self, stream):
        """Seconds of a job to the device."""
        stream.synchronize()
        start = time.perf_counter()
        step = self.queue.start_step([(next(self.jobs), self.pieces, None)])
        step.before_layer(0)
        stream.synchronize()
        seconds = time.perf_counter() - start
        assert step.finish() == []
        return seconds

    def store(self):
        """Seconds of a job to the host."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.queue.submit_store(next(self.jobs), self.pieces)
        self.queue.drain()
        return time.perf_counter() - start

    def check(self):
        """Whether both sides have the bytes that the last job moved."""
        assert torch.equal(self.tensor[0].cpu(), self.host[self.order])

    def paths(self):
        """Mechanisms that were used."""
        stats = self.queue.stats()
        return {m for m in MECHANISMS if stats["load"][m] + stats["store"][m]}


def main(names):
    memory = HostMemory(POOL_BYTES, touch_threads=16)
    memory.array()[:] = np.random.default_rng(1).integers(0, 256, POOL_BYTES, np.uint8)
    stream = torch.cuda.Stream(DEVICE)
    print("mechanism   piece KiB   pieces   to device GB/s   to host GB/s")
    for name in names:
        # One at a time: memory is registered once.
        device = copy_device(stream, thresholds=MECHANISMS[name])
        device.register(memory)
        for size in SIZES:
            pieces = Pieces(device, memory, size)
            torch.cuda.synchronize()
            loads = [pieces.load(stream) for _ in range(TRIES)]
            pieces.check()
            pieces.tensor.random_(0, 256)
            stores = [pieces.store() for _ in range(TRIES)]
            pieces.check()
            assert pieces.paths() == {name}, pieces.paths()
            load, store = (pieces.nbytes / min(times) / 1e9 for times in (loads, stores))
            print(
                f"{name:9s} {size >> 10:11d} {pieces.count:8d} {load:16.2f} {store:14.2f}",
                flush=True,
            )
            pieces.queue.shutdown()
            del pieces
        del device
    start = time.perf_counter()
    measured = copy_device(stream, cache=None).thresholds
    print(
        f"thresholds (plain, batch): {measured}, {time.perf_counter() - start:.3f} s with start-up"
    )


if __name__ == "__main__":
    main(sys.argv[1:] or list(MECHANISMS))
