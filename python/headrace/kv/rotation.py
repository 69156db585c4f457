"""The fixed random rotation of K and V, sums in a fixed order and exact square roots.

`R x = c * FWHT(sigma . x)` with random signs sigma and `c = 1 / sqrt(D)`: orthonormal, the same for
every layer, head, K and V. It spreads an outlier channel over the whole vector. Without the signs a
constant vector would become one spike (47 % error in 4 bits at D = 128, 9 % with them).

Every output of these functions is defined to the bit: each number comes from one fp32 operation
(rounded to nearest even) on numbers defined before, whatever the schedule, so a kernel can be
compared byte by byte. torch's elementwise sum, difference, product, quotient and casts are such
operations. `addcmul`, `lerp`, matrix products and `sum` are not, since they fuse or reorder, and
`sqrt` is not on a CPU.

Source: TurboQuant (arXiv 2504.19874), splitmix64 for the signs. No state, no locks.
"""

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError

DEFAULT_SEED = 0

# splitmix64: increment and multipliers of its mixing function.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Keeps the streams of different head sizes apart; far above any head size.
_HEAD_DIM_STRIDE = 65_536
_U64 = 2**64


def sign_words(head_dim: int, seed: int = DEFAULT_SEED) -> NDArray[np.uint64]:
    """Random 64-bit words `[head_dim]`; the top bit of word i is the sign of channel i.

    Raises
    ------
    ConfigError
        The seed is not an unsigned 64-bit number.
    """
    if type(seed) is not int or not 0 <= seed < _U64:
        raise ConfigError(f"rotation seed {seed!r}: accepted is an integer from 0 to {_U64 - 1}")
    # Arrays of uint64 wrap silently, which is the arithmetic wanted here.
    step = np.arange(1, head_dim + 1, dtype=np.uint64) + np.uint64(head_dim * _HEAD_DIM_STRIDE)
    z = np.full(head_dim, seed, dtype=np.uint64) + step * np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    words: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return words


def sign_vector(head_dim: int, seed: int = DEFAULT_SEED) -> torch.Tensor:
    """Signs +1 and -1, fp32 `[head_dim]`.

    Raises
    ------
    ConfigError
        The seed is not an unsigned 64-bit number.
    """
    negative = torch.from_numpy((sign_words(head_dim, seed) >> np.uint64(63)).astype(np.float32))
    return 1.0 - 2.0 * negative


@functools.cache
def _signs_on(device: torch.device, head_dim: int, seed: int) -> torch.Tensor:
    # Outside of inference mode, or the cached tensor would be barred from use outside of it.
    with torch.inference_mode(False):
        return sign_vector(head_dim, seed).to(device)


def fwht(x: torch.Tensor) -> torch.Tensor:
    """Walsh-Hadamard transform of the last axis in natural order, not normalised; fp32.

    Stage h = 1, 2, 4, ... replaces the elements i and i + h by their sum and difference. Here each
    stage takes neighbours and writes sums, then differences, which moves the bit of the index it
    has dealt with to the top: after the last stage the order is natural again and the operands were
    those of the definition. Three times as fast as pairs at a distance of h (512 vectors of 128 on
    one core: 0.37 against 1.09 ms).
    """
    size = x.shape[-1]
    assert size & (size - 1) == 0, "the length of the transform is a power of two"
    y = x.float()
    for _ in range(size.bit_length() - 1):
        even, odd = y[..., 0::2], y[..., 1::2]
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        torch.add(even, odd, out=y[..., : size // 2])
        torch.sub(even, odd, out=y[..., size // 2 :])
    return y


def rotate(x: torch.Tensor, seed: int = DEFAULT_SEED) -> torch.Tensor:
    """`R x` over the last axis, fp32 in any float dtype."""
    head_dim = x.shape[-1]
    return fwht(x.float() * _signs_on(x.device, head_dim, seed)) * _norm(head_dim)


def unrotate(y: torch.Tensor, seed: int = DEFAULT_SEED) -> torch.Tensor:
    """`R^T y` over the last axis, fp32; undoes `rotate` up to rounding."""
    head_dim = y.shape[-1]
    return (fwht(y) * _norm(head_dim)) * _signs_on(y.device, head_dim, seed)


def tree_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum of the last axis (a power of two) over a binary tree of neighbours, fp32.

    An exchange between lanes at distances 1, 2, 4, ... adds the same pairs.
    """
    size = terms.shape[-1]
    assert size & (size - 1) == 0, "the tree has a power of two of leaves"
    total = terms.float()
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


def sqrt_rn(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp32 square root.

    torch 2.11 on a CPU is off by one unit for 17 % of all inputs. A root in fp64, even if that one
    is off by a unit, rounds to the right fp32: no fp32 root lies so close to a midpoint.
    """
    return x.double().sqrt().float()


def _norm(head_dim: int) -> float:
    # The double nearest to 1 / sqrt(D), rounded once more to fp32 when it meets a tensor: for
    # powers of two the same number as rounding the real value to fp32.
    return 1.0 / math.sqrt(head_dim)
