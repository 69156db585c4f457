// Gated delta rule over the prompts of a step, in chunks of 64 at absolute multiples of 64.
//
// With c the running sum of g in a chunk, M_ij = exp(c_i - c_j) for i >= j and A the part below the diagonal
// of (diag(beta) K K^T) . M:
// delta_chunks, grid (chunks, value heads), block 256: gates and what needs neither state nor values, T =
// (I + A)^-1 diag(beta) and P = (Q K^T) . M.
// delta_states, grid (dv / 64, value heads, segments), block 128 (dv = 32: (1, ...), block 64): the chunks of
// a segment one after the other. X = V - diag(e^c) K S^T, R = T X, O = diag(e^c) Q S^T + P R, S = e^{c_64} S +
// R^T diag(e^{c_64 - c}) K.
// A warp has 16 rows of the state, and of X, R and O transposed, in registers: the result of a product is the
// left side of the next, and only right sides come through shared memory, fetched a chunk ahead. One barrier
// a chunk.
// Sums are fp32, in an order fixed by the shape: bits depend on nothing but the chunk and the state before
// it, so that cuts at multiples of 64 are invisible. Products are made on tensor cores. bf16 elements are
// operands as they are, with norms and other factors on the result or on the other side, and fp32 values are
// the sum of two bf16 ones (three products; the fourth is below what is kept, 16 bits). Elements of fp16 and
// fp32, and what meets them, go as two tf32 numbers (21 bits). T is made in fp32 on CUDA cores.
// Bounded by the tensor cores of the SMs that have a state: 504 products a warp and chunk.
//
// Chunks of all segments are numbered one segment after the other. The two kernels take turns with passes of
// as many chunks as the scratch holds, the first of which is `first`; a state waits in its slot in between.
//
// Layouts: qkv [T, 2 Hk DK + Hv DV] (q, k, v) as the convolution leaves it (the L2 norm and the scale of q are
// taken here), with a row stride, rows at multiples of 16 bytes; b, a [T, Hv] with one row stride; a_log,
// dt_bias fp32 [Hv]. state fp32 [slots, Hv, DV, DK], not read for a segment that starts at 0; out fp32 [T, Hv,
// DV]. Only rows and slots of segments are touched. group: value heads of a key head.
// Scratch of a chunk and head, in the order of lanes: T and P, blocks on and below the diagonal; `Factors`.
//
// -D at load: ELEMENT (0 bf16, 1 fp16, 2 fp32), DK, DV (32, 64 or 128).
#include "delta_gates.cuh"
#include "delta_operands.cuh"
#include "segments.cuh"

#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSide = kChunk / kBlock;           // blocks of a chunk
constexpr int kLower = kSide * (kSide + 1) / 2;  // those on and below the diagonal
constexpr int kSquarePitch = kChunk + 4;
constexpr float kL2Eps = 1e-6f;  // part of the model
static_assert(DK % 32 == 0 && DV % 32 == 0, "a row is a whole number of blocks");

struct Span {
    int first, count;
};

__device__ __forceinline__ int chunks_of(const Segment& segment) {
    return segment.tokens ? (segment.start % kChunk + segment.tokens + kChunk - 1) / kChunk : 0;
}

// Tokens of a chunk: the first ends at the next absolute multiple of 64.
__device__ __forceinline__ Span span_of(int chunk, int start, int tokens) {
    const int head = kChunk - start % kChunk;
    const int first = chunk == 0 ? 0 : head + (chunk - 1) * kChunk;
    return {first, min(tokens, head + chunk * kChunk) - first};
}

// ---- the chunks ----------------------------------------------------------------------------------

// Blocks on and below the diagonal are numbered row by row.
struct Place {
    int row, column;
};

__device__ __forceinline__ Place place_of(int block) {
    const int row = (block >= 1) + (block >= 3) + (block >= 6);
    return {row, block - row * (row + 1) / 2};
}

__device__ __forceinline__ constexpr int number_of(int row, int column) {
    return row * (row + 1) / 2 + column;
}

// The sum of g up to a token. Rounded to fp32 it would show in the decay between two tokens: the sums are
// large and differ by little.
struct Decay {
    float sum, rest;

    __device__ __forceinline__ float since(const Decay& other) const {
        return expf((sum - other.sum) + (rest - other.rest));
    }
    __device__ __forceinline__ float whole() const { return expf(sum); }
};

// By one warp, two tokens a lane.
__device__ __forceinline__ void sum_up(Decay* to, const float* from) {
    const int lane = lane_id();
    const float2 own = pair_at(from + 2 * lane);
    double sum = static_cast<double>(own.x) + own.y;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
    }
    const double sums[2] = {sum - own.y, sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float rounded_sum = static_cast<float>(sums[i]);
        to[2 * lane + i] = {rounded_sum, static_cast<float>(sums[i] - rounded_sum)};
    }
}

// 1 / |row| for 64 rows, four threads a row.
__device__ __forceinline__ void norms_of(float* to, const Rows<DK>& rows) {
    const int row = threadIdx.x / 4, part = threadIdx.x % 4;
    float squares = 0.0f;
#pragma unroll
    for (int i = part; i < DK / 8; i += 4) squares += rows.squares(row, i);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    if (part == 0) to[row] = rsqrtf(squares + kL2Eps);
}

// Turns two inverses of `Size` rows on the diagonal into one of twice the size, for each such pair of the
// chunk: the block below is -T_11 A_10 T_00. `between` has room for those of all pairs.
template <int Size>
__device__ __forceinline__ void join(float* square, float* between) {
    constexpr int kEach = Size * Size / 4;  // threads of a pair, four neighbours each
    const int pair = threadIdx.x / kEach, row = threadIdx.x % kEach / (Size / 4);
    const int column = threadIdx.x % (Size / 4) * 4;
    const bool active = threadIdx.x < kChunk / (2 * Size) * kEach;
    const float* upper = square + pair * 2 * Size * (kSquarePitch + 1);
    const float* lower = upper + Size * (kSquarePitch + 1);
    float* below = square + pair * 2 * Size * (kSquarePitch + 1) + Size * kSquarePitch;
    between += pair * Size * Size;
    const auto dot = [&](const float* left, const float* right, int pitch, int first, int last) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int k = first; k < last; k += 4) {
            const float4 a = vector_at(left + row * kSquarePitch + k);
            const float factors[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 b = vector_at(right + (k + i) * pitch + column);
                sum.x = fmaf(factors[i], b.x, sum.x);
                sum.y = fmaf(factors[i], b.y, sum.y);
                sum.z = fmaf(factors[i], b.z, sum.z);
                sum.w = fmaf(factors[i], b.w, sum.w);
            }
        }
        return sum;
    };
    // Blocks above the diagonal are nowhere written, and not read.
    if (active)
        *reinterpret_cast<float4*>(between + row * Size + column) =
            dot(below, upper, kSquarePitch, column / kBlock * kBlock, Size);
    __syncthreads();
    if (active) {
        const float4 sum = dot(lower, between, Size, 0, (row / kBlock + 1) * kBlock);
        *reinterpret_cast<float4*>(below + row * kSquarePitch + column) =
            make_float4(-sum.x, -sum.y, -sum.z, -sum.w);
    }
    __syncthreads();
}

// Puts (I + A)^-1 in the place of A, whose blocks on the diagonal have zeros from the diagonal on:
// substitution in those, one column a thread, then what is below them.
__device__ __forceinline__ void invert(float* square, float* between) {
    if (threadIdx.x < kChunk) {
        const int column = threadIdx.x % kBlock;
        float* block = square + threadIdx.x / kBlock * kBlock * (kSquarePitch + 1);
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < kBlock - 1; ++j)
#pragma unroll
            for (int i = j + 1; i < kBlock; ++i)
                x[i] = fmaf(-block[i * kSquarePitch + j], x[j], x[i]);
        __syncwarp();  // which has read its two blocks
#pragma unroll
        for (int i = 0; i < kBlock; ++i) block[i * kSquarePitch + column] = x[i];
    }
    __syncthreads();
    join<kBlock>(square, between);
    join<2 * kBlock>(square, between);
}

// Factors of a chunk: of q, of k against the state and of k on its way into it, with their norms.
struct alignas(16) Factors {
    float q[kChunk], k_read[kChunk], k_write[kChunk];
    float decay;  // of the state
};

// What the first kernel leaves of a chunk and head.
struct Scratch {
    uint4 t[kLower * kVectorsOf<Split>], p[kLower * kVectorsOf<Split>];
    Factors factors;
};

}  // namespace

// Dynamic shared memory: q, later scratch of `invert`, k, [64, 68] floats; see `DeltaPrefill`.
extern "C" __global__ void __launch_bounds__(kThreads, ELEMENT == 0 ? 4 : 2)
    delta_chunks(const Element* qkv, long long stride, const Element* b, const Element* a,
                 long long gate_stride, const float* a_log, const float* dt_bias, Scratch* scratch,
                 const Segment* segments, int first, int group) {
    extern __shared__ uint4 dynamic[];
    const Rows<DK> q_of(dynamic), k_of(dynamic + Rows<DK>::kVectorCount);
    float* square = reinterpret_cast<float*>(dynamic + 2 * Rows<DK>::kVectorCount);
    alignas(8) __shared__ float g_of[kChunk], beta_of[kChunk];
    __shared__ float q_norm[kChunk], k_norm[kChunk];
    __shared__ Decay c_of[kChunk];
    const Part chunk = find_part(segments, first + blockIdx.x, chunks_of);
    if (chunk.segment < 0) return;
    const int head = blockIdx.y, heads = gridDim.y;
    const int t = threadIdx.x, lane = lane_id(), warp = warp_id();
    const int row_of_lane = lane >> 2, pair_of_lane = 2 * (lane & 3);
    const Segment segment = segments[chunk.segment];
    const Span span = span_of(chunk.index, segment.start, segment.tokens);
    const long long row = segment.row + span.first;
    scratch += static_cast<long long>(blockIdx.x) * heads + head;

    const Element* q = Rows<DK>::own_of(qkv + row * stride + head / group * DK, stride);
    const Element* k = q + heads / group * DK;
#pragma unroll
    for (int n = 0; n < Rows<DK>::kLoads<kThreads>; ++n) {
        q_of.load<kThreads>(n, q, stride, span.count);
        k_of.load<kThreads>(n, k, stride, span.count);
    }
    if (t < kChunk) {
        const bool live = t < span.count;
        const long long gate = (row + t) * gate_stride + head;
        g_of[t] = live ? log_decay(widen(a[gate]), a_log[head], dt_bias[head]) : 0.0f;
        beta_of[t] = live ? sigmoid(widen(b[gate])) : 0.0f;
    }
    copies_done();
    __syncthreads();
    norms_of(q_norm, q_of);
    norms_of(k_norm, k_of);
    if (warp == 0) sum_up(c_of, g_of);
    __syncthreads();
    if (t < kChunk) {
        Factors& factors = scratch->factors;
        const float scaled = q_norm[t] * rsqrtf(static_cast<float>(DK));
        q_norm[t] = scaled;
        factors.q[t] = scaled * c_of[t].whole();
        factors.k_read[t] = k_norm[t] * c_of[t].whole();
        factors.k_write[t] = k_norm[t] * c_of[kChunk - 1].since(c_of[t]);
        if (t == 0) factors.decay = c_of[kChunk - 1].whole();
    }
    __syncthreads();

    // A and P, a block at a time.
    for (int e = warp; e < 2 * kLower; e += kWarps) {
        const bool of_k = e < kLower;
        const int block = of_k ? e : e - kLower;
        const Place at = place_of(block);
        const Rows<DK> left = of_k ? k_of : q_of;
        Sum sum = {};
#pragma unroll
        for (int i = 0; i < DK; i += kBlock)
            multiply(sum, left.rows_of(at.row * kBlock, i), k_of.rows_of(at.column * kBlock, i));
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int i = at.row * kBlock + part / 2 * 8 + row_of_lane;
            const int j = at.column * kBlock + part % 2 * 8 + pair_of_lane;
            float4& half = sum.half[part % 2];
            float& x = part < 2 ? half.x : half.z;
            float& y = part < 2 ? half.y : half.w;
            const float row_factor = of_k ? beta_of[i] * k_norm[i] : q_norm[i];
            const Decay c = c_of[i];
            // Not computed above the diagonal, where the exponent may be positive.
            x = i - j >= of_k ? x * row_factor * k_norm[j] * c.since(c_of[j]) : 0.0f;
            y = i - j - 1 >= of_k ? y * row_factor * k_norm[j + 1] * c.since(c_of[j + 1]) : 0.0f;
            if (of_k) *reinterpret_cast<float2*>(square + i * kSquarePitch + j) = make_float2(x, y);
        }
        if (!of_k) store(scratch->p + block * kVectorsOf<Split>, split(sum));
    }
    __syncthreads();

    invert(square, reinterpret_cast<float*>(dynamic));
    for (int block = warp; block < kLower; block += kWarps) {
        const Place at = place_of(block);
        const int row = at.row * kBlock + row_of_lane, column = at.column * kBlock + pair_of_lane;
        const float* top = square + row * kSquarePitch + column;
        Sum sum;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const float2 high = pair_at(top + 8 * part), f = pair_at(beta_of + column + 8 * part);
            const float2 low = pair_at(top + 8 * kSquarePitch + 8 * part);
            sum.half[part] = make_float4(high.x * f.x, high.y * f.y, low.x * f.x, low.y * f.y);
        }
        store(scratch->t + block * kVectorsOf<Split>, split(sum));
    }
}

// ---- the state -----------------------------------------------------------------------------------

namespace {

constexpr int kSlice = DV < 64 ? DV : 64;  // rows of the state in one CTA, 16 a warp
constexpr int kStateThreads = 2 * kSlice;
constexpr int kDepth = DK / kBlock;
constexpr int kStages = 2;  // chunks in shared memory
constexpr int kScratchVectors = sizeof(Scratch) / 16;

// Chunks of the segments ahead of one. By all lanes of a warp.
__device__ __forceinline__ int chunks_before(const Segment* segments, int index) {
    const int lane = lane_id();
    return __reduce_add_sync(0xffffffffu, lane < index ? chunks_of(segments[lane]) : 0);
}

// The same segment in registers that a warp has once, which leaves the others for the state.
__device__ __forceinline__ Segment uniform(Segment segment) {
    const auto once = [](int& field) { field = __reduce_max_sync(0xffffffffu, field); };
    once(segment.start);
    once(segment.tokens);
    once(segment.row);
    once(segment.slot);
    return segment;
}

// A chunk in shared memory.
struct Stage {
    const Scratch* scratch;
    Rows<DK> q, k;
    Rows<kSlice> v;

    static constexpr int kVectorCount =
        kScratchVectors + 2 * Rows<DK>::kVectorCount + Rows<kSlice>::kVectorCount;

    __device__ __forceinline__ explicit Stage(uint4* at)
        : scratch(reinterpret_cast<const Scratch*>(at)),
          q(at + kScratchVectors),
          k(at + kScratchVectors + Rows<DK>::kVectorCount),
          v(at + kScratchVectors + 2 * Rows<DK>::kVectorCount) {}
};

// Times a factor for each column.
__device__ __forceinline__ Sum scaled(const Sum& x, const float* factors) {
    Sum s;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const float2 f = pair_at(factors + part * 8 + 2 * (lane_id() & 3));
        const float4 half = x.half[part];
        s.half[part] = make_float4(half.x * f.x, half.y * f.y, half.z * f.x, half.w * f.y);
    }
    return s;
}

__device__ __forceinline__ Sum minus(const Sum& x, const Sum& y) {
    Sum s;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const float4 a = x.half[part], b = y.half[part];
        s.half[part] = make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
    }
    return s;
}

}  // namespace

// Dynamic shared memory: kStages stages. most: chunks of a pass.
extern "C" __global__ void __launch_bounds__(kStateThreads, 1)
    delta_states(const Element* qkv, long long stride, const Scratch* scratch, float* state,
                 float* out, const Segment* segments, int first, int most, int group) {
    extern __shared__ uint4 dynamic[];
    const Segment segment = uniform(segments[blockIdx.z]);
    // Chunks of this pass, counted within the segment.
    const int begin = first - chunks_before(segments, blockIdx.z), skipped = max(begin, 0);
    const int chunks = min(begin + most, chunks_of(segment)) - skipped;
    if (chunks <= 0) return;
    const int done = skipped ? span_of(skipped, segment.start, segment.tokens).first : 0;
    const int start = skipped ? 0 : segment.start % kChunk, tokens = segment.tokens - done;
    const bool initial = segment.start + done > 0;
    const int slice = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int row = slice * kSlice + warp_id() * kBlock + (lane_id() >> 2);
    const int pair = 2 * (lane_id() & 3);
    const long long first_row = segment.row + done;
    const Element* of_step = qkv + first_row * stride;
    const Element* q = Rows<DK>::own_of(of_step + head / group * DK, stride);
    const Element* k = q + heads / group * DK;
    const Element* v = Rows<kSlice>::own_of(
        of_step + 2 * (heads / group) * DK + head * DV + slice * kSlice, stride);
    scratch += static_cast<long long>(skipped - begin) * heads + head;
    state += static_cast<long long>(segment.slot) * heads * DV * DK;
    out += first_row * heads * DV;

    // Starts the n-th of so many parts of the copies of a chunk.
    const auto fetch_keys = [&](uint4* to, int chunk, int n, int parts) {
        const Stage stage(to);
        const Span span = span_of(chunk, start, tokens);
        const long long rows = span.first * stride;
#pragma unroll
        for (int i = n; i < Rows<DK>::kLoads<kStateThreads>; i += parts) {
            stage.q.load<kStateThreads>(i, q + rows, stride, span.count);
            stage.k.load<kStateThreads>(i, k + rows, stride, span.count);
        }
    };
    const auto fetch_others = [&](uint4* to, int chunk, int n, int parts) {
        const Stage stage(to);
        const Span span = span_of(chunk, start, tokens);
#pragma unroll
        for (int i = n; i < Rows<kSlice>::kLoads<kStateThreads>; i += parts)
            stage.v.load<kStateThreads>(i, v + span.first * stride, stride, span.count);
        const auto* from =
            reinterpret_cast<const uint4*>(scratch + static_cast<long long>(chunk) * heads);
#pragma unroll
        for (int i = n * kStateThreads; i < kScratchVectors; i += parts * kStateThreads) {
            const int vector = min(i + static_cast<int>(threadIdx.x), kScratchVectors - 1);
            copy_vector(to + vector, from + vector, true);
        }
    };
    fetch_keys(dynamic, 0, 0, 1);
    fetch_others(dynamic, 0, 0, 1);

    Sum s[kDepth];
    float* own_state = state + (static_cast<long long>(head) * DV + row) * DK + pair;
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const float* at = own_state + i * kBlock + part * 8;
            const float2 top = initial ? pair_at(at) : make_float2(0.0f, 0.0f);
            const float2 low = initial ? pair_at(at + 8 * DK) : make_float2(0.0f, 0.0f);
            s[i].half[part] = make_float4(top.x, top.y, low.x, low.y);
        }

#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        copies_done();
        __syncthreads();  // all copies of this chunk are there, and nobody needs the one before it
        // Fetched a little after each product, whose issue leaves room for it; at the end something again.
        uint4* const ahead = dynamic + (chunk + 1) % kStages * Stage::kVectorCount;
        const int next = min(chunk + 1, chunks - 1);
        const Stage stage(dynamic + chunk % kStages * Stage::kVectorCount);
        const Factors& factors = stage.scratch->factors;

        // S K^T and S Q^T
        Sum x[kSide] = {}, o[kSide] = {};
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            const Split left = split(s[i]);
            Exact keys[kSide], queries[kSide];
#pragma unroll
            for (int n = 0; n < kSide; ++n) keys[n] = stage.k.rows_of(n * kBlock, i * kBlock);
            multiply(x, left, keys);
            fetch_keys(ahead, next, i, kDepth);
#pragma unroll
            for (int n = 0; n < kSide; ++n) queries[n] = stage.q.rows_of(n * kBlock, i * kBlock);
            multiply(o, left, queries);
        }

        // X^T = V^T - S K^T diag(e^c) and R^T = X^T T^T
        Sum r[kSide] = {};
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
            const Sum values = sum_of(stage.v.columns_of(j * kBlock, warp_id() * kBlock));
            const Split left = split(minus(values, scaled(x[j], factors.k_read + j * kBlock)));
            Split t[kSide];
#pragma unroll
            for (int i = j; i < kSide; ++i)
                t[i] = load<Split>(stage.scratch->t + number_of(i, j) * kVectorsOf<Split>);
            fetch_others(ahead, next, j, kSide);
            multiply(r, left, t, j);
        }

        // O^T = S Q^T diag(e^c) + R^T P^T and S = e^{c_64} S + R^T diag(e^{c_64 - c}) K
        const float decay = factors.decay;
#pragma unroll
        for (int n = 0; n < kSide; ++n) o[n] = scaled(o[n], factors.q + n * kBlock);
#pragma unroll
        for (int i = 0; i < kDepth; ++i)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                float4& half = s[i].half[part];
                half = make_float4(half.x * decay, half.y * decay, half.z * decay, half.w * decay);
            }
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
            Split p[kSide];
#pragma unroll
            for (int i = j; i < kSide; ++i)
                p[i] = load<Split>(stage.scratch->p + number_of(i, j) * kVectorsOf<Split>);
            multiply(o, split(r[j]), p, j);
            Exact keys[kDepth];
#pragma unroll
            for (int i = 0; i < kDepth; ++i)
                keys[i] = stage.k.columns_of(j * kBlock, i * kBlock);
            multiply(s, split(scaled(r[j], factors.k_write + j * kBlock)), keys);
        }

        const Span span = span_of(chunk, start, tokens);
        float* to = out + (static_cast<long long>(span.first) * heads + head) * DV + row;
#pragma unroll
        for (int n = 0; n < kSide; ++n)
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const float4 half = o[n].half[part];
                const int token = n * kBlock + part * 8 + pair;
                float* at = to + static_cast<long long>(token) * heads * DV;
                if (token < span.count) at[0] = half.x, at[8] = half.z;
                at += heads * DV;
                if (token + 1 < span.count) at[0] = half.y, at[8] = half.w;
            }
    }
    copies_done();
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            float* at = own_state + i * kBlock + part * 8;
            const float4 half = s[i].half[part];
            *reinterpret_cast<float2*>(at) = make_float2(half.x, half.y);
            *reinterpret_cast<float2*>(at + 8 * DK) = make_float2(half.z, half.w);
        }
}
