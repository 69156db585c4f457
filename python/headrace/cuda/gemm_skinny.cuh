// Pieces of the skinny matrix products: the copy engine and its barriers, tensor core products, e4m3.
#pragma once

#include "barrier.cuh"
#include "early.cuh"
#include "element.cuh"
#include "threads.cuh"

// What the driver encodes for the copy engine; cuda.h has it under the same name.
struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

namespace skinny {

// A box of a two-dimensional tensor map at (column, row); zeros outside the tensor.
__device__ __forceinline__ void copy_box(unsigned shared, const void* map, int column, int row,
                                         unsigned barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// For bytes that nobody reads again: they leave L2 before the activations do.
__device__ __forceinline__ unsigned long long evict_first() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// For bytes that every CTA reads.
__device__ __forceinline__ unsigned long long evict_last() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint4 read16(unsigned shared) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared));
    return value;
}

// d[16 x 8] += a[16 x 16] b[16 x 8] of 16-bit values. One column of d depends on the same column
// of b alone, whatever the other columns hold, NaN included.
__device__ __forceinline__ void product(float4& d, unsigned a0, unsigned a1, unsigned a2,
                                        unsigned a3, unsigned b0, unsigned b1) {
#if ELEMENT == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(d.x), "+f"(d.y), "+f"(d.z), "+f"(d.w)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An e4m3 code moved into the fields of a bf16 is its value times 2^-120, subnormals included,
// because the exponent biases are 7 and 127. Half of that is taken back on the activations and
// half on the fp32 sum, so that no product leaves the normal range of fp32: |x| < 2^68 is assumed.
// A NaN code becomes 480; loading refuses weights with NaN.
constexpr float kHalfBias = 0x1p60f;

// Codes 0 and 2 of four, as a pair of bf16.
__device__ __forceinline__ unsigned even_codes(unsigned codes) {
    return ((codes << 4) & 0x07f007f0u) | ((codes << 8) & 0x80008000u);
}

// Codes 1 and 3.
__device__ __forceinline__ unsigned odd_codes(unsigned codes) {
    return ((codes >> 4) & 0x07f007f0u) | (codes & 0x80008000u);
}

// A pair of bf16 times 2^60; exact below 2^68.
__device__ __forceinline__ unsigned raised(unsigned pair) {
    unsigned result;
    // 0x5d80 is 2^60 in bf16.
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0x5d805d80u));
    return result;
}

}  // namespace skinny
