// Prompts of a step: `Segment` describes the new tokens of one request. 32 stand together in memory that the
// host wrote before the step (`DeviceSegments`), so that a captured graph serves any prompts that fit.
#pragma once

// Tokens start..start+tokens-1 of a request are rows row..row+tokens-1 of the step. table: its pages; slot:
// of its state. One without tokens is none.
struct Segment {
    const unsigned* table;
    int pages, start, tokens, row, slot, padding;
};

constexpr int kMostSegments = 32;

// segment: -1 if there are no more than `all` parts.
struct Part {
    int segment, index, all;
};

// The n-th of all parts, where a segment has parts_of(segment) and those of one stand together. By all lanes
// of a warp, with the same result.
template <class PartsOf>
__device__ __forceinline__ Part find_part(const Segment* segments, int n, const PartsOf& parts_of) {
    const int lane = threadIdx.x % 32;
    const int own = parts_of(segments[lane]);
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
    }
    const unsigned later = __ballot_sync(0xffffffffu, end > n);
    const int found = later ? __ffs(later) - 1 : kMostSegments - 1;
    const int first = __shfl_sync(0xffffffffu, end - own, found);
    return {later ? found : -1, n - first, __shfl_sync(0xffffffffu, end, 31)};
}
