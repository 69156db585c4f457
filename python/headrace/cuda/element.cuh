// The 16- or 32-bit type of activations, chosen at load, and its conversions to and from fp32.
//
// ELEMENT: 0 = bf16, 1 = fp16, 2 = fp32. Every conversion rounds to nearest even, as torch does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ELEMENT
#define ELEMENT 0
#endif

#if ELEMENT == 0
using Element = __nv_bfloat16;
__device__ __forceinline__ float widen(Element x) { return __bfloat162float(x); }
__device__ __forceinline__ Element narrow(float x) { return __float2bfloat16_rn(x); }
#elif ELEMENT == 1
using Element = __half;
__device__ __forceinline__ float widen(Element x) { return __half2float(x); }
__device__ __forceinline__ Element narrow(float x) { return __float2half_rn(x); }
#else
using Element = float;
__device__ __forceinline__ float widen(Element x) { return x; }
__device__ __forceinline__ Element narrow(float x) { return x; }
#endif

// What a value is after a trip through memory: the separate torch operations round in between.
__device__ __forceinline__ float rounded(float x) { return widen(narrow(x)); }

// silu and sigmoid as torch computes them: full-precision exp, IEEE division.
__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, 1.0f + expf(-x)); }
