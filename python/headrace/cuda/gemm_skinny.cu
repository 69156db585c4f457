// Products of a few rows with a large matrix, bounded by the bytes of the matrix: 4.2 TB/s from 1 GB on,
// and about 2.5 us a launch besides (1 us if started early) on an H200.
//
// out[m, n] = sum_k x[m, k] W[n, k] for m <= 16. W is row-major [n, k] as checkpoints and cuBLAS have
// it: 16-bit elements, or e4m3 codes with one fp32 scale for every 128 x 128 block.
//
// Grid: CTAs that stay, at most one a multiprocessor; block: ROW_WARPS * K_WARPS warps that compute and
// one that feeds the copy engine. W is cut into groups of ROW_WARPS * TILES * 16 rows, CTA c takes the
// groups from c * groups / grid on, and walks along k in steps of K_WARPS * 64 bytes a row. STAGES
// steps are in flight, also while the sums of a group are combined. Launched with programmatic stream
// serialization it reads W while the kernel before it still runs. No CTA waits for another: a few
// idle multiprocessors cost less than that, because the others then pull more each.
// It lets the next kernel start once x is there. So one with the same x need not wait for it, and fills
// idle multiprocessors; it ends after the kernel ahead, as everyone behind it takes for granted.
// W is the 16-row operand of mma.m16n8k16 and x the 8 columns. The order of k inside a tile is
// permuted alike on both sides, so that a lane reads 16 contiguous bytes; the rows of a tile are
// permuted so that the eight lanes of a shared memory access hit all banks (row_of_lane).
//
// Where the groups are fewer than half the multiprocessors, two CTAs (a cluster) share one, each with
// half of k, and the second hands its sums to the first.
//
// Order of addition, a function of k and the tiling only and never of m: steps along k inside a
// warp, then warps along k ascending, then the halves of k.
//
// Shared memory (dynamic, 1024 bytes to align): STAGES * (rows * K_WARPS * 64 of W, NT * 8
// rows of x), then (ROW_WARPS * K_WARPS * TILES + split * ROW_WARPS * TILES) * NT * 512 of sums.
//
// -D at load: ELEMENT (0 bf16, 1 fp16), CODES (0, 1: needs bf16), NT (columns of 8: 1 for m <= 8, 2 for
// m <= 16), TILES, ROW_WARPS, K_WARPS (even), STAGES, K_SPLIT (1, or 2 if every cluster has one group and there are two steps along k), EPILOGUE (0 none; 1 out = residual + product,
// both rounded in between; 2 silu(first half of n) * second half), WIDE (1: out is fp32, not rounded), SAME_INPUT
// (1: the launch just ahead is this kernel with the same x).
#include "gemm_skinny.cuh"

#ifndef CODES
#define CODES 0
#endif
#ifndef NT
#define NT 1
#endif
#ifndef TILES
#define TILES 4
#endif
#ifndef ROW_WARPS
#define ROW_WARPS 2
#endif
#ifndef K_WARPS
#define K_WARPS 4
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef K_SPLIT
#define K_SPLIT 1
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef SAME_INPUT
#define SAME_INPUT 0
#endif

using namespace skinny;

namespace {

constexpr int kWarps = ROW_WARPS * K_WARPS;
constexpr int kThreads = kWarps * 32;          // that compute
constexpr int kDepth = CODES ? 64 : 32;        // elements of k in the 64 bytes of a warp
constexpr int kColumnPieces = CODES ? 2 : 1;   // 16-byte pieces of x a lane needs a column tile
constexpr int kHalves = EPILOGUE == 2 ? 2 : 1;  // gate and up stand n / 2 rows apart
constexpr int kTilesOfHalf = TILES / kHalves;
constexpr int kRows = ROW_WARPS * TILES * 16;  // rows of a unit
constexpr int kRowsOfHalf = kRows / kHalves;
[[maybe_unused]] constexpr int kScaleBlock = 128;
constexpr int kSums = ROW_WARPS * TILES * NT * 32;  // float4 of one CTA's result
constexpr int kBoxes = K_WARPS / 2;            // boxes of 128 bytes along k
constexpr int kWeightBytes = kRows * K_WARPS * 64;
constexpr int kColumnBytes = K_WARPS * kDepth * 2;
// x comes in boxes of all its rows; 256 words are the widest there are.
constexpr int kColumnBoxes = (kColumnBytes + 1023) / 1024;
constexpr int kBoxPitch = kColumnBytes / kColumnBoxes;
constexpr int kStageBytes = (kWeightBytes + NT * 8 * kColumnBytes + 1023) / 1024 * 1024;
static_assert(K_SPLIT == 1 || (K_SPLIT == 2 && kHalves == 1), "a gate stays with its up");
static_assert(TILES % kHalves == 0, "gate and up share the tiles of a warp");
static_assert(K_WARPS % 2 == 0, "two warps share the 128 bytes of a box");
static_assert(kColumnBytes % kColumnBoxes == 0, "boxes of one width");
static_assert(kRowsOfHalf <= 256, "a box has at most 256 rows");

struct Shape {
    const CUtensorMap* map;
    const CUtensorMap* x_map;
    const float* scales;
    int m, n, k;
    int scale_columns;
};

// Steps along k of one CTA.
struct Steps {
    int first, end;
};

struct Unit {
    int group, step;

    __device__ __forceinline__ void advance(Steps steps) {
        if (++step == steps.end) {
            step = steps.first;
            ++group;
        }
    }
};

// First row of the tile within its half of a unit.
__device__ __forceinline__ int row_in_half(int row_warp, int tile) {
    return (row_warp * kTilesOfHalf + tile % kTilesOfHalf) * 16;
}

// Of the 16 rows of a tile lane group g has this one and the one 8 below. The copy engine exchanges
// the 16-byte pieces of a row by its number modulo 8; two neighbouring groups read in one go, and
// with rows 4 apart they find their pieces in different halves of the banks.
__device__ __forceinline__ int row_of_lane(int group) { return (group >> 1) | (group & 1) << 2; }

__device__ __forceinline__ void feed_weights(const Shape& s, Unit unit, unsigned stage,
                                             unsigned barrier, unsigned long long policy) {
    const int lane = threadIdx.x & 31;
    if (lane == 0) barrier_expect(barrier, kWeightBytes + NT * 8 * kColumnBytes);
    __syncwarp();
    if (lane < kHalves * kBoxes) {
        const int half = lane % kHalves, box = lane / kHalves;
        copy_box(stage + (box * kRows + half * kRowsOfHalf) * 128, s.map,
                 (unit.step * kBoxes + box) * 128,
                 half * (s.n / kHalves) + unit.group * kRowsOfHalf, barrier, policy);
    }
}

__device__ __forceinline__ void feed_columns(const Shape& s, Unit unit, unsigned stage,
                                             unsigned barrier, unsigned long long policy) {
    const int box = threadIdx.x & 31;
    if (box < kColumnBoxes)
        copy_box(stage + kWeightBytes + box * NT * 8 * kBoxPitch, s.x_map,
                 (unit.step * kColumnBytes + box * kBoxPitch) / 4, 0, barrier, policy);
}

__device__ __forceinline__ void accumulate(float4 (&sums)[TILES][NT], const uint4 (&w)[2 * TILES],
                                           const uint4 (&x)[NT * kColumnPieces],
                                           const float (&scale)[TILES]) {
#if CODES
    unsigned b[NT][8];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            const uint4 v = x[nt * 2 + piece];
            // Elements 0 and 2, 1 and 3 of four together, as the codes are decoded.
            b[nt][piece * 4] = raised(__byte_perm(v.x, v.y, 0x5410));
            b[nt][piece * 4 + 1] = raised(__byte_perm(v.x, v.y, 0x7632));
            b[nt][piece * 4 + 2] = raised(__byte_perm(v.z, v.w, 0x5410));
            b[nt][piece * 4 + 3] = raised(__byte_perm(v.z, v.w, 0x7632));
        }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const uint4 top = w[2 * tile], low = w[2 * tile + 1];
        const unsigned tops[4] = {top.x, top.y, top.z, top.w};
        const unsigned lows[4] = {low.x, low.y, low.z, low.w};
        float4 part[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) part[nt] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned a0 = even_codes(tops[i]), a1 = even_codes(lows[i]);
            const unsigned a2 = odd_codes(tops[i]), a3 = odd_codes(lows[i]);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
                product(part[nt], a0, a1, a2, a3, b[nt][2 * i], b[nt][2 * i + 1]);
        }
        const float factor = scale[tile] * kHalfBias;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            sums[tile][nt].x = fmaf(part[nt].x, factor, sums[tile][nt].x);
            sums[tile][nt].y = fmaf(part[nt].y, factor, sums[tile][nt].y);
            sums[tile][nt].z = fmaf(part[nt].z, factor, sums[tile][nt].z);
            sums[tile][nt].w = fmaf(part[nt].w, factor, sums[tile][nt].w);
        }
    }
#else
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const uint4 top = w[2 * tile], low = w[2 * tile + 1];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            product(sums[tile][nt], top.x, low.x, top.y, low.y, x[nt].x, x[nt].y);
            product(sums[tile][nt], top.z, low.z, top.w, low.w, x[nt].z, x[nt].w);
        }
    }
#endif
}

struct Output {
    void* out;
    long long stride;  // elements
    const Element* residual;
    long long residual_stride;
};

__device__ __forceinline__ void store(const Output& o, int m, int n, float value) {
#if WIDE
    static_cast<float*>(o.out)[m * o.stride + n] = value;
#else
#if EPILOGUE == 1
    value = widen(fresh(o.residual + m * o.residual_stride + n)) + rounded(value);
#endif
    static_cast<Element*>(o.out)[m * o.stride + n] = narrow(value);
#endif
}

// Write the four results of sum `e` of a group: two rows of a tile, columns m and m + 1.
__device__ __forceinline__ void finish(const Shape& s, const Output& o, int group, int row_warp,
                                       int tile, int nt, int lane, float4 value, float4 up) {
    const int row = group * kRowsOfHalf + row_in_half(row_warp, tile);
    if (row >= s.n / kHalves) return;
    const int n = row + row_of_lane(lane >> 2);
    const int m = nt * 8 + (lane & 3) * 2;
#if EPILOGUE == 2
    value.x = rounded(silu(rounded(value.x))) * rounded(up.x);
    value.y = rounded(silu(rounded(value.y))) * rounded(up.y);
    value.z = rounded(silu(rounded(value.z))) * rounded(up.z);
    value.w = rounded(silu(rounded(value.w))) * rounded(up.w);
#endif
    if (m < s.m) {
        store(o, m, n, value.x);
        store(o, m, n + 8, value.z);
    }
    if (m + 1 < s.m) {
        store(o, m + 1, n, value.y);
        store(o, m + 1, n + 8, value.w);
    }
}

__device__ __forceinline__ void add(float4& a, float4 b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
}

__device__ __forceinline__ void await_input() {
#if !SAME_INPUT
    previous_kernel_ended();
    next_kernel_may_start();
#endif
}

__device__ __forceinline__ void await_end() {
#if SAME_INPUT
    previous_kernel_ended();
#endif
}

// Among the warps that compute.
__device__ __forceinline__ void sync_computing() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Scales of the tiles of a warp for its part of a step; codes beyond the matrix are zeros.
__device__ __forceinline__ void read_scales(float (&scale)[TILES], const Shape& s, Unit unit,
                                            int row_warp, int k_warp) {
#if CODES
    const int depth = (unit.step * K_WARPS + k_warp) * kDepth;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int row = tile / kTilesOfHalf * (s.n / kHalves) + unit.group * kRowsOfHalf +
                        row_in_half(row_warp, tile);
        if (depth < s.k && row < s.n)
            scale[tile] = __ldg(s.scales + static_cast<long long>(row / kScaleBlock) * s.scale_columns +
                                depth / kScaleBlock);
    }
#endif
}

}  // namespace

// map: of W as bytes [n, 2 k or k], boxes of 128 bytes times kRowsOfHalf rows with the 128-byte
// swizzle. x_map: of x as words [m, k / 2], boxes of kBoxPitch bytes times NT * 8 rows.
extern "C" __global__ void
#if K_SPLIT > 1
__cluster_dims__(K_SPLIT, 1, 1)
#endif
    __launch_bounds__(kThreads + 32, 1)
    gemm_skinny(const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap x_map,
                const float* scales, void* out, long long out_stride, const Element* residual,
                long long residual_stride, int m, int n, int k, int scale_columns) {
    extern __shared__ char dynamic[];
    __shared__ unsigned long long barriers[2 * STAGES];  // full, then empty
    const Shape s{&map, &x_map, scales, m, n, k, scale_columns};
    const Output o{out, out_stride, residual, residual_stride};
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    const int groups = (n / kHalves + kRowsOfHalf - 1) / kRowsOfHalf;
    const int all_steps = (k + K_WARPS * kDepth - 1) / (K_WARPS * kDepth);
    const int part = blockIdx.x % K_SPLIT, place = blockIdx.x / K_SPLIT, places = gridDim.x / K_SPLIT;
    const Steps steps{part * all_steps / K_SPLIT, (part + 1) * all_steps / K_SPLIT};
    const int begin = static_cast<long long>(place) * groups / places;
    const int end = static_cast<long long>(place + 1) * groups / places;
    const int units = (end - begin) * (steps.end - steps.first);

    const unsigned raw = static_cast<unsigned>(__cvta_generic_to_shared(dynamic));
    const unsigned base = (raw + 1023) / 1024 * 1024;
    const unsigned full = static_cast<unsigned>(__cvta_generic_to_shared(barriers));
    const unsigned empty = full + STAGES * 8;
#if SAME_INPUT
    next_kernel_may_start();
#endif
    if (threadIdx.x == kThreads) {
        prefetch_map(&map);
        prefetch_map(&x_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            barrier_init(empty + stage * 8, kWarps);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
#if K_SPLIT == 2
    cluster_arrive();  // this CTA runs, and its memory may be written
#endif

    if (warp == kWarps) {
        const unsigned long long once = evict_first(), again = evict_last();
        // W is there before the kernel that writes x has ended.
        Unit ahead{begin, steps.first};
        for (int i = 0; i < min(STAGES, units); ++i) {
            feed_weights(s, ahead, base + i * kStageBytes, full + i * 8, once);
            ahead.advance(steps);
        }
        await_input();
        Unit unit{begin, steps.first};
        int stage = 0;
        unsigned parity = 1;  // of the barrier that says that a stage is free
        for (int i = 0; i < units; ++i) {
            const unsigned at = base + stage * kStageBytes, barrier = full + stage * 8;
            if (i >= STAGES) {
                barrier_wait(empty + stage * 8, parity);
                feed_weights(s, unit, at, barrier, once);
            }
            feed_columns(s, unit, at, barrier, again);
            unit.advance(steps);
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
#if K_SPLIT == 2
        __syncwarp();
        cluster_wait();  // what comes later is for the warps that compute: this one has left by then
#endif
        await_end();
        return;
    }

    await_input();
    const int row_warp = warp / K_WARPS, k_warp = warp % K_WARPS;
    float4* sums_of = reinterpret_cast<float4*>(dynamic + (base - raw) + STAGES * kStageBytes);
    // Where a lane finds its 16 bytes of the first tile, relative to the stage.
    const int lane_row = row_of_lane(lane >> 2);
    const int piece = (k_warp & 1) * 4 + (lane & 3);
    const unsigned weight_at =
        ((k_warp / 2) * kRows + lane_row) * 128 + ((piece ^ lane_row) * 16);
    const int column = k_warp * kDepth * 2 + (lane & 3) * 16 * kColumnPieces;
    const unsigned column_at = kWeightBytes + (column / kBoxPitch * NT * 8 + (lane >> 2)) * kBoxPitch +
                               column % kBoxPitch;

    float4 sums[TILES][NT];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) sums[tile][nt] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    Unit now{begin, steps.first};
    float scale[TILES] = {}, next_scale[TILES] = {};
    read_scales(next_scale, s, now, row_warp, k_warp);
    int stage = 0;
    unsigned parity = 0;
    for (int unit = 0; unit < units; ++unit) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) scale[tile] = next_scale[tile];
        Unit next = now;
        next.advance(steps);
        read_scales(next_scale, s, next, row_warp, k_warp);  // a step ahead of its use
        barrier_wait(full + stage * 8, parity);
        const unsigned slot = base + stage * kStageBytes;
        uint4 w[2 * TILES], b[NT * kColumnPieces];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int row = tile / kTilesOfHalf * kRowsOfHalf + row_in_half(row_warp, tile);
            w[2 * tile] = read16(slot + weight_at + row * 128);
            w[2 * tile + 1] = read16(slot + weight_at + row * 128 + 1024);
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < kColumnPieces; ++i)
                b[nt * kColumnPieces + i] =
                    read16(slot + column_at + nt * 8 * kBoxPitch + i * 16);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage * 8);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        // The copy engine writes zeros beyond the ends of both, so that the rest of a step adds none.
        accumulate(sums, w, b, scale);

        if (now.step + 1 == steps.end) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    sums_of[k_warp * kSums + ((row_warp * TILES + tile) * NT + nt) * 32 + lane] =
                        sums[tile][nt];
                    sums[tile][nt] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
            sync_computing();
#if K_SPLIT == 2
            float4* others = sums_of + K_WARPS * kSums;
            cluster_wait();
            if (part == 1) {
                for (int e = threadIdx.x; e < kSums; e += kThreads) {
                    float4 total = sums_of[e];
#pragma unroll
                    for (int other = 1; other < K_WARPS; ++other) add(total, sums_of[other * kSums + e]);
                    store_in_cluster(others + e, 0, total);
                }
                cluster_arrive();
                cluster_wait();
                await_end();
                return;
            }
            cluster_arrive();
            cluster_wait();
#endif
            // A gate and its up are kTilesOfHalf tiles apart in the same warp.
            for (int e = threadIdx.x; e < kSums / kHalves; e += kThreads) {
                const int nt = (e >> 5) % NT, tile = (e >> 5) / NT % kTilesOfHalf;
                const int warp_of = (e >> 5) / NT / kTilesOfHalf;
                const int at = ((warp_of * TILES + tile) * NT + nt) * 32 + (e & 31);
                const int up_at = at + (kHalves - 1) * kTilesOfHalf * NT * 32;
                float4 total = sums_of[at], up = sums_of[up_at];
#pragma unroll
                for (int other = 1; other < K_WARPS; ++other) {
                    add(total, sums_of[other * kSums + at]);
                    if (kHalves == 2) add(up, sums_of[other * kSums + up_at]);
                }
#if K_SPLIT == 2
                add(total, others[at]);
#endif
                finish(s, o, now.group, warp_of, tile, nt, e & 31, total, up);
            }
            if (unit + 1 < units) sync_computing();
        }
        now = next;
    }
    await_end();
}
