// fp32 matrix product whose rows do not depend on each other: out[m, n] = sum_k x[m, k] W[n, k].
//
// Grid: (n / 8, m / 16, rounded up); block: 8 warps, one row of W each. A lane adds every 32nd group
// of four k in ascending order by fused multiply-adds, and the lanes are added as a fixed tree, so
// the order depends on k only. No tf32. k must be a multiple of 4. Made for correctness: it reads x
// once for every 8 rows of W and is bounded by that.
constexpr int kRows = 16;

extern "C" __global__ void __launch_bounds__(256)
    gemm_fp32(const float* weights, const float* x, long long x_stride, float* out,
              long long out_stride, int m, int n, int k) {
    const int lane = threadIdx.x & 31;
    const int column = blockIdx.x * 8 + (threadIdx.x >> 5);
    const int first = blockIdx.y * kRows;
    if (column >= n) return;
    const float4* w = reinterpret_cast<const float4*>(weights + static_cast<long long>(column) * k);
    float sums[kRows] = {};
    for (int i = lane; i < k / 4; i += 32) {
        const float4 a = __ldg(w + i);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            if (first + row >= m) continue;
            const float4 b = __ldg(reinterpret_cast<const float4*>(x + (first + row) * x_stride) + i);
            sums[row] = fmaf(a.x, b.x, sums[row]);
            sums[row] = fmaf(a.y, b.y, sums[row]);
            sums[row] = fmaf(a.z, b.z, sums[row]);
            sums[row] = fmaf(a.w, b.w, sums[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            sums[row] += __shfl_xor_sync(0xffffffffu, sums[row], step);
        if (lane == 0 && first + row < m) out[(first + row) * out_stride + column] = sums[row];
    }
}
