// Small operations between the matrix products of a decode step, each one launch.
//
// All are bounded by launch latency at a few rows. Rows are computed alone and reductions have an
// order that depends on the width only. Widths and strides are multiples of 16 bytes.
//
// -D at load: ELEMENT (0 bf16, 1 fp16, 2 fp32).
#include "early.cuh"
#include "element.cuh"
#include "threads.cuh"

namespace {

constexpr int kVector = 16 / sizeof(Element);

union Vector {
    uint4 bytes;
    Element values[kVector];
};

__device__ __forceinline__ Vector read(const Element* p) {
    Vector v;
    v.bytes = fresh(reinterpret_cast<const uint4*>(p));
    return v;
}

__device__ __forceinline__ void write(Element* p, const Vector& v) {
    *reinterpret_cast<uint4*>(p) = v.bytes;
}

// The same sum in every thread of the block: lanes as a tree, then warps.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x & 31;
    x = warp_sum(x);
    if (lane == 0) of_warp[threadIdx.x >> 5] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? of_warp[lane] : 0.0f);
}

__device__ __forceinline__ void take_turn() {
    next_kernel_may_start();
    previous_kernel_ended();
}

constexpr int kPasses = 4;  // vectors of one thread

template <bool Wide>
struct ScaleOf {
    using Type = Element;
};
template <>
struct ScaleOf<true> {
    using Type = float;
};

// Wide: weight is fp32, applied before the only rounding; else it has the type of x, applied after.
template <bool Wide>
__device__ __forceinline__ void norm(const Element* x, long long x_stride, const Element* addend,
                                     long long addend_stride, Element* sum, long long sum_stride,
                                     const void* weight, Element* out, long long out_stride,
                                     float eps, int width) {
    using Scale = typename ScaleOf<Wide>::Type;
    struct alignas(16) Scales {
        Scale of[kVector];
    };
    next_kernel_may_start();
    // Nobody writes the weights, and in a decode step they come from far.
    const auto* scales = static_cast<const Scales*>(weight) + threadIdx.x;
    Scales ahead = {};
    if (threadIdx.x * kVector < width) ahead = *scales;
    previous_kernel_ended();
    const long long row = blockIdx.x;
    Vector v[kPasses];
    float squares = 0.0f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int at = (pass * blockDim.x + threadIdx.x) * kVector;
        if (at >= width) break;
        v[pass] = read(x + row * x_stride + at);
        if (addend != nullptr) {
            const Vector other = read(addend + row * addend_stride + at);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                v[pass].values[i] = narrow(widen(v[pass].values[i]) + widen(other.values[i]));
            write(sum + row * sum_stride + at, v[pass]);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const float value = widen(v[pass].values[i]);
            squares = fmaf(value, value, squares);
        }
    }
    const float mean = __fdiv_rn(block_sum(squares), static_cast<float>(width));
    const float factor = rsqrtf(mean + eps);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const int at = (pass * blockDim.x + threadIdx.x) * kVector;
        if (at >= width) break;
        if (pass > 0) ahead = scales[pass * blockDim.x];
        Vector result;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const float normed = widen(v[pass].values[i]) * factor;
            result.values[i] = narrow((Wide ? normed : rounded(normed)) * float(ahead.of[i]));
        }
        write(out + row * out_stride + at, result);
    }
}

}  // namespace

// Grid: rows; block: a multiple of 32 with 4 * kVector * block >= width. With an addend, sum =
// x + addend is stored (it may be x itself) and normed; without, x is.
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const Element* x, long long x_stride, const Element* addend, long long addend_stride,
             Element* sum, long long sum_stride, const Element* weight, Element* out,
             long long out_stride, float eps, int width) {
    norm<false>(x, x_stride, addend, addend_stride, sum, sum_stride, weight, out, out_stride, eps,
                width);
}

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_wide(const Element* x, long long x_stride, const Element* addend,
                  long long addend_stride, Element* sum, long long sum_stride, const float* weight,
                  Element* out, long long out_stride, float eps, int width) {
    norm<true>(x, x_stride, addend, addend_stride, sum, sum_stride, weight, out, out_stride, eps,
               width);
}

// Grid: (rows, vectors of n / block). gate_up [rows, 2 n] -> silu(gate) * up, silu rounded as well.
extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const Element* gate_up, long long stride, Element* out, long long out_stride, int n) {
    take_turn();
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
    if (at >= n) return;
    const Element* row = gate_up + blockIdx.x * stride + at;
    Vector gate = read(row);
    const Vector up = read(row + n);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        gate.values[i] = narrow(rounded(silu(widen(gate.values[i]))) * widen(up.values[i]));
    write(out + blockIdx.x * out_stride + at, gate);
}

// Grid: (rows, vectors of n / block). x [rows, n] * sigmoid(gate); head h of the gate stands at
// h * head_stride, `head` wide, so that it can be read out of a projection [q | gate] a head.
extern "C" __global__ void __launch_bounds__(256)
    sigmoid_gate(const Element* x, long long x_stride, const Element* gate, long long gate_stride,
                 int head, int head_stride, Element* out, long long out_stride, int n) {
    take_turn();
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
    if (at >= n) return;
    Vector v = read(x + blockIdx.x * x_stride + at);
    const Vector g = read(gate + blockIdx.x * gate_stride + at / head * head_stride + at % head);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        v.values[i] = narrow(widen(v.values[i]) * sigmoid(widen(g.values[i])));
    write(out + blockIdx.x * out_stride + at, v);
}

// Grid: (rows, vectors of width / block). Row ids[row] of the table; zeros for an id outside it. Where
// sources is given and sources[row] >= 0, the id is tokens[sources[row]]: a token of the step before,
// which may be -1 and which the last kernel of this step writes again.
extern "C" __global__ void __launch_bounds__(256)
    embed(const Element* table, const long long* ids, const int* sources, const int* tokens,
          Element* out, long long out_stride, int vocab, int width) {
    take_turn();
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kVector;
    if (at >= width) return;
    const int source = sources != nullptr ? sources[blockIdx.x] : -1;
    const long long id = source >= 0 ? tokens[source] : ids[blockIdx.x];
    Vector v;
    v.bytes = make_uint4(0, 0, 0, 0);
    if (id >= 0 && id < vocab) v = read(table + id * width + at);
    write(out + blockIdx.x * out_stride + at, v);
}
