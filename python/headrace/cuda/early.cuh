// What a kernel needs that starts before the one ahead of it has ended.
#pragma once

// Both mean nothing unless the launch allows this kernel, or the next one, to start early. The next one
// may fetch what nobody writes; it waits for the end of this one before it reads what this one wrote.
__device__ __forceinline__ void next_kernel_may_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Every thread calls it, also one that has nothing to do: a grid none of whose threads has waited may
// end before the one ahead of it, and the next one would take that for the end of both.
__device__ __forceinline__ void previous_kernel_ended() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// N bytes that an earlier kernel of the step wrote: past L1, which may hold what was there before. The
// cache is known to be clean when a kernel begins, and this one began early.
template <int N>
struct FreshBytes;
template <>
struct FreshBytes<2> {
    using Type = unsigned short;
};
template <>
struct FreshBytes<4> {
    using Type = unsigned;
};
template <>
struct FreshBytes<8> {
    using Type = uint2;
};
template <>
struct FreshBytes<16> {
    using Type = uint4;
};

template <class T>
__device__ __forceinline__ T fresh(const T* address) {
    using Bytes = typename FreshBytes<(sizeof(T) < 16 ? int(sizeof(T)) : 16)>::Type;
    Bytes parts[sizeof(T) / sizeof(Bytes)];
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / sizeof(Bytes)); ++i)
        parts[i] = __ldcg(reinterpret_cast<const Bytes*>(address) + i);
    T value;
    memcpy(&value, parts, sizeof(T));
    return value;
}
