// The decay of the gated delta rule as torch computes it: full-precision functions in fp32.
#pragma once

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float log_decay(float a, float a_log, float dt_bias) {
    return -expf(a_log) * softplus(a + dt_bias);
}
