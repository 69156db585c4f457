// What a prompt needs between matrix products and has no kernel elsewhere: short convolution, norm of the
// delta rule's output with its gate, and quantisation of activations for block-scaled products.
//
// All are bounded by bytes. Every output depends on its own token (and the three before it) and is
// computed in an order that depends on widths only, so cuts and neighbours do not show in the bits.
//
// -D at load: ELEMENT (0 bf16, 1 fp16, 2 fp32).
#include "element.cuh"
#include "segments.cuh"
#include "threads.cuh"

namespace {

constexpr int kVector = 8;   // channels of a thread
constexpr int kAhead = 4;    // tokens of a thread that are read before one is written
constexpr int kGroup = 128;  // columns that share a scale

struct alignas(kVector * sizeof(Element) < 16 ? kVector * sizeof(Element) : 16) Vector {
    Element values[kVector];
};

}  // namespace

// Causal depthwise convolution of width 4, then silu, over the segments of a step. Grid: (channels / (8 *
// block), runs of so many tokens of a segment), rounded up; blocks beyond the last run do nothing. x [T,
// channels] strided, taps fp32 [channels, 4], state [slots, channels, 3] the inputs before a segment,
// oldest first, read unless it starts at 0 and left alone; out [T, channels], rows of segments only.
// Products and sums come in the order of the decode step, which gives the same bits.
extern "C" __global__ void __launch_bounds__(128)
    conv_prefill(const Element* x, long long x_stride, const float* taps, const Element* state,
                 Element* out, int channels, const Segment* segments, int run_tokens) {
    const Part run = find_part(segments, blockIdx.y, [=](const Segment& segment) {
        return (segment.tokens + run_tokens - 1) / run_tokens;
    });
    const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * kVector;
    if (run.segment < 0 || channel >= channels) return;
    const Segment segment = segments[run.segment];
    const bool initial = segment.start > 0;
    x += segment.row * x_stride;
    out += static_cast<long long>(segment.row) * channels;
    state += static_cast<long long>(segment.slot) * channels * 3;
    const int first = run.index * run_tokens, last = min(first + run_tokens, segment.tokens);
    float4 tap[kVector];
    float window[kVector][3];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        tap[i] = __ldg(reinterpret_cast<const float4*>(taps) + channel + i);
#pragma unroll
    for (int back = 0; back < 3; ++back) {
        const int token = first - 3 + back;
        Vector v;
        if (token >= 0) v = *reinterpret_cast<const Vector*>(x + token * x_stride + channel);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            window[i][back] = 0.0f;
            if (token >= 0)
                window[i][back] = widen(v.values[i]);
            else if (initial)
                window[i][back] = widen(state[static_cast<long long>(channel + i) * 3 + token + 3]);
        }
    }
    for (int token = first; token < last; token += kAhead) {
        Vector v[kAhead] = {};
#pragma unroll
        for (int n = 0; n < kAhead; ++n)
            if (token + n < last)
                v[n] = *reinterpret_cast<const Vector*>(x + (token + n) * x_stride + channel);
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
            if (token + n >= last) break;
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                const float input = widen(v[n].values[i]);
                float total = __fmul_rn(window[i][0], tap[i].x);
                total = __fadd_rn(total, __fmul_rn(window[i][1], tap[i].y));
                total = __fadd_rn(total, __fmul_rn(window[i][2], tap[i].z));
                total = __fadd_rn(total, __fmul_rn(input, tap[i].w));
                window[i][0] = window[i][1];
                window[i][1] = window[i][2];
                window[i][2] = input;
                v[n].values[i] = narrow(silu(total));
            }
            *reinterpret_cast<Vector*>(out + static_cast<long long>(token + n) * channels +
                                       channel) = v[n];
        }
    }
}

// Leave the last three inputs of each segment in its state, for the launch after `conv_prefill`. Grid:
// (channels / block, rounded up, segments).
extern "C" __global__ void __launch_bounds__(256)
    conv_keep(const Element* x, long long x_stride, Element* state, int channels,
              const Segment* segments) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    const Segment segment = segments[blockIdx.y];
    if (channel >= channels || !segment.tokens) return;
    x += segment.row * x_stride;
    Element* own = state + (static_cast<long long>(segment.slot) * channels + channel) * 3;
    Element kept[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int token = segment.tokens - 3 + i;
        kept[i] = narrow(0.0f);
        if (token >= 0)
            kept[i] = x[token * x_stride + channel];
        else if (segment.start > 0)
            kept[i] = own[token + 3];
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) own[i] = kept[i];
}

// Norm of each head, times weight * silu(z). Grid: (tokens * heads / 8, rounded up), block: 256, one
// warp a head. x fp32 [tokens, heads, width], z [tokens, heads * width] strided, weight [width], out
// [tokens, heads * width]; width a multiple of 32, at most 128.
extern "C" __global__ void __launch_bounds__(256)
    gated_norm(const float* x, const Element* z, long long z_stride, const Element* weight,
               Element* out, float eps, int tokens, int heads, int width) {
    const long long index = static_cast<long long>(blockIdx.x) * 8 + (threadIdx.x >> 5);
    if (index >= static_cast<long long>(tokens) * heads) return;
    const int lane = threadIdx.x & 31, per_lane = width / 32;
    const long long token = index / heads;
    const int head = static_cast<int>(index % heads);
    const float* row = x + index * width;
    const Element* gate = z + token * z_stride + head * width;
    // All is read before anything is written, which the compiler may not take for something else.
    float values[4], gates[4], scales[4], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i >= per_lane) break;
        values[i] = row[i * 32 + lane];
        gates[i] = widen(gate[i * 32 + lane]);
        scales[i] = widen(weight[i * 32 + lane]);
        squares = fmaf(values[i], values[i], squares);
    }
    const float factor = rsqrtf(__fdiv_rn(warp_sum(squares), static_cast<float>(width)) + eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i >= per_lane) break;
        const float normed = rounded(values[i] * factor);
        out[index * width + i * 32 + lane] = narrow(normed * scales[i] * silu(gates[i]));
    }
}

namespace {

constexpr int kLanes = kGroup / kVector;  // that have a group

__device__ __forceinline__ unsigned pack_codes(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// x / divisor, correctly rounded, if the divisor is between 2^-60 and 2^60 and `inverse` its correctly
// rounded inverse: one correction makes it so (Markstein, IBM J. Res. Dev. 34, 1990). Quotients of less
// than 2^-11 may be off; they are coded as zeros of the same sign.
__device__ __forceinline__ float quotient_of(float x, float divisor, float inverse) {
    const float near = x * inverse;
    return copysignf(fmaf(fmaf(-near, divisor, x), inverse, near), x);
}

// Codes eight neighbours, the largest value of a group as the largest code. By whole warps.
__device__ __forceinline__ void quantise(const Vector& v, unsigned int* codes, float* scale,
                                         bool live) {
    float values[kVector], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        values[i] = widen(v.values[i]);
        largest = fmaxf(largest, fabsf(values[i]));
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const float divisor = largest > 0.0f ? __fdiv_rn(largest, 448.0f) : 1.0f;
    if (divisor > 0x1p-60f && divisor < 0x1p60f) {
        const float inverse = __frcp_rn(divisor);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = quotient_of(values[i], divisor, inverse);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[i] = __fdiv_rn(values[i], divisor);
    }
    if (!live) return;
    unsigned packed[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        packed[i] = pack_codes(values[4 * i], values[4 * i + 1]) |
                    pack_codes(values[4 * i + 2], values[4 * i + 3]) << 16;
    *reinterpret_cast<uint2*>(codes) = make_uint2(packed[0], packed[1]);
    if ((threadIdx.x & (kLanes - 1)) == 0) *scale = divisor;
}

// The same columns of so many rows, of which all are read before one is coded.
template <int Rows, bool Gated>
__device__ __forceinline__ void quantise_all(const Element* x, long long x_stride,
                                             unsigned int* codes, float* scales, int rows,
                                             int columns) {
    const int at = (blockIdx.x * blockDim.x + threadIdx.x) * kVector, first = blockIdx.y * Rows;
    Vector v[Rows] = {}, up[Rows] = {};
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        if (at >= columns || first + i >= rows) continue;
        const Element* from = x + (first + i) * x_stride + at;
        v[i] = *reinterpret_cast<const Vector*>(from);
        if (Gated) up[i] = *reinterpret_cast<const Vector*>(from + columns);
    }
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        const long long row = first + i;
#pragma unroll
        for (int j = 0; Gated && j < kVector; ++j)
            v[i].values[j] = narrow(rounded(silu(widen(v[i].values[j]))) * widen(up[i].values[j]));
        quantise(v[i], codes + (row * columns + at) / 4,
                 scales + static_cast<long long>(at / kGroup) * rows + row,
                 at < columns && row < rows);
    }
}

}  // namespace

// e4m3 codes with one scale a token for every 128 columns, the largest value as the largest code. Grid:
// (columns / 2048, rows / 4), rounded up, block: 256. x [rows, columns] strided, rows at multiples of 16
// bytes, codes [rows, columns], scales fp32 [columns / 128, rows]. A group of zeros has the scale 1.
extern "C" __global__ void __launch_bounds__(256)
    quantise_rows(const Element* x, long long x_stride, unsigned int* codes, float* scales,
                  int rows, int columns) {
    quantise_all<4, false>(x, x_stride, codes, scales, rows, columns);
}

// The same of silu(gate) * up, both roundings of `silu_mul` in between. x [rows, 2 * columns]: gate, then
// up. Grid: (columns / 2048, rows / 2), rounded up, block: 256.
extern "C" __global__ void __launch_bounds__(256)
    quantise_silu_mul(const Element* x, long long x_stride, unsigned int* codes, float* scales,
                      int rows, int columns) {
    quantise_all<2, true>(x, x_stride, codes, scales, rows, columns);
}
