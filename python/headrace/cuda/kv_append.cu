// Append: K and V of new tokens to the planes of a layer, in the exact bytes of the reference
// codecs (headrace/kv/codecs.py), optionally after q/k RMS norm and rotary embedding of the same
// launch.
//
// A warp works on a run: up to `span` neighbouring heads of one token, of one kind (q, k or v), N
// at a time. What they share is fetched once, N vectors are loaded together, and exchanges between
// lanes serve all N. A vector meets the same operations in the same order whatever N and `span`
// are, so its bits do not depend on them.
//
// Grid: ceil(tokens * (q_runs + 2 * kv_runs) / 4); block: 128. No shared memory. Order: all runs of
// a token, q first, then k, then v. What bounds it: N = 1, decode steps of one wave of a few CTAs:
// latency; N = 4, prompts: instructions, then bytes. Compile with -fmad=false: a fused multiply-add
// changes codes.
//
// A token whose page is not in [0, page_limit) or whose offset is not in [0, page_tokens) is a
// padding row: no vector of it is read and none is written, q included.
#include "kv_common.cuh"

constexpr int WARPS = 4;

// Rows of a layer's planes, contiguous `[pages, page_tokens, kv_heads, row]`.
struct Planes {
    u8* k;
    u16* k_scale;
    u8* v;
    u16* v_scale;
};

DEVICE float sanitise(float x) {
    // fmaxf would take the other operand for NaN, too, but the wrong one.
    if (x != x) return 0.0f;
    return fminf(fmaxf(x, -MAX_HALF), MAX_HALF);
}

// Smallest half >= v, at least 2^-24, at most 65504; as bits.
DEVICE u16 up16(float v) {
    u32 bits = float_to_half(fminf(v, MAX_HALF));
    if (half_to_float(u16(bits)) < v) bits += 1;
    return u16(min(max(bits, 1u), 0x7BFFu));
}

// ---- N vectors in a warp -----------------------------------------------------------------------

// The bits of the W values of a lane lie as `load_bits` leaves them: W words of fp32, or W / 2
// words of two values each.
template <int DT, int W>
constexpr int lane_words() { return W * itemsize(DT) / 4; }

// Rounded to the dtype. Two at a time: a conversion of one value runs at a quarter of the rate.
template <int DT, int W>
DEVICE void round_lane(u32 (&bits)[W], const float (&x)[W]) {
    if constexpr (DT == F32) {
#pragma unroll
        for (int r = 0; r < W; ++r) bits[r] = __float_as_uint(x[r]);
    } else {
#pragma unroll
        for (int r = 0; r < W; r += 2) {
            bits[r / 2] = DT == BF16 ? pack_bf16x2(x[r], x[r + 1]) : pack_half2(x[r], x[r + 1]);
        }
    }
}

// The product of two pairs, rounded to the dtype: what rounding their products in fp32 gives, since
// those are exact or, if bf16, round to zero either way.
template <int DT>
DEVICE u32 product(u32 a, u32 b) {
    u32 bits;
    if constexpr (DT == BF16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    if constexpr (DT == F16) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    return bits;
}

template <int DT, int W>
DEVICE void store_bits(const u32 (&bits)[W], u8* target) {
    constexpr int WORDS = lane_words<DT, W>();
    struct alignas(WORDS < 4 ? WORDS * 4 : 16) Piece { u32 v[WORDS]; } piece;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) piece.v[i] = bits[i];
    *reinterpret_cast<Piece*>(target) = piece;
}

// N vectors from neighbouring heads, `step` bytes apart; zeros for those from `count` on. `source`
// (of this lane) moves to the head after them.
template <int DT, int N, int W>
DEVICE void load_heads(u32 (&bits)[N][W], const u8*& source, i64 step, int count) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (n < count) {
            load_bits(bits[n], source, DT, 0);
        } else {
#pragma unroll
            for (int i = 0; i < lane_words<DT, W>(); ++i) bits[n][i] = 0;
        }
        source += step;
    }
}
// The first `count` of N vectors; `target` moves likewise.
template <int DT, int N, int W>
DEVICE void store_heads(const u32 (&bits)[N][W], u8*& target, i64 step, int count) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (n < count) store_bits<DT>(bits[n], target);
        target += step;
    }
}

struct Sum {
    static DEVICE float of(float a, float b) { return __fadd_rn(a, b); }
};
struct Largest {
    static DEVICE float of(float a, float b) { return fmaxf(a, b); }
};

// Folds N values over groups of LANES neighbouring lanes, by exchanges of distance 1, 2, 4 and so
// on: the tree of neighbours that the format definition pins. The result of value n is in the
// lanes with lane % N == n: at the first distances a lane keeps half of its values and hands over
// the others, so that what follows is done once for all N.
template <class Op, int LANES, int N>
DEVICE float fold(float (&v)[N], int lane) {
    static_assert(N <= LANES, "a lane is left with one value");
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        if (distance < N) {
            bool odd = lane & distance;
#pragma unroll
            for (int i = 0; i < N / 2 / distance; ++i) {
                float given = odd ? v[2 * i] : v[2 * i + 1];
                float kept = odd ? v[2 * i + 1] : v[2 * i];
                v[i] = Op::of(kept, __shfl_xor_sync(FULL_WARP, given, distance));
            }
        } else {
            v[0] = Op::of(v[0], __shfl_xor_sync(FULL_WARP, v[0], distance));
        }
    }
    return v[0];
}
// What follows from result n, in every lane of its group.
template <int N>
DEVICE float folded(float own, int n, int lane) {
    if constexpr (N == 1) return own;
    return __shfl_sync(FULL_WARP, own, (lane & -N) | n);
}

// ---- codecs ------------------------------------------------------------------------------------

template <int W, int N>
DEVICE void lane_max(float (&largest)[N], const float (&x)[N][W]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        largest[n] = 0.0f;
#pragma unroll
        for (int r = 0; r < W; ++r) largest[n] = fmaxf(largest[n], fabsf(x[n][r]));
    }
}

// Codes and scales: of the first of `count` rows, N at most.
template <int D, int BLOCK, int N>
DEVICE void encode_fp8(const float (&x)[N][D / 32], u8* codes, u16* scales, int count, int lane) {
    constexpr int W = D / 32;
    constexpr int LANES = BLOCK / W;
    float largest[N];
    lane_max(largest, x);
    u16 bits = up16(__fdiv_rn(fold<Largest, LANES>(largest, lane), 448.0f));
    float own = half_to_float(bits);
    if (lane % LANES < count) scales[lane % LANES * (D / BLOCK) + lane / LANES] = bits;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float scale = folded<N>(own, n, lane);
        struct alignas(W) Piece { u16 v[W / 2]; } piece;
#pragma unroll
        for (int r = 0; r < W; r += 2) {
            piece.v[r / 2] = pack_e4m3x2(__fdiv_rn(x[n][r], scale), __fdiv_rn(x[n][r + 1], scale));
        }
        if (n < count) reinterpret_cast<Piece*>(codes + n * D)[lane] = piece;
    }
}

template <int D, int N>
DEVICE void encode_int8(const float (&x)[N][D / 32], u8* codes, u16* scales, int count, int lane) {
    constexpr int W = D / 32;
    float largest[N];
    lane_max(largest, x);
    u16 bits = up16(__fdiv_rn(fold<Largest, 32>(largest, lane), 127.0f));
    float own = half_to_float(bits);
    if (lane < count) scales[lane] = bits;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float scale = folded<N>(own, n, lane);
        struct alignas(W) Piece { signed char v[W]; } piece;
#pragma unroll
        for (int r = 0; r < W; ++r) {
            float code = rintf(__fdiv_rn(x[n][r], scale));
            piece.v[r] = static_cast<signed char>(int(fminf(fmaxf(code, -127.0f), 127.0f)));
        }
        if (n < count) reinterpret_cast<Piece*>(codes + n * D)[lane] = piece;
    }
}

// 127 / 2.7326 * sqrt(D) in fp32.
constexpr float codebook_gain(int d) {
    return d == 64 ? 0x1.73ce9cp+8f : (d == 128 ? 0x1.06e844p+9f : 0x1.73ce9cp+9f);
}

// Number of thresholds strictly below u.
DEVICE u32 codebook_code(float u) {
    u32 code = u > 0.0f;
    float size = fabsf(u);
    u32 steps = 0;
    // Thresholds are symmetric: on the negative side "strictly below u" means "not above |u|".
    bool positive = u > 0.0f;
#define STEP(T) steps += positive ? size > T : size >= T;
    STEP(12.0f) STEP(24.5f) STEP(37.5f) STEP(51.0f) STEP(66.5f) STEP(85.5f) STEP(111.5f)
#undef STEP
    return code ? 8u + steps : 7u - steps;
}

// Sum within a lane, the first stages of the pinned tree.
template <int W>
DEVICE float lane_sum(float (&t)[W]) {
#pragma unroll
    for (int width = 1; width < W; width *= 2) {
#pragma unroll
        for (int r = 0; r < W; r += 2 * width) t[r] = __fadd_rn(t[r], t[r + width]);
    }
    return t[0];
}

template <int D, int N>
DEVICE void encode_levels(const float (&x)[N][D / 32], u8* codes, u16* scales, int count,
                          int lane) {
    constexpr int W = D / 32;
    float sums[N], squares[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float terms[W];
#pragma unroll
        for (int r = 0; r < W; ++r) terms[r] = __fmul_rn(x[n][r], x[n][r]);
        sums[n] = lane_sum(terms);
    }
    float norm2 = fold<Sum, 32>(sums, lane);
    bool zero = norm2 == 0.0f;
    // Zero of a zero vector, else positive: vectors are finite.
    float own = zero ? 0.0f : __fdiv_rn(codebook_gain(D), __fsqrt_rn(norm2));
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float gain = folded<N>(own, n, lane);
        u32 packed = 0;
        float terms[W];
        squares[n] = 0.0f;  // an integer below 2^24: exact in any order
#pragma unroll
        for (int r = 0; r < W; ++r) {
            u32 code = gain == 0.0f ? 0u : codebook_code(__fmul_rn(x[n][r], gain));
            packed |= code << (4 * r);
            float level = level_of(code);
            squares[n] += level * level;
            terms[r] = __fmul_rn(x[n][r], level);
        }
        sums[n] = lane_sum(terms);
        u8* row = codes + n * (D / 2);
        if (n >= count) continue;
        if constexpr (W == 8) reinterpret_cast<u32*>(row)[lane] = packed;
        if constexpr (W == 4) reinterpret_cast<u16*>(row)[lane] = u16(packed);
        if constexpr (W == 2) row[lane] = u8(packed);
    }
    float square = fold<Sum, 32>(squares, lane);
    float fit = fminf(fmaxf(__fdiv_rn(fold<Sum, 32>(sums, lane), square), 0.0f), MAX_HALF);
    if (lane < count) scales[lane] = zero ? u16(0) : float_to_half(fit);
}

// K or V of `count` heads, N at most, from `row` on.
template <int DT, int FMT, int D, int N>
DEVICE void encode(const u32 (&bits)[N][D / 32], bool is_v, const Planes& planes, i64 row,
                   int count, bool rotated, int lane) {
    constexpr int W = D / 32;
    u8* codes = is_v ? planes.v + row * v_row_bytes(FMT, DT, D)
                     : planes.k + row * k_row_bytes(FMT, DT, D);
    if constexpr (FMT == PLAIN) {
        u8* target = codes + lane * W * itemsize(DT);
        store_heads<DT>(bits, target, D * itemsize(DT), count);
        return;
    }
    u16* scales = (is_v ? planes.v_scale : planes.k_scale) + row * scale_blocks(FMT, D);
    float x[N][W];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        values_of(x[n], bits[n], DT);
#pragma unroll
        for (int r = 0; r < W; ++r) x[n][r] = sanitise(x[n][r]);
    }
    if constexpr (FMT == FP8) encode_fp8<D, D>(x, codes, scales, count, lane);
    if constexpr (FMT == FP8_B64) encode_fp8<D, 64>(x, codes, scales, count, lane);
    if constexpr (FMT == INT8 || FMT == K8V4) {
        if (rotated) rotate<D>(x, lane);
    }
    if constexpr (FMT == INT8) encode_int8<D>(x, codes, scales, count, lane);
    if constexpr (FMT == K8V4) {
        if (is_v) encode_levels<D>(x, codes, scales, count, lane);
        else encode_int8<D>(x, codes, scales, count, lane);
    }
}

// ---- norm and rotary embedding -----------------------------------------------------------------

enum Norm : int { NO_NORM = 0, RMS_NORM = 1, RMS_NORM_WIDE = 2 };

// RMS norm of heads. w: bits of the weights of this lane. RMS_NORM: cast, then times a weight in
// the model dtype; RMS_NORM_WIDE: times an fp32 scale, then cast.
template <int DT, int D, int N>
DEVICE void normalise(u32 (&bits)[N][D / 32], const u32 (&w)[D / 32], int norm, float eps,
                      int lane) {
    constexpr int W = D / 32;
    float x[N][W], sums[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        values_of(x[n], bits[n], DT);
        sums[n] = x[n][0] * x[n][0];
#pragma unroll
        for (int r = 1; r < W; ++r) sums[n] += x[n][r] * x[n][r];
    }
    float own = __frsqrt_rn(fold<Sum, 32>(sums, lane) / float(D) + eps);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float inverse = folded<N>(own, n, lane);
#pragma unroll
        for (int r = 0; r < W; ++r) x[n][r] *= inverse;
    }
    if constexpr (DT != F32) {
        if (norm == RMS_NORM) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                round_lane<DT>(bits[n], x[n]);
#pragma unroll
                for (int i = 0; i < W / 2; ++i) bits[n][i] = product<DT>(bits[n][i], w[i]);
            }
            return;
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int r = 0; r < W; ++r) x[n][r] *= __uint_as_float(w[r]);
        round_lane<DT>(bits[n], x[n]);
    }
}

// Rotary embedding of dims 0..2*half-1, dim j with dim j + half; half is a multiple of D / 32.
template <int D>
struct Turn {
    static constexpr int W = D / 32;
    bool first, turns;
    int partner;
    float cos[W], sin[W];

    DEVICE Turn(const float* cosines, const float* sines, u32 position, int half, int lane) {
        int lanes = half / W;
        first = lane < lanes;
        turns = lane < 2 * lanes;
        partner = first ? lane + lanes : (turns ? lane - lanes : lane);
        if (!turns) return;
        u64 entry = u64(position) * u32(half) + u32(first ? lane : partner) * W;
        struct alignas(W * 4 < 16 ? W * 4 : 16) Piece { float v[W]; };
        Piece c = *reinterpret_cast<const Piece*>(cosines + entry);
        Piece s = *reinterpret_cast<const Piece*>(sines + entry);
#pragma unroll
        for (int r = 0; r < W; ++r) {
            cos[r] = c.v[r];
            sin[r] = s.v[r];
        }
    }

    // Before the first `apply`: x - y is x + -y to the bit. The first use of a table, so that the
    // vectors are asked for before it has come.
    DEVICE void sign() {
#pragma unroll
        for (int r = 0; r < W; ++r) sin[r] = first ? -sin[r] : sin[r];
    }

    template <int DT, int N>
    DEVICE void apply(u32 (&bits)[N][W]) const {
        u32 others[N][W];
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < lane_words<DT, W>(); ++i) {
                others[n][i] = __shfl_sync(FULL_WARP, bits[n][i], partner);
            }
        }
        if (!turns) return;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float x[W], other[W];
            values_of(x, bits[n], DT);
            values_of(other, others[n], DT);
#pragma unroll
            for (int r = 0; r < W; ++r) x[r] = x[r] * cos[r] + other[r] * sin[r];
            round_lane<DT>(bits[n], x);
        }
    }
};

DEVICE i64 index_at(const void* array, int i, int wide) {
    return wide ? static_cast<const i64*>(array)[i] : i64(static_cast<const int*>(array)[i]);
}

// Strides in elements. q_weight, k_weight: [D], see `Norm`. cos, sin: fp32 [positions, half],
// half 0 for no rotary. pages, offsets, positions: [tokens], i64 if `wide`, else i32; the row
// written is (page_base + pages[t], offsets[t]). q_heads 0: only K and V. span: heads of a warp, a
// multiple of N, 1 if N is 1; q_runs, kv_runs: heads by span, rounded up.
template <int DT, int FMT, int D, int N>
__global__ void __launch_bounds__(32 * WARPS)
    kv_append(const void* q, i64 q_token, i64 q_head, void* q_out, i64 out_token, i64 out_head,
              const void* k, i64 k_token, i64 k_head, const void* v, i64 v_token, i64 v_head,
              int tokens, int q_heads, int kv_heads, int span, int q_runs, int kv_runs,
              const void* q_weight, const void* k_weight, int norm, float eps, const float* cos,
              const float* sin, const void* positions, int half, const void* pages,
              const void* offsets, int wide, u32 page_base, u32 page_limit, u32 page_tokens,
              u8* k_codes, u16* k_scales, u8* v_codes, u16* v_scales, int rotated) {
    constexpr int W = D / 32;
    next_kernel_may_start();
    int lane = threadIdx.x % 32;
    // A step has fewer than 2^32 vectors, and a division of 64 bits takes longer than all the rest.
    u32 index = blockIdx.x * WARPS + threadIdx.x / 32;
    u32 runs = q_runs + 2 * kv_runs;
    int token = int(index / runs), run = int(index % runs);
    bool is_q = run < q_runs, is_v = run >= q_runs + kv_runs;
    bool turned = half && !is_v;
    // Everything that no kernel writes, before the wait and before the first use of any of it.
    i64 page = -1, offset = -1, position = 0;
    if (token < tokens) {
        page = index_at(pages, token, wide);
        offset = index_at(offsets, token, wide);
        if (turned) position = index_at(positions, token, wide);
    }
    u32 w[W] = {};
    if (!is_v && norm != NO_NORM) {
        load_bits(w, is_q ? q_weight : k_weight, norm == RMS_NORM ? DT : F32, lane);
    }
    bool live = u64(page) < page_limit && u64(offset) < page_tokens;
    // The position of a padding row means nothing.
    Turn<D> turn(cos, sin, live ? u32(position) : 0, turned ? half : 0, lane);
    previous_kernel_ended();
    if (!live) return;

    int head = (is_q ? run : run - q_runs - (is_v ? kv_runs : 0)) * span;
    int count = min(span, (is_q ? q_heads : kv_heads) - head);
    if constexpr (N == 1) count = 1;
    const void* base = is_q ? q : (is_v ? v : k);
    i64 step = is_q ? q_head : (is_v ? v_head : k_head);
    i64 start = token * (is_q ? q_token : (is_v ? v_token : k_token)) + head * step + lane * W;
    const u8* source = static_cast<const u8*>(base) + start * itemsize(DT);
    step *= itemsize(DT);
    i64 row = i64(u64(page_base + u32(page)) * page_tokens + u32(offset)) * kv_heads + head;
    i64 target = token * out_token + head * out_head + lane * W;
    u8* turned_q = static_cast<u8*>(q_out) + target * itemsize(DT);
    Planes planes{k_codes, k_scales, v_codes, v_scales};

    u32 bits[N][W];
    load_heads<DT>(bits, source, step, count);
    turn.sign();
    while (true) {
        if (!is_v && norm != NO_NORM) normalise<DT, D>(bits, w, norm, eps, lane);
        if (turned) turn.template apply<DT>(bits);
        if (is_q) {
            store_heads<DT>(bits, turned_q, out_head * itemsize(DT), count);
        } else {
            encode<DT, FMT, D>(bits, is_v, planes, row, min(N, count), rotated, lane);
        }
        count -= N;
        if (N == 1 || count <= 0) return;
        row += N;
        load_heads<DT>(bits, source, step, count);
    }
}
