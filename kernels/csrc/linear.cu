// What a product with one dense W_hat needs around it. One warp a (row, block of 128).
#include <cuda_runtime.h>

#include "experts.h"
#include "rotate.cuh"

namespace exl3 {

constexpr int kLinearWarps = 4;

__global__ void rotate_in(const void* x, const __half* suh, __half* out, int k, int dtype) {
    const int block = blockIdx.y * kLinearWarps + (threadIdx.x >> 5);
    if (block >= k / 128) return;
    const int at = 128 * block + 4 * (threadIdx.x & 31);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * k;
    float v[4], s[4];
    load4(x, row + at, dtype, v);
    load4(suh + at, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= s[i] * kInverseSqrt128;
    hadamard(v);
    *reinterpret_cast<uint2*>(out + row + at) = {pack(v[0], v[1]), pack(v[2], v[3])};
}

struct Columns {
    int n, skip, columns, stride;
};

__global__ void rotate_out(const float* y, const __half* svh, void* out, Columns c, int dtype) {
    const int block = blockIdx.y * kLinearWarps + (threadIdx.x >> 5);
    if (block >= c.n / 128) return;
    const int64_t row = blockIdx.x;
    float v[4];
    load4(y, row * c.n + 128 * block + 4 * (threadIdx.x & 31), EXPERTS_FLOAT32, v);
    store_columns(v, svh, block, out, row * c.stride, c.skip, c.columns, dtype);
}

dim3 linear_grid(int rows, int size) { return dim3(rows, (size / 128 + kLinearWarps - 1) / kLinearWarps); }

}  // namespace exl3

extern "C" int experts_rotate_in(
    const void* x, const void* suh, void* out, int rows, int k, int dtype, void* stream) {
    if (rows < 1 || k < 1 || k % 128) return cudaErrorInvalidValue;
    exl3::rotate_in<<<exl3::linear_grid(rows, k), 32 * exl3::kLinearWarps, 0, static_cast<cudaStream_t>(stream)>>>(
        x, static_cast<const __half*>(suh), static_cast<__half*>(out), k, dtype);
    return cudaGetLastError();
}

extern "C" int experts_rotate_out(
    const float* y, const void* svh, void* out, int rows, int n, int skip, int columns, int stride, int dtype,
    void* stream) {
    if (rows < 1 || n < 1 || n % 128 || skip < 0 || columns < 1 || skip + columns > n || stride < columns)
        return cudaErrorInvalidValue;
    exl3::rotate_out<<<exl3::linear_grid(rows, n), 32 * exl3::kLinearWarps, 0, static_cast<cudaStream_t>(stream)>>>(
        y, static_cast<const __half*>(svh), out, {n, skip, columns, stride}, dtype);
    return cudaGetLastError();
}
