"""Reference codecs: K and V vectors to the bytes of the planes and back.

Exact definition: the KV format notes, section 2. A vector is K or V of one (layer, token, KV head)
and its bytes depend on nothing else. All arithmetic is fp32, one rounding per operation (see
`rotation`), so a kernel must write the same bytes. No state, no locks.

Decoded values are in the code domain: those of the model for plain formats, rotated for rotated
ones. Attention rotates the query and rotates its output back instead of every key and value.
"""

import functools
import itertools

import torch

from headrace.errors import NonFiniteKV
from headrace.kv.formats import AUTO, FP8, K8V4, KVFormat, Which
from headrace.kv.rotation import fwht, rotate, sign_vector, sqrt_rn, tree_sum, unrotate

__all__ = [
    "CODEBOOK",
    "THRESHOLDS",
    "check_finite",
    "decode",
    "encode",
    "fwht",
    "rotate",
    "rotate_queries",
    "sanitise",
    "sign_vector",
    "tree_sum",
    "unrotate",
    "unrotate_outputs",
    "up16",
]

MAX_HALF = 65_504.0
FP8_MAX = 448.0  # largest e4m3fn
INT8_MAX = 127.0  # -128 is never written, so that codes are symmetric

# Lloyd-Max levels of a normal distribution, rounded to integers: 0.3 % more error than the real
# levels, and the decoder continues as if it had read int8.
CODEBOOK = (-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127)
# Midpoints of neighbours, exact in fp32.
THRESHOLDS = tuple((low + high) / 2 for low, high in itertools.pairwise(CODEBOOK))
# Beyond this many halves a value lies outside of all thresholds.
_MOST_HALVES = 224
# 127 / 2.7326 * sqrt(D) in fp32: takes a vector of norm 1 to the scale of the codebook, whose
# largest level stands for 2.7326 standard deviations.
_CODEBOOK_GAIN = {
    64: float.fromhex("0x1.73ce9cp+8"),
    128: float.fromhex("0x1.06e844p+9"),
    256: float.fromhex("0x1.73ce9cp+9"),
}


def check_finite(
    which: Which, x: torch.Tensor, *, layer: int, pages: torch.Tensor, positions: torch.Tensor
) -> None:
    """Raise at the first non-finite element of `x [T, kv_heads, head_dim]`.

    Reads from the device, so it is for checked mode only.

    Raises
    ------
    NonFiniteKV
        Says layer, row of the step, KV head, channel, page and position.
    """
    bad = ~torch.isfinite(x)
    if not bool(bad.any()):
        return
    row, head, channel = (int(index) for index in bad.nonzero()[0])
    raise NonFiniteKV(
        f"{which.upper()} of layer {layer}, row {row}, position {int(positions[row])} (page or "
        f"slot {int(pages[row])}) is {float(x[row, head, channel])} at head {head}, channel "
        f"{channel}; {int(bad.sum())} elements of this step are not finite"
    )


def sanitise(x: torch.Tensor) -> torch.Tensor:
    """Widen to fp32, replace NaN by 0 and clamp to the range of half, so that nothing overflows."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-MAX_HALF, MAX_HALF)


def up16(v: torch.Tensor) -> torch.Tensor:
    """Smallest half >= v for fp32 v >= 0; at least 2^-24, at most 65504.

    A scale that is rounded up keeps `|x| / scale` within the range of the codes.
    """
    nearest = v.clamp(max=MAX_HALF).to(torch.float16)
    # The bits of non-negative halves, read as integers, are in the order of the values.
    bits = nearest.view(torch.int16)
    bits = bits + (nearest.float() < v).to(torch.int16)
    return bits.clamp(1, 0x7BFF).view(torch.float16)


def encode(kv_format: KVFormat, which: Which, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encode vectors `x [..., head_dim]`, given in the dtype of the model.

    Returns one tensor `[..., row]` for each plane of `which`, in the order of `planes`: codes, then
    scales. `auto` returns `x` itself. The format must accept the head size; see `check_head_dim`.
    """
    if kv_format.name == AUTO:
        return (x,)
    finite = sanitise(x)
    if kv_format.name == FP8:
        return _encode_fp8(finite, kv_format.fp8_block)
    if kv_format.rotated:
        finite = rotate(finite)
    if kv_format.name == K8V4 and which == "v":
        return _encode_codebook(finite)
    return _encode_int8(finite)


def decode(kv_format: KVFormat, which: Which, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return what is stored, fp32 `[..., head_dim]` in the code domain; exact.

    rows: the planes of `which` as `encode` returns them.
    """
    if kv_format.name == AUTO:
        return rows[0].float()
    codes, scales = rows
    if kv_format.name == FP8:
        values = _looked_up(_fp8_values_on(codes.device), codes)
    elif kv_format.name == K8V4 and which == "v":
        values = _looked_up(_level_pairs_on(codes.device), codes)
    else:
        values = codes.float()
    head_dim, blocks = values.shape[-1], scales.shape[-1]
    blocked = values.reshape(*values.shape[:-1], blocks, head_dim // blocks)
    return (blocked * scales.float().unsqueeze(-1)).reshape(values.shape)


def rotate_queries(kv_format: KVFormat, q: torch.Tensor) -> torch.Tensor:
    """Queries `[..., head_dim]` in the domain of the stored keys, fp32."""
    return rotate(q) if kv_format.rotated else q.float()


def unrotate_outputs(kv_format: KVFormat, out: torch.Tensor) -> torch.Tensor:
    """Attention outputs `[..., head_dim]` over stored values back in the model's domain, fp32.

    Once per query head, after partial results are merged and before an output gate.
    """
    return unrotate(out) if kv_format.rotated else out.float()


def _scale_for(largest: torch.Tensor, top: float) -> torch.Tensor:
    # A tensor divisor: dividing by a Python number becomes a product with its reciprocal on CUDA.
    return up16(largest / torch.full_like(largest, top))


def _encode_fp8(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = x.shape[-1]
    block = block or head_dim
    blocked = x.reshape(*x.shape[:-1], head_dim // block, block)
    scales = _scale_for(blocked.abs().amax(dim=-1), FP8_MAX)  # [..., blocks]
    # torch's cast does not saturate: 480 and above would become NaN.
    scaled = (blocked / scales.float().unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).reshape(x.shape), scales


def _encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _scale_for(x.abs().amax(dim=-1, keepdim=True), INT8_MAX)  # [..., 1]
    codes = torch.round(x / scales.float()).clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales


def _encode_codebook(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code rotated V in 4 bits: nearest level at the vector's own norm, least-squares scale."""
    norm2 = tree_sum(x * x).unsqueeze(-1)  # [..., 1]
    zero = norm2 == 0
    norm = sqrt_rn(torch.where(zero, torch.ones_like(norm2), norm2))
    gain = torch.full_like(norm, _CODEBOOK_GAIN[x.shape[-1]]) / norm
    # Thresholds are multiples of 1/2, so as many lie strictly below u as below ceil(2 u) / 2, which
    # a table can tell: 20 times as fast as a search (2 M values on one core: 89 ms).
    halves = torch.ceil(x * gain * 2.0).clamp(-_MOST_HALVES, _MOST_HALVES) + _MOST_HALVES
    codes = _looked_up(_codes_on(x.device), halves)
    codes = torch.where(zero, torch.zeros_like(codes), codes)
    levels = _looked_up(_levels_on(x.device), codes)
    # Sums of these squares stay below 2^24: exact in fp32 in any order.
    level_norm2 = (levels * levels).sum(dim=-1, keepdim=True)
    scale = (tree_sum(x * levels).unsqueeze(-1) / level_norm2).clamp(0.0, MAX_HALF)
    # +0 where the vector vanishes, so that level 0 does not decode to something.
    return _packed(codes), torch.where(zero, torch.zeros_like(scale), scale).to(torch.float16)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even channel in the low four bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _looked_up(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`table [n]` or `[n, width]` at `indices [..., r]` -> `[..., r * width]`.

    `index_select`: 2 M fp8 codes on one core take 1.6 ms, plain indexing 41, torch's cast 15. A
    width of 1 has no axis, with one it takes 5.5.
    """
    rows = torch.index_select(table, 0, indices.reshape(-1).to(torch.int32))
    width = table.numel() // len(table)
    return rows.reshape(*indices.shape[:-1], indices.shape[-1] * width)


# Constant tables, one a device. Outside of inference mode, or they could not be used outside of it.
@functools.cache
def _fp8_values_on(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        return codes.view(torch.float8_e4m3fn).float().to(device)


@functools.cache
def _levels_on(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(CODEBOOK, dtype=torch.float32, device=device)


@functools.cache
def _level_pairs_on(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        pairs = [(CODEBOOK[byte & 15], CODEBOOK[byte >> 4]) for byte in range(256)]
        return torch.tensor(pairs, dtype=torch.float32, device=device)  # [256, 2]


@functools.cache
def _codes_on(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        halves = torch.arange(-_MOST_HALVES, _MOST_HALVES + 1, dtype=torch.float32)
        codes = (2 * torch.tensor(THRESHOLDS) < halves.unsqueeze(1)).sum(dim=1)
        return codes.to(dtype=torch.uint8, device=device)  # [449]
