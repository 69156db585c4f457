// One token of a linear layer for every row, between its input and its output projection.
//
// Fused: convolution of width 4 with its state, silu, L2 norm of q and k, gates, gated delta rule on
// the fp32 state in place, RMS norm of the output, silu(z) gate. Bounded by the state, which is read
// once and written once: 2 Hv dv dk 4 bytes a row; 5.9 us at 1 row and 20.2 at 8 of the 27B model on an
// H200, of which about 4 us are latency.
//
// Grid: (GROUP * SPLIT, key heads, rows), a cluster for all value heads of one key head; block: WARPS
// warps. A CTA has dv / SPLIT rows of one head's state in registers; they and all other inputs are
// asked for before anything is computed. Eight lanes share a row of dk. The CTAs of a head exchange
// their outputs through distributed shared memory and each normalises all of them in the same
// order, so bits do not depend on SPLIT.
//
// Layouts: qkv [rows, 2 Hk dk + Hv dv] (q, k, v) and z [rows, Hv dv] with a row stride, b and a
// [rows, Hv] with one row stride, taps fp32 [channels, 4], a_log, dt_bias fp32 [Hv], weight [dv], conv
// state [slots, channels, 3] oldest first, state fp32 [slots, Hv, dv, dk], out [rows, Hv dv]. Value
// head i reads key head i / (Hv / Hk). A row with a negative slot touches no state; its out is 0.
//
// The value heads of a key head read the same convolution state. It is moved on by one CTA once the
// barrier of the cluster says that all have read it.
//
// settled: both states were there before a step that did not start early, and may be read at once.
//
// -D at load: ELEMENT (0 bf16, 1 fp16, 2 fp32), DK, DV (multiples of 32), GROUP (value heads of a key
// head), SPLIT, WARPS, CTAS (on one multiprocessor at least); GROUP * SPLIT <= 8, DV / SPLIT a multiple of 4 WARPS, at most 32 WARPS.
#include "delta_gates.cuh"
#include "early.cuh"
#include "element.cuh"
#include "threads.cuh"

#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif
#ifndef GROUP
#define GROUP 3
#endif
#ifndef SPLIT
#define SPLIT 2
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef CTAS
#define CTAS 2
#endif

namespace {

constexpr int kThreads = WARPS * 32;
constexpr int kRows = DV / SPLIT;            // rows of the state in one CTA
constexpr int kLanes = 8;                    // lanes that share a row
constexpr int kBatches = kRows / (4 * WARPS);  // rows of one lane
constexpr int kVectors = DK / (4 * kLanes);  // float4 of a row in one lane
constexpr float kL2Eps = 1e-6f;              // part of the model
static_assert(DK % 32 == 0 && DV % 32 == 0, "a lane has whole vectors");
static_assert(kRows % (4 * WARPS) == 0 && kBatches > 0, "every warp has the same rows");
static_assert(kRows <= kThreads, "a thread has one output");

__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

struct Channel {
    Element history[3], x;
    float4 taps;
};

// All but x.
__device__ __forceinline__ Channel read_channel(const Element* conv, const float* taps, long long c) {
    Channel channel;
#pragma unroll
    for (int i = 0; i < 3; ++i) channel.history[i] = fresh(conv + c * 3 + i);
    channel.taps = __ldg(reinterpret_cast<const float4*>(taps) + c);
    return channel;
}

// Products and sums apart and in this order: the bits prefill gives for the same token.
__device__ __forceinline__ float convolved(const Channel& channel) {
    float total = __fmul_rn(widen(channel.history[0]), channel.taps.x);
    total = __fadd_rn(total, __fmul_rn(widen(channel.history[1]), channel.taps.y));
    total = __fadd_rn(total, __fmul_rn(widen(channel.history[2]), channel.taps.z));
    total = __fadd_rn(total, __fmul_rn(widen(channel.x), channel.taps.w));
    return rounded(silu(total));
}

// Reads again what a thread would otherwise have to keep in registers.
__device__ __forceinline__ void move_on(Element* conv, const Element* x, long long c) {
    conv[c * 3] = fresh(conv + c * 3 + 1);
    conv[c * 3 + 1] = fresh(conv + c * 3 + 2);
    conv[c * 3 + 2] = fresh(x + c);
}

}  // namespace

extern "C" __global__ void __cluster_dims__(GROUP* SPLIT, 1, 1) __launch_bounds__(kThreads, CTAS)
    delta_step(const Element* qkv, long long qkv_stride, const Element* z, long long z_stride,
               const Element* b, const Element* a, long long gate_stride, const float* taps,
               const float* a_log, const float* dt_bias, const Element* weight, float eps,
               Element* conv, float* state, const long long* slots, Element* out,
               long long out_stride, int settled) {
    constexpr int kChannels = 2 * DK + kRows;
    constexpr int kTurns = (kChannels + kThreads - 1) / kThreads;
    __shared__ __align__(16) float qkv_of[kChannels];
    __shared__ float o_of[DV];
    __shared__ float beta, decay;
    next_kernel_may_start();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int member = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT;
    const int key_heads = gridDim.y, key_head = blockIdx.y, value_heads = key_heads * GROUP;
    const int head = key_head * GROUP + member;
    const long long row = blockIdx.z;
    const long long slot = slots[row];
    Element* result = out + row * out_stride + head * DV + slice * kRows;
    if (slot < 0) {
        previous_kernel_ended();
        for (int i = threadIdx.x; i < kRows; i += kThreads) result[i] = narrow(0.0f);
        return;  // all CTAs of a cluster have the same row
    }

    const int key_size = key_heads * DK;
    const long long channels = 2 * key_size + value_heads * DV;
    const Element* x = qkv + row * qkv_stride;
    Element* histories = conv + slot * channels * 3;
    // Channel of the i-th that the CTA convolves: q, k, its share of v.
    const auto channel_at = [&](int i) {
        if (i < DK) return key_head * DK + i;
        if (i < 2 * DK) return key_size - DK + key_head * DK + i;
        return 2 * key_size + head * DV + slice * kRows + i - 2 * DK;
    };
    // What carries over from earlier steps is asked for while the projections still run.
    if (!settled) previous_kernel_ended();
    Channel channel[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int i = turn * kThreads + threadIdx.x;
        if (i < kChannels) channel[turn] = read_channel(histories, taps, channel_at(i));
    }
    const int local = warp * (4 * kBatches) + (lane >> 3);  // its rows are local + 4 * batch
    float* matrix = state + ((slot * value_heads + head) * DV + slice * kRows) * DK;
    float4 s[kBatches][kVectors];
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch)
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            s[batch][i] = __ldcs(reinterpret_cast<const float4*>(matrix + (local + 4 * batch) * DK) +
                                 i * kLanes + (lane & 7));
    const int mine = min(static_cast<int>(threadIdx.x), kRows - 1);  // the output of this thread
    const float factor_of_norm = widen(weight[slice * kRows + mine]);
    float write_gate = 0.0f, decay_gate = 0.0f, rate = 0.0f, bias = 0.0f;
    if (threadIdx.x == kThreads - 1) {
        rate = a_log[head];
        bias = dt_bias[head];
    }

    previous_kernel_ended();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int i = turn * kThreads + threadIdx.x;
        if (i < kChannels) channel[turn].x = fresh(x + channel_at(i));
    }
    if (threadIdx.x == kThreads - 1) {
        write_gate = widen(fresh(b + row * gate_stride + head));
        decay_gate = widen(fresh(a + row * gate_stride + head));
    }
    const float gate = widen(fresh(z + row * z_stride + head * DV + slice * kRows + mine));

#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int i = turn * kThreads + threadIdx.x;
        if (i < kChannels) qkv_of[i] = convolved(channel[turn]);
        // Nobody else reads the state of its share of v.
        if (i >= 2 * DK && i < kChannels) move_on(histories, x, channel_at(i));
    }
    if (threadIdx.x == kThreads - 1) {
        beta = sigmoid(write_gate);
        decay = expf(log_decay(decay_gate, rate, bias));
    }
    __syncthreads();
    // From here on the convolution state has been read, and everyone runs.
    cluster_arrive();

    // Every warp takes the norms for itself: cheaper than a barrier.
    const float* q_of = qkv_of;
    const float* k_of = qkv_of + DK;
    const float* v_of = qkv_of + 2 * DK;
    float q_squares = 0.0f, k_squares = 0.0f;
#pragma unroll
    for (int i = lane; i < DK; i += 32) {
        q_squares = fmaf(q_of[i], q_of[i], q_squares);
        k_squares = fmaf(k_of[i], k_of[i], k_squares);
    }
    const float q_factor = rsqrtf(warp_sum(q_squares) + kL2Eps);
    const float k_factor = rsqrtf(warp_sum(k_squares) + kL2Eps);
    const float q_scale = rsqrtf(static_cast<float>(DK));
    float4 q[kVectors], k[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int at = 4 * (i * kLanes + (lane & 7));
        q[i] = *reinterpret_cast<const float4*>(q_of + at);
        k[i] = *reinterpret_cast<const float4*>(k_of + at);
        q[i].x = q[i].x * q_factor * q_scale;
        q[i].y = q[i].y * q_factor * q_scale;
        q[i].z = q[i].z * q_factor * q_scale;
        q[i].w = q[i].w * q_factor * q_scale;
        k[i].x *= k_factor;
        k[i].y *= k_factor;
        k[i].z *= k_factor;
        k[i].w *= k_factor;
    }

    float output[kBatches];
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
        float known = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float4& v = s[batch][i];
            v.x *= decay;
            v.y *= decay;
            v.z *= decay;
            v.w *= decay;
            known = fmaf(v.x, k[i].x, known);
            known = fmaf(v.y, k[i].y, known);
            known = fmaf(v.z, k[i].z, known);
            known = fmaf(v.w, k[i].w, known);
        }
        const float written = beta * (v_of[local + 4 * batch] - row_sum(known));
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            float4& v = s[batch][i];
            v.x = fmaf(written, k[i].x, v.x);
            v.y = fmaf(written, k[i].y, v.y);
            v.z = fmaf(written, k[i].z, v.z);
            v.w = fmaf(written, k[i].w, v.w);
            total = fmaf(v.x, q[i].x, total);
            total = fmaf(v.y, q[i].y, total);
            total = fmaf(v.z, q[i].z, total);
            total = fmaf(v.w, q[i].w, total);
            __stcs(reinterpret_cast<float4*>(matrix + (local + 4 * batch) * DK) + i * kLanes +
                       (lane & 7),
                   v);
        }
        output[batch] = row_sum(total);
    }

    cluster_wait();
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
        const float* place = o_of + slice * kRows + local + 4 * batch;
        if ((lane & 7) < SPLIT)
            store_in_cluster(place, member * SPLIT + (lane & 7), output[batch]);
    }
    cluster_arrive();

    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < 2 * DK; i += kThreads) move_on(histories, x, channel_at(i));
    cluster_wait();
    if (warp >= (kRows + 31) / 32) return;
    float squares = 0.0f;
#pragma unroll
    for (int i = lane; i < DV; i += 32) squares = fmaf(o_of[i], o_of[i], squares);
    const float factor = rsqrtf(__fdiv_rn(warp_sum(squares), static_cast<float>(DV)) + eps);
    if (threadIdx.x < kRows) {
        const float normed = rounded(o_of[slice * kRows + mine] * factor);
        result[mine] = narrow(normed * factor_of_norm * silu(gate));
    }
}
