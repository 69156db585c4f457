// One warp's part of decode attention: loading tiles of 16 tokens and multiplying them.
//
// Tokens stand on the M side: S^T[16 x 8] = K[16 x D] Q^T and O^T[D x 8] = V^T P^T, the query heads
// of a KV head padded to 8 columns, with mma.m16n8k16. Eight-bit codes become halves: e4m3 by its
// conversion, int8 through the half 1024 + x. The 4-bit levels are put into the ten low bits of a
// half, where an integer n means n * 2^-24: no arithmetic, the power of two comes off at the end.
// The order of channels inside a product is free, so a lane takes the bytes a single ldmatrix gives
// it; `Tile::channel` says which output channel an accumulator belongs to.
#pragma once
#include "kv_common.cuh"

constexpr int WARPS = 4;
constexpr int TILE = 16;
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int HEADS = 8;  // columns of a product; the most query heads of a KV head

// Stages of a warp's ring and CTAs of an SM: 64 KiB and more in flight an SM, within 227 KiB of
// shared memory and 64 Ki registers.
constexpr int ring_stages(int format, int dtype, int d) {
    int row = k_row_bytes(format, dtype, d) + v_row_bytes(format, dtype, d);
    return row >= 1024 ? 1 : (row >= 384 ? 2 : (row >= 192 ? 3 : 4));
}
constexpr int ctas_per_sm(int format, int dtype, int d) {
    if (format == PLAIN && dtype == F32) return d == 256 ? 1 : 3;
    if (d == 256 || (format == PLAIN && d == 128)) return 3;
    return d == 128 ? 4 : 5;
}

// Shared memory of one warp's ring.
template <int DT, int FMT, int D>
struct Ring {
    static constexpr int K_ROW = k_row_bytes(FMT, DT, D);
    static constexpr int V_ROW = v_row_bytes(FMT, DT, D);
    static constexpr int BLOCKS = scale_blocks(FMT, D);
    // A copy has at least 4 bytes, so a lone half comes with its neighbour.
    static constexpr int SCALE_ROW = BLOCKS == 0 ? 0 : (BLOCKS == 4 ? 8 : 4);
    static constexpr int STAGES = ring_stages(FMT, DT, D);
    static constexpr int K_BYTES = TILE * (K_ROW + SCALE_ROW);
    static constexpr int V_BYTES = TILE * (V_ROW + SCALE_ROW);
    static constexpr int BYTES = STAGES * (K_BYTES + V_BYTES);
};

// ---- PTX --------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
// Copies of `size` bytes, zero-filled where `live` is false (and nothing is read).
DEVICE void copy_16(u32 target, const void* source, bool live) {
    int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(source), "r"(bytes));
}
template <int SIZE>
DEVICE void copy_small(u32 target, const void* source, bool live) {
    int bytes = live ? SIZE : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                 "n"(SIZE), "r"(bytes));
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE u32 transpose(u32 matrix) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}
template <bool BF>
DEVICE void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (BF) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}
// Bytes of (a, b) by the nibbles of `selector`, whose bit 3 must be clear; __byte_perm would clear it.
DEVICE u32 pick_bytes(u32 a, u32 b, u32 selector) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 subtract_half2(u32 a, u32 b) {
    u32 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// ---- layout of a tile in shared memory ----------------------------------------------------------

// Byte of 16-byte chunk `chunk` of row `row`: chunks are permuted within 128 bytes so that eight
// rows at one chunk lie in eight different bank groups.
template <int ROW>
DEVICE int chunk_offset(int row, int chunk) {
    constexpr int ROWS_A_LINE = ROW >= 128 ? 1 : 128 / ROW;
    constexpr int MASK = (ROW >= 128 ? 8 : ROW / 16) - 1;
    return row * ROW + ((chunk ^ (row / ROWS_A_LINE & MASK)) << 4);
}

// Start copies of one tile of K or V, rows of ROW bytes `step` bytes apart from `source` on. Rows
// from `live` on become zeros; their addresses are formed, but nothing is read there.
template <int ROW>
DEVICE void copy_tile(u32 target, const u8* source, i64 step, int live, int lane) {
    constexpr int CHUNKS = ROW / 16;
    constexpr int ROWS = CHUNKS >= 32 ? 1 : 32 / CHUNKS;    // of one warp-wide copy
    constexpr int PARTS = CHUNKS >= 32 ? CHUNKS / 32 : 1;  // copies of one row
    int first = lane / CHUNKS % ROWS;
    source += first * step + lane % CHUNKS * 16;
    step *= ROWS;
#pragma unroll
    for (int i = 0; i < TILE / ROWS; ++i, source += step) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            int row = i * ROWS + first, chunk = part * 32 + lane % CHUNKS;
            copy_16(target + chunk_offset<ROW>(row, chunk), source + part * 512, row < live);
        }
    }
}

// Start copies of one side of a tile, codes and scales. row: of the first token's vector in the
// plane; live: tokens that exist, the others become zeros with scale 0.
template <int ROW, int BLOCKS, int SCALE_ROW>
DEVICE void copy_side(u32 target, const u8* codes, const u16* scales, i64 row, int kv_heads,
                      int live, int lane) {
    copy_tile<ROW>(target, codes + row * ROW, i64(kv_heads) * ROW, live, lane);
    if constexpr (BLOCKS > 0) {
        bool in = lane < live;
        i64 own = row + (in ? lane : 0) * kv_heads;
        // A lone half is copied with its neighbour, from an address of 4 bytes.
        i64 half = BLOCKS == 1 ? own & ~1ll : own * BLOCKS;
        if (lane < TILE) {
            copy_small<SCALE_ROW>(target + TILE * ROW + lane * SCALE_ROW, scales + half, in);
        }
    }
}

// ---- codes to halves ----------------------------------------------------------------------------

constexpr u32 HALF_1024 = 0x64646464u;  // high bytes of 1024 + n
constexpr u32 HALF_1152 = 0x64806480u;  // 1024 + 128
// An integer n in the low bits of a half means n * 2^-24.
constexpr float HALF_UNIT = 16777216.0f;

// Two neighbouring bytes of K (`high`: the upper two) as halves. Integers come as (n + 128) * 2^-24:
// the scores have 128 * sum(q) taken off, which costs no instruction here.
template <int FMT>
DEVICE u32 key_pair(u32 codes, bool high) {
    if constexpr (FMT == FP8 || FMT == FP8_B64) {
        return high ? upper_e4m3x2_to_half2(codes) : e4m3x2_to_half2(u16(codes));
    }
    return pick_bytes(codes, 0u, high ? 0x4342 : 0x4140);
}
template <int FMT>
DEVICE u32 prepared_key(u32 codes) {
    return FMT == INT8 || FMT == K8V4 ? codes ^ 0x80808080u : codes;
}
// Bytes 0 and 2 of V (`odd`: 1 and 3) as halves; e4m3 codes come with bytes 1 and 2 exchanged. Here
// an offset would cancel: the sum over values of both signs is small.
template <int FMT>
DEVICE u32 value_pair(u32 codes, bool odd) {
    if constexpr (FMT == FP8 || FMT == FP8_B64) {
        return odd ? upper_e4m3x2_to_half2(codes) : e4m3x2_to_half2(u16(codes));
    }
    return subtract_half2(pick_bytes(codes, HALF_1024, odd ? 0x4341 : 0x4240), HALF_1152);
}
template <int FMT>
DEVICE u32 prepared_value(u32 codes) {
    if constexpr (FMT == FP8 || FMT == FP8_B64) return pick_bytes(codes, 0u, 0x3120);
    return codes ^ 0x80808080u;
}
// Levels of four channels of two tokens (low half-word: first token) as `n * 2^-24`.
DEVICE void levels(u32 (&out)[4], u32 codes) {
    u32 y = pick_bytes(codes, 0u, 0x3120);
    u32 positive = y >> 3 & 0x11111111u;
    u32 index = (y ^ positive * 7u) & 0x77777777u;
    u32 size_a = pick_bytes(LEVELS_LOW, LEVELS_HIGH, index);
    u32 size_b = pick_bytes(LEVELS_LOW, LEVELS_HIGH, index >> 16);
    u32 sign_a = pick_bytes(0x80u, 0u, positive);
    u32 sign_b = pick_bytes(0x80u, 0u, positive >> 16);
    out[0] = pick_bytes(size_a, sign_a, 0x6240);
    out[1] = pick_bytes(size_a, sign_a, 0x7351);
    out[2] = pick_bytes(size_b, sign_b, 0x6240);
    out[3] = pick_bytes(size_b, sign_b, 0x7351);
}

// Largest maximum of a head over the warps, maxima [WARPS][HEADS].
DEVICE float top_of(const float* maxima, int head) {
    float top = maxima[head];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) top = fmaxf(top, maxima[w * HEADS + head]);
    return top;
}
// Factor of sums that refer to the maximum `own`; a warp without tokens has none.
DEVICE float share(const float* maxima, int head, float own) {
    return own == MINUS_INFINITY ? 0.0f : exp2_fast(own - top_of(maxima, head));
}

// Sum of the weights of a head, relative to `top_of`, warps ascending.
DEVICE float total_of(const float* maxima, const float* sums, int head) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        total += share(maxima, head, maxima[w * HEADS + head]) * sums[w * HEADS + head];
    }
    return total;
}

// ---- one warp -----------------------------------------------------------------------------------

// Running state of a warp over its tiles, products on tensor cores. Lane: tokens lane / 4 and + 8,
// heads 2 * (lane % 4) and + 1. Weights are p * V scale, so the running maximum is that of
// score + log2(V scale): weights stay within 1 whatever the scales are, and fit a half.
template <int DT, int FMT, int D>
struct TensorWarp {
    using R = Ring<DT, FMT, D>;
    static constexpr bool BF = FMT == PLAIN && DT == BF16;
    static constexpr bool WIDE = FMT == PLAIN;  // K and V have 16 bits
    static constexpr int STEPS = D / 16;
    static constexpr int Q_STRIDE = D + 8;  // halves; keeps heads in different banks
    static constexpr int Q_BYTES = HEADS * Q_STRIDE * 2;
    static constexpr int PARTS = FMT == FP8_B64 ? D / 64 : (D == 64 ? 2 : 4);
    static constexpr int BLOCKS = R::BLOCKS == 0 ? 1 : R::BLOCKS;
    static constexpr bool K_OFFSET = FMT == INT8 || FMT == K8V4;
    static constexpr float K_UNIT = K_OFFSET ? HALF_UNIT : 1.0f;
    static constexpr float V_UNIT = FMT == K8V4 ? HALF_UNIT : 1.0f;

    u32 q[STEPS][2];
    float o[STEPS][4];
    float scale[2];   // of the scores of this lane's heads
    float offset[2];  // what their products have too much
    float m[2], l[2];

    DEVICE void reset() {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) o[i][j] = 0.0f;
        }
        m[0] = m[1] = MINUS_INFINITY;
        l[0] = l[1] = 0.0f;
    }

    // Write one query head, D / 32 values a lane; returns the factor its scores need and the offset
    // that comes off before. A power of two brings every head into the range of half without rounding.
    DEVICE static float2 write_query(u8* area, int head, const float (&x)[D / 32], int lane) {
        constexpr int W = D / 32;
        float values[W], factor = 1.0f;
        if constexpr (!WIDE) {
            float largest = 0.0f;
#pragma unroll
            for (int r = 0; r < W; ++r) largest = fmaxf(largest, fabsf(x[r]));
            largest = group_max<32>(largest);
            int exponent = int(__float_as_uint(largest) >> 23) - 127;
            if (exponent > -126 && exponent < 127) factor = __uint_as_float(u32(exponent + 127) << 23);
        }
#pragma unroll
        for (int r = 0; r < W; ++r) values[r] = WIDE ? x[r] : x[r] / factor;
        store_lane<BF ? BF16 : F16>(values, area + head * Q_STRIDE * 2, lane);
        float sum = 0.0f;
        if constexpr (K_OFFSET) {
#pragma unroll
            for (int r = 0; r < W; ++r) sum += round_to<F16>(values[r]);
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            }
        }
        return float2{factor * K_UNIT, sum * (128.0f / K_UNIT)};
    }

    DEVICE void read_queries(const u8* area, const float2* factors, int lane) {
        const u16* row = reinterpret_cast<const u16*>(area) + lane / 4 * Q_STRIDE;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if constexpr (WIDE) {
                q[i][0] = *reinterpret_cast<const u32*>(row + 16 * i + 2 * (lane % 4));
                q[i][1] = *reinterpret_cast<const u32*>(row + 16 * i + 2 * (lane % 4) + 8);
            } else {
                uint2 pair = *reinterpret_cast<const uint2*>(row + 16 * i + 4 * (lane % 4));
                q[i][0] = pair.x;
                q[i][1] = pair.y;
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            scale[j] = factors[lane % 4 * 2 + j].x;
            offset[j] = factors[lane % 4 * 2 + j].y;
        }
    }

    // Scale `block` of a token of a tile; `parity`: which half of the copied word it is, if alone.
    DEVICE static float token_scale(const u8* scales, int token, int parity, int block) {
        if constexpr (R::BLOCKS == 0) return 1.0f;
        int place = R::BLOCKS == 1 ? parity : block;
        return half_to_float(reinterpret_cast<const u16*>(scales + token * R::SCALE_ROW)[place]);
    }

    // Scores in log2 units of the tile at `k`.
    DEVICE void scores(float (&s)[4], const u8* k, int parity, int lane) const {
        float part[PARTS][4];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) part[i][j] = 0.0f;
        }
        u32 base = shared_address(k);
        int row = (lane >> 3 & 1) * 8 + (lane & 7), side = lane >> 4;
        constexpr int STEP_BYTES = WIDE ? 32 : 16;
#pragma unroll
        for (int i = 0; i < STEPS; i += WIDE ? 1 : 2) {
            u32 r[4];
            load_matrices(r, base + chunk_offset<R::K_ROW>(row, i * STEP_BYTES / 16 + side));
            if constexpr (WIDE) {
                multiply<BF>(part[i % PARTS], r[0], r[1], r[2], r[3], q[i][0], q[i][1]);
            } else {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    u32 low = prepared_key<FMT>(r[2 * j]), high = prepared_key<FMT>(r[2 * j + 1]);
                    int at = FMT == FP8_B64 ? (i + j) / 4 : (i + j) % PARTS;
                    multiply<false>(part[at], key_pair<FMT>(low, false),
                                    key_pair<FMT>(high, false), key_pair<FMT>(low, true),
                                    key_pair<FMT>(high, true), q[i + j][0], q[i + j][1]);
                }
            }
        }
        const u8* scales = k + TILE * R::K_ROW;
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] = 0.0f;
        if constexpr (FMT == FP8_B64) {
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                float k0 = token_scale(scales, lane / 4, parity, i);
                float k8 = token_scale(scales, lane / 4 + 8, parity, i);
#pragma unroll
                for (int j = 0; j < 4; ++j) s[j] += part[i][j] * (j < 2 ? k0 : k8);
            }
        } else {
            float k0 = token_scale(scales, lane / 4, parity, 0);
            float k8 = token_scale(scales, lane / 4 + 8, parity, 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int i = 0; i < PARTS; ++i) s[j] += part[i][j];
                if constexpr (K_OFFSET) s[j] -= offset[j & 1];
                s[j] *= j < 2 ? k0 : k8;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) s[j] *= scale[j & 1];
    }

    // Fold a tile of scores and the values at `v` into the state; tokens from `live` on do not exist.
    DEVICE void fold(float (&s)[4], const u8* v, int live, int parity, int lane) {
        const u8* scales = v + TILE * R::V_ROW;
        float top_0 = 0.0f, top_8 = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            top_0 = fmaxf(top_0, token_scale(scales, lane / 4, parity, i));
            top_8 = fmaxf(top_8, token_scale(scales, lane / 4 + 8, parity, i));
        }
        // A vector of zeros has scale 0, which must not drag the maximum to minus infinity.
        float log_0 = FMT == PLAIN ? 0.0f : fmaxf(log2_fast(top_0), -40.0f);
        float log_8 = FMT == PLAIN ? 0.0f : fmaxf(log2_fast(top_8), -40.0f);
        if (lane / 4 >= live) s[0] = s[1] = MINUS_INFINITY;
        if (lane / 4 + 8 >= live) s[2] = s[3] = MINUS_INFINITY;
        float top[2] = {fmaxf(s[0] + log_0, s[2] + log_8), fmaxf(s[1] + log_0, s[3] + log_8)};
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            top[0] = fmaxf(top[0], __shfl_xor_sync(FULL_WARP, top[0], distance));
            top[1] = fmaxf(top[1], __shfl_xor_sync(FULL_WARP, top[1], distance));
        }
        float next[2] = {fmaxf(m[0], top[0]), fmaxf(m[1], top[1])};
        bool moved = next[0] != m[0] || next[1] != m[1];
        if (__any_sync(FULL_WARP, moved)) {  // else the factors are exactly 1
            float f0 = exp2_fast(m[0] - next[0]), f1 = exp2_fast(m[1] - next[1]);
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                o[i][0] *= f0;
                o[i][1] *= f1;
                o[i][2] *= f0;
                o[i][3] *= f1;
            }
            l[0] *= f0;
            l[1] *= f1;
            m[0] = next[0];
            m[1] = next[1];
        }
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = exp2_fast(s[j] - m[j & 1]);
        l[0] += p[0] + p[2];
        l[1] += p[1] + p[3];
        values(p, v, parity, lane);
    }

    // Weights p * V scale of a block of channels as B operand.
    DEVICE static void weigh(u32 (&w)[2], const float (&p)[4], const u8* scales, int parity,
                             int block, int lane) {
        float v0 = token_scale(scales, lane / 4, parity, block);
        float v8 = token_scale(scales, lane / 4 + 8, parity, block);
        w[0] = transpose(pack_half2(p[0] * v0, p[1] * v0));
        w[1] = transpose(pack_half2(p[2] * v8, p[3] * v8));
    }

    // o += V^T (p * V scale)
    DEVICE void values(const float (&p)[4], const u8* v, int parity, int lane) {
        const u8* scales = v + TILE * R::V_ROW;
        u32 weight[2], rest[2] = {0u, 0u};
        if constexpr (BF) {
            // The part of p that bf16 drops goes through a second product.
            u32 first = pack_bf16x2(p[0], p[1]), second = pack_bf16x2(p[2], p[3]);
            weight[0] = transpose(first);
            weight[1] = transpose(second);
            rest[0] = transpose(pack_bf16x2(p[0] - bf16_to_float(u16(first)),
                                            p[1] - bf16_to_float(u16(first >> 16))));
            rest[1] = transpose(pack_bf16x2(p[2] - bf16_to_float(u16(second)),
                                            p[3] - bf16_to_float(u16(second >> 16))));
        } else {
            weigh(weight, p, scales, parity, 0, lane);
        }
        u32 base = shared_address(v);
        // Matrices in the order of an A operand: WIDE: channels inside, tokens outside.
        int inner = lane >> 3 & 1, outer = lane >> 4;
        int row = (WIDE ? outer : inner) * 8 + (lane & 7), side = WIDE ? inner : outer;
        constexpr int CHANNELS = FMT == K8V4 ? 64 : (WIDE ? 16 : 32);  // of one ldmatrix
#pragma unroll
        for (int c = 0; c < D / CHANNELS; ++c) {
            u32 r[4];
            if (BLOCKS > 1 && c > 0 && c * CHANNELS % 64 == 0) {
                weigh(weight, p, scales, parity, c * CHANNELS / 64, lane);
            }
            load_transposed(r, base + chunk_offset<R::V_ROW>(row, 2 * c + side));
            if constexpr (WIDE) {
                multiply<BF>(o[c], r[0], r[1], r[2], r[3], weight[0], weight[1]);
                if constexpr (BF) multiply<BF>(o[c], r[0], r[1], r[2], r[3], rest[0], rest[1]);
            } else {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    u32 near = r[2 * j], far = r[2 * j + 1];  // tokens 0..7 and 8..15
                    if constexpr (FMT == K8V4) {
                        u32 a[4], b[4];
                        levels(a, near);
                        levels(b, far);
                        multiply<false>(o[4 * c + 2 * j], a[0], a[1], b[0], b[1], weight[0],
                                        weight[1]);
                        multiply<false>(o[4 * c + 2 * j + 1], a[2], a[3], b[2], b[3], weight[0],
                                        weight[1]);
                    } else {
                        near = prepared_value<FMT>(near);
                        far = prepared_value<FMT>(far);
                        multiply<false>(o[2 * c + j], value_pair<FMT>(near, false),
                                        value_pair<FMT>(near, true),
                                        value_pair<FMT>(far, false), value_pair<FMT>(far, true),
                                        weight[0], weight[1]);
                    }
                }
            }
        }
    }

    // Output channel of o[i][0..1] (second = false) or o[i][2..3].
    DEVICE static int channel(int i, bool second, int lane) {
        int r = lane / 4;
        if (FMT == K8V4) return i / 2 * 32 + 4 * r + i % 2 * 2 + second;
        return WIDE ? 16 * i + r + 8 * second : 16 * i + 2 * r + second;
    }

    // Sum of weights of each head over the warp, ready for `write_state`.
    DEVICE void finish() {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
            l[0] += __shfl_xor_sync(FULL_WARP, l[0], distance);
            l[1] += __shfl_xor_sync(FULL_WARP, l[1], distance);
        }
    }
    DEVICE void write_state(float* maxima, float* sums, int lane) const {
        if (lane >= 4) return;
        maxima[2 * lane] = m[0];
        maxima[2 * lane + 1] = m[1];
        sums[2 * lane] = l[0];
        sums[2 * lane + 1] = l[1];
    }
    // Output of the warp times its share exp2(m - top), to area[head][d] or added to what is there;
    // rows `stride` floats apart.
    DEVICE void merge_output(float* area, int stride, const float* maxima, int heads, bool add,
                             int lane) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int head = lane % 4 * 2 + j;
            if (head >= heads) continue;
            float factor = share(maxima, head, m[j]) * V_UNIT;
            float* row = area + head * stride;
            // All loads first: the compiler cannot move one across a store to the same array.
            float2 sum[STEPS];
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                const float* at = row + channel(i, false, lane);
                sum[i] = float2{0.0f, 0.0f};
                if (add && WIDE) sum[i] = float2{at[0], at[8]};
                if (add && !WIDE) sum[i] = *reinterpret_cast<const float2*>(at);
            }
#pragma unroll
            for (int i = 0; i < STEPS; ++i) {
                float* at = row + channel(i, false, lane);
                sum[i].x = fmaf(o[i][j], factor, sum[i].x);
                sum[i].y = fmaf(o[i][j + 2], factor, sum[i].y);
                if constexpr (WIDE) {
                    at[0] = sum[i].x;
                    at[8] = sum[i].y;
                } else {
                    *reinterpret_cast<float2*>(at) = sum[i];
                }
            }
        }
    }
};

// The same for fp32 K and V with plain fused multiply-adds: tf32 would lose bits that decide tokens.
// Lane: token lane % 16, half of its chunks for the scores; channels for the output.
template <int D, int GROUP>
struct PlainWarp {
    using R = Ring<F32, PLAIN, D>;
    static constexpr int Q_STRIDE = D;
    static constexpr int WEIGHTS = TILE * HEADS * 4;  // bytes a warp
    static constexpr int Q_BYTES = HEADS * D * 4 + WARPS * WEIGHTS;
    static constexpr int W = D / 32;
    static constexpr int PIECE = W < 4 ? W : 4;  // neighbouring channels of a lane

    const float* q;
    float* weights;
    const float2* scale;
    float o[GROUP][W];
    float m[GROUP], l[GROUP];

    DEVICE void reset() {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (int r = 0; r < W; ++r) o[g][r] = 0.0f;
            m[g] = MINUS_INFINITY;
            l[g] = 0.0f;
        }
    }
    DEVICE static float2 write_query(u8* area, int head, const float (&x)[W], int lane) {
        store_lane<F32>(x, area + head * Q_STRIDE * 4, lane);
        return float2{1.0f, 0.0f};
    }
    DEVICE void read_queries(const u8* area, const float2* factors, int) {
        q = reinterpret_cast<const float*>(area);
        weights = reinterpret_cast<float*>(const_cast<u8*>(area) + HEADS * D * 4 +
                                           threadIdx.x / 32 * WEIGHTS);
        scale = factors;
    }
    DEVICE void scores(float (&s)[GROUP], const u8* k, int, int lane) const {
        int token = lane % 16, side = lane / 16;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) s[g] = 0.0f;
#pragma unroll 4
        for (int i = 0; i < D / 8; ++i) {
            int chunk = 2 * i + side;
            float4 a = *reinterpret_cast<const float4*>(k + chunk_offset<R::K_ROW>(token, chunk));
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float4 b = *reinterpret_cast<const float4*>(q + g * Q_STRIDE + chunk * 4);
                s[g] = fmaf(a.x, b.x, s[g]);
                s[g] = fmaf(a.y, b.y, s[g]);
                s[g] = fmaf(a.z, b.z, s[g]);
                s[g] = fmaf(a.w, b.w, s[g]);
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            s[g] += __shfl_xor_sync(FULL_WARP, s[g], 16);
            s[g] *= scale[g].x;
        }
    }
    DEVICE void fold(float (&s)[GROUP], const u8* v, int live, int, int lane) {
        int token = lane % 16;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            if (token >= live) s[g] = MINUS_INFINITY;
            float next = fmaxf(m[g], group_max<16>(s[g]));
            float factor = exp2_fast(m[g] - next);
            m[g] = next;
            float p = exp2_fast(s[g] - next);
            l[g] = l[g] * factor + p;
            if (lane < 16) weights[token * HEADS + g] = p;
#pragma unroll
            for (int r = 0; r < W; ++r) o[g][r] *= factor;
        }
        __syncwarp();
#pragma unroll 4
        for (int t = 0; t < TILE; ++t) {
            float x[W];
#pragma unroll
            for (int r = 0; r < W; r += PIECE) {
                int at = channel(r, lane);
                const u8* source = v + chunk_offset<R::V_ROW>(t, at / 4) + at % 4 * 4;
                struct alignas(PIECE * 4) Piece { float v[PIECE]; };
                Piece piece = *reinterpret_cast<const Piece*>(source);
#pragma unroll
                for (int i = 0; i < PIECE; ++i) x[r + i] = piece.v[i];
            }
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float p = weights[t * HEADS + g];
#pragma unroll
                for (int r = 0; r < W; ++r) o[g][r] = fmaf(p, x[r], o[g][r]);
            }
        }
        __syncwarp();
    }
    // Channel of o[.][r].
    DEVICE static int channel(int r, int lane) {
        return r / PIECE * 32 * PIECE + lane * PIECE + r % PIECE;
    }
    DEVICE void finish() {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
#pragma unroll
            for (int distance = 1; distance < 16; distance *= 2) {
                l[g] += __shfl_xor_sync(FULL_WARP, l[g], distance);
            }
        }
    }
    DEVICE void write_state(float* maxima, float* sums, int lane) const {
        if (lane != 0) return;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            maxima[g] = m[g];
            sums[g] = l[g];
        }
    }
    DEVICE void merge_output(float* area, int stride, const float* maxima, int heads, bool add,
                             int lane) const {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            if (g >= heads) break;
            float factor = share(maxima, g, m[g]);
            float* row = area + g * stride;
            float sum[W];
#pragma unroll
            for (int r = 0; r < W; ++r) sum[r] = add ? row[channel(r, lane)] : 0.0f;
#pragma unroll
            for (int r = 0; r < W; ++r) row[channel(r, lane)] = fmaf(o[g][r], factor, sum[r]);
        }
    }
};
