// Greedy choice of one token a row from fp32 logits.
//
// Grid: (splits, rows); block: 256 threads. Every score becomes a 64-bit key, its order in the high
// half and the complement of its index in the low half, so that the largest key is the highest score
// with the lowest index whatever the order of comparison. NaN has the highest key of all. The last
// CTA of a row to arrive writes the token and sets the row's scratch back to 0.
// Bounded by the logits, read once.

namespace {

__device__ __forceinline__ unsigned long long key_of(float score, unsigned index) {
    const unsigned bits = __float_as_uint(score + 0.0f);  // -0 and 0 are equal
    unsigned order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (isnan(score)) order = 0xffffffffu;
    return static_cast<unsigned long long>(order) << 32 | (0xffffffffu - index);
}

__device__ __forceinline__ unsigned long long larger(unsigned long long a, unsigned long long b) {
    return a > b ? a : b;
}

}  // namespace

// best: 0 [rows]; arrived: 0 [rows]; tokens: int32 [rows], -1 where the highest is not finite.
extern "C" __global__ void __launch_bounds__(256)
    argmax(const float* logits, long long stride, int vocab, unsigned long long* best,
           unsigned* arrived, int* tokens) {
    __shared__ unsigned long long of_warp[8];
    const long long row = blockIdx.y;
    const float* scores = logits + row * stride;
    const int share = (vocab + gridDim.x - 1) / gridDim.x;
    const int first = blockIdx.x * share, end = min(vocab, first + share);
    unsigned long long key = 0;
#pragma unroll 8
    for (int i = first + threadIdx.x; i < end; i += blockDim.x)
        key = larger(key, key_of(scores[i], i));
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        key = larger(key, __shfl_xor_sync(0xffffffffu, key, step));
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = key;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < 8; ++warp) key = larger(key, of_warp[warp]);
    atomicMax(best + row, key);
    __threadfence();
    if (atomicAdd(arrived + row, 1u) != gridDim.x - 1) return;
    __threadfence();
    const unsigned long long top = atomicExch(best + row, 0ull);
    arrived[row] = 0;
    const unsigned order = static_cast<unsigned>(top >> 32);
    // Finite floats have orders strictly between those of -inf and +inf.
    const bool finite = order > 0x007fffffu && order < 0xff800000u;
    tokens[row] = finite ? static_cast<int>(0xffffffffu - static_cast<unsigned>(top)) : -1;
}
