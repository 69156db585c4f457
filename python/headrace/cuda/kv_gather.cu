// Gather: K and V of a run of tokens of one request, dequantised into a contiguous workspace for
// attention of prompts.
//
// Grid: any; block: 128, one warp four consecutive tokens of one (head, K or V) at a time. No shared
// memory. Bounded by bytes: reads the stored row, writes D elements. Values are `f32(code) *
// f32(scale)`, exact; with `restore` the rotation is undone in fp32; one rounding to the dtype of
// the workspace.
#include "kv_common.cuh"
#include "segments.cuh"

constexpr int WARPS = 4;
constexpr int RUN = 4;

template <int DT, int FMT, int D>
DEVICE void decode(float (&x)[D / 32], const u8* codes, const u16* scales, bool is_v, int lane) {
    constexpr int W = D / 32;
    if constexpr (FMT == PLAIN) {
        load_lane<DT>(x, codes, lane);
        return;
    }
    float scale = half_to_float(scales[FMT == FP8_B64 ? lane * W / 64 : 0]);
    if constexpr (FMT == K8V4) {
        if (is_v) {
            u32 packed = 0;
            if constexpr (W == 8) packed = reinterpret_cast<const u32*>(codes)[lane];
            if constexpr (W == 4) packed = reinterpret_cast<const u16*>(codes)[lane];
            if constexpr (W == 2) packed = codes[lane];
#pragma unroll
            for (int r = 0; r < W; ++r) x[r] = level_of(packed >> (4 * r) & 15u) * scale;
            return;
        }
    }
    struct alignas(W) Piece { u8 v[W]; };
    Piece piece = reinterpret_cast<const Piece*>(codes)[lane];
#pragma unroll
    for (int r = 0; r < W; r += 2) {
        if constexpr (FMT == FP8 || FMT == FP8_B64) {
            u32 pair = e4m3x2_to_half2(u16(piece.v[r] | piece.v[r + 1] << 8));
            x[r] = half_to_float(u16(pair)) * scale;
            x[r + 1] = half_to_float(u16(pair >> 16)) * scale;
        } else {
            x[r] = float(static_cast<signed char>(piece.v[r])) * scale;
            x[r + 1] = float(static_cast<signed char>(piece.v[r + 1])) * scale;
        }
    }
}

// Tokens first..first+tokens-1 of the row of `table` [max_pages]; with a `segment`, whose table it is then,
// all of its request up to its end. k_out, v_out: dtype OUT, element (token, head, d) at token * out_token +
// head * out_head + d. k0: see `Pages`, null without LOW.
template <int DT, int FMT, int D, int OUT>
__global__ void __launch_bounds__(32 * WARPS)
    kv_gather(const Segment* segment, const u32* table, int max_pages, int page_tokens, u32 layer,
              u32 pool_pages, u32 window, const u32* k0, int first, int tokens, int kv_heads,
              const u8* k_codes, const u16* k_scales, const u8* v_codes, const u16* v_scales,
              void* k_out, void* v_out, i64 out_token, i64 out_head, int restore) {
    constexpr int W = D / 32;
    int lane = threadIdx.x % 32;
    if (segment) {
        table = segment->table, max_pages = segment->pages;
        tokens = segment->tokens ? segment->start + segment->tokens : 0;
    }
    const Pages pages = pages_of(table, max_pages, page_tokens, layer, pool_pages, window, k0);
    const i64 works = i64((tokens + RUN - 1) / RUN) * kv_heads * 2;
    for (i64 index = i64(blockIdx.x) * WARPS + threadIdx.x / 32; index < works;
         index += i64(gridDim.x) * WARPS) {
        // Heads next to each other: their rows are, too.
        int head = int(index % kv_heads);
        bool is_v = index / kv_heads % 2;
        int start = int(index / kv_heads / 2) * RUN;
        // A run that ends early repeats its last token, and does not store it again.
        float x[RUN][W];
#pragma unroll
        for (int t = 0; t < RUN; ++t) {
            int token = first + min(start + t, tokens - 1);
            i64 row = pages.flat_token(pages.entry(0, token), token) * kv_heads + head;
            const u8* codes = is_v ? v_codes + row * v_row_bytes(FMT, DT, D)
                                   : k_codes + row * k_row_bytes(FMT, DT, D);
            const u16* scales = (is_v ? v_scales : k_scales) + row * scale_blocks(FMT, D);
            decode<DT, FMT, D>(x[t], codes, scales, is_v, lane);
        }
        if constexpr (FMT == INT8 || FMT == K8V4) {
            if (restore) unrotate<D>(x, lane);
        }
#pragma unroll
        for (int t = 0; t < RUN; ++t) {
            if (start + t >= tokens) break;
            i64 target = i64(start + t) * out_token + head * out_head;
            u8* out = static_cast<u8*>(is_v ? v_out : k_out) + target * itemsize(OUT);
            store_lane<OUT>(x[t], out, lane);
        }
    }
}
