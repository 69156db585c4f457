// Decode attention: one new token a row against its own KV, all formats and layouts, split over
// the context (`attention_decode`) and merged in a fixed order (`attention_merge`, the launch
// after it).
//
// attention_decode. Grid: any number of CTAs, meant to be what fits the device at once. Each
// starts with work items blockIdx.x and blockIdx.x + gridDim.x and draws further ones from a
// counter. An item is (row, split, KV head), heads innermost since their rows are neighbours in
// memory, and the list follows from `lengths` on the device, so that a captured graph serves
// every context. Block: 128; dynamic shared memory: see `Shared`.
//
// A split has 128 tokens up to a length of 8192, 256 up to 32768, else 512. Its tiles of 16
// tokens go to the four warps in turn; each warp keeps its own ring of asynchronous copies and
// its own running maximum, so the loop has no block barrier. A warp starts the copies of its next
// item as soon as it is done with the tiles of this one, before the warps are merged, so that
// memory is never idle.
//
// A separate merge: with one by the last CTA to arrive every item waits for a fence (which waits
// for the copies on their way) and an atomic, 8 us under load, and a CTA that lags arrives last
// and does all merges. Order of accumulation: tiles of a warp ascending, warps ascending, splits
// ascending in equal parts, parts ascending. It depends on the length of the row alone.
//
// Bounded by bytes: length * kv_heads * bytes of a token-head.
#include "attention_warp.cuh"

constexpr int MERGE_THREADS = 256;
constexpr int THREADS = 32 * WARPS;

DEVICE int split_tokens(int length) { return length <= 8192 ? 128 : (length <= 32768 ? 256 : 512); }
DEVICE int split_count(int length) {
    int size = split_tokens(length);
    return (length + size - 1) / size;
}

// Dynamic shared memory: rings; queries, later outputs of the warps; small arrays; then the list
// of rows, 8 * (rows + 1) bytes.
template <int DT, int FMT, int D, class Warp>
struct Shared {
    static constexpr int RINGS = WARPS * Ring<DT, FMT, D>::BYTES;
    static constexpr int ROUND = WARPS * HEADS * ROUND_STRIDE * 4;
    static constexpr int AREA = ROUND > Warp::Q_BYTES ? ROUND : Warp::Q_BYTES;
    static constexpr int BYTES = RINGS + AREA + 4 * (2 * HEADS + 2 * WARPS * HEADS + 2);
    // With what the system keeps and a list of 64 rows, the CTAs that are meant to be resident are:
    // others would start when the first ones end, with work they had been given.
    static_assert(ctas_per_sm(FMT, DT, D) * (BYTES + 1024 + 128 + 8 * 65) <= 228 * 1024);
};
struct Scratch {
    float* outputs;  // [rows, kv_heads, max_splits, group, D], not divided by the sums
    float* sums;     // [rows, kv_heads, max_splits, group, 2]: maximum, sum
    u32* drawn;      // items drawn from the list, zero between calls
    int max_splits;
};

struct Work {
    int row, head, split, splits, first, tokens;
};

// start: first split of each row in the list of all of them; length: tokens, cut to the capacity.
struct Row {
    int start, length;
};

DEVICE Work work_at(int item, const Row* list, int rows, int kv_heads) {
    int place = item / kv_heads;
    int low = 0, high = rows - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (list[middle].start <= place) low = middle;
        else high = middle - 1;
    }
    Row row = list[low];
    int size = split_tokens(row.length);
    Work work;
    work.row = low;
    work.head = item - place * kv_heads;
    work.split = place - row.start;
    work.splits = list[low + 1].start - row.start;
    work.first = work.split * size;
    work.tokens = min(size, row.length - work.first);
    return work;
}

// Fill list [rows + 1] by an exclusive prefix sum of the splits.
DEVICE void list_rows(Row* list, const int* lengths, int rows, int capacity) {
    __shared__ int warp_sums[WARPS];
    int carried = 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int base = 0; base < rows; base += THREADS) {
        int row = base + threadIdx.x;
        int length = row < rows ? min(max(lengths[row], 0), capacity) : 0;
        int count = row < rows ? split_count(length) : 0;
        int sum = count;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(FULL_WARP, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int before = carried;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += warp_sums[w];
            carried += warp_sums[w];
        }
        if (row < rows) list[row] = Row{before + sum - count, length};
        __syncthreads();
    }
    if (threadIdx.x == 0) list[rows].start = carried;
    __syncthreads();
}

// q: [rows, kv_heads * group, D], strides in elements, D contiguous, dtype `io`.
// Planes: contiguous [.., page_tokens, kv_heads, row]. table, k0: see `Pages`. lengths: [rows].
// capacity: most tokens of a row. scale: D^-0.5 * log2(e). settled: all but the last token of a row may
// be read before the kernel ahead has ended.
template <int DT, int FMT, int D, class Warp, int SCORES>
DEVICE void decode(const void* q, i64 q_row, i64 q_head, int io, const u8* k_codes,
                   const u16* k_scales, const u8* v_codes, const u16* v_scales, const Pages& pages,
                   const int* lengths, int rows, int kv_heads, int group, int capacity, float scale,
                   bool rotated, bool settled, const Scratch& scratch) {
    using R = Ring<DT, FMT, D>;
    using S = Shared<DT, FMT, D, Warp>;
    constexpr int W = D / 32;
    extern __shared__ __align__(128) u8 shared[];
    u8* queries = shared + S::RINGS;
    float* area = reinterpret_cast<float*>(queries);  // [WARPS][HEADS][ROUND_STRIDE], later
    float2* factors = reinterpret_cast<float2*>(queries + S::AREA);  // [HEADS]: scale, offset
    float* maxima = reinterpret_cast<float*>(factors + HEADS);       // [WARPS][HEADS]
    float* sums = maxima + WARPS * HEADS;                           // [WARPS][HEADS]
    int* drawn = reinterpret_cast<int*>(sums + WARPS * HEADS);
    Row* list = reinterpret_cast<Row*>(drawn + 2);  // [rows + 1]
    // Through a shuffle the compiler knows that all lanes agree on what depends on the warp.
    int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, int(threadIdx.x) / 32, 0);
    u8* ring = shared + warp * R::BYTES;
    u32 ring_address = shared_address(ring);

    next_kernel_may_start();
    list_rows(list, lengths, rows, capacity);
    int items = list[rows].start * kv_heads;
    if (blockIdx.x >= items) {
        previous_kernel_ended();
        return;
    }

    Work work = work_at(blockIdx.x, list, rows, kv_heads);
    int mine;   // tiles of this warp
    i64 begin;  // where tile `lane` of the item begins; a tile lies in one page
    auto entry_of = [&](const Work& w) {
        int token = lane * TILE;
        return token < w.tokens ? pages.entry(w.row, w.first + token) : 0u;
    };
    auto copy_k = [&](int i, int stage) {
        if (i < mine) {
            int tile = i * WARPS + warp;
            i64 row = __shfl_sync(FULL_WARP, begin, tile) * kv_heads + work.head;
            copy_side<R::K_ROW, R::BLOCKS, R::SCALE_ROW>(
                ring_address + stage * R::K_BYTES, k_codes, k_scales, row, kv_heads,
                work.tokens - tile * TILE, lane);
        }
        copy_commit();
    };
    auto copy_v = [&](int i, int stage) {
        if (i < mine) {
            int tile = i * WARPS + warp;
            i64 row = __shfl_sync(FULL_WARP, begin, tile) * kv_heads + work.head;
            copy_side<R::V_ROW, R::BLOCKS, R::SCALE_ROW>(
                ring_address + R::STAGES * R::K_BYTES + stage * R::V_BYTES, v_codes, v_scales, row,
                kv_heads, work.tokens - tile * TILE, lane);
        }
        copy_commit();
    };
    auto start_item = [&](u32 entry) {
        int tiles = (work.tokens + TILE - 1) / TILE;
        mine = (tiles - warp + WARPS - 1) / WARPS;
        begin = pages.flat_token(entry, work.first + lane * TILE);
#pragma unroll
        for (int i = 0; i < R::STAGES; ++i) {
            copy_k(i, i);
            copy_v(i, i);
        }
    };
    // This warp's query heads of an item, on their way while other things are done.
    constexpr int OWN = HEADS / WARPS;
    u32 bits[OWN][W];
    auto load_queries = [&]() {
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            int g = warp + j * WARPS;
            i64 start = work.row * q_row + (work.head * group + g) * q_head;
#pragma unroll
            for (int r = 0; r < W; ++r) bits[j][r] = 0u;
            if (g < group) {
                load_bits(bits[j], static_cast<const u8*>(q) + start * itemsize(io), io, lane);
            }
        }
    };
    auto write_queries = [&](auto& x) {
        constexpr int N = sizeof(x) / sizeof(x[0]);
#pragma unroll
        for (int n = 0; n < N; ++n) values_of(x[n], bits[n], io);
        if (rotated) rotate<D>(x, lane);
        Warp::write_queries(queries, factors, warp, x, scale, lane);
    };
    // The kernel ahead writes the queries, and K and V of the last token of a row alone.
    u32 entry = entry_of(work);
    // Scales come in words through L1, so that the sector of the last one must wait as well.
    bool written = settled && work.split + (is_quantised(FMT) ? 2 : 1) < work.splits;
    if (written) start_item(entry);
    previous_kernel_ended();
    load_queries();
    if (!written) start_item(entry);
    int next = blockIdx.x + gridDim.x;

    while (true) {
        if (group > WARPS) {
            float x[OWN][W];
            write_queries(x);
        } else {
            float x[1][W], zeros[1][W] = {};
            write_queries(x);
            Warp::write_queries(queries, factors, warp + WARPS, zeros, scale, lane);
        }
        __syncthreads();
        Warp state;
        state.reset();
        state.read_queries(queries, factors, lane);

        // On their way while the tiles are worked on.
        u32 next_entry = next < items ? entry_of(work_at(next, list, rows, kv_heads)) : 0u;
        int draw = 0;
        if (threadIdx.x == 0) draw = int(atomicAdd(scratch.drawn, 1u));

        int stage = 0;
        for (int i = 0; i < mine; ++i) {
            int tile = i * WARPS + warp;
            int live = work.tokens - tile * TILE;
            // Which half of a copied word is the token's scale. Eight tokens on it is the same.
            u32 low = __shfl_sync(FULL_WARP, u32(begin), tile) + (lane / 4);
            int parity = int(low & kv_heads ^ work.head) & 1;
            u8* k = ring + stage * R::K_BYTES;
            u8* v = ring + R::STAGES * R::K_BYTES + stage * R::V_BYTES;
            copy_wait<2 * R::STAGES - 1>();
            __syncwarp();
            float s[SCORES];
            state.scores(s, k, parity, lane);
            __syncwarp();
            copy_k(i + R::STAGES, stage);
            copy_wait<2 * R::STAGES - 1>();
            __syncwarp();
            state.fold(s, v, live, parity, lane);
            __syncwarp();
            copy_v(i + R::STAGES, stage);
            stage = stage + 1 == R::STAGES ? 0 : stage + 1;
        }
        Work done = work;
        if (next < items) {
            work = work_at(next, list, rows, kv_heads);
            load_queries();
            start_item(next_entry);
        }

        // The four warps, ascending.
        state.finish();
        state.write_state(maxima + warp * HEADS, sums + warp * HEADS, lane);
        if (threadIdx.x == 0) *drawn = 2 * gridDim.x + draw;
        __syncthreads();
        int after = *drawn;
        i64 pair = i64(done.row) * kv_heads + done.head;
        i64 entry = (pair * scratch.max_splits + done.split) * group;
        if (threadIdx.x < group) {
            int g = threadIdx.x;
            reinterpret_cast<float2*>(scratch.sums)[entry + g] =
                float2{top_of(maxima, g), total_of(maxima, sums, g)};
        }
#pragma unroll
        for (int round = 0; round < D / 64; ++round) {
            state.write_round(area + warp * HEADS * ROUND_STRIDE, round, maxima, group, lane);
            __syncthreads();
            if (threadIdx.x < group * 16) {
                int g = threadIdx.x / 16, d = threadIdx.x % 16 * 4;
                float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float* at = area + (w * HEADS + g) * ROUND_STRIDE + d;
                    float4 part = *reinterpret_cast<const float4*>(at);
                    total.x += part.x;
                    total.y += part.y;
                    total.z += part.z;
                    total.w += part.w;
                }
                float* target = scratch.outputs + (entry + g) * D + round * 64 + d;
                *reinterpret_cast<float4*>(target) = total;
            }
            __syncthreads();  // the next round, or the queries of the next item, go over it
        }
        if (next >= items) return;
        next = after;
    }
}

// One query head of one row: grid (kv_heads * group, rows), block MERGE_THREADS. Merges the
// splits, undoes the rotation and writes the output, zeros for a row of length 0. Reads splits *
// (D + 2) floats that lie in the L2 cache: latency. out: [rows, kv_heads * group, D], dtype `io`.
template <int D>
__global__ void __launch_bounds__(MERGE_THREADS)
    attention_merge(const float* outputs, const float* sums, u32* drawn, int max_splits, void* out,
                    i64 out_row, i64 out_head, int io, const int* lengths, int kv_heads, int group,
                    int capacity, int rotated) {
    constexpr int COLUMNS = D / 4, PARTS = MERGE_THREADS / COLUMNS, W = D / 32;
    __shared__ float weights[2048];  // splits of 1,048,576 tokens
    __shared__ float4 parts[PARTS][COLUMNS];
    __shared__ float warp_values[2][MERGE_THREADS / 32];
    int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    next_kernel_may_start();
    int splits = split_count(min(max(lengths[row], 0), capacity));
    previous_kernel_ended();
    if (head == 0 && row == 0 && threadIdx.x == 0) *drawn = 0u;
    i64 first = (i64(row) * kv_heads + head / group) * max_splits * group + head % group;
    const float2* states = reinterpret_cast<const float2*>(sums) + first;
    float2 own = {MINUS_INFINITY, 0.0f};
    if (threadIdx.x < splits) own = fresh(states + i64(threadIdx.x) * group);

    float top = own.x;
#pragma unroll 1
    for (int e = threadIdx.x + MERGE_THREADS; e < splits; e += MERGE_THREADS) {
        top = fmaxf(top, fresh(states + i64(e) * group).x);
    }
    top = group_max<32>(top);
    if (lane == 0) warp_values[0][warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < MERGE_THREADS / 32; ++w) top = fmaxf(top, warp_values[0][w]);
    float weight = exp2_fast(own.x - top), sum = weight * own.y;
    if (threadIdx.x < splits) weights[threadIdx.x] = weight;
#pragma unroll 1
    for (int e = threadIdx.x + MERGE_THREADS; e < splits; e += MERGE_THREADS) {
        float2 other = fresh(states + i64(e) * group);
        weight = exp2_fast(other.x - top);
        weights[e] = weight;
        sum += weight * other.y;
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    }
    if (lane == 0) warp_values[1][warp] = sum;
    __syncthreads();

    int column = threadIdx.x % COLUMNS, part = threadIdx.x / COLUMNS;
    int share = (splits + PARTS - 1) / PARTS;
    int from = part * share, to = min(from + share, splits);
    const float4* source = reinterpret_cast<const float4*>(outputs) + first * COLUMNS + column;
    i64 step = i64(group) * COLUMNS;
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int e = from; e < to; ++e) {
        float4 value = fresh(source + e * step);
        float factor = weights[e];
        total.x = fmaf(factor, value.x, total.x);
        total.y = fmaf(factor, value.y, total.y);
        total.z = fmaf(factor, value.z, total.z);
        total.w = fmaf(factor, value.w, total.w);
    }
    parts[part][column] = total;
    __syncthreads();
    if (warp > 0) return;
    float all = 0.0f, x[1][W] = {};
#pragma unroll
    for (int w = 0; w < MERGE_THREADS / 32; ++w) all += warp_values[1][w];
#pragma unroll 4
    for (int p = 0; p < PARTS; ++p) {
        const float* values = reinterpret_cast<const float*>(parts[p]);
#pragma unroll
        for (int r = 0; r < W; ++r) x[0][r] += values[lane * W + r];
    }
    float inverse = splits > 0 ? 1.0f / all : 0.0f;
#pragma unroll
    for (int r = 0; r < W; ++r) x[0][r] *= inverse;
    if (rotated) unrotate<D>(x, lane);
    i64 start = row * out_row + head * out_head + lane * W;
#pragma unroll
    for (int r = 0; r < W; ++r) store_as(out, start + r, io, x[0][r]);
}

#define PARAMETERS                                                                                 \
    const void *q, i64 q_row, i64 q_head, int io, const u8 *k_codes, const u16 *k_scales,          \
        const u8 *v_codes, const u16 *v_scales, const u32 *table, int max_pages, int page_tokens,  \
        u32 layer, u32 pool_pages, u32 window, const u32 *k0, const int *lengths, int rows,        \
        int kv_heads, int group, int capacity, float scale, int rotated, int settled,              \
        float *partial_outputs, float *partial_sums, u32 *drawn, int max_splits
#define ARGUMENTS                                                                                  \
    q, q_row, q_head, io, k_codes, k_scales, v_codes, v_scales,                                    \
        pages_of(table, max_pages, page_tokens, layer, pool_pages, window, k0), lengths, rows,     \
        kv_heads, group, capacity, scale, rotated != 0, settled != 0,                              \
        Scratch { partial_outputs, partial_sums, drawn, max_splits }

// K and V of 16, 8 or 4 bits.
template <int DT, int FMT, int D>
__global__ void __launch_bounds__(THREADS, ctas_per_sm(FMT, DT, D)) attention_decode(PARAMETERS) {
    decode<DT, FMT, D, TensorWarp<DT, FMT, D>, 4>(ARGUMENTS);
}
// K and V in fp32; GROUP: at least the query heads of a KV head.
template <int D, int GROUP>
__global__ void __launch_bounds__(THREADS, ctas_per_sm(PLAIN, F32, D))
    attention_decode_f32(PARAMETERS) {
    decode<F32, PLAIN, D, PlainWarp<D, GROUP>, GROUP>(ARGUMENTS);
}

// What a launcher must know: bytes of shared memory without the row list, and CTAs of an SM.
template <int DT, int FMT, int D>
__global__ void attention_limits(int* out) {
    out[0] = Shared<DT, FMT, D, TensorWarp<DT, FMT, D>>::BYTES;
    out[1] = ctas_per_sm(FMT, DT, D);
}
template <int D, int GROUP>
__global__ void attention_limits_f32(int* out) {
    out[0] = Shared<F32, PLAIN, D, PlainWarp<D, GROUP>>::BYTES;
    out[1] = ctas_per_sm(PLAIN, F32, D);
}
