// A trellis to fp16 W_hat [k][n], for products too large to decode as they go. One warp a tile.
#include <cuda_runtime.h>

#include "exl3_tile.cuh"

namespace exl3 {

constexpr int kTilesABlock = 8;  // neighbours along n: 256 bytes of each of 16 rows
constexpr int kDeep = 4;  // rows of tiles a block: a warp has as many reads under way (k/16 is a multiple of 8)

template <int BITS8, int CODEBOOK>
__global__ void __launch_bounds__(32 * kTilesABlock) to_dense(const uint32_t* trellis, __half* out, int n) {
    constexpr int kThreads = 32 * kTilesABlock, kWords = kTilesABlock * BITS8;
    __shared__ __align__(16) uint32_t words[kDeep * kWords];
    __shared__ __align__(16) __half dense[16 * kDeep][16 * kTilesABlock + 8];
    const int lane_index = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Lane<BITS8> lane(lane_index);
    const int64_t across = n / 16, first = static_cast<int64_t>(kDeep) * blockIdx.y * across + kTilesABlock * blockIdx.x;
#pragma unroll
    for (int i = threadIdx.x; i < kDeep * kWords / 4; i += kThreads) {
        const int deep = i / (kWords / 4), word = i % (kWords / 4);
        const auto* from = reinterpret_cast<const uint4*>(trellis + (first + deep * across) * BITS8);
        reinterpret_cast<uint4*>(words)[i] = from[word];
    }
    __syncthreads();
#pragma unroll
    for (int deep = 0; deep < kDeep; ++deep) {
        uint32_t a[4];
        fragment<BITS8, CODEBOOK>(words + deep * kWords + warp * BITS8, lane, a);
        // A = tile^T: a[0] is column lane>>2, rows 2*(lane&3) and the next; a[1] column + 8; a[2], a[3] row + 8.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * deep + 2 * (lane_index & 3) + 8 * (i >> 1);
            const int column = 16 * warp + (lane_index >> 2) + 8 * (i & 1);
            dense[row][column] = __ushort_as_half(static_cast<uint16_t>(a[i] & 0xFFFFu));
            dense[row + 1][column] = __ushort_as_half(static_cast<uint16_t>(a[i] >> 16));
        }
    }
    __syncthreads();
    __half* to = out + static_cast<int64_t>(blockIdx.y) * 16 * kDeep * n + 16 * kTilesABlock * blockIdx.x;
#pragma unroll
    for (int deep = 0; deep < kDeep; ++deep) {
        const int row = 16 * deep + (threadIdx.x >> 4), chunk = threadIdx.x & 15;
        reinterpret_cast<uint4*>(to + static_cast<int64_t>(row) * n)[chunk] =
            *reinterpret_cast<const uint4*>(&dense[row][8 * chunk]);
    }
}

template <int CODEBOOK>
int launch_dense(const void* trellis, void* out, int k, int n, int bits8, cudaStream_t stream) {
    const dim3 grid(n / (16 * kTilesABlock), k / (16 * kDeep));
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
