// The Hadamard-128 rotation, one warp a block of 128: lane i holds elements 4*i .. 4*i+3.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "experts.h"

namespace exl3 {

constexpr float kInverseSqrt128 = 0.08838834764831845f;

// Sylvester order, signs only: unnormalised.
__device__ __forceinline__ void hadamard(float (&v)[4]) {
    const int lane = threadIdx.x & 31;
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int mask = 1; mask < 32; mask <<= 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], mask);
            v[i] = (lane & mask) ? other - v[i] : v[i] + other;
        }
    }
}

__device__ __forceinline__ float2 unpack(uint32_t two) {
    return __half22float2(reinterpret_cast<const __half2&>(two));
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
    const __half2 two = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(two);
}

__device__ __forceinline__ void unpack4(uint2 bits, float (&v)[4]) {
    const float2 a = unpack(bits.x), b = unpack(bits.y);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}

// Four consecutive halves, 8-byte aligned.
__device__ __forceinline__ void load4(const __half* from, float (&v)[4]) {
    unpack4(*reinterpret_cast<const uint2*>(from), v);
}

__device__ __forceinline__ void load4(const void* base, int64_t at, int dtype, float (&v)[4]) {
    if (dtype == EXPERTS_FLOAT32) {
        const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(base) + at);
        v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
    } else if (dtype == EXPERTS_FLOAT16) {
        load4(static_cast<const __half*>(base) + at, v);
    } else {
        const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(base) + at);
        v[0] = __uint_as_float(bits.x << 16), v[1] = __uint_as_float(bits.x & 0xFFFF0000u);
        v[2] = __uint_as_float(bits.y << 16), v[3] = __uint_as_float(bits.y & 0xFFFF0000u);
    }
}

__device__ __forceinline__ void store4(void* base, int64_t at, int dtype, const float (&v)[4]) {
    if (dtype == EXPERTS_FLOAT32) {
        *reinterpret_cast<float4*>(static_cast<float*>(base) + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (dtype == EXPERTS_FLOAT16) {
        uint2 bits = {pack(v[0], v[1]), pack(v[2], v[3])};
        *reinterpret_cast<uint2*>(static_cast<__half*>(base) + at) = bits;
    } else {
        const __nv_bfloat162 a = __floats2bfloat162_rn(v[0], v[1]), b = __floats2bfloat162_rn(v[2], v[3]);
        uint2 bits = {reinterpret_cast<const uint32_t&>(a), reinterpret_cast<const uint32_t&>(b)};
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(base) + at) = bits;
    }
}

__device__ __forceinline__ void store1(void* base, int64_t at, int dtype, float v) {
    if (dtype == EXPERTS_FLOAT32) {
        static_cast<float*>(base)[at] = v;
    } else if (dtype == EXPERTS_FLOAT16) {
        static_cast<__half*>(base)[at] = __float2half_rn(v);
    } else {
        static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(v);
    }
}

// 128 outputs of one row, still rotated, block `block` of a matrix: of its columns those from `skip` go
// to out[at], out[at + 1], .. Not four at once: a shard of a vocabulary may start anywhere.
__device__ __forceinline__ void store_columns(
    float (&v)[4], const __half* svh, int block, void* out, int64_t at, int skip, int columns, int dtype) {
    const int first = 128 * block + 4 * (threadIdx.x & 31);
    float s[4];
    load4(svh + first, s);
    hadamard(v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int column = first + i - skip;
        if (column >= 0 && column < columns) store1(out, at + column, dtype, v[i] * s[i] * kInverseSqrt128);
    }
}

// A row's 128 values as the main kernel reads them: within each 16 the order of mma.m16n8k16's B
// operand (lane q of four owns k = 2q, 2q+1, 2q+8, 2q+9), so a fragment is one 8-byte read.
__device__ __forceinline__ void store_fragments(__half* row, int block, const float (&v)[4]) {
    const int k = 4 * (threadIdx.x & 31);
    const int inner = k & 15;
    __half* tile = row + 128 * block + (k & ~15);
    const int at = 4 * ((inner & 7) >> 1) + 2 * (inner >> 3);
    *reinterpret_cast<uint32_t*>(tile + at) = pack(v[0], v[1]);
    *reinterpret_cast<uint32_t*>(tile + at + 4) = pack(v[2], v[3]);
}

// gate and up, still rotated, with their svh and down's suh -> s: down's inputs, rotated.
__device__ __forceinline__ void swiglu(
    float (&gate)[4], float (&up)[4], const float (&gate_svh)[4], const float (&up_svh)[4], float (&s)[4],
    float limit) {
    hadamard(gate);
    hadamard(up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float g = gate_svh[i] * gate[i] * kInverseSqrt128;
        float u = up_svh[i] * up[i] * kInverseSqrt128;
        if (limit > 0.0f) {
            // Comparisons, not fminf: NaN must stay NaN.
            if (g > limit) g = limit;
            if (fabsf(u) > limit) u = copysignf(limit, u);
        }
        s[i] *= g / (1.0f + expf(-g)) * u * kInverseSqrt128;
    }
    hadamard(s);
}

}  // namespace exl3
