// Operands of 16 x 16 for tensor core products of the delta rule, and rows of a chunk in shared memory.
//
// Left and right operands look the same: a lane has of the outer axis (rows of the left, columns of the
// right one) g = lane / 4 and g + 8, and of the axis that is summed over 2 t, 2 t + 1, 2 t + 8, 2 t + 9 with
// t = lane % 4. A sum has rows g and g + 8, columns 2 t and 2 t + 1 of its halves of 8 columns: what is a
// result can be an operand, its columns summed over.
// `Exact` is made of elements, `Split` of fp32. For bf16 elements an Exact is bf16 and a Split the sum of two
// bf16; their product has two or three parts, and what it leaves out is below the 16 bits that are kept. For
// fp16 and fp32 elements both are fp32, multiplied as sums of two tf32 numbers (21 bits are kept).
#pragma once

#include "element.cuh"

namespace {

constexpr int kChunk = 64;
constexpr int kBlock = 16;  // side of an operand

__device__ __forceinline__ float4 vector_at(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}

__device__ __forceinline__ float2 pair_at(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// A copy to shared memory that the thread does not wait for; zeros if it is not live.
__device__ __forceinline__ void copy_vector(uint4* to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(live ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

__device__ __forceinline__ float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ void split_pair(float x, float y, unsigned& high, unsigned& low) {
    high = pack_pair(x, y);
    low = pack_pair(x - low_of(high), y - high_of(high));
}

__device__ __forceinline__ Split split(const Sum& x) {
    Split s;
    split_pair(x.half[0].x, x.half[0].y, s.high[0], s.low[0]);
    split_pair(x.half[1].x, x.half[1].y, s.high[1], s.low[1]);
    split_pair(x.half[0].z, x.half[0].w, s.high[2], s.low[2]);
    split_pair(x.half[1].z, x.half[1].w, s.high[3], s.low[3]);
    return s;
}

__device__ __forceinline__ Sum sum_of(const Exact& x) {
    Sum s;
    s.half[0] = make_float4(low_of(x.v[0]), high_of(x.v[0]), low_of(x.v[2]), high_of(x.v[2]));
    s.half[1] = make_float4(low_of(x.v[1]), high_of(x.v[1]), low_of(x.v[3]), high_of(x.v[3]));
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

// d += a b^T.
__device__ __forceinline__ void multiply(Sum& d, const Exact& a, const Exact& b) {
    add_product(d, a.v, b.v);
}

// d_n += a b_n^T for n from `first` on: small products first, and none next to one of the same sum, which
// would wait for it.
template <int N>
__device__ __forceinline__ void multiply(Sum (&d)[N], const Split& a, const Exact (&b)[N],
                                         int first = 0) {
#pragma unroll
    for (int n = first; n < N; ++n) add_product(d[n], a.low, b[n].v);
#pragma unroll
    for (int n = first; n < N; ++n) add_product(d[n], a.high, b[n].v);
}
template <int N>
__device__ __forceinline__ void multiply(Sum (&d)[N], const Split& a, const Split (&b)[N],
                                         int first = 0) {
#pragma unroll
    for (int n = first; n < N; ++n) add_product(d[n], a.low, b[n].high);
#pragma unroll
    for (int n = first; n < N; ++n) add_product(d[n], a.high, b[n].low);
#pragma unroll
    for (int n = first; n < N; ++n) add_product(d[n], a.high, b[n].high);
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
    static constexpr int kVectors = Width / 8;  // of a row
    template <int Threads>
    static constexpr int kApart = Threads / kVectors;  // rows between a thread's vectors
    template <int Threads>
    static constexpr int kLoads = kChunk / kApart<Threads>;
    static constexpr int kVectorCount = kChunk * kVectors;  // of shared memory
    uint4* at;

    __device__ __forceinline__ explicit Rows(uint4* shared) : at(shared) {}

    __device__ __forceinline__ static const Element* own_of(const Element* rows, long long stride) {
        return rows + threadIdx.x / kVectors * stride + threadIdx.x % kVectors * 8;
    }

    __device__ __forceinline__ int place(int row, int vector) const {
        return row * kVectors + (vector ^ (Width >= 64 ? row & 7 : row >> 1 & 3));
    }

    // The n-th vector of one of so many threads, zeros beyond the count; `copies_done` and a barrier tell
    // that it is there. `own` is the thread's first.
    template <int Threads>
    __device__ __forceinline__ void load(int n, const Element* own, long long stride,
                                         int count) const {
        const int row = threadIdx.x / kVectors + n * kApart<Threads>;
        copy_vector(at + place(row, threadIdx.x % kVectors), own + n * kApart<Threads> * stride,
                    row < count);
    }

    // The sum of the squares of eight elements.
    __device__ __forceinline__ float squares(int row, int vector) const {
        const uint4 v = at[place(row, vector)];
        const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = low_of(pairs[i]), high = high_of(pairs[i]);
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

__device__ __forceinline__ Sum sum_of(const Exact& x) {
    Sum s;
    s.half[0] = make_float4(x.v[0], x.v[1], x.v[4], x.v[5]);
    s.half[1] = make_float4(x.v[2], x.v[3], x.v[6], x.v[7]);
    return s;
}

// A value as the sum of two that tf32 holds.
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

template <int N>
__device__ __forceinline__ void multiply(Sum (&d)[N], const Exact& a, const Exact (&b)[N],
                                         int first = 0) {
#pragma unroll
    for (int n = first; n < N; ++n) multiply(d[n], a, b[n]);
}

// [64, Width] elements in shared memory as fp32.
template <int Width>
struct Rows {
    static constexpr int kVectors = Width / 8;  // of a row, elements
    template <int Threads>
    static constexpr int kApart = Threads / kVectors;  // rows between a thread's vectors
    template <int Threads>
    static constexpr int kLoads = kChunk / kApart<Threads>;
    static constexpr int kPitch = Width + 4;
    static constexpr int kVectorCount = kChunk * kPitch / 4;  // of shared memory
    float* at;

    __device__ __forceinline__ explicit Rows(uint4* shared) : at(reinterpret_cast<float*>(shared)) {}

    __device__ __forceinline__ static const Element* own_of(const Element* rows, long long stride) {
        return rows + threadIdx.x / kVectors * stride + threadIdx.x % kVectors * 8;
    }

    // The n-th eight elements of one of so many threads, zeros beyond the count; a barrier tells that they
    // are there. `own` is the thread's first.
    template <int Threads>
    __device__ __forceinline__ void load(int n, const Element* own, long long stride,
                                         int count) const {
        const int row = threadIdx.x / kVectors + n * kApart<Threads>;
        float* to = at + row * kPitch + threadIdx.x % kVectors * 8;
        own += n * kApart<Threads> * stride;
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = row < count ? widen(own[e]) : 0.0f;
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

}  // namespace
