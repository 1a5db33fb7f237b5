// A trellis to fp16 W_hat [k][n], for products too large to decode as they go. One warp a tile.
#include <cuda_runtime.h>

#include "exl3_tile.cuh"

namespace exl3 {

constexpr int kTilesABlock = 8;  // neighbours along n: 256 bytes of each of 16 rows

template <int BITS8, int CODEBOOK>
__global__ void __launch_bounds__(32 * kTilesABlock) to_dense(const uint32_t* trellis, __half* out, int n) {
    __shared__ __align__(16) uint32_t words[kTilesABlock * BITS8];
    __shared__ __align__(16) __half dense[16][16 * kTilesABlock + 8];
    const int lane_index = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * (n / 16) + kTilesABlock * blockIdx.x;
    const auto* from = reinterpret_cast<const uint4*>(trellis + first * BITS8);
    for (int i = threadIdx.x; i < kTilesABlock * BITS8 / 4; i += 32 * kTilesABlock)
        reinterpret_cast<uint4*>(words)[i] = from[i];
    __syncthreads();
    uint32_t a[4];
    fragment<BITS8, CODEBOOK>(words + warp * BITS8, Lane<BITS8>(lane_index), a);
    // A = tile^T: a[0] is column lane>>2, rows 2*(lane&3) and the next; a[1] column + 8; a[2], a[3] row + 8.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 2 * (lane_index & 3) + 8 * (i >> 1);
        const int column = 16 * warp + (lane_index >> 2) + 8 * (i & 1);
        dense[row][column] = __ushort_as_half(static_cast<uint16_t>(a[i] & 0xFFFFu));
        dense[row + 1][column] = __ushort_as_half(static_cast<uint16_t>(a[i] >> 16));
    }
    __syncthreads();
    const int row = threadIdx.x >> 4, chunk = threadIdx.x & 15;
    __half* to = out + (static_cast<int64_t>(blockIdx.y) * 16 + row) * n + 16 * kTilesABlock * blockIdx.x;
    reinterpret_cast<uint4*>(to)[chunk] = *reinterpret_cast<const uint4*>(&dense[row][8 * chunk]);
}

template <int CODEBOOK>
int launch_dense(const void* trellis, void* out, int k, int n, int bits8, cudaStream_t stream) {
    const dim3 grid(n / (16 * kTilesABlock), k / 16);
    const auto* words = static_cast<const uint32_t*>(trellis);
    auto* dense = static_cast<__half*>(out);
    switch (bits8) {
#define EXL3_CASE(B) \
    case B: to_dense<B, CODEBOOK><<<grid, 32 * kTilesABlock, 0, stream>>>(words, dense, n); break;
        EXL3_CASE(8) EXL3_CASE(16) EXL3_CASE(24) EXL3_CASE(32)
        EXL3_CASE(40) EXL3_CASE(48) EXL3_CASE(56) EXL3_CASE(64)
        EXL3_CASE(12) EXL3_CASE(20) EXL3_CASE(28)
#undef EXL3_CASE
        default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

}  // namespace exl3

int reconstruct(const void* trellis, void* out, int k, int n, int bits8, int codebook, cudaStream_t stream) {
    if (k % 128 || n % 128 || k < 1 || n < 1) return cudaErrorInvalidValue;
    switch (codebook) {
        case exl3::kThreeInst: return exl3::launch_dense<exl3::kThreeInst>(trellis, out, k, n, bits8, stream);
        case exl3::kMcg: return exl3::launch_dense<exl3::kMcg>(trellis, out, k, n, bits8, stream);
        case exl3::kMul1: return exl3::launch_dense<exl3::kMul1>(trellis, out, k, n, bits8, stream);
        default: return cudaErrorInvalidValue;
    }
}
