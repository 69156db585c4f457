"""The page allocator beside that of SGLang, run by hand.

    python -m pip download --no-deps -d /tmp/peer sglang==0.5.23
    python tests/bench/peer_allocator.py --wheel /tmp/peer/sglang-*.whl -o json

SGLang's `TokenToKVPoolAllocator` is a free list in one torch tensor: no classes, owners, fences or
best fit. It is the nearest public allocator that runs without a GPU; the package itself is not
imported, only the module of the allocator, because the rest wants one. Both pools have as many
pages (65,536 of 36 layers, so 1,179,648 LOW pages), are 90 % full after random frees, and are
called from Python for 1,000 pages at a time, in turns within one process. vLLM's wheel is 320 MB
and its block pool does not import alone; the smaller engines are not on PyPI.
"""

import argparse
import importlib
import statistics
import sys
import time
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import numpy as np
import torch

from headrace import PageAllocator
from headrace.bench.env import machine
from headrace.bench.output import Report, emit

RAW_PAGES, LAYERS, WIDTH = 65_536, 36, 2
PAGES = RAW_PAGES * (LAYERS // WIDTH)
CALL = 1_000
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.allocator")


class Headrace:
    """LOW pages of a `PageAllocator`."""

    def __init__(self):
        self._pool = PageAllocator(RAW_PAGES, LAYERS, 64, slot_widths=WIDTH, cap_low=RAW_PAGES)

    def alloc(self, n):
        return np.stack(self._pool.alloc(n, "low"), axis=1)

    def free(self, pages):
        self._pool.free(np.ascontiguousarray(pages[:, 0]), np.ascontiguousarray(pages[:, 1]))

    def available(self):
        return self._pool.available("low")


class Sglang:
    """SGLang's allocator; `need_sort` keeps the list of freed pages apart and merges it sorted."""

    def __init__(self, allocator, need_sort):
        self._pool = allocator(PAGES, torch.float16, "cpu", None, need_sort)

    def alloc(self, n):
        return self._pool.alloc(n).numpy()

    def free(self, pages):
        self._pool.free(torch.from_numpy(pages))

    def available(self):
        return self._pool.available_size()


def peer_class(wheel, folder):
    """Import the allocator's module without the packages above it."""
    ZipFile(wheel).extractall(folder)
    sys.path.insert(0, str(folder))
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module(f"{PACKAGES[-1]}.token").TokenToKVPoolAllocator


class Run:
    """A pool at 90 %, and the times of its calls."""

    def __init__(self, pool, seed):
        self.pool = pool
        self.rng = np.random.default_rng(seed)
        self.held = pool.alloc(PAGES)
        self.alloc_ns, self.free_ns = [], []
        self.free(PAGES // 10)
        self.free_ns.clear()

    def free(self, n):
        order = self.rng.permutation(len(self.held))
        gone, self.held = self.held[order[:n]], self.held[order[n:]]
        start = time.perf_counter_ns()
        self.pool.free(gone)
        self.free_ns.append((time.perf_counter_ns() - start) / n)

    def turn(self):
        start = time.perf_counter_ns()
        got = self.pool.alloc(CALL)
        self.alloc_ns.append((time.perf_counter_ns() - start) / CALL)
        self.held = np.concatenate((self.held, got))
        self.free(CALL)

    def row(self, name):
        return {
            "allocator": name,
            "alloc_ns_page": statistics.median(self.alloc_ns),
            "free_ns_page": statistics.median(self.free_ns),
            # Nothing was lost or handed out twice.
            "conserved": self.pool.available() + len(self.held) == PAGES,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True, help="wheel of sglang 0.5.23")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("-o", "--output", default="table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        peer = peer_class(args.wheel, folder)
        runs = {
            "headrace": Run(Headrace(), 0),
            "sglang": Run(Sglang(peer, need_sort=False), 0),
            "sglang, sorted": Run(Sglang(peer, need_sort=True), 0),
        }
        for _ in range(args.turns):
            for run in runs.values():
                run.turn()
    rows = [run.row(name) for name, run in runs.items()]
    emit(
        Report({**machine(), "pages": PAGES, "turns": args.turns}, rows, tuple(rows[0])),
        args.output,
    )
    return 0 if all(row["conserved"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
