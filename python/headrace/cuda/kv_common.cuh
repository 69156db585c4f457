// What the KV kernels share: names of formats and dtypes, conversions that are one instruction,
// and operations of one warp on one vector.
//
// A vector of D values lies in a warp as D / 32 consecutive values a lane: value i is register
// i % W of lane i / W, W = D / 32. So the stages of the transform and of the sum tree with a
// distance below W stay in a lane, the others are exchanges between lanes, and every number comes
// from the operands the format definition names.
//
// No CUDA header is needed, which makes NVRTC several times as fast.
#pragma once

#include "early.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

// Numbers of the formats and dtypes; `kv.py` has the same list.
enum Dtype : int { F32 = 0, BF16 = 1, F16 = 2 };
enum Format : int { PLAIN = 0, FP8 = 1, FP8_B64 = 2, INT8 = 3, K8V4 = 4 };

constexpr u32 FULL_WARP = 0xffffffffu;
constexpr float MAX_HALF = 65504.0f;

constexpr int itemsize(int dtype) { return dtype == F32 ? 4 : 2; }
constexpr bool is_quantised(int format) { return format != PLAIN; }
// Bytes of one row of codes of K or V.
constexpr int k_row_bytes(int format, int dtype, int d) {
    return format == PLAIN ? d * itemsize(dtype) : d;
}
constexpr int v_row_bytes(int format, int dtype, int d) {
    return format == K8V4 ? d / 2 : k_row_bytes(format, dtype, d);
}
// Half scales of one row, K and V alike.
constexpr int scale_blocks(int format, int d) {
    return format == PLAIN ? 0 : (format == FP8_B64 ? d / 64 : 1);
}

// ---- conversions ------------------------------------------------------------------------------

DEVICE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE float bf16_to_float(u16 bits) { return __uint_as_float(u32(bits) << 16); }
DEVICE u16 float_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
DEVICE u32 pack_half2(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
DEVICE u32 pack_bf16x2(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
// Two e4m3 codes, `low` in the low byte; values beyond 448 become 448.
DEVICE u16 pack_e4m3x2(float low, float high) {
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
DEVICE u32 e4m3x2_to_half2(u16 codes) {
    u32 bits;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(codes));
    return bits;
}

// The upper pair of four codes.
DEVICE u32 upper_e4m3x2_to_half2(u32 codes) {
    u32 bits;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(bits)
        : "r"(codes));
    return bits;
}

template <int DT>
DEVICE float round_to(float value) {
    if constexpr (DT == BF16) return bf16_to_float(float_to_bf16(value));
    if constexpr (DT == F16) return half_to_float(float_to_half(value));
    return value;
}

DEVICE void store_as(void* base, i64 index, int dtype, float value) {
    if (dtype == F32) {
        static_cast<float*>(base)[index] = value;
    } else {
        u16 bits = dtype == BF16 ? float_to_bf16(value) : float_to_half(value);
        static_cast<u16*>(base)[index] = bits;
    }
}

// ---- vectors in a warp ------------------------------------------------------------------------

// The W values of this lane of a vector of dtype DT at `source`.
template <int DT, int W>
DEVICE void load_lane(float (&x)[W], const void* source, int lane) {
    if constexpr (DT == F32) {
        struct alignas(W * 4 < 16 ? W * 4 : 16) Piece { float v[W]; };
        Piece piece = fresh(static_cast<const Piece*>(source) + lane);
#pragma unroll
        for (int r = 0; r < W; ++r) x[r] = piece.v[r];
    } else {
        struct alignas(W * 2) Piece { u16 v[W]; };
        Piece piece = fresh(static_cast<const Piece*>(source) + lane);
#pragma unroll
        for (int r = 0; r < W; ++r) {
            x[r] = DT == BF16 ? bf16_to_float(piece.v[r]) : half_to_float(piece.v[r]);
        }
    }
}
template <int DT, int W>
DEVICE void store_lane(const float (&x)[W], void* target, int lane) {
    if constexpr (DT == F32) {
        struct alignas(W * 4 < 16 ? W * 4 : 16) Piece { float v[W]; };
        Piece piece;
#pragma unroll
        for (int r = 0; r < W; ++r) piece.v[r] = x[r];
        static_cast<Piece*>(target)[lane] = piece;
    } else {
        struct alignas(W * 2) Piece { u16 v[W]; };
        Piece piece;
#pragma unroll
        for (int r = 0; r < W; ++r) {
            piece.v[r] = DT == BF16 ? float_to_bf16(x[r]) : float_to_half(x[r]);
        }
        static_cast<Piece*>(target)[lane] = piece;
    }
}

// The same of a vector whose dtype is known when the kernel runs: first the bits, later the
// values, so that other work fits between.
template <int W>
DEVICE void load_bits(u32 (&bits)[W], const void* source, int dtype, int lane) {
    struct alignas(W * 4 < 16 ? W * 4 : 16) Wide { u32 v[W]; };
    struct alignas(W * 2) Narrow { u32 v[W / 2]; };
    if (dtype == F32) {
        Wide piece = fresh(static_cast<const Wide*>(source) + lane);
#pragma unroll
        for (int r = 0; r < W; ++r) bits[r] = piece.v[r];
    } else {
        Narrow piece = fresh(static_cast<const Narrow*>(source) + lane);
#pragma unroll
        for (int r = 0; r < W / 2; ++r) bits[r] = piece.v[r];
    }
}
template <int W>
DEVICE void values_of(float (&x)[W], const u32 (&bits)[W], int dtype) {
#pragma unroll
    for (int r = 0; r < W; ++r) {
        u16 narrow = u16(bits[r / 2] >> 16 * (r % 2));
        x[r] = dtype == F32 ? __uint_as_float(bits[r])
                            : (dtype == BF16 ? bf16_to_float(narrow) : half_to_float(narrow));
    }
}

// Largest value over groups of LANES neighbouring lanes, in each of them.
template <int LANES>
DEVICE float group_max(float value) {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, distance));
    }
    return value;
}

// Walsh-Hadamard transform of N vectors, natural order, not normalised; together, because one
// exchange takes long and the next of the same vector has to wait for it.
template <int N, int W>
DEVICE void fwht(float (&y)[N][W], int lane) {
#pragma unroll
    for (int h = 1; h < W; h *= 2) {
#pragma unroll
        for (int i = 0; i < N * W; ++i) {
            int n = i / W, k = i % W;
            if ((k & h) == 0) {
                float a = y[n][k], b = y[n][k + h];
                y[n][k] = __fadd_rn(a, b);
                y[n][k + h] = __fsub_rn(a, b);
            }
        }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < N * W; ++i) {
            float own = y[i / W][i % W];
            float other = __shfl_xor_sync(FULL_WARP, own, distance);
            y[i / W][i % W] = lane & distance ? __fsub_rn(other, own) : __fadd_rn(own, other);
        }
    }
}

// Signs of the rotation, seed 0: bit i of the mask is set where channel i is negated.
template <int D>
struct SignMask {
    u32 words[D / 32];
    constexpr SignMask() : words() {
        for (int i = 0; i < D; ++i) {
            u64 z = (u64(D) * 65536 + u64(i) + 1) * 0x9E3779B97F4A7C15ull;
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
            z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
            z = z ^ (z >> 31);
            words[i / 32] |= u32(z >> 63) << (i % 32);
        }
    }
};
// Word `index` of the mask. Selections between constants: lanes want different words, and a
// constant bank serves one address at a time.
template <int D, int FIRST = 0, int COUNT = D / 32>
DEVICE u32 sign_word(int index) {
    if constexpr (COUNT == 1) {
        constexpr u32 word = SignMask<D>().words[FIRST];
        return word;
    } else {
        u32 low = sign_word<D, FIRST, COUNT / 2>(index);
        u32 high = sign_word<D, FIRST + COUNT / 2, COUNT / 2>(index);
        return index & COUNT / 2 ? high : low;
    }
}

// The W sign bits of this lane.
template <int D>
DEVICE u32 lane_signs(int lane) {
    constexpr int W = D / 32;
    return sign_word<D>(lane * W / 32) >> (lane * W % 32);
}
// 1 / sqrt(D) in fp32.
constexpr float rotation_norm(int d) {
    return d == 64 ? 0.125f : (d == 128 ? 0.08838834764831845f : 0.0625f);
}

DEVICE float negated_if(float x, u32 bit) {
    return __uint_as_float(__float_as_uint(x) ^ ((bit & 1u) << 31));
}

// x -> R x, N vectors
template <int D, int N>
DEVICE void rotate(float (&x)[N][D / 32], int lane) {
    constexpr int W = D / 32;
    u32 negative = lane_signs<D>(lane);
#pragma unroll
    for (int i = 0; i < N * W; ++i) {
        x[i / W][i % W] = negated_if(x[i / W][i % W], negative >> i % W);
    }
    fwht(x, lane);
#pragma unroll
    for (int i = 0; i < N * W; ++i) {
        x[i / W][i % W] = __fmul_rn(x[i / W][i % W], rotation_norm(D));
    }
}
// y -> R^T y
template <int D, int N>
DEVICE void unrotate(float (&y)[N][D / 32], int lane) {
    constexpr int W = D / 32;
    fwht(y, lane);
    u32 negative = lane_signs<D>(lane);
#pragma unroll
    for (int i = 0; i < N * W; ++i) {
        float scaled = __fmul_rn(y[i / W][i % W], rotation_norm(D));
        y[i / W][i % W] = negated_if(scaled, negative >> i % W);
    }
}

// ---- levels of the 4-bit format ---------------------------------------------------------------

// |level| of codes 0..7, one byte each; codes 8..15 mirror them with a positive sign.
constexpr u32 LEVELS_LOW = 0x3A4B607Fu;   // 127 96 75 58
constexpr u32 LEVELS_HIGH = 0x06121F2Cu;  // 44 31 18 6

// Level of one code.
DEVICE float level_of(u32 code) {
    u32 positive = code >> 3;
    u32 size = __byte_perm(LEVELS_LOW, LEVELS_HIGH, (code ^ (positive * 7)) & 7) & 0xffu;
    return positive ? float(size) : -float(size);
}

// ---- block tables -----------------------------------------------------------------------------

// Pages of a pool as a layer sees them. An entry is a flat page base, bit 31 set for LOW pages,
// whose window position is that of the running index of the streamed layer.
struct Pages {
    const u32* table;  // [rows, max_pages]
    int max_pages;
    int page_tokens;
    u32 high;  // layer * N
    u32 low;   // ((k0 + layer) mod window) * N

    DEVICE u32 entry(int row, int token) const {
        return table[i64(row) * max_pages + u32(token) / u32(page_tokens)];
    }
    // Place of `token` among all tokens of the pool, by the entry of its page: the number to
    // multiply by heads and row size. Everything in 64 bits from here on.
    DEVICE i64 flat_token(u32 entry, int token) const {
        u32 flat = (entry & 0x7fffffffu) + (entry >> 31 ? low : high);
        return i64(flat) * page_tokens + u32(token) % u32(page_tokens);
    }
};

DEVICE Pages pages_of(const u32* table, int max_pages, int page_tokens, u32 layer, u32 pool_pages,
                      u32 window, const u32* k0) {
    u32 streamed = k0 ? (*k0 + layer) % window : 0u;
    return Pages{table, max_pages, page_tokens, layer * pool_pages, streamed * pool_pages};
}
