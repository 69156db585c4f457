"""Medians and percentiles that say nothing where the samples say nothing (BEN-03)."""

import math
from collections.abc import Sequence

# Below so many samples a percentile is the largest sample under another name.
_LEAST_SAMPLES = {90: 10, 95: 20, 99: 100}


def median(samples: Sequence[float]) -> float | None:
    """Middle sample, or the mean of the middle two; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """Smallest sample that `percent` of all do not exceed; None if there are too few."""
    if len(samples) < _LEAST_SAMPLES[percent]:
        return None
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def rate(count: int, seconds: float | None) -> float | None:
    """Count per second, None if nothing was counted."""
    return count / seconds if count and seconds else None
