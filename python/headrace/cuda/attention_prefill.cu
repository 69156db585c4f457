// Attention of prompts: new tokens of some requests, each over the KV of its own up to itself, which
// has been appended. bf16 or fp16 KV in slots, pages and LOW windows, or in a workspace.
//
// A unit is CONSUMERS tiles of 64 queries of one head each; heads of one KV head, of one place or
// nearly so, stand together. A CTA is a warpgroup for each tile, and one that copies queries, and K and
// V in turn, KEYS tokens at a time, to a ring of shared memory. It draws one unit after the other, the
// longest first, and copies for the next while the last is worked on. Grid: CTAs that are resident, no
// more than there may be units; one without a unit ends at once. Block: 128 * (CONSUMERS + 1).
// Bounded by tensor cores and exponentials.
//
// Blocks of keys stand at absolute places and come in order, and a block of which a query sees
// nothing leaves it as it was: the bits of a row depend on its own request up to itself, and not on
// cuts, tiles or neighbours. (Values that are not finite reach the rows before them of their tile and
// block: a weight of zero does not hide them. With 64 keys no such row has a complete prefix page of
// 64 tokens without them.) Compile for sm_90a.
#include "async_copy.cuh"
#include "barrier.cuh"
#include "kv_common.cuh"
#include "segments.cuh"
#include "wgmma.cuh"

constexpr int PANEL = 64 * 128;  // bytes of 64 values of 64 rows
constexpr int QUERIES = 64;      // of a tile
constexpr int KEYS = 64;         // of a block
#define MINUS_INFINITY __int_as_float(0xff800000)

// Prompts of a launch: all of `of`, or `only` that one, whose KV lies in a workspace then: page 0 of it,
// which is the entry of `workspace`.
struct Prompts {
    const Segment* of;
    int only;
    const u32* workspace;
    int kv_heads, group;
};

template <int D, int CONSUMERS>
struct Shape {
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int Q_BYTES = QUERIES * D * 2;  // of a warpgroup
    static constexpr int LIMIT = 227 * 1024 - 2048;  // less barriers, and what alignment takes
    static constexpr int FIT = (LIMIT - CONSUMERS * Q_BYTES) / TILE_BYTES;
    static constexpr int RING = FIT < 8 ? FIT : 8;
    static constexpr int AHEAD = RING > 4 ? 3 : 2;  // tiles on their way while one is handed over
    // A worker holds values while it waits for the next keys.
    static_assert(RING >= AHEAD + 2, "what is waited for is handed over");
    static constexpr int BYTES = RING * TILE_BYTES + CONSUMERS * Q_BYTES + 2048;
    // Of a thread: what is right for the tiles, the rest of 64 Ki for copying. Multiples of 8.
    static constexpr int PRODUCT_REGISTERS = CONSUMERS == 3 ? 152 : (D == 256 ? 224 : 208);
    static constexpr int COPY_REGISTERS =
        (CONSUMERS == 3 ? 512 : 504) - CONSUMERS * PRODUCT_REGISTERS;
};

DEVICE float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Largest, or sum, over the four lanes that have a row.
DEVICE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
template <int DT>
DEVICE u32 pack(float low, float high) {
    return DT == BF16 ? pack_bf16x2(low, high) : pack_half2(low, high);
}

// Shared memory, by the place of each barrier. Of what a full barrier stands for, all warps that read
// it arrive at the empty one.
template <int D, int CONSUMERS>
struct Memory {
    using S = Shape<D, CONSUMERS>;
    static constexpr int UNITS = 2;  // drawn, and not yet seen by all
    static constexpr int BARRIERS = 2 * (S::RING + CONSUMERS + UNITS);
    static_assert(8 * BARRIERS + 4 * UNITS + 1024 <= 2048, "what Shape leaves for it");
    u32 start;

    DEVICE u32 tile(int slot) const { return start + slot * S::TILE_BYTES; }
    DEVICE u32 queries(int worker) const { return tile(S::RING) + worker * S::Q_BYTES; }
    DEVICE u32 barrier(int index) const { return queries(CONSUMERS) + 8 * index; }
    DEVICE u32 full(int slot) const { return barrier(slot); }
    DEVICE u32 empty(int slot) const { return barrier(S::RING + slot); }
    DEVICE u32 queries_full(int worker) const { return barrier(2 * S::RING + worker); }
    DEVICE u32 queries_empty(int worker) const {
        return barrier(2 * S::RING + CONSUMERS + worker);
    }
    DEVICE u32 unit_full(int i) const { return barrier(2 * (S::RING + CONSUMERS) + i); }
    DEVICE u32 unit_empty(int i) const { return barrier(2 * (S::RING + CONSUMERS) + UNITS + i); }
    DEVICE u32 unit(int i) const { return barrier(BARRIERS) + 4 * i; }

    DEVICE void init() const {
        for (int slot = 0; slot < S::RING; ++slot) {
            barrier_init(full(slot), 4);
            barrier_init(empty(slot), 4 * CONSUMERS);
        }
        for (int worker = 0; worker < CONSUMERS; ++worker) {
            barrier_init(queries_full(worker), 4);
            barrier_init(queries_empty(worker), 4);
        }
        for (int i = 0; i < UNITS; ++i) {
            barrier_init(unit_full(i), 1);
            barrier_init(unit_empty(i), 4 * (CONSUMERS + 1));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// A place in a ring of `SIZE` barriers, and the parity of the phase to wait for.
template <int SIZE>
struct Place {
    int slot = 0, phase;

    DEVICE explicit Place(int first_phase) : phase(first_phase) {}
    DEVICE void advance() {
        if (++slot == SIZE) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// By a warp, once all its lanes are through.
DEVICE void arrive_once(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Where all of it comes from; see `attention_prefill`.
struct Source {
    const u16* q;
    i64 q_token, q_head;
    const u8 *k, *v;
    int page_tokens;
    u32 layer, pool_pages, window;
    const u32* k0;
};

// The number of a unit is index * kv_heads + kv_head; those of a segment come longest first. By a warp.
template <int CONSUMERS>
struct Unit {
    Segment segment;
    int kv_head, first_item, items, numbers;  // numbers: of all units

    // False if there is no such unit.
    DEVICE bool find(const Prompts& prompts, int number) {
        const auto items_of = [&](const Segment& segment) {
            return (segment.tokens + QUERIES - 1) / QUERIES * prompts.group;
        };
        const auto units_of = [&](const Segment& segment) {
            const bool counts = prompts.only < 0 || prompts.only == int(threadIdx.x % 32);
            return counts ? (items_of(segment) + CONSUMERS - 1) / CONSUMERS : 0;
        };
        kv_head = number % prompts.kv_heads;
        const Part part = find_part(prompts.of, number / prompts.kv_heads, units_of);
        numbers = part.all * prompts.kv_heads;
        if (part.segment < 0) return false;
        segment = prompts.of[part.segment];
        items = items_of(segment);
        const int units = (items + CONSUMERS - 1) / CONSUMERS;
        first_item = (units - 1 - part.index) * CONSUMERS;
        return true;
    }
};

// Blocks of keys that the tile of an item sees.
DEVICE int blocks_of(const Segment& segment, int tile) {
    return (segment.start + min(tile * QUERIES + QUERIES, segment.tokens) - 1) / KEYS + 1;
}

// The next unit of whoever asks, -1 if there is none. drawn: 0 between launches: a CTA starts with its
// own number and draws until there is no more, so that a launch makes `numbers` draws, the last of
// which sets it back.
DEVICE int draw(u32* drawn, int numbers) {
    const int turn = int(atomicAdd(drawn, 1u));
    if (turn == numbers - 1) atomicExch(drawn, 0u);
    const int number = int(gridDim.x) + turn;
    return number < numbers ? number : -1;
}

// The unit at a place, by a warp that has waited for it; -1 is the end.
template <class M, class P>
DEVICE int seen_unit(const M& memory, P& place) {
    int number;
    asm volatile("ld.shared.s32 %0, [%1];"
                 : "=r"(number)
                 : "r"(memory.unit(place.slot))
                 : "memory");
    arrive_once(memory.unit_empty(place.slot));
    place.advance();
    return number;
}

// Copies of a warp, handed over once they have landed.
template <int AHEAD>
struct Copies {
    u32 pending[AHEAD] = {};  // barriers, oldest first

    DEVICE void commit(u32 barrier) {
        copy_commit();
        copy_wait<AHEAD>();
        writes_visible_to_products();
        if (pending[0]) arrive_once(pending[0]);
#pragma unroll
        for (int i = 0; i + 1 < AHEAD; ++i) pending[i] = pending[i + 1];
        pending[AHEAD - 1] = barrier;
    }
    DEVICE void flush() {
        copy_wait<0>();
        writes_visible_to_products();
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (pending[i]) arrive_once(pending[i]);
            pending[i] = 0;
        }
    }
};

// Sixteen rows by a warp, to rows `row...` of panels; zeros for all but `live` of them.
template <int D>
DEVICE void copy_run(u32 target, int row, const u8* source, i64 row_bytes, int live) {
    constexpr int CHUNKS = D / 8;      // of a row
    constexpr int STEP = 32 / CHUNKS;  // rows of one copy
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, sub = lane / CHUNKS;
    target += chunk / 8 * PANEL + (row + sub) * 128;
    source += sub * row_bytes + chunk * 16;
#pragma unroll 4
    for (int r = 0; r < 16; r += STEP) {
        copy_16(target + r * 128 + ((chunk ^ sub ^ r) & 7) * 16, source, r + sub < live);
        source += STEP * row_bytes;
    }
}

template <int D, int CONSUMERS>
DEVICE void copy_all(const Memory<D, CONSUMERS> memory, const Prompts& prompts,
                     const Source& source, u32* drawn) {
    using S = Shape<D, CONSUMERS>;
    const int warp = threadIdx.x / 32 % 4;
    const i64 row_bytes = i64(prompts.kv_heads) * D * 2;
    Copies<S::AHEAD> copies;
    Place<S::RING> to(1);
    Place<Memory<D, CONSUMERS>::UNITS> unit_to(1);
    int queries_phase = 1;
    Unit<CONSUMERS> unit;
    int next = unit.find(prompts, int(blockIdx.x)) ? int(blockIdx.x) : -1;
    const int numbers = unit.numbers;
    const bool draws = threadIdx.x % 128 == 0;
    while (true) {
        if (draws) {
            barrier_wait(memory.unit_empty(unit_to.slot), unit_to.phase);
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(memory.unit(unit_to.slot)), "r"(next)
                         : "memory");
            barrier_arrive(memory.unit_full(unit_to.slot));
        }
        __syncwarp();
        barrier_wait(memory.unit_full(unit_to.slot), unit_to.phase ^ 1);
        const int number = seen_unit(memory, unit_to);
        if (number < 0) break;
        unit.find(prompts, number);
        const Segment& segment = unit.segment;
        const bool in_pool = prompts.only < 0;
        const Pages pages =
            pages_of(in_pool ? segment.table : prompts.workspace, in_pool ? segment.pages : 1,
                     source.page_tokens, source.layer, source.pool_pages, source.window, source.k0);
        const int end = segment.start + segment.tokens;
        const int last = min(unit.first_item + CONSUMERS, unit.items) - 1;
        const int tiles = 2 * blocks_of(segment, last / prompts.group);
        i64 from = 0;
        for (int tile = 0; tile < tiles; ++tile) {
            // Of a warp: 16 tokens, which lie in one page.
            const int token = tile / 2 * KEYS + warp * 16;
            if (tile % 2 == 0) {
                const i64 at = token < end ? pages.flat_token(pages.entry(0, token), token) : 0;
                from = at * row_bytes + unit.kv_head * D * 2;
            }
            barrier_wait(memory.empty(to.slot), to.phase);
            copy_run<D>(memory.tile(to.slot), warp * 16, (tile % 2 ? source.v : source.k) + from,
                        row_bytes, end - token);
            copies.commit(memory.full(to.slot));
            to.advance();
            if (tile > 0) continue;
            // Whoever has the queries of the last unit waits for copies that are still pending.
            copies.flush();
#pragma unroll 1
            for (int worker = 0; worker < CONSUMERS; ++worker) {
                barrier_wait(memory.queries_empty(worker), queries_phase);
                const int item = min(unit.first_item + worker, last);
                const int query = item / prompts.group * QUERIES + warp * 16;
                const int head = unit.kv_head * prompts.group + item % prompts.group;
                const u16* q = source.q + i64(segment.row + query) * source.q_token +
                               i64(head) * source.q_head;
                copy_run<D>(memory.queries(worker), warp * 16, reinterpret_cast<const u8*>(q),
                            source.q_token * 2, segment.tokens - query);
                copies.commit(memory.queries_full(worker));
            }
            queries_phase ^= 1;
        }
        if (draws) next = draw(drawn, numbers);
    }
    copies.flush();
}

// One head of 64 queries. rows of them exist; position: of the first. Takes 2 * blocks tiles.
template <int DT, int D, int CONSUMERS>
DEVICE void attend(const Memory<D, CONSUMERS> memory,
                   Place<Shape<D, CONSUMERS>::RING>& from, int worker, u16* out,
                   i64 out_token, int rows, int position, int blocks, float scale) {
    constexpr int WIDTH = D < 128 ? D : 128;  // channels of a product
    constexpr int PARTS = D / WIDTH;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const u32 queries = memory.queries(worker);
    float scores[KEYS / 2];
    float sums[PARTS][WIDTH / 2] = {};
    float top[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {};
    const int own = thread / 32 * 16 + lane / 4;  // row of this thread; the other is 8 below
    const auto next_tile = [&](u32& tile) {
        barrier_wait(memory.full(from.slot), from.phase);
        tile = memory.tile(from.slot);
        const u32 passed = memory.empty(from.slot);
        from.advance();
        return passed;
    };
    u32 keys, values;
    const auto multiply_keys = [&] {
        products_begin();
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            const u32 panel = k / 4, inside = k % 4 * 32;
            Wgmma<DT>::rows(scores, operand(queries + panel * PANEL + inside, 16),
                            operand(keys + panel * PANEL + inside, 16), k > 0);
        }
        products_commit();
    };

    u32 keys_passed = next_tile(keys);
    multiply_keys();
    products_wait<0>();
    arrive_once(keys_passed);
    if (blocks == 1) arrive_once(memory.queries_empty(worker));
    for (int block = 0; block < blocks; ++block) {
        settle(scores);
        const int first = block * KEYS;
        if (first + KEYS - 1 > position) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                const int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (key > position + own + i / 2 % 2 * 8) scores[i] = MINUS_INFINITY;
            }
        }
        float factor[2], base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = top[half];
#pragma unroll
            for (int i = 2 * half; i < KEYS / 2; i += 4)
                largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
            largest = row_max(largest);
            factor[half] = exp2_of((top[half] - largest) * scale);
            top[half] = largest;
            base[half] = largest * scale;
            total[half] = __fmul_rn(total[half], factor[half]);
        }
        u32 weights[KEYS / 16][4];
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2) {
            const int half = i / 2 % 2;
            const float low = exp2_of(fmaf(scores[i], scale, -base[half]));
            const float high = exp2_of(fmaf(scores[i + 1], scale, -base[half]));
            total[half] = __fadd_rn(total[half], __fadd_rn(low, high));
            weights[i / 8][i / 2 % 4] = pack<DT>(low, high);
        }
        // A factor of one changes nothing, and is the rule once the largest score has been seen.
        if (__any_sync(FULL_WARP, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < PARTS * WIDTH / 2; ++i)
                sums[i / (WIDTH / 2)][i % (WIDTH / 2)] *= factor[i / 2 % 2];
        }
        const u32 values_passed = next_tile(values);
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                Wgmma<DT>::values(
                    sums[part], weights[k],
                    operand(values + part * 2 * PANEL + k * 2048, PANEL));
        }
        products_commit();
        if (block + 1 < blocks) {
            keys_passed = next_tile(keys);
            multiply_keys();
            products_wait<1>();
            arrive_once(values_passed);
            products_wait<0>();
            arrive_once(keys_passed);
            if (block + 2 == blocks) arrive_once(memory.queries_empty(worker));
        } else {
            products_wait<0>();
            arrive_once(values_passed);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) settle(sums[part]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = own + 8 * half;
        const float sum = row_sum(total[half]);
        if (row >= rows) continue;
        const float inverse = __frcp_rn(sum);
        u32* target = reinterpret_cast<u32*>(out + i64(row) * out_token) + lane % 4;
#pragma unroll
        for (int i = 2 * half; i < PARTS * WIDTH / 2; i += 4) {
            const float* pair = &sums[i / (WIDTH / 2)][i % (WIDTH / 2)];
            target[i / 4 * 4] = pack<DT>(pair[0] * inverse, pair[1] * inverse);
        }
    }
}

// q, out: 16-bit values, strides in elements, rows at multiples of 16 bytes. k, v: planes
// [pages, page_tokens, kv_heads, D]. only, workspace: see `Prompts`. scale: of a score, times log2(e).
template <int DT, int D, int CONSUMERS>
__global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    attention_prefill(const Segment* segments, int only, const u32* workspace, int kv_heads,
                      int group, int page_tokens, u32 layer, u32 pool_pages, u32 window,
                      const u32* k0, const u8* k, const u8* v, const u16* q, i64 q_token,
                      i64 q_head, u16* out, i64 out_token, i64 out_head, float scale,
                      u32* drawn) {
    using S = Shape<D, CONSUMERS>;
    extern __shared__ u8 bytes[];
    const Memory<D, CONSUMERS> memory{(shared_address(bytes) + 1023) & ~1023u};
    const Prompts prompts{segments, only, workspace, kv_heads, group};
    if (threadIdx.x == 0) memory.init();
    __syncthreads();
    const int worker = int(threadIdx.x / 128) - 1;
    if (worker < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::COPY_REGISTERS));
        const Source source{q, q_token, q_head, k, v, page_tokens, layer, pool_pages, window, k0};
        copy_all<D, CONSUMERS>(memory, prompts, source, drawn);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::PRODUCT_REGISTERS));
    Place<S::RING> from(0);
    Place<Memory<D, CONSUMERS>::UNITS> unit_from(0);
    int queries_phase = 0;
    while (true) {
        barrier_wait(memory.unit_full(unit_from.slot), unit_from.phase);
        const int number = seen_unit(memory, unit_from);
        if (number < 0) break;
        Unit<CONSUMERS> unit;
        unit.find(prompts, number);
        const Segment& segment = unit.segment;
        const int last = min(unit.first_item + CONSUMERS, unit.items) - 1;
        const int blocks = blocks_of(segment, last / prompts.group);
        barrier_wait(memory.queries_full(worker), queries_phase);
        queries_phase ^= 1;
        const int item = unit.first_item + worker;
        int read = 0;
        if (item <= last) {
            const int tile = item / prompts.group, first = tile * QUERIES;
            const int head = unit.kv_head * prompts.group + item % prompts.group;
            read = blocks_of(segment, tile);
            attend<DT, D, CONSUMERS>(
                memory, from, worker,
                out + i64(segment.row + first) * out_token + i64(head) * out_head, out_token,
                segment.tokens - first, segment.start + first, read, scale);
        } else {
            arrive_once(memory.queries_empty(worker));
        }
        // The copies are for all; whoever is through hands the rest on unread.
        for (int tile = 2 * read; tile < 2 * blocks; ++tile) {
            barrier_wait(memory.full(from.slot), from.phase);
            arrive_once(memory.empty(from.slot));
            from.advance();
        }
    }
}

// Bytes of shared memory of a launch.
template <int D, int CONSUMERS>
__global__ void attention_prefill_limits(int* told) {
    *told = Shape<D, CONSUMERS>::BYTES;
}
