// Gated delta rule over many tokens of one request, in chunks of 64 at absolute multiples of 64.
//
// delta_chunks, grid (chunks, value heads), block 256: everything of a chunk that needs no state. With
// c the running sum of g, M_ij = exp(c_i - c_j) for i >= j and A the part below the diagonal of
// (diag(beta) K K^T) . M: U = (I + A)^-1 diag(beta) V, W = (I + A)^-1 diag(beta e^c) K by forward
// substitution, one column a thread, and P = (Q K^T) . M.
// delta_states, grid (dv / 32, value heads), block 256: the chunks one after the other, with 32 rows of
// the state in shared memory: R = U - W S^T, O = diag(e^c) Q S^T + P R, S = e^{c_64} S + R^T diag(e^{c_64
// - c}) K.
// All in fp32, in an order fixed by the shape: bits depend on nothing but the chunk and the state before
// it, so that cuts at multiples of 64 are invisible. The second kernel multiplies on tensor cores, each
// fp32 factor as the sum of two tf32 ones (three products; the fourth is below fp32), because CUDA cores
// would wait for shared memory. Bounded by arithmetic and shared memory, not by HBM: 8192 tokens of
// the 27B model take 2.8 ms a layer on an H200.
//
// Layouts: q, k [tokens, Hk, DK] and v [tokens, Hv, DV] with row strides, as the convolution leaves them
// (the L2 norm and the scale of q are taken here); g, beta fp32 [tokens, Hv] with row strides.
// Scratch of one chunk and head: U [64, DV], W [64, DK], P [64, 64], factors of q and of k [2, 64], e^{c_64} (of 64), fp32.
// state fp32 [Hv, DV, DK] of one slot, out fp32 [tokens, Hv, DV].
//
// -D at load: ELEMENT (0 bf16, 1 fp16, 2 fp32), DK, DV (multiples of 32, together at most 256).
#include "element.cuh"

#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif

namespace {

constexpr int kChunk = 64;
constexpr int kThreads = 256;
constexpr int kPitch = DK + 4;      // floats; neighbouring rows four banks apart
constexpr int kSquarePitch = kChunk + 4;
constexpr int kSlice = 32;          // rows of the state in one CTA
constexpr long long kScratch = kChunk * (DV + DK + kChunk + 3);
// Of the second kernel: eight rows of fragments in different banks.
constexpr int kWidePitch = DK + 8;
constexpr int kWideSquare = kChunk + 8;
constexpr float kL2Eps = 1e-6f;     // part of the model
static_assert(DK % 32 == 0 && DV % 32 == 0 && DK + DV <= kThreads, "a thread has one column");

struct Span {
    int first, count;
};

// Tokens of a chunk: the first ends at the next absolute multiple of 64.
__device__ __forceinline__ Span span_of(int chunk, int start, int tokens) {
    const int head = kChunk - start % kChunk;
    const int first = chunk == 0 ? 0 : head + (chunk - 1) * kChunk;
    return {first, min(tokens, head + chunk * kChunk) - first};
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

__device__ __forceinline__ float4 vector_at(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}

__device__ __forceinline__ float4 read_four(const Element* p) {
#if ELEMENT == 2
    return *reinterpret_cast<const float4*>(p);
#else
    const uint2 raw = *reinterpret_cast<const uint2*>(p);
    Element four[4];
    memcpy(four, &raw, sizeof(raw));
    return make_float4(widen(four[0]), widen(four[1]), widen(four[2]), widen(four[3]));
#endif
}

// [64, DK] elements into shared memory, zeros beyond the count.
__device__ __forceinline__ void load_rows(float* to, const Element* from, long long stride,
                                          int count) {
#pragma unroll
    for (int i = 0; i < kChunk * DK / 4 / kThreads; ++i) {
        const int at = (i * kThreads + threadIdx.x) * 4, row = at / DK, column = at % DK;
        *reinterpret_cast<float4*>(to + row * kPitch + column) =
            row < count ? read_four(from + row * stride + column) : make_float4(0, 0, 0, 0);
    }
}

// 1 / |row|, for the 64 rows, by warps.
__device__ __forceinline__ void norms_of(float* to, const float* rows) {
    const int lane = threadIdx.x & 31;
    for (int row = threadIdx.x >> 5; row < kChunk; row += kThreads / 32) {
        float squares = 0.0f;
#pragma unroll
        for (int i = lane; i < DK; i += 32)
            squares = fmaf(rows[row * kPitch + i], rows[row * kPitch + i], squares);
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            squares += __shfl_xor_sync(0xffffffffu, squares, step);
        if (lane == 0) to[row] = rsqrtf(squares + kL2Eps);
    }
}

}  // namespace

// Dynamic shared memory: (2 * 64 * kPitch + 64 * kSquarePitch) floats.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    delta_chunks(const Element* q, const Element* k, long long qk_stride, const Element* v,
                 long long v_stride, const float* g, const float* beta, long long gate_stride,
                 float* scratch, int start, int tokens, int group) {
    extern __shared__ float4 dynamic[];
    float* q_of = reinterpret_cast<float*>(dynamic);
    float* k_of = q_of + kChunk * kPitch;
    float* a_of = k_of + kChunk * kPitch;
    __shared__ float g_of[kChunk], beta_of[kChunk], c_of[kChunk], q_norm[kChunk], k_norm[kChunk];
    const int chunk = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const Span span = span_of(chunk, start, tokens);
    const long long first = span.first;
    q += first * qk_stride + head / group * DK;
    k += first * qk_stride + head / group * DK;
    v += first * v_stride + head * DV;
    float* u = scratch + (static_cast<long long>(chunk) * heads + head) * kScratch;
    float* p = u + kChunk * (DV + DK);
    float* factors = p + kChunk * kChunk;

    load_rows(q_of, q, qk_stride, span.count);
    load_rows(k_of, k, qk_stride, span.count);
    const int t = threadIdx.x;
    if (t < kChunk) {
        const bool live = t < span.count;
        g_of[t] = live ? g[(first + t) * gate_stride + head] : 0.0f;
        beta_of[t] = live ? beta[(first + t) * gate_stride + head] : 0.0f;
    }
    __syncthreads();
    norms_of(q_norm, q_of);
    norms_of(k_norm, k_of);
    if (t < kChunk) {
        float sum = 0.0f;
        for (int i = 0; i <= t; ++i) sum += g_of[i];
        c_of[t] = sum;
    }
    __syncthreads();
    if (t < kChunk) {
        q_norm[t] *= rsqrtf(static_cast<float>(DK));
        factors[t] = q_norm[t] * expf(c_of[t]);
        factors[kChunk + t] = k_norm[t] * expf(c_of[kChunk - 1] - c_of[t]);
        if (t == 0) factors[2 * kChunk] = expf(c_of[kChunk - 1]);
    }
    __syncthreads();

    // K K^T and Q K^T: 4 x 4 elements of each a thread, rows and columns 16 apart.
    const int ti = t / 16, tj = t % 16;
    float kk[4][4] = {}, qk[4][4] = {};
#pragma unroll 2
    for (int i = 0; i < DK; i += 4) {
        float4 columns[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) columns[b] = vector_at(k_of + (tj + 16 * b) * kPitch + i);
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const float4 k_row = vector_at(k_of + (ti + 16 * a) * kPitch + i);
            const float4 q_row = vector_at(q_of + (ti + 16 * a) * kPitch + i);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                if (b > a) continue;  // above the diagonal, but for the blocks on it
                kk[a][b] = dot4(k_row, columns[b], kk[a][b]);
                qk[a][b] = dot4(q_row, columns[b], qk[a][b]);
            }
        }
    }
#pragma unroll
    for (int a = 0; a < 4; ++a)
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int i = ti + 16 * a, j = tj + 16 * b;
            // Not computed above the diagonal, where the exponent may be positive.
            const float decay = i >= j ? expf(c_of[i] - c_of[j]) * k_norm[j] : 0.0f;
            a_of[i * kSquarePitch + j] =
                i > j ? beta_of[i] * k_norm[i] * kk[a][b] * decay : 0.0f;
            p[i * kChunk + j] = i >= j ? q_norm[i] * qk[a][b] * decay : 0.0f;
        }
    __syncthreads();

    if (t >= DV + DK) return;
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        if (t < DV)
            x[i] = i < span.count ? beta_of[i] * widen(v[i * v_stride + t]) : 0.0f;
        else
            x[i] = beta_of[i] * expf(c_of[i]) * k_norm[i] * k_of[i * kPitch + t - DV];
    }
#pragma unroll
    for (int i = 1; i < kChunk; ++i) {
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            const float4 a = vector_at(a_of + i * kSquarePitch + j);  // zeros from i on
            x[i] = fmaf(-a.x, x[j], x[i]);
            if (j + 1 < i) x[i] = fmaf(-a.y, x[j + 1], x[i]);
            if (j + 2 < i) x[i] = fmaf(-a.z, x[j + 2], x[i]);
            if (j + 3 < i) x[i] = fmaf(-a.w, x[j + 3], x[i]);
        }
    }
    float* column = t < DV ? u + t : u + kChunk * DV + t - DV;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) column[i * (t < DV ? DV : DK)] = x[i];
}

namespace {

constexpr int kHeld = kChunk * DK / kThreads / 4;  // vectors of a [64, DK] tile in one thread

// A tile on its way from global to shared memory, in registers.
struct Tile {
    float4 held[kHeld];

    __device__ __forceinline__ void read(const float* from) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            held[i] = __ldcs(reinterpret_cast<const float4*>(from) + i * kThreads + threadIdx.x);
    }

    __device__ __forceinline__ void read(const Element* from, long long stride, int count) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int at = (i * kThreads + threadIdx.x) * 4, row = at / DK;
            held[i] = row < count ? read_four(from + row * stride + at % DK)
                                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    __device__ __forceinline__ void write(float* to, const float* factor) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int at = (i * kThreads + threadIdx.x) * 4, row = at / DK;
            const float f = factor == nullptr ? 1.0f : factor[row];
            *reinterpret_cast<float4*>(to + row * kWidePitch + at % DK) =
                make_float4(held[i].x * f, held[i].y * f, held[i].z * f, held[i].w * f);
        }
    }
};

// A value as the sum of two that tf32 holds.
struct Halves {
    unsigned high, low;
};

__device__ __forceinline__ Halves halves_of(float x) {
    const unsigned high = __float_as_uint(x) & 0xffffe000u;
    return {high, __float_as_uint(x - __uint_as_float(high))};
}

__device__ __forceinline__ void multiply(float4& d, const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

struct Left {
    unsigned high[4], low[4];

    __device__ __forceinline__ Left(float a0, float a1, float a2, float a3) {
        const float values[4] = {a0, a1, a2, a3};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Halves halves = halves_of(values[i]);
            high[i] = halves.high;
            low[i] = halves.low;
        }
    }

    // d[16 x 8] += this [16 x 8] b[8 x 8], the small products first.
    __device__ __forceinline__ void times(float b0, float b1, float4& d) const {
        const Halves first = halves_of(b0), second = halves_of(b1);
        const unsigned b_high[2] = {first.high, second.high}, b_low[2] = {first.low, second.low};
        multiply(d, low, b_high);
        multiply(d, high, b_low);
        multiply(d, high, b_high);
    }
};

__device__ __forceinline__ float2 pair_at(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}

// d[16 x 8] of two neighbouring tiles of columns += a[16 x Depth] b^T, both with k contiguous. a and b
// point to the row of the lane's group and to its pair of k.
template <int Depth>
__device__ __forceinline__ void multiply_rows(float4 (&d)[2], const float* a, int a_pitch,
                                              const float* b, int b_pitch) {
#pragma unroll 4
    for (int i = 0; i < Depth; i += 8) {
        const float2 top = pair_at(a + i), low = pair_at(a + 8 * a_pitch + i);
        const Left left(top.x, low.x, top.y, low.y);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float2 column = pair_at(b + tile * 8 * b_pitch + i);
            left.times(column.x, column.y, d[tile]);
        }
    }
}

}  // namespace

// Dynamic shared memory: ((64 + 32) * (kWidePitch + kWideSquare)) floats.
// initial: 0 starts from zeros whatever the state holds.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    delta_states(const Element* q, const Element* k, long long qk_stride, const float* scratch,
                 float* state, float* out, int start, int tokens, int chunks, int group,
                 int initial) {
    extern __shared__ float4 dynamic[];
    float* tile_of = reinterpret_cast<float*>(dynamic);
    float* p_of = tile_of + kChunk * kWidePitch;
    float* s_of = p_of + kChunk * kWideSquare;
    float* r_of = s_of + kSlice * kWidePitch;  // transposed: [32, 64]
    __shared__ float q_factor[kChunk], k_factor[kChunk];
    const int t = threadIdx.x, slice = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int warp = t >> 5, row_of_lane = (t & 31) >> 2, k_of_lane = t & 3;
    q += head / group * DK;
    k += head / group * DK;
    float* matrix = state + (static_cast<long long>(head) * DV + slice * kSlice) * DK;
    for (int i = t; i < kSlice * DK; i += kThreads)
        s_of[i / DK * kWidePitch + i % DK] = initial ? matrix[i] : 0.0f;

    // A warp has tokens i and i + 8 of a chunk, and columns d, d + 1 of two tiles of the slice.
    const int i = (warp & 3) * 16 + row_of_lane;
    const int first_column = (warp >> 2) * 16;
    const float* tile_row = tile_of + i * kWidePitch + 2 * k_of_lane;
    const float* p_row = p_of + i * kWideSquare + 2 * k_of_lane;
    const float* s_row = s_of + (first_column + row_of_lane) * kWidePitch + 2 * k_of_lane;
    const float* r_row = r_of + (first_column + row_of_lane) * kWideSquare + 2 * k_of_lane;

    for (int chunk = 0; chunk < chunks; ++chunk) {
        const Span span = span_of(chunk, start, tokens);
        const long long first = span.first;
        const float* u = scratch + (static_cast<long long>(chunk) * heads + head) * kScratch;
        const float* p = u + kChunk * (DV + DK);
        Tile tile;
        tile.read(u + kChunk * DV);
        const float decay = p[kChunk * kChunk + 2 * kChunk];
        float2 u_top[2], u_low[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const float* at = u + i * DV + slice * kSlice + first_column + b * 8 + 2 * k_of_lane;
            u_top[b] = pair_at(at);
            u_low[b] = pair_at(at + 8 * DV);
        }
        __syncthreads();  // the last chunk is done with shared memory
        tile.write(tile_of, nullptr);
        for (int e = t; e < kChunk * kChunk / 4; e += kThreads)
            *reinterpret_cast<float4*>(p_of + e / 16 * kWideSquare + e % 16 * 4) =
                *(reinterpret_cast<const float4*>(p) + e);
        if (t < kChunk) {
            q_factor[t] = p[kChunk * kChunk + t];
            k_factor[t] = p[kChunk * kChunk + kChunk + t];
        }
        tile.read(q + first * qk_stride, qk_stride, span.count);
        __syncthreads();

        // R = U - W S^T
        float4 known[2] = {};
        multiply_rows<DK>(known, tile_row, kWidePitch, s_row, kWidePitch);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float* at = r_of + (first_column + b * 8 + 2 * k_of_lane) * kWideSquare + i;
            at[0] = u_top[b].x - known[b].x;
            at[kWideSquare] = u_top[b].y - known[b].y;
            at[8] = u_low[b].x - known[b].z;
            at[kWideSquare + 8] = u_low[b].y - known[b].w;
        }
        __syncthreads();
        tile.write(tile_of, q_factor);
        tile.read(k + first * qk_stride, qk_stride, span.count);
        __syncthreads();

        // O = diag(e^c) Q S^T + P R
        float4 o[2] = {};
        multiply_rows<DK>(o, tile_row, kWidePitch, s_row, kWidePitch);
        multiply_rows<kChunk>(o, p_row, kWideSquare, r_row, kWideSquare);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float* at = out + ((first + i) * heads + head) * DV + slice * kSlice + first_column +
                        b * 8 + 2 * k_of_lane;
            if (i < span.count) *reinterpret_cast<float2*>(at) = make_float2(o[b].x, o[b].y);
            if (i + 8 < span.count)
                *reinterpret_cast<float2*>(at + 8LL * heads * DV) = make_float2(o[b].z, o[b].w);
        }
        __syncthreads();
        tile.write(tile_of, k_factor);
        __syncthreads();

        // S = e^{c_64} S + R^T K: a warp has rows d and d + 8, and every fourth tile of columns.
        const int d = (warp & 1) * 16 + row_of_lane;
        constexpr int kTiles = DK / 8 / 4;
        float4 s[kTiles];
        const auto place = [&](int n) {
            return s_of + d * kWidePitch + ((warp >> 1) + 4 * n) * 8 + 2 * k_of_lane;
        };
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float2 top = pair_at(place(n)), low = pair_at(place(n) + 8 * kWidePitch);
            s[n] = make_float4(top.x * decay, top.y * decay, low.x * decay, low.y * decay);
        }
        const float* left_row = r_of + d * kWideSquare + k_of_lane;
        const float* key = tile_of + k_of_lane * kWidePitch + (warp >> 1) * 8 + row_of_lane;
#pragma unroll 2
        for (int j = 0; j < kChunk; j += 8) {
            const Left left(left_row[j], left_row[8 * kWideSquare + j], left_row[j + 4],
                            left_row[8 * kWideSquare + j + 4]);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                left.times(key[j * kWidePitch + 32 * n], key[(j + 4) * kWidePitch + 32 * n], s[n]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            *reinterpret_cast<float2*>(place(n)) = make_float2(s[n].x, s[n].y);
            *reinterpret_cast<float2*>(place(n) + 8 * kWidePitch) = make_float2(s[n].z, s[n].w);
        }
    }
    __syncthreads();
    for (int e = t; e < kSlice * DK; e += kThreads) matrix[e] = s_of[e / DK * kWidePitch + e % DK];
}
