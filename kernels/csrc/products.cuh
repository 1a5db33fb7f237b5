// Products of many experts in one launch: rows of a piece times W_hat, weights decoded on their way
// into the matrix units, so no dense W_hat is ever written. A block makes 128 rows by 128 columns: a
// warp decodes 16 columns and multiplies them with all rows, so each weight is decoded once a piece.
// Every element is one chain of sums over k, whatever else is in the launch: the same bits every time.
#pragma once
#include <cuda_runtime.h>

#include "experts.h"
#include "exl3_tile.cuh"
#include "instructions.cuh"

namespace exl3 {

constexpr int kPieceRows = EXPERTS_PIECE_ROWS;
constexpr int kProductThreads = 256;
constexpr int kDeep = 4;  // tiles of k in a stage
constexpr int kProductStages = 4;
constexpr int kRowBytes = 32 * kDeep;
constexpr int kInputBytes = kPieceRows * kRowBytes;
static_assert(kPieceRows == 128, "of multiply() below");

struct Products {
    const ExpertsPiece* pieces;
    const __half* left[2];  // [rows][k], by blockIdx.z
    float* out[2];          // [rows][n]
    int k, n, projection;   // of blockIdx.z == 0
};

template <int BITS8>
constexpr int kProductWeightBytes = kDeep * 8 * 4 * BITS8;

// 16-byte chunk `chunk` of a row's 128 bytes: eight rows' chunks lie in different banks. It is the
// 128-byte swizzle of wgmma.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

// acc[g][i]: rows 8g + 2*(lane&3) + (i&1), columns (lane>>2) + 8*(i>>1) of the warp's 16.
using ProductSums = float[kPieceRows / 8][4];

// One tile of k: the fragment of the warp's 16 columns times the rows' chunks 2*deep and the next.
__device__ __forceinline__ void multiply(
    ProductSums& acc, const uint32_t (&a)[4], uint32_t inputs, int deep, int rows, bool first) {
#ifdef EXPERTS_WARPGROUPS
    multiply_group(acc, a, swizzled_matrix(inputs + 32 * deep), !first);
#else
    if (first)
        for (auto& of_rows : acc)
            for (float& sum : of_rows) sum = 0.0f;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int pair = 0; pair < kPieceRows / 16; ++pair) {
        if (16 * pair >= rows) continue;
        uint32_t b[4];
        load_matrices(b, inputs + swizzled(16 * pair + 8 * (lane >> 4) + (lane & 7), 2 * deep + ((lane >> 3) & 1)));
        mma(acc[2 * pair], a, make_uint2(b[0], b[1]));
        mma(acc[2 * pair + 1], a, make_uint2(b[2], b[3]));
    }
#endif
}

template <int BITS8, int CODEBOOK>
__global__ void __launch_bounds__(kProductThreads, 2) products(const Products p) {
    extern __shared__ __align__(1024) char memory[];
    constexpr int kWeightBytes = kProductWeightBytes<BITS8>;
    constexpr int kChunksAcross = 2 * BITS8, kChunks = kDeep * kChunksAcross;  // of 16 bytes: eight tiles of n
    const ExpertsPiece& piece = p.pieces[blockIdx.y];
    const int rows = piece.rows, z = blockIdx.z, thread = threadIdx.x, warp = thread >> 5, lane_index = thread & 31;
    const uint32_t memory_at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    const char* weights_at = memory + kProductStages * kInputBytes;
    const auto* left = reinterpret_cast<const char*>(z ? p.left[1] : p.left[0]) + 2 * static_cast<int64_t>(piece.at) * p.k;
    const int64_t tile_row = static_cast<int64_t>(p.n / 16) * 4 * BITS8;  // bytes
    const auto* weights = reinterpret_cast<const char*>(piece.trellis[p.projection + z]) +
                          static_cast<int64_t>(blockIdx.x) * 8 * 4 * BITS8;
    const Lane<BITS8> lane(lane_index);

    const auto fetch = [&](int step) {
        const int slot = step % kProductStages;
#pragma unroll
        for (int i = 0; i < kPieceRows * 8 / kProductThreads; ++i) {
            const int row = (thread + kProductThreads * i) >> 3, chunk = thread & 7;
            const bool here = row < rows;
            const char* from = left + 2 * static_cast<int64_t>(here ? row : 0) * p.k + step * kRowBytes + 16 * chunk;
            copy16(memory_at + slot * kInputBytes + swizzled(row, chunk), from, here ? 16 : 0);
        }
        const uint32_t to = memory_at + kProductStages * kInputBytes + slot * kWeightBytes;
        const char* from = weights + kDeep * step * tile_row;
#pragma unroll
        for (int i = 0; i < (kChunks + kProductThreads - 1) / kProductThreads; ++i) {
            const int at = thread + kProductThreads * i;
            if (at < kChunks) copy16(to + 16 * at, from + at / kChunksAcross * tile_row + 16 * (at % kChunksAcross), 16);
        }
    };

    ProductSums acc;
    uint32_t a[kDeep][4];
    const int steps = p.k / (16 * kDeep);
    // Two stages less one are ahead: a slot is free when the products of the step before the last ended.
    for (int s = 0; s < kProductStages - 2; ++s) {
        if (s < steps) fetch(s);
        commit();
    }
    for (int step = 0; step < steps; ++step) {
        wait_all_but<kProductStages - 3>();
        show_to_products();
        __syncthreads();
        if (step + kProductStages - 2 < steps) fetch(step + kProductStages - 2);
        commit();
        const int slot = step % kProductStages;
        const auto* tiles = reinterpret_cast<const uint32_t*>(weights_at + slot * kWeightBytes) + warp * BITS8;
#pragma unroll
        for (int deep = 0; deep < kDeep; ++deep) {
            wait_products<kDeep - 1>();  // the one that reads a[deep]
            fragment<BITS8, CODEBOOK>(tiles + 8 * deep * BITS8, lane, a[deep]);
            multiply(acc, a[deep], memory_at + slot * kInputBytes, deep, rows, step == 0 && deep == 0);
        }
    }
    wait_products<0>();
    float* out = (z ? p.out[1] : p.out[0]) + static_cast<int64_t>(piece.at) * p.n + 128 * blockIdx.x + 16 * warp + (lane_index >> 2);
#pragma unroll
    for (int g = 0; g < kPieceRows / 8; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            asm volatile("" : "+f"(acc[g][i])::"memory");  // not before the wait
            const int row = 8 * g + 2 * (lane_index & 3) + (i & 1);
            if (row < rows) out[static_cast<int64_t>(row) * p.n + 8 * (i >> 1)] = acc[g][i];
        }
}

template <int BITS8, int CODEBOOK>
int launch_products_of(const Products& p, dim3 grid, cudaStream_t stream) {
    const auto kernel = products<BITS8, CODEBOOK>;
    constexpr int kBytes = kProductStages * (kInputBytes + kProductWeightBytes<BITS8>);
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
