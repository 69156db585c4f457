// Copy a list of pieces, between host and device in either direction.
//
// Grid: at most 16 blocks of 1024 threads: they fill the host link, and more would take processors
// from the forward. `share` threads (a power of two, 32 to 1024) take a piece together and then
// every `gridDim * 1024 / share`-th after it, so that small pieces keep all warps busy. No shared
// memory, no synchronisation. Bounded by the link: a thread has four loads of the widest kind that
// both addresses allow in flight; what that leaves over at the end goes byte by byte.
//
// Sources are not written while the kernel runs and not read twice, which is what `.nc` and
// `no_allocate` say. The list lies in pinned host memory until the kernel is over.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 BLOCK = 1024;
constexpr int IN_FLIGHT = 4;

struct Piece {
    const u8* source;
    u8* target;
    u64 bytes;
};

__device__ __forceinline__ uint4 load(const uint4* at) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(at));
    return x;
}

__device__ __forceinline__ u64 load(const u64* at) {
    u64 x;
    asm("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
}

__device__ __forceinline__ u32 load(const u32* at) {
    u32 x;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(at));
    return x;
}

__device__ __forceinline__ u8 load(const u8* at) {
    u32 x;
    asm("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(x) : "l"(at));
    return u8(x);
}

// All whole `T` of a piece; `thread` of `share`.
template <typename T>
__device__ __forceinline__ void copy_as(const Piece& piece, u32 thread, u32 share) {
    const T* source = reinterpret_cast<const T*>(piece.source);
    T* target = reinterpret_cast<T*>(piece.target);
    u64 count = piece.bytes / sizeof(T);
    u64 at = thread;
    for (; at + u64(IN_FLIGHT - 1) * share < count; at += u64(IN_FLIGHT) * share) {
        T x[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) x[i] = load(source + at + u64(i) * share);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) target[at + u64(i) * share] = x[i];
    }
    for (; at < count; at += share) target[at] = load(source + at);
    for (u64 byte = count * sizeof(T) + thread; byte < piece.bytes; byte += share) {
        piece.target[byte] = load(piece.source + byte);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    copy_gather(const Piece* pieces, u32 count, u32 share) {
    u32 groups = gridDim.x * (BLOCK / share);
    u32 thread = threadIdx.x % share;
    for (u64 index = blockIdx.x * (BLOCK / share) + threadIdx.x / share; index < count;
         index += groups) {
        Piece piece = pieces[index];
        u64 both = reinterpret_cast<u64>(piece.source) | reinterpret_cast<u64>(piece.target);
        if (both % 16 == 0) {
            copy_as<uint4>(piece, thread, share);
        } else if (both % 8 == 0) {
            copy_as<u64>(piece, thread, share);
        } else if (both % 4 == 0) {
            copy_as<u32>(piece, thread, share);
        } else {
            copy_as<u8>(piece, thread, share);
        }
    }
}
