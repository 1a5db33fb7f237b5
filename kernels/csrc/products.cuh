// Products of many experts in one launch: rows of a piece times W_hat, weights decoded on their way
// into the matrix units, so no dense W_hat is ever written. A block makes 128 rows by 128 columns:
// four warps across (two tiles of 16 columns each) by two down (64 rows each). Every element is one
// chain of sums over k, whatever else is in the launch: the same bits every time.
#pragma once
#include <cuda_runtime.h>

#include "experts.h"
#include "exl3_tile.cuh"
#include "instructions.cuh"

namespace exl3 {

constexpr int kPieceRows = EXPERTS_PIECE_ROWS;
constexpr int kProductThreads = 256;
constexpr int kStepK = 32;    // a stage: two tiles of k
constexpr int kProductStages = 4;
constexpr int kRowBytes = 2 * kStepK;
constexpr int kInputBytes = kPieceRows * kRowBytes;
static_assert(kPieceRows == 128, "two warps of 64 rows");

struct Products {
    const ExpertsPiece* pieces;
    const __half* left[2];  // [rows][k], by blockIdx.z
    float* out[2];          // [rows][n]
    int k, n, projection;   // of blockIdx.z == 0
};

template <int BITS8>
constexpr int kProductStageBytes = kInputBytes + 2 * 8 * 4 * BITS8;

// 16-byte chunk `chunk` of a row's 64 bytes: eight rows' chunks lie in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
}

template <int BITS8, int CODEBOOK>
__global__ void __launch_bounds__(kProductThreads, 2) products(const Products p) {
    extern __shared__ __align__(128) char memory[];
    constexpr int kStageBytes = kProductStageBytes<BITS8>;
    constexpr int kWeightChunks = 4 * BITS8;  // of 16 bytes, two tiles of k by eight of n
    const ExpertsPiece& piece = p.pieces[blockIdx.y];
    const int rows = piece.rows, z = blockIdx.z, thread = threadIdx.x, lane_index = thread & 31;
    const int across = (thread >> 5) & 3, down = thread >> 7;
    const uint32_t memory_at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    const auto* left = reinterpret_cast<const char*>(z ? p.left[1] : p.left[0]) + 2 * static_cast<int64_t>(piece.at) * p.k;
    const int64_t tile_row = static_cast<int64_t>(p.n / 16) * 4 * BITS8;  // bytes
    const auto* weights = reinterpret_cast<const char*>(piece.trellis[p.projection + z]) +
                          static_cast<int64_t>(blockIdx.x) * 8 * 4 * BITS8;
    const Lane<BITS8> lane(lane_index);

    const auto fetch = [&](int step) {
        const uint32_t stage = memory_at + step % kProductStages * kStageBytes;
#pragma unroll
        for (int i = 0; i < kPieceRows * 4 / kProductThreads; ++i) {
            const int row = (thread + kProductThreads * i) >> 2, chunk = thread & 3;
            const bool here = row < rows;
            const char* from = left + 2 * (static_cast<int64_t>(here ? row : 0) * p.k + step * kStepK) + 16 * chunk;
            copy16(stage + swizzled(row, chunk), from, here ? 16 : 0);
        }
        if (thread < kWeightChunks) {
            const int deep = thread / (kWeightChunks / 2), chunk = thread % (kWeightChunks / 2);
            copy16(stage + kInputBytes + 16 * thread, weights + (2 * step + deep) * tile_row + 16 * chunk, 16);
        }
    };

    float acc[2][8][4] = {};
    const int steps = p.k / kStepK, groups = (rows - 64 * down + 7) >> 3;
    for (int s = 0; s < kProductStages - 1; ++s) {
        if (s < steps) fetch(s);
        commit();
    }
    for (int step = 0; step < steps; ++step) {
        wait_all_but<kProductStages - 2>();
        __syncthreads();
        if (step + kProductStages - 1 < steps) fetch(step + kProductStages - 1);
        commit();
        if (groups <= 0) continue;
        const int slot = step % kProductStages;
        const auto* tiles = reinterpret_cast<const uint32_t*>(memory + slot * kStageBytes + kInputBytes);
        const uint32_t inputs = memory_at + slot * kStageBytes;
#pragma unroll
        for (int deep = 0; deep < 2; ++deep) {
            uint32_t a[2][4];
#pragma unroll
            for (int t = 0; t < 2; ++t)
                fragment<BITS8, CODEBOOK>(tiles + (8 * deep + 2 * across + t) * BITS8, lane, a[t]);
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                if (2 * pair >= groups) continue;
                const int row = 64 * down + 16 * pair + 8 * (lane_index >> 4) + (lane_index & 7);
                uint32_t b[4];
                load_matrices(b, inputs + swizzled(row, 2 * deep + ((lane_index >> 3) & 1)));
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    mma(acc[t][2 * pair], a[t], make_uint2(b[0], b[1]));
                    mma(acc[t][2 * pair + 1], a[t], make_uint2(b[2], b[3]));
                }
            }
        }
    }
    float* out = (z ? p.out[1] : p.out[0]) + static_cast<int64_t>(piece.at) * p.n + 128 * blockIdx.x + 32 * across + (lane_index >> 2);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int g = 0; g < 8; ++g)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 64 * down + 8 * g + 2 * (lane_index & 3) + (i & 1);
                if (row < rows) out[static_cast<int64_t>(row) * p.n + 16 * t + 8 * (i >> 1)] = acc[t][g][i];
            }
}

template <int BITS8, int CODEBOOK>
int launch_products_of(const Products& p, dim3 grid, cudaStream_t stream) {
    const auto kernel = products<BITS8, CODEBOOK>;
    constexpr int kBytes = kProductStages * kProductStageBytes<BITS8>;
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
        return e;
    kernel<<<grid, kProductThreads, kBytes, stream>>>(p);
    return cudaGetLastError();
}

template <int CODEBOOK>
int launch_products(const Products& p, int bits8, dim3 grid, cudaStream_t stream) {
    switch (bits8) {
#define EXL3_CASE(B) \
    case B: return launch_products_of<B, CODEBOOK>(p, grid, stream);
        EXL3_CASE(8) EXL3_CASE(16) EXL3_CASE(24) EXL3_CASE(32)
        EXL3_CASE(40) EXL3_CASE(48) EXL3_CASE(56) EXL3_CASE(64)
        default: break;
    }
    if constexpr (CODEBOOK == kMul1) {
        switch (bits8) { EXL3_CASE(12) EXL3_CASE(20) EXL3_CASE(28) }
    }
#undef EXL3_CASE
    return cudaErrorInvalidValue;
}

}  // namespace exl3
