"""KV codecs one number at a time, from the format definition: what the torch codecs must equal.

Every step is a numpy float32 scalar operation or a search in a table of all values of a type.
"""

from bisect import bisect_left

import numpy as np

f32 = np.float32
HALVES = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64).tolist()
E4M3 = [
    (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
    for exponent in range(16)
    for mantissa in range(8)
][:127]  # the 128th is NaN
LEVELS = [-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127]
LIMITS = [-111.5, -85.5, -66.5, -51, -37.5, -24.5, -12, 0]
LIMITS += [12, 24.5, 37.5, 51, 66.5, 85.5, 111.5]
GAIN = {64: "0x1.73ce9cp+8", 128: "0x1.06e844p+9", 256: "0x1.73ce9cp+9"}
NORM = {64: "0x1p-3", 128: "0x1.6a09e6p-4", 256: "0x1p-4"}
MASK64 = 2**64 - 1


def splitmix(head_dim, seed=0):
    words = []
    for i in range(head_dim):
        z = (seed + (head_dim * 65536 + i + 1) * 0x9E3779B97F4A7C15) & MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        words.append(z ^ (z >> 31))
    return words


def signs(head_dim, seed=0):
    return [-1 if z >> 63 else 1 for z in splitmix(head_dim, seed)]


def sanitise(x):
    limited = (0.0 if np.isnan(v) else min(max(float(v), -65504.0), 65504.0) for v in x)
    return [f32(v) for v in limited]


def up16_bits(v):
    return min(bisect_left(HALVES, float(v), lo=1), 0x7BFF)


def half(bits):
    return f32(np.uint16(bits).view(np.float16))


def fwht(values):
    y = list(values)
    h = 1
    while h < len(y):
        for i in range(len(y)):
            if i & h == 0:
                y[i], y[i + h] = y[i] + y[i + h], y[i] - y[i + h]
        h *= 2
    return y


def rotate(x):
    norm = f32(float.fromhex(NORM[len(x)]))
    flipped = [v * f32(sign) for v, sign in zip(x, signs(len(x)), strict=True)]
    return [v * norm for v in fwht(flipped)]


def tree(terms):
    if len(terms) == 1:
        return terms[0]
    return tree([terms[i] + terms[i + 1] for i in range(0, len(terms), 2)])


def e4m3_bits(t):
    size = min(abs(float(t)), 448.0)
    above = bisect_left(E4M3, size)
    if above and size != E4M3[above]:
        low, high = size - E4M3[above - 1], E4M3[above] - size
        if low < high or (low == high and (above - 1) % 2 == 0):
            above -= 1
    return above | (0x80 if np.signbit(t) else 0)


def encode_fp8(x, block):
    codes, scales = [], []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        bits = up16_bits(max(abs(v) for v in part) / f32(448))
        scales.append(bits)
        codes += [e4m3_bits(v / half(bits)) for v in part]
    return codes, scales


def encode_int8(x):
    bits = up16_bits(max(abs(v) for v in x) / f32(127))
    return [min(max(round(float(v / half(bits))), -127), 127) for v in x], [bits]


def encode_v4(x):
    norm2 = tree([v * v for v in x])
    if norm2 == 0:
        return [0] * (len(x) // 2), [0]
    gain = f32(float.fromhex(GAIN[len(x)])) / np.sqrt(norm2)
    # Limits in ascending order: as many as lie strictly below.
    codes = [bisect_left(LIMITS, float(v * gain)) for v in x]
    square = f32(sum(LEVELS[code] ** 2 for code in codes))
    fit = tree([v * f32(LEVELS[code]) for v, code in zip(x, codes, strict=True)]) / square
    scale = np.float16(f32(min(max(float(fit), 0.0), 65504.0)))
    pairs = zip(codes[0::2], codes[1::2], strict=True)
    return [low + 16 * high for low, high in pairs], [int(scale.view(np.uint16))]


def encode(name, which, x, *, fp8_block=0, int8_rotate=False):
    """Codes (bytes, or integers of int8) and bits of the half scales of one vector."""
    x = sanitise(x)
    if name == "fp8_e4m3":
        return encode_fp8(x, fp8_block or len(x))
    if name == "turboquant_k8v4" or int8_rotate:
        x = rotate(x)
    if name == "turboquant_k8v4" and which == "v":
        return encode_v4(x)
    return encode_int8(x)


def decode(name, which, codes, scales):
    """Stored values as float32, in the domain of the codes."""
    if name == "fp8_e4m3":
        values = [E4M3[code & 0x7F] * (-1 if code & 0x80 else 1) for code in codes]
    elif name == "turboquant_k8v4" and which == "v":
        values = [LEVELS[code] for byte in codes for code in (byte % 16, byte // 16)]
    else:
        values = codes
    block = len(values) // len(scales)
    return [f32(value) * half(scales[i // block]) for i, value in enumerate(values)]
