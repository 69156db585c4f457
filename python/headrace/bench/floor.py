"""The least time of a decode step: the bytes it must move over the bandwidth of the memory.

The bandwidth is that of a large copy on the device, bytes read and written counted, measured in the
run that uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from headrace.bench.stats import median
from headrace.engine import Engine
from headrace.models.tensors import weight_bytes

_COPY_BYTES = 1 << 30
_COPIES = 11


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of the parts of a decode step, and the bandwidth they move at.

    fixed_bytes: of a step, weights; row_bytes: of a row, state read and written; token_bytes: of a
    token in the cache of a row.
    """

    bytes_per_s: float
    fixed_bytes: int
    row_bytes: int
    token_bytes: int

    @classmethod
    def of(cls, engine: Engine) -> Self | None:
        """Return the floor of an engine; None on a CPU, whose caches a copy does not see."""
        if engine.device.type != "cuda":
            return None
        config = engine.model_config
        itemsize = engine.kv.dtype.itemsize
        weights = weight_bytes(config, itemsize)
        if engine.config.fp8_weights == "dequantize":
            weights = config.parameter_count * itemsize
        if not config.tie_word_embeddings:
            weights -= config.vocab_size * config.hidden_size * itemsize  # read a row at a time
        return cls(
            bytes_per_s=copy_bandwidth(engine.device),
            fixed_bytes=weights,
            row_bytes=2 * config.state_bytes_per_slot(itemsize),
            token_bytes=engine.kv.bytes_per_token,
        )

    def step_ms(self, rows: int, context: float) -> float:
        """Milliseconds of a decode step of `rows` rows with `context` tokens each."""
        moved = self.fixed_bytes + rows * (self.row_bytes + context * self.token_bytes)
        return moved / self.bytes_per_s * 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB on the device."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / device_median_s(lambda: target.copy_(source), _COPIES)


def device_median_s(call: Callable[[], object], repeat: int) -> float:
    """Median seconds of a call by the clock of the device, after one that does not count."""
    times = []
    for _ in range(repeat + 1):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            for _ in range(2)
        )
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    middle = median(times[1:])
    assert middle is not None, "it was called"
    return middle
