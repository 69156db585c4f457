// What the threads of a warp, or the CTAs of a cluster, do together.
#pragma once

// The same sum in every lane, by a tree whose order is fixed.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Both barriers of a cluster are met by all of its threads that have not ended.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ unsigned in_cluster(const void* address, int cta) {
    unsigned remote;
    const unsigned local = static_cast<unsigned>(__cvta_generic_to_shared(address));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(cta));
    return remote;
}

__device__ __forceinline__ void store_in_cluster(const float* address, int cta, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(in_cluster(address, cta)), "f"(value)
                 : "memory");
}

__device__ __forceinline__ void store_in_cluster(const float4* address, int cta, float4 value) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(in_cluster(address, cta)),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
}
