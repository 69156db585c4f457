// Tiles of 16 tokens for decode attention: copying them to shared memory, and codes to halves.
//
// Eight-bit codes become halves: e4m3 by its conversion, int8 through the half 1024 + x. Integers
// of K and the 4-bit levels are put into the ten low bits of a half, where an integer n means n *
// 2^-24: no arithmetic, the power of two comes off at the end.
#pragma once
#include "async_copy.cuh"
#include "kv_common.cuh"

constexpr int WARPS = 4;
constexpr int TILE = 16;
// The outputs of the warps are added up in rounds of 64 channels, in rows of ROUND_STRIDE floats,
// which keeps heads in different banks.
constexpr int ROUND_STRIDE = 64 + 4;
#define MINUS_INFINITY __int_as_float(0xff800000)

constexpr int HEADS = 8;  // columns of a product; the most query heads of a KV head

// Stages of a warp's ring and CTAs of an SM: 64 KiB and more in flight an SM, within 227 KiB of
// shared memory and 64 Ki registers.
constexpr int ring_stages(int format, int dtype, int d) {
    int row = k_row_bytes(format, dtype, d) + v_row_bytes(format, dtype, d);
    return row >= 1024 ? 1 : (row >= 256 ? 2 : (row >= 192 ? 3 : 4));
}
constexpr int ctas_per_sm(int format, int dtype, int d) {
    if (format == PLAIN && dtype == F32) return d == 256 ? 1 : 3;
    if (format == FP8_B64 && d == 256) return 2;  // the larger scales do not fit three times
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
// Bytes of (a, b) by the nibbles of `selector`, whose bit 3 must be clear; __byte_perm would
// clear it.
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

// Two neighbouring bytes of K (`high`: the upper two) as halves. Integers come as (n + 128) *
// 2^-24: the scores have 128 * sum(q) taken off, which costs no instruction here.
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
// Bytes 0 and 2 of V (`odd`: 1 and 3) as halves; e4m3 codes come with bytes 1 and 2 exchanged.
// Here an offset would cancel: the sum over values of both signs is small.
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
