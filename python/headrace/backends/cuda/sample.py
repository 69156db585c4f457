"""Greedy choice on the device, as `headrace.sampling` makes it for rows without options.

Owns scratch that is zero between launches; launches on one stream take turns. No locks.
"""

import torch

from headrace.backends.cuda.loader import Variant, load_kernel
from headrace.errors import ConfigError

# CTAs of a row: one row keeps most multiprocessors busy.
_SPLITS = 96
_THREADS = 256


class Argmax:
    """Highest logit of at most `max_rows` rows."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._best = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def __call__(self, logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Token of each row of fp32 `logits [S, vocab]`: int32 `[S]`.

        Ties go to the lowest id; -1 for a row with NaN or +inf, or with nothing but -inf.

        Raises
        ------
        ConfigError
            More rows than `max_rows`, or logits that are not fp32 with contiguous rows.
        """
        rows, vocab = logits.shape
        if rows > self._best.shape[0]:
            raise ConfigError(f"argmax: {rows} rows, max_rows is {self._best.shape[0]}")
        if logits.dtype != torch.float32 or logits.stride(1) != 1 or not vocab:
            raise ConfigError(f"argmax: logits are {logits.dtype} {list(logits.shape)}")
        if out is None:
            out = torch.empty(rows, dtype=torch.int32, device=logits.device)
        if rows:
            load_kernel(_SOURCE, "argmax", torch.cuda.current_device()).launch(
                (_SPLITS, rows),
                _THREADS,
                (
                    logits.data_ptr(),
                    logits.stride(0),
                    vocab,
                    self._best.data_ptr(),
                    self._arrived.data_ptr(),
                    out.data_ptr(),
                ),
            )
        return out


_SOURCE = Variant(file="sample.cu", names=("argmax",))


VARIANTS = (_SOURCE,)
