"""The least time of a step: the bytes it must move, and for a prompt its products, at full speed.

The bandwidth is that of a large copy on the device, bytes read and written counted, and the speed
of products that of one large library product in the dtype of the weights. Both are measured in the
run that uses them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from headrace.bench.stats import median
from headrace.engine import Engine
from headrace.models.quantization import FP8_BLOCK
from headrace.models.tensors import weight_bytes

_COPY_BYTES = 1 << 30
_REPEAT = 11
_PRODUCT_SIZE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What a step must move and compute, and how fast that goes.

    fixed_bytes: of a step, weights; row_bytes: of a row, state read and written; token_bytes: of a
    token in the cache of a row. token_flops: of a prompt token in products with weights, row_flops:
    of the head; pair_flops: of a query with a key it sees, over all layers and heads.
    """

    bytes_per_s: float
    flops_per_s: float
    fixed_bytes: int
    row_bytes: int
    token_bytes: int
    token_flops: int
    row_flops: int
    pair_flops: int

    @classmethod
    def of(cls, engine: Engine) -> Self | None:
        """Return the floor of an engine; None on a CPU, whose caches a copy does not see."""
        if engine.device.type != "cuda":
            return None
        config = engine.model_config
        itemsize = engine.kv.dtype.itemsize
        codes = config.weight_format == FP8_BLOCK and engine.config.fp8_weights != "dequantize"
        weights = weight_bytes(config, itemsize) if codes else config.parameter_count * itemsize
        table = config.vocab_size * config.hidden_size
        if not config.tie_word_embeddings:
            weights -= table * itemsize  # read a row at a time
        return cls(
            bytes_per_s=copy_bandwidth(engine.device),
            flops_per_s=product_rate(engine.device, engine.kv.dtype, codes=codes),
            fixed_bytes=weights,
            row_bytes=2 * config.state_bytes_per_slot(itemsize),
            token_bytes=engine.kv.bytes_per_token,
            token_flops=2 * config.layer_parameters,
            row_flops=2 * table,
            pair_flops=4 * config.kv_layers * config.num_heads * config.head_dim,
        )

    def step_ms(self, rows: int, context: float) -> float:
        """Milliseconds of a decode step of `rows` rows with `context` tokens each."""
        moved = self.fixed_bytes + rows * (self.row_bytes + context * self.token_bytes)
        return moved / self.bytes_per_s * 1e3

    def prefill_ms(self, rows: int, tokens: int) -> float:
        """Milliseconds of `rows` prompts of `tokens` tokens: of their products or of their bytes.

        Attention is causal, and counted at the speed of products; the recurrence of linear layers
        is not counted.
        """
        pairs = tokens * (tokens + 1) // 2
        flops = rows * (tokens * self.token_flops + self.row_flops + pairs * self.pair_flops)
        moved = self.fixed_bytes + rows * (self.row_bytes + tokens * self.token_bytes)
        return max(flops / self.flops_per_s, moved / self.bytes_per_s) * 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 1 GiB on the device."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / device_median_s(lambda: target.copy_(source), _REPEAT)


def product_rate(device: torch.device, dtype: torch.dtype, *, codes: bool) -> float:
    """Floating point operations a second of a library product of two matrices of 8192 rows.

    codes: both are fp8, with a scale for every block.
    """
    size = _PRODUCT_SIZE
    x = torch.randn((size, size), device=device).to(dtype)
    if codes:
        from headrace.backends.cuda.many_rows import product_of_codes
        from headrace.backends.cuda.prefill import quantise_rows
        from headrace.layers.block_fp8 import quantise

        weight, (rows, scales) = quantise(x), quantise_rows(x)

        def product() -> object:
            return product_of_codes(rows, scales, weight, dtype)
    else:

        def product() -> object:
            return F.linear(x, x)

    return 2 * size**3 / device_median_s(product, _REPEAT)


def device_median_s(call: Callable[[], object], repeat: int) -> float:
    """Median seconds of a call by the clock of the device, after one that does not count."""
    return timed_s(call, repeat)[0]


def timed_s(call: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median seconds of a call by the clock of the device and by that of the host.

    The host waits for the end of every call; one before them does not count.
    """
    device, wall = [], []
    for _ in range(repeat + 1):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            for _ in range(2)
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        end.synchronize()
        wall.append(time.perf_counter() - start)
        device.append(begin.elapsed_time(end) * 1e-3)
    middles = median(device[1:]), median(wall[1:])
    assert middles[0] is not None, "it was called"
    assert middles[1] is not None, "it was called"
    return middles[0], middles[1]
