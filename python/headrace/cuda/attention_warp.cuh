// One warp's part of decode attention: the state over its tiles, by tensor cores or in plain
// fp32.
//
// Tokens stand on the M side: S^T[16 x 8] = K[16 x D] Q^T and O^T[D x 8] = V^T P^T, the query
// heads of a KV head padded to 8 columns, with mma.m16n8k16. The order of channels inside a
// product is free, so a lane takes the bytes a single ldmatrix gives it; `channel` says which
// output channel an accumulator belongs to. Both kinds of warp have the same interface:
//   write_queries, read_queries    query heads to shared memory and from there
//   reset, scores, fold            the state; a tile of K to scores; scores and a tile of V to it
//   finish, write_state, write_round   results to shared memory
#pragma once
#include "attention_tile.cuh"

// Running state of a warp over its tiles, products on tensor cores. Lane: tokens lane / 4 and +
// 8, heads 2 * (lane % 4) and + 1. Weights are p * V scale, so the running maximum is that of
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

    // Write query heads first, first + WARPS, ..., D / 32 values a lane, and for each the factor
    // of its scores (times `scale`) and the offset that comes off before. A power of two brings
    // every head into the range of half without rounding.
    template <int N>
    DEVICE static void write_queries(u8* area, float2* factors, int first,
                                     const float (&x)[N][D / 32], float scale, int lane) {
        constexpr int W = D / 32;
        float values[N][W], factor[N], sum[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            factor[n] = 1.0f;
            sum[n] = 0.0f;
            if constexpr (!WIDE) {
                float largest = 0.0f;
#pragma unroll
                for (int r = 0; r < W; ++r) largest = fmaxf(largest, fabsf(x[n][r]));
                largest = group_max<32>(largest);
                int exponent = int(__float_as_uint(largest) >> 23) - 127;
                if (exponent > -126 && exponent < 127) {
                    factor[n] = __uint_as_float(u32(exponent + 127) << 23);
                }
            }
            float inverse = 1.0f / factor[n];
#pragma unroll
            for (int r = 0; r < W; ++r) {
                values[n][r] = WIDE ? x[n][r] : x[n][r] * inverse;
                if constexpr (K_OFFSET) sum[n] += round_to<F16>(values[n][r]);
            }
            store_lane<BF ? BF16 : F16>(values[n], area + (first + n * WARPS) * Q_STRIDE * 2, lane);
        }
        if constexpr (K_OFFSET) {
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
                for (int n = 0; n < N; ++n) sum[n] += __shfl_xor_sync(FULL_WARP, sum[n], distance);
            }
        }
        if (lane > 0) return;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            factors[first + n * WARPS] =
                float2{factor[n] * K_UNIT * scale, sum[n] * (128.0f / K_UNIT)};
        }
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

    // Scale `block` of a token of a tile; `parity`: which half of the copied word it is, if
    // alone.
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

    // Fold a tile of scores and the values at `v` into the state; tokens from `live` on do not
    // exist.
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
    // Output channels 64 * round.. times the share of this warp, to area[head][ROUND_STRIDE].
    DEVICE void write_round(float* area, int round, const float* maxima, int heads,
                            int lane) const {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int head = lane % 4 * 2 + j;
            if (head >= heads) continue;
            float factor = share(maxima, head, m[j]) * V_UNIT;
            float* row = area + head * ROUND_STRIDE;
#pragma unroll
            for (int i = 4 * round; i < 4 * round + 4; ++i) {
                float* at = row + channel(i, false, lane) - 64 * round;
                float low = o[i][j] * factor, high = o[i][j + 2] * factor;
                if constexpr (WIDE) {
                    at[0] = low;
                    at[8] = high;
                } else {
                    *reinterpret_cast<float2*>(at) = float2{low, high};
                }
            }
        }
    }
};

// The same for fp32 K and V with plain fused multiply-adds: tf32 would lose bits that decide
// tokens. Lane: token lane % 16, half of its chunks for the scores; channels for the output.
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
    template <int N>
    DEVICE static void write_queries(u8* area, float2* factors, int first, const float (&x)[N][W],
                                     float scale, int lane) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            int head = first + n * WARPS;
            store_lane<F32>(x[n], area + head * Q_STRIDE * 4, lane);
            if (lane == 0) factors[head] = float2{scale, 0.0f};
        }
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
    DEVICE void write_round(float* area, int round, const float* maxima, int heads,
                            int lane) const {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            if (g >= heads) break;
            float factor = share(maxima, g, m[g]);
#pragma unroll
            for (int r = 0; r < W; ++r) {
                int at = channel(r, lane) - 64 * round;
                if (at >= 0 && at < 64) area[g * ROUND_STRIDE + at] = o[g][r] * factor;
            }
        }
    }
};
