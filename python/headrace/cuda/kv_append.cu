// Append: K and V of new tokens to the planes of a layer, in the exact bytes of the reference
// codecs (headrace/kv/codecs.py), optionally after q/k RMS norm and rotary embedding of the same
// launch.
//
// Grid: ceil(tokens * (q_heads + 2 * kv_heads) / 4); block: 128, one warp a vector. No shared
// memory. Order: all heads of a token, q first, then k, then v. What bounds it: bytes (a decode
// step is one wave of a few CTAs: latency). Compile with -fmad=false: a fused multiply-add
// changes codes.
//
// A token whose page is not in [0, page_limit) or whose offset is not in [0, page_tokens) is a
// padding row: nothing is read or written for it, q included.
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

template <int W>
DEVICE float lane_max(const float (&x)[W]) {
    float largest = 0.0f;
#pragma unroll
    for (int r = 0; r < W; ++r) largest = fmaxf(largest, fabsf(x[r]));
    return largest;
}

template <int D, int BLOCK>
DEVICE void encode_fp8(const float (&x)[D / 32], u8* codes, u16* scales, int lane) {
    constexpr int W = D / 32;
    constexpr int LANES = BLOCK / W;
    u16 bits = up16(__fdiv_rn(group_max<LANES>(lane_max(x)), 448.0f));
    float scale = half_to_float(bits);
    struct alignas(W) Piece { u16 v[W / 2]; } piece;
#pragma unroll
    for (int r = 0; r < W; r += 2) {
        piece.v[r / 2] = pack_e4m3x2(__fdiv_rn(x[r], scale), __fdiv_rn(x[r + 1], scale));
    }
    reinterpret_cast<Piece*>(codes)[lane] = piece;
    if (lane % LANES == 0) scales[lane / LANES] = bits;
}

template <int D>
DEVICE void encode_int8(const float (&x)[D / 32], u8* codes, u16* scales, int lane) {
    constexpr int W = D / 32;
    u16 bits = up16(__fdiv_rn(group_max<32>(lane_max(x)), 127.0f));
    float scale = half_to_float(bits);
    struct alignas(W) Piece { signed char v[W]; } piece;
#pragma unroll
    for (int r = 0; r < W; ++r) {
        float code = rintf(__fdiv_rn(x[r], scale));
        piece.v[r] = static_cast<signed char>(int(fminf(fmaxf(code, -127.0f), 127.0f)));
    }
    reinterpret_cast<Piece*>(codes)[lane] = piece;
    if (lane == 0) *scales = bits;
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

template <int D>
DEVICE void encode_levels(const float (&x)[D / 32], u8* codes, u16* scales, int lane) {
    constexpr int W = D / 32;
    float terms[W];
#pragma unroll
    for (int r = 0; r < W; ++r) terms[r] = __fmul_rn(x[r], x[r]);
    float norm2 = tree_sum(terms);
    bool zero = norm2 == 0.0f;
    float gain = __fdiv_rn(codebook_gain(D), __fsqrt_rn(zero ? 1.0f : norm2));
    u32 packed = 0;
    float square = 0.0f;  // an integer below 2^24: exact in any order
#pragma unroll
    for (int r = 0; r < W; ++r) {
        u32 code = zero ? 0u : codebook_code(__fmul_rn(x[r], gain));
        packed |= code << (4 * r);
        float level = level_of(code);
        square += level * level;
        terms[r] = __fmul_rn(x[r], level);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        square += __shfl_xor_sync(FULL_WARP, square, distance);
    }
    float fit = fminf(fmaxf(__fdiv_rn(tree_sum(terms), square), 0.0f), MAX_HALF);
    if constexpr (W == 8) reinterpret_cast<u32*>(codes)[lane] = packed;
    if constexpr (W == 4) reinterpret_cast<u16*>(codes)[lane] = u16(packed);
    if constexpr (W == 2) codes[lane] = u8(packed);
    if (lane == 0) *scales = zero ? u16(0) : float_to_half(fit);
}

template <int DT, int FMT, int D>
DEVICE void encode(float (&vector)[1][D / 32], bool is_v, const Planes& planes, i64 row,
                   bool rotated, int lane) {
    constexpr int W = D / 32;
    float (&x)[W] = vector[0];
    u8* codes = is_v ? planes.v + row * v_row_bytes(FMT, DT, D)
                     : planes.k + row * k_row_bytes(FMT, DT, D);
    if constexpr (FMT == PLAIN) {
        store_lane<DT>(x, codes, lane);
        return;
    }
    u16* scales = (is_v ? planes.v_scale : planes.k_scale) + row * scale_blocks(FMT, D);
#pragma unroll
    for (int r = 0; r < W; ++r) x[r] = sanitise(x[r]);
    if constexpr (FMT == FP8) encode_fp8<D, D>(x, codes, scales, lane);
    if constexpr (FMT == FP8_B64) encode_fp8<D, 64>(x, codes, scales, lane);
    if constexpr (FMT == INT8 || FMT == K8V4) {
        if (rotated) rotate<D>(vector, lane);
    }
    if constexpr (FMT == INT8) encode_int8<D>(x, codes, scales, lane);
    if constexpr (FMT == K8V4) {
        if (is_v) encode_levels<D>(x, codes, scales, lane);
        else encode_int8<D>(x, codes, scales, lane);
    }
}

// Bits as they are: a conversion to fp32 and back would change those of a NaN.
template <int N>
DEVICE void copy_lane(const u8* source, u8* target, int lane) {
    struct alignas(N < 16 ? N : 16) Piece { u32 v[N / 4]; };
    reinterpret_cast<Piece*>(target)[lane] = fresh(reinterpret_cast<const Piece*>(source) + lane);
}

enum Norm : int { NO_NORM = 0, RMS_NORM = 1, RMS_NORM_WIDE = 2 };

// RMS norm of one head by the weights of this lane. RMS_NORM: cast, then times a weight in the model
// dtype; RMS_NORM_WIDE: times an fp32 scale, then cast.
template <int DT, int D>
DEVICE void normalise(float (&x)[D / 32], const float (&w)[D / 32], int norm, float eps) {
    constexpr int W = D / 32;
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < W; ++r) sum += x[r] * x[r];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    }
    float inverse = __frsqrt_rn(sum / float(D) + eps);
#pragma unroll
    for (int r = 0; r < W; ++r) {
        float normed = x[r] * inverse;
        x[r] = round_to<DT>((norm == RMS_NORM ? round_to<DT>(normed) : normed) * w[r]);
    }
}

// Rotary embedding of dims 0..2*half-1, dim j with dim j + half; half is a multiple of D / 32.
template <int D>
struct Turn {
    static constexpr int W = D / 32;
    bool first, second;
    int partner;
    float cos[W], sin[W];

    DEVICE Turn(const float* cosines, const float* sines, i64 position, int half, int lane) {
        int lanes = half / W;
        first = lane < lanes;
        second = !first && lane < 2 * lanes;
        partner = first ? lane + lanes : (second ? lane - lanes : lane);
        if (!first && !second) return;
        i64 entry = position * half + (second ? lane - lanes : lane) * W;
        struct alignas(W * 4 < 16 ? W * 4 : 16) Piece { float v[W]; };
        Piece c = *reinterpret_cast<const Piece*>(cosines + entry);
        Piece s = *reinterpret_cast<const Piece*>(sines + entry);
#pragma unroll
        for (int r = 0; r < W; ++r) {
            cos[r] = c.v[r];
            sin[r] = s.v[r];
        }
    }

    template <int DT>
    DEVICE void apply(float (&x)[W]) const {
#pragma unroll
        for (int r = 0; r < W; ++r) {
            float other = __shfl_sync(FULL_WARP, x[r], partner);
            if (first || second) {
                float cross = other * sin[r];
                x[r] = round_to<DT>(first ? x[r] * cos[r] - cross : x[r] * cos[r] + cross);
            }
        }
    }
};

DEVICE i64 index_at(const void* array, int i, int wide) {
    return wide ? static_cast<const i64*>(array)[i] : i64(static_cast<const int*>(array)[i]);
}

// Strides in elements. q_weight, k_weight: [D], see `Norm`. cos, sin: fp32 [positions, half],
// half 0 for no rotary. pages, offsets, positions: [tokens], i64 if `wide`, else i32; the row
// written is (page_base + pages[t], offsets[t]). q_heads 0: only K and V.
template <int DT, int FMT, int D>
__global__ void __launch_bounds__(32 * WARPS)
    kv_append(const void* q, i64 q_token, i64 q_head, void* q_out, i64 out_token, i64 out_head,
              const void* k, i64 k_token, i64 k_head, const void* v, i64 v_token, i64 v_head,
              int tokens, int q_heads, int kv_heads, const void* q_weight, const void* k_weight,
              int norm, float eps, const float* cos, const float* sin, const void* positions,
              int half, const void* pages, const void* offsets, int wide, i64 page_base,
              i64 page_limit, i64 page_tokens, u8* k_codes, u16* k_scales, u8* v_codes,
              u16* v_scales, int rotated) {
    constexpr int W = D / 32;
    next_kernel_may_start();
    int lane = threadIdx.x % 32;
    u32 vectors = q_heads + 2 * kv_heads;
    // A step has fewer than 2^32 vectors, and a division of 64 bits takes longer than all the rest.
    u32 index = blockIdx.x * WARPS + threadIdx.x / 32;
    int token = int(index / vectors), vector = int(index % vectors);
    bool live = token < tokens;
    i64 page = live ? index_at(pages, token, wide) : -1;
    i64 offset = live ? index_at(offsets, token, wide) : -1;
    live = page >= 0 && page < page_limit && offset >= 0 && offset < page_tokens;
    bool is_q = vector < q_heads, is_v = vector >= q_heads + kv_heads;
    // Everything that no kernel writes, before the wait and before the first use of any of it.
    float w[W] = {};
    if (!is_v && norm == RMS_NORM) load_lane<DT>(w, is_q ? q_weight : k_weight, lane);
    if (!is_v && norm == RMS_NORM_WIDE) load_lane<F32>(w, is_q ? q_weight : k_weight, lane);
    bool turned = half && !is_v;
    i64 position = turned && live ? index_at(positions, token, wide) : 0;
    Turn<D> turn(cos, sin, position, turned ? half : 0, lane);
    previous_kernel_ended();
    if (!live) return;

    int head = is_q ? vector : (is_v ? vector - q_heads - kv_heads : vector - q_heads);
    const void* base = is_q ? q : (is_v ? v : k);
    i64 start = is_q ? token * q_token + head * q_head
                     : (is_v ? token * v_token + head * v_head : token * k_token + head * k_head);
    const u8* source = static_cast<const u8*>(base) + start * itemsize(DT);
    i64 row = ((page_base + page) * page_tokens + offset) * kv_heads + head;
    if (FMT == PLAIN && !is_q && (is_v || (norm == NO_NORM && half == 0))) {
        u8* target = (is_v ? v_codes : k_codes) + row * D * itemsize(DT);
        copy_lane<W * itemsize(DT)>(source, target, lane);
        return;
    }
    float held[1][W];
    float (&x)[W] = held[0];
    load_lane<DT>(x, source, lane);
    if (!is_v && norm != NO_NORM) normalise<DT, D>(x, w, norm, eps);
    if (turned) turn.template apply<DT>(x);
    if (is_q) {
        i64 target = token * out_token + head * out_head;
        store_lane<DT>(x, static_cast<u8*>(q_out) + target * itemsize(DT), lane);
        return;
    }
    Planes planes{k_codes, k_scales, v_codes, v_scales};
    encode<DT, FMT, D>(held, is_v, planes, row, rotated, lane);
}
