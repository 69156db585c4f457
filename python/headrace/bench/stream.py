"""`bench stream`: whether LOW streaming takes no longer than its slower half.

The copy queue is driven as by a step with LOW rows, over an imitated link and with a wait of fixed
length in the place of each layer's kernels. So the step is the queue's doing: ordering, gates and
hand-shakes; no model takes part.

With two buffers a step of L layers whose load takes `load` and whose compute takes `compute` can
end after `L * max(load, compute) + min(load, compute)`, and no number of buffers makes it shorter.
`compute_ms` is what the wait really took, as measured around it (a wait overshoots), `load_ms` is
bytes over the rate of the link.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace._core import CopyPlanes, CopyQueue, CpuDevice, HostMemory, Region
from headrace.bench.env import Value, machine
from headrace.bench.output import Report
from headrace.bench.stats import median
from headrace.errors import ConfigError

# The most that a step may take of its bound.
CLAIMED_RATIO = 1.1
DEFAULT_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
# A layer of one LOW page: small, so that moving the bytes is nothing beside waiting for the link.
_PAGE_TOKENS = 64
_TOKEN_BYTES = 1024
_MS = 1e3
_COLUMNS = (
    "ratio",
    "layers",
    "width",
    "load_ms",
    "compute_ms",
    "step_ms_median",
    "step_ms_min",
    "bound_ms",
    "step_per_bound",
    "step_per_bound_min",
    "claim_holds",
    "parity",
)


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    compute_s: float
    gate_s: float
    right: bool


class _Window:
    """A queue over one page that streams through `width` layers; host layers differ."""

    def __init__(self, layers: int, width: int, load_s: float) -> None:
        self.layers, self.width = layers, width
        self.device = np.zeros((layers, 1, _PAGE_TOKENS, _TOKEN_BYTES), np.uint8)
        memory = HostMemory(self.device.nbytes)
        self.host = memory.array().reshape(self.device.shape)
        self.host[:] = np.random.default_rng(0).integers(0, 256, self.host.shape, np.uint8)
        layer, page = self.device.strides[:2]
        region = Region(self.device.ctypes.data, self.device.nbytes, self.device)
        planes = CopyPlanes(
            ["kv"] * layers,
            pages=1,
            page_tokens=_PAGE_TOKENS,
            host_pages=1,
            kv_planes=[("kv", _TOKEN_BYTES, layer, page, region, memory.region())],
        )
        self.layer_bytes: int = self.device[0].nbytes
        self.link_bytes_per_s = max(1, round(self.layer_bytes / load_s))
        self.queue = CopyQueue(CpuDevice(self.link_bytes_per_s), planes)
        self._pieces: NDArray[np.uint32] = np.array([(0, 0, 0, _PAGE_TOKENS)], np.uint32)
        self._steps = 0

    @property
    def load_s(self) -> float:
        """Time of one layer on the link."""
        return float(self.layer_bytes / self.link_bytes_per_s)

    def step(self, compute_s: float) -> _Step:
        """All layers once: gate, compare what has arrived, wait, release."""
        k0 = self._steps * self.layers
        self._steps += 1
        right = True
        computed = gates = 0.0
        start = time.perf_counter()
        handle = self.queue.start_step([], (self._steps, self._pieces, k0, self.width))
        for layer in range(self.layers):
            before = time.perf_counter()
            handle.before_layer(layer)
            begin = time.perf_counter()
            # Part of the compute, as a kernel that reads the window would be.
            found = self.device[(k0 + layer) % self.width, 0]
            right = right and bool(np.array_equal(found, self.host[layer, 0]))
            time.sleep(max(0.0, begin + compute_s - time.perf_counter()))
            done = time.perf_counter()
            handle.after_layer(layer)
            gates += begin - before
            computed += done - begin
        failed = handle.finish()
        return _Step(time.perf_counter() - start, computed, gates, right and not failed)


def bench_stream(
    ratios: Sequence[float] = DEFAULT_RATIOS,
    *,
    layers: int = 64,
    width: int = 2,
    layer_ms: float = 4.0,
    repeat: int = 7,
    warmup: int = 1,
    on_run: Callable[[int], None] = lambda total: None,
) -> Report:
    """Measure steps whose load takes `ratio` times their compute; the slower takes `layer_ms`.

    `step_per_bound` is the median over the runs of step / bound, each with its own compute time;
    `claim_holds` judges it. Parity: every layer read its own bytes in every run.

    Raises
    ------
    ConfigError
        A ratio or time that is not positive, or a width beyond the layers.
    """
    for name, value in (("layer-ms", layer_ms), *(("ratio", ratio) for ratio in ratios)):
        if not 0 < value < 1e6:
            raise ConfigError(f"{name}={value!r}: accepted is a number above 0")
    if not 1 <= width <= layers:
        raise ConfigError(f"width={width}: accepted is 1 to the {layers} layers")
    windows = {ratio: _Window(layers, width, min(1.0, ratio) * layer_ms / _MS) for ratio in ratios}
    runs: dict[float, list[_Step]] = {ratio: [] for ratio in ratios}
    # In turns, so that a busy moment of the machine does not hit one ratio only.
    for _ in range(warmup + repeat):
        for ratio, window in windows.items():
            runs[ratio].append(window.step(min(1.0, 1.0 / ratio) * layer_ms / _MS))
            on_run((warmup + repeat) * len(windows))
    rows = [_row(ratio, windows[ratio], done, warmup) for ratio, done in runs.items()]
    for window in windows.values():
        window.queue.shutdown()
    env = {**machine(), "layers": layers, "slot_widths": width, "repeat": repeat}
    return Report(env, rows, _COLUMNS)


def _row(ratio: float, window: _Window, done: Sequence[_Step], warmup: int) -> dict[str, Value]:
    load = window.load_s
    layers = window.layers
    runs = done[warmup:]

    def bound(run: _Step) -> float:
        compute = run.compute_s / layers
        return layers * max(load, compute) + min(load, compute)

    per_bound = [run.seconds / bound(run) for run in runs]
    middle = median(per_bound)
    return {
        "ratio": ratio,
        "layers": layers,
        "width": window.width,
        "layer_bytes": window.layer_bytes,
        "link_bytes_per_s": window.link_bytes_per_s,
        "load_ms": load * _MS,
        "compute_ms": median([run.compute_s / layers * _MS for run in runs]),
        "step_ms_median": median([run.seconds * _MS for run in runs]),
        "step_ms_min": min(run.seconds for run in runs) * _MS,
        "gate_wait_ms": median([run.gate_s * _MS for run in runs]),
        "bound_ms": median([bound(run) * _MS for run in runs]),
        "step_per_bound": middle,
        "step_per_bound_min": min(per_bound),
        "claimed": CLAIMED_RATIO,
        "claim_holds": middle is not None and middle <= CLAIMED_RATIO,
        "parity": all(run.right for run in done),
    }
