// Gated delta rule over many tokens of one request, in chunks of 64 at absolute multiples of 64.
//
// delta_chunks, grid (chunks, value heads), block 256: everything of a chunk that needs no state. With
// c the running sum of g, M_ij = exp(c_i - c_j) for i >= j and A the part below the diagonal of
// (diag(beta) K K^T) . M: T = (I + A)^-1, U = T diag(beta) V, W = T diag(beta e^c) K and P = (Q K^T) . M.
// delta_states, grid (dv / 32, value heads), block 256: the chunks one after the other, with 32 rows of
// the state in shared memory: R = U - W S^T, O = diag(e^c) Q S^T + P R, S = e^{c_64} S + R^T diag(e^{c_64
// - c}) K.
// Sums are fp32, in an order fixed by the shape: bits depend on nothing but the chunk and the state before
// it, so that cuts at multiples of 64 are invisible. Products are made on tensor cores. The first kernel
// gives them q, k and v as they are where those are bf16, with norms and other factors on the result or on
// the other side, and fp32 factors as the sum of two bf16 ones (16 bits are kept); elements of fp16 and
// fp32 go as two tf32 numbers (21 bits). T is made in fp32 on CUDA cores. The second kernel multiplies fp32
// as two tf32 numbers (three products; the fourth is below fp32).
//
// Layouts: q, k [tokens, Hk, DK] and v [tokens, Hv, DV] with row strides, as the convolution leaves them
// (the L2 norm and the scale of q are taken here), rows at multiples of 16 bytes; g, beta fp32 [tokens, Hv]
// with row strides.
// Scratch of one chunk and head: U [64, DV], W [64, DK], P [64, 64], factors of q and of k [2, 64], e^{c_64} (of 64), fp32.
// state fp32 [Hv, DV, DK] of one slot, out fp32 [tokens, Hv, DV].
//
// -D at load: ELEMENT (0 bf16, 1 fp16, 2 fp32), DK, DV (32, 64 or 128).
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
constexpr int kWarps = kThreads / 32;
constexpr int kBlock = 16;                // side of an operand of tensor core products
constexpr int kSide = kChunk / kBlock;    // blocks of a chunk
constexpr int kLower = kSide * (kSide + 1) / 2;  // those on and below the diagonal
constexpr int kSquarePitch = kChunk + 4;
constexpr float kL2Eps = 1e-6f;     // part of the model
static_assert(DK % 32 == 0 && DV % 32 == 0, "a row is a whole number of blocks");

struct Span {
    int first, count;
};

// Tokens of a chunk: the first ends at the next absolute multiple of 64.
__device__ __forceinline__ Span span_of(int chunk, int start, int tokens) {
    const int head = kChunk - start % kChunk;
    const int first = chunk == 0 ? 0 : head + (chunk - 1) * kChunk;
    return {first, min(tokens, head + chunk * kChunk) - first};
}

__device__ __forceinline__ float4 vector_at(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}

__device__ __forceinline__ float2 pair_at(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// ---- operands of 16 x 16 -------------------------------------------------------------------------
// Left and right operands look the same: a lane has of the outer axis (rows of the left, columns of the
// right one) g = lane / 4 and g + 8, and of the axis that is summed over 2 t, 2 t + 1, 2 t + 8, 2 t + 9 with
// t = lane % 4. A sum has rows g and g + 8, columns 2 t and 2 t + 1 of its halves of 8 columns: what is a
// result can be an operand, the columns summed over.

struct Sum {
    float4 half[2];  // x, y: row g; z, w: row g + 8
};

#if ELEMENT == 0

struct Exact {
    unsigned v[4];  // pairs of bf16: g low, g high, g + 8 low, g + 8 high
};

// The sum of two, which keeps 16 bits of significand.
struct Split {
    unsigned high[4], low[4];
};

__device__ __forceinline__ unsigned pack_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ void split_pair(float x, float y, unsigned& high, unsigned& low) {
    high = pack_pair(x, y);
    low = pack_pair(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

__device__ __forceinline__ Split split(const Sum& x) {
    Split s;
    split_pair(x.half[0].x, x.half[0].y, s.high[0], s.low[0]);
    split_pair(x.half[1].x, x.half[1].y, s.high[1], s.low[1]);
    split_pair(x.half[0].z, x.half[0].w, s.high[2], s.low[2]);
    split_pair(x.half[1].z, x.half[1].w, s.high[3], s.low[3]);
    return s;
}

__device__ __forceinline__ void multiply_bf16(float4& d, const unsigned (&a)[4], unsigned b0,
                                              unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void add_product(Sum& d, const unsigned (&a)[4], const unsigned (&b)[4]) {
    multiply_bf16(d.half[0], a, b[0], b[1]);
    multiply_bf16(d.half[1], a, b[2], b[3]);
}

// d += a b^T, small products first.
__device__ __forceinline__ void multiply(Sum& d, const Exact& a, const Exact& b) {
    add_product(d, a.v, b.v);
}
__device__ __forceinline__ void multiply(Sum& d, const Split& a, const Exact& b) {
    add_product(d, a.low, b.v);
    add_product(d, a.high, b.v);
}

// Four matrices of 8 x 8 16-bit values; lanes 8 i to 8 i + 7 point to the rows of matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&v)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

__device__ __forceinline__ void load_transposed(unsigned (&v)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// [64, Width] elements in shared memory, 16-byte vectors permuted so that eight rows, which a matrix load
// reads at the same columns, are in different banks.
template <int Width>
struct Rows {
    static constexpr int kBytes = kChunk * Width * 2;
    static constexpr int kVectors = Width / 8;
    uint4* at;

    __device__ __forceinline__ int place(int row, int vector) const {
        return row * kVectors + (vector ^ (Width >= 64 ? row & 7 : row >> 1 & 3));
    }

    // Zeros beyond the count.
    __device__ __forceinline__ void load(const Element* from, long long stride, int count) const {
#pragma unroll
        for (int i = threadIdx.x; i < kChunk * kVectors; i += kThreads) {
            const int row = i / kVectors, vector = i % kVectors;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (row < count) v = *reinterpret_cast<const uint4*>(from + row * stride + vector * 8);
            at[place(row, vector)] = v;
        }
    }

    // The sum of the squares of eight elements.
    __device__ __forceinline__ float squares(int row, int vector) const {
        const uint4 v = at[place(row, vector)];
        const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = __uint_as_float(pairs[i] << 16);
            const float high = __uint_as_float(pairs[i] & 0xffff0000u);
            sum = fmaf(high, high, fmaf(low, low, sum));
        }
        return sum;
    }

    // 16 rows from `row` on, the columns from `column` on summed over.
    __device__ __forceinline__ Exact rows_of(int row, int column) const {
        const int lane = lane_id();
        Exact e;
        load_matrices(e.v, at + place(row + (lane >> 4) * 8 + (lane & 7),
                                      column / 8 + (lane >> 3 & 1)));
        return e;
    }

    // 16 columns from `column` on, the rows from `row` on summed over.
    __device__ __forceinline__ Exact columns_of(int row, int column) const {
        const int lane = lane_id();
        Exact e;
        load_transposed(e.v, at + place(row + (lane >> 3 & 1) * 8 + (lane & 7),
                                        column / 8 + (lane >> 4)));
        return e;
    }
};

#else

// Row g: columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9, then row g + 8.
struct Exact {
    float v[8];
};
using Split = Exact;

__device__ __forceinline__ Split split(const Sum& x) {
    return {x.half[0].x, x.half[0].y, x.half[1].x, x.half[1].y,
            x.half[0].z, x.half[0].w, x.half[1].z, x.half[1].w};
}

#endif

// ---- fp32 as two tf32 numbers --------------------------------------------------------------------

struct Halves {
    unsigned high, low;
};

__device__ __forceinline__ Halves halves_of(float x) {
    const unsigned high = __float_as_uint(x) & 0xffffe000u;
    return {high, __float_as_uint(x - __uint_as_float(high))};
}

__device__ __forceinline__ void multiply_tf32(float4& d, const unsigned (&a)[4],
                                              const unsigned (&b)[2]) {
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
        multiply_tf32(d, low, b_high);
        multiply_tf32(d, high, b_low);
        multiply_tf32(d, high, b_high);
    }
};

#if ELEMENT != 0

// d += a b^T. Which of the columns a lane calls its first and which its fifth of eight is the same on
// both sides.
__device__ __forceinline__ void multiply(Sum& d, const Exact& a, const Exact& b) {
#pragma unroll
    for (int step = 0; step < 4; step += 2) {
        const Left left(a.v[step], a.v[4 + step], a.v[step + 1], a.v[4 + step + 1]);
        left.times(b.v[step], b.v[step + 1], d.half[0]);
        left.times(b.v[4 + step], b.v[4 + step + 1], d.half[1]);
    }
}

// [64, Width] elements in shared memory as fp32.
template <int Width>
struct Rows {
    static constexpr int kPitch = Width + 4;
    static constexpr int kBytes = kChunk * kPitch * 4;
    float* at;

    // Zeros beyond the count.
    __device__ __forceinline__ void load(const Element* from, long long stride, int count) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < kChunk * Width; i += kThreads) {
            const int row = i / Width, column = i % Width;
            at[row * kPitch + column] = row < count ? widen(from[row * stride + column]) : 0.0f;
        }
    }

    // The sum of the squares of eight elements.
    __device__ __forceinline__ float squares(int row, int vector) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float value = at[row * kPitch + vector * 8 + i];
            sum = fmaf(value, value, sum);
        }
        return sum;
    }

    // 16 rows from `row` on, the columns from `column` on summed over.
    __device__ __forceinline__ Exact rows_of(int row, int column) const {
        const float* top = at + (row + (lane_id() >> 2)) * kPitch + column + 2 * (lane_id() & 3);
        const float* low = top + 8 * kPitch;
        return {top[0], top[1], top[8], top[9], low[0], low[1], low[8], low[9]};
    }

    // 16 columns from `column` on, the rows from `row` on summed over.
    __device__ __forceinline__ Exact columns_of(int row, int column) const {
        const float* first = at + (row + 2 * (lane_id() & 3)) * kPitch + column + (lane_id() >> 2);
        const float* eighth = first + 8 * kPitch;
        return {first[0], first[kPitch], eighth[0], eighth[kPitch],
                first[8], first[kPitch + 8], eighth[8], eighth[kPitch + 8]};
    }
};

#endif

// An operand in memory: consecutive lanes have consecutive vectors.
template <class Operand>
constexpr int kVectorsOf = sizeof(Operand) / 16 * 32;

template <class Operand>
__device__ __forceinline__ void store(uint4* to, const Operand& operand) {
    uint4 vectors[sizeof(Operand) / 16];
    memcpy(vectors, &operand, sizeof(Operand));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Operand) / 16); ++i)
        to[i * 32 + lane_id()] = vectors[i];
}

template <class Operand>
__device__ __forceinline__ Operand load(const uint4* from) {
    uint4 vectors[sizeof(Operand) / 16];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Operand) / 16); ++i)
        vectors[i] = from[i * 32 + lane_id()];
    Operand operand;
    memcpy(&operand, vectors, sizeof(Operand));
    return operand;
}

// ---- the chunks ----------------------------------------------------------------------------------

// Blocks on and below the diagonal are numbered row by row.
struct Place {
    int row, column;
};

__device__ __forceinline__ Place place_of(int block) {
    const int row = (block >= 1) + (block >= 3) + (block >= 6);
    return {row, block - row * (row + 1) / 2};
}

__device__ __forceinline__ constexpr int number_of(int row, int column) {
    return row * (row + 1) / 2 + column;
}

// The sum of g up to a token. Rounded to fp32 it would show in the decay between two tokens: the sums are
// large and differ by little.
struct Decay {
    float sum, rest;

    __device__ __forceinline__ float since(const Decay& other) const {
        return expf((sum - other.sum) + (rest - other.rest));
    }
    __device__ __forceinline__ float whole() const { return expf(sum); }
};

// By one warp, two tokens a lane.
__device__ __forceinline__ void sum_up(Decay* to, const float* from) {
    const int lane = lane_id();
    const float2 own = pair_at(from + 2 * lane);
    double sum = static_cast<double>(own.x) + own.y;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
    }
    const double sums[2] = {sum - own.y, sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float rounded_sum = static_cast<float>(sums[i]);
        to[2 * lane + i] = {rounded_sum, static_cast<float>(sums[i] - rounded_sum)};
    }
}

// 1 / |row| for 64 rows, four threads a row.
__device__ __forceinline__ void norms_of(float* to, const Rows<DK>& rows) {
    const int row = threadIdx.x / 4, part = threadIdx.x % 4;
    float squares = 0.0f;
#pragma unroll
    for (int i = part; i < DK / 8; i += 4) squares += rows.squares(row, i);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    if (part == 0) to[row] = rsqrtf(squares + kL2Eps);
}

// Turns two inverses of `Size` rows on the diagonal into one of twice the size, for each such pair of the
// chunk: the block below is -T_11 A_10 T_00. `between` has room for those of all pairs.
template <int Size>
__device__ __forceinline__ void join(float* square, float* between) {
    constexpr int kEach = Size * Size / 4;  // threads of a pair, four neighbours each
    const int pair = threadIdx.x / kEach, row = threadIdx.x % kEach / (Size / 4);
    const int column = threadIdx.x % (Size / 4) * 4;
    const bool active = threadIdx.x < kChunk / (2 * Size) * kEach;
    const float* upper = square + pair * 2 * Size * (kSquarePitch + 1);
    const float* lower = upper + Size * (kSquarePitch + 1);
    float* below = square + pair * 2 * Size * (kSquarePitch + 1) + Size * kSquarePitch;
    between += pair * Size * Size;
    const auto dot = [&](const float* left, const float* right, int pitch, int first, int last) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int k = first; k < last; k += 4) {
            const float4 a = vector_at(left + row * kSquarePitch + k);
            const float factors[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 b = vector_at(right + (k + i) * pitch + column);
                sum.x = fmaf(factors[i], b.x, sum.x);
                sum.y = fmaf(factors[i], b.y, sum.y);
                sum.z = fmaf(factors[i], b.z, sum.z);
                sum.w = fmaf(factors[i], b.w, sum.w);
            }
        }
        return sum;
    };
    // Blocks above the diagonal are nowhere written, and not read.
    if (active)
        *reinterpret_cast<float4*>(between + row * Size + column) =
            dot(below, upper, kSquarePitch, column / kBlock * kBlock, Size);
    __syncthreads();
    if (active) {
        const float4 sum = dot(lower, between, Size, 0, (row / kBlock + 1) * kBlock);
        *reinterpret_cast<float4*>(below + row * kSquarePitch + column) =
            make_float4(-sum.x, -sum.y, -sum.z, -sum.w);
    }
    __syncthreads();
}

// Puts (I + A)^-1 in the place of A, whose blocks on the diagonal have zeros from the diagonal on:
// substitution in those, one column a thread, then what is below them.
__device__ __forceinline__ void invert(float* square, float* between) {
    if (threadIdx.x < kChunk) {
        const int column = threadIdx.x % kBlock;
        float* block = square + threadIdx.x / kBlock * kBlock * (kSquarePitch + 1);
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < kBlock - 1; ++j)
#pragma unroll
            for (int i = j + 1; i < kBlock; ++i)
                x[i] = fmaf(-block[i * kSquarePitch + j], x[j], x[i]);
        __syncwarp();  // which has read its two blocks
#pragma unroll
        for (int i = 0; i < kBlock; ++i) block[i * kSquarePitch + column] = x[i];
    }
    __syncthreads();
    join<kBlock>(square, between);
    join<2 * kBlock>(square, between);
}

constexpr long long kScratch = kChunk * (DV + DK + kChunk + 3);

// Dynamic shared memory of the first kernel. Factors of T take the place of q.
constexpr int kFactorBytes = 2 * kLower * kVectorsOf<Split> * 16;
constexpr int kFirstBytes = Rows<DK>::kBytes > kFactorBytes ? Rows<DK>::kBytes : kFactorBytes;

}  // namespace

// Dynamic shared memory: q or the factors made of T, k, v, [64, 68] floats; see `DeltaPrefill`.
extern "C" __global__ void __launch_bounds__(kThreads, ELEMENT == 0 ? 3 : 1)
    delta_chunks(const Element* q, const Element* k, long long qk_stride, const Element* v,
                 long long v_stride, const float* g, const float* beta, long long gate_stride,
                 float* scratch, int start, int tokens, int group) {
    extern __shared__ uint4 dynamic[];
    char* shared = reinterpret_cast<char*>(dynamic);
    const Rows<DK> q_of{reinterpret_cast<decltype(Rows<DK>::at)>(shared)};
    const Rows<DK> k_of{reinterpret_cast<decltype(Rows<DK>::at)>(shared + kFirstBytes)};
    const Rows<DV> v_of{
        reinterpret_cast<decltype(Rows<DV>::at)>(shared + kFirstBytes + Rows<DK>::kBytes)};
    float* square = reinterpret_cast<float*>(shared + kFirstBytes + Rows<DK>::kBytes +
                                             Rows<DV>::kBytes);
    alignas(8) __shared__ float g_of[kChunk], column_factor[2][kChunk];  // of T, for U and for W
    __shared__ float q_norm[kChunk], k_norm[kChunk];
    __shared__ Decay c_of[kChunk];
    const int chunk = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int t = threadIdx.x, lane = lane_id(), warp = warp_id();
    const int row_of_lane = lane >> 2, pair_of_lane = 2 * (lane & 3);
    const Span span = span_of(chunk, start, tokens);
    const long long first = span.first;
    float* u = scratch + (static_cast<long long>(chunk) * heads + head) * kScratch;
    float* p = u + kChunk * (DV + DK);
    float* factors = p + kChunk * kChunk;

    q_of.load(q + first * qk_stride + head / group * DK, qk_stride, span.count);
    k_of.load(k + first * qk_stride + head / group * DK, qk_stride, span.count);
    v_of.load(v + first * v_stride + head * DV, v_stride, span.count);
    if (t < kChunk) {
        const bool live = t < span.count;
        g_of[t] = live ? g[(first + t) * gate_stride + head] : 0.0f;
        column_factor[0][t] = live ? beta[(first + t) * gate_stride + head] : 0.0f;
    }
    __syncthreads();
    norms_of(q_norm, q_of);
    norms_of(k_norm, k_of);
    if (warp == 0) sum_up(c_of, g_of);
    __syncthreads();
    if (t < kChunk) {
        q_norm[t] *= rsqrtf(static_cast<float>(DK));
        factors[t] = q_norm[t] * c_of[t].whole();
        factors[kChunk + t] = k_norm[t] * c_of[kChunk - 1].since(c_of[t]);
        if (t == 0) factors[2 * kChunk] = c_of[kChunk - 1].whole();
        column_factor[1][t] = column_factor[0][t] * c_of[t].whole() * k_norm[t];
    }
    __syncthreads();

    // A and P, a block at a time.
    for (int e = warp; e < 2 * kLower; e += kWarps) {
        const bool of_k = e < kLower;
        const Place at = place_of(of_k ? e : e - kLower);
        Sum sum = {};
#pragma unroll
        for (int i = 0; i < DK; i += kBlock) {
            const Exact left = of_k ? k_of.rows_of(at.row * kBlock, i)
                                    : q_of.rows_of(at.row * kBlock, i);
            multiply(sum, left, k_of.rows_of(at.column * kBlock, i));
        }
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int i = at.row * kBlock + part / 2 * 8 + row_of_lane;
            const int j = at.column * kBlock + part % 2 * 8 + pair_of_lane;
            float4& half = sum.half[part % 2];
            float& x = part < 2 ? half.x : half.z;
            float& y = part < 2 ? half.y : half.w;
            // Not computed above the diagonal, where the exponent may be positive.
            const float row_factor = of_k ? column_factor[0][i] * k_norm[i] : q_norm[i];
            const Decay c = c_of[i];
            x = i - j >= of_k ? x * row_factor * k_norm[j] * c.since(c_of[j]) : 0.0f;
            y = i - j - 1 >= of_k ? y * row_factor * k_norm[j + 1] * c.since(c_of[j + 1]) : 0.0f;
            float* to = of_k ? square + i * kSquarePitch + j : p + i * kChunk + j;
            *reinterpret_cast<float2*>(to) = make_float2(x, y);
        }
    }
    for (int e = t; e < kChunk * kChunk; e += kThreads)
        if (e / kChunk / kBlock < e % kChunk / kBlock) p[e] = 0.0f;
    __syncthreads();

    invert(square, reinterpret_cast<float*>(shared));
    uint4* t_of = reinterpret_cast<uint4*>(shared);
    for (int e = warp; e < 2 * kLower; e += kWarps) {
        const int of_w = e >= kLower;
        const Place at = place_of(of_w ? e - kLower : e);
        const float* top = square + (at.row * kBlock + row_of_lane) * kSquarePitch +
                           at.column * kBlock + pair_of_lane;
        const float* factor = column_factor[of_w] + at.column * kBlock + pair_of_lane;
        Sum block;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const float2 high = pair_at(top + 8 * part), f = pair_at(factor + 8 * part);
            const float2 low = pair_at(top + 8 * kSquarePitch + 8 * part);
            block.half[part] = make_float4(high.x * f.x, high.y * f.y, low.x * f.x, low.y * f.y);
        }
        store(t_of + e * kVectorsOf<Split>, split(block));
    }
    __syncthreads();

    // U and W, 16 columns a warp.
    for (int e = warp; e < (DV + DK) / kBlock; e += kWarps) {
        const bool of_w = e >= DV / kBlock;
        const int column = (of_w ? e - DV / kBlock : e) * kBlock, width = of_w ? DK : DV;
        const uint4* t_block = t_of + of_w * kLower * kVectorsOf<Split>;
        Sum sum[kSide] = {};
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
            const Exact right = of_w ? k_of.columns_of(j * kBlock, column)
                                     : v_of.columns_of(j * kBlock, column);
#pragma unroll
            for (int i = j; i < kSide; ++i)
                multiply(sum[i], load<Split>(t_block + number_of(i, j) * kVectorsOf<Split>), right);
        }
        float* to = u + of_w * kChunk * DV + row_of_lane * width + column + pair_of_lane;
#pragma unroll
        for (int i = 0; i < kSide; ++i)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const float4 half = sum[i].half[part];
                float* at = to + i * kBlock * width + part * 8;
                *reinterpret_cast<float2*>(at) = make_float2(half.x, half.y);
                *reinterpret_cast<float2*>(at + 8 * width) = make_float2(half.z, half.w);
            }
    }
}

namespace {

constexpr int kSlice = 32;          // rows of the state in one CTA
// Eight rows of fragments in different banks.
constexpr int kWidePitch = DK + 8;
constexpr int kWideSquare = kChunk + 8;

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
    extern __shared__ uint4 dynamic[];
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
