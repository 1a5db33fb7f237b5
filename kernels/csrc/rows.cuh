// A few rows through EXL3 matrices that share their inputs, outputs side by side. Weights are decoded
// on their way into the matrix units, each byte read once.
//
//   rotate_rows   x * suh of each matrix, rotated
//   linear_rows   a block makes 128 columns of one matrix over a part of k; the block that brings the
//                 last part adds the parts in order, rotates, scales and stores
//
// Every sum has one order, whoever does it and whenever.
#pragma once
#include <cuda_runtime.h>

#include "early.cuh"
#include "experts.h"
#include "stream.cuh"
#include "sums.cuh"

namespace exl3 {

static __global__ void __launch_bounds__(kThreads) rotate_rows(const ExpertsLinear c) {
    // In this order: the main kernel must not start before what came before this one has ended.
    wait_for_earlier_kernels();
    let_the_next_kernel_start();
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        for (int i = threadIdx.x; i < c.blocks; i += kThreads) c.arrived[i] = 0;
    const int block = blockIdx.x * kWarps + (threadIdx.x >> 5);
    if (block >= c.k / 128) return;
    const int row = blockIdx.y, which = blockIdx.z, at = 128 * block + 4 * (threadIdx.x & 31);
    float v[4], s[4];
    load4(c.x, static_cast<int64_t>(row) * c.k + at, c.dtype, v);
    load4(static_cast<const __half*>(c.matrix[which].suh) + at, s);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= s[i] * kInverseSqrt128;
    hadamard(v);
    auto* to = static_cast<__half*>(c.rotated) + (static_cast<int64_t>(which) * c.rows + row) * c.k;
    store_fragments(to, block, v);
}

template <int CODEBOOK, int GROUPS>
struct Rows {
    // A warp has kTiles columns of 16; kAcross warps make 128 columns, the others are parts of k.
    static constexpr int kTiles = GROUPS <= 2 ? 8 : 16 / GROUPS;
    static constexpr int kAcross = 8 / kTiles;
    static constexpr int kParts = kWarps / kAcross;
    static constexpr int kStride = 8 * GROUPS * kPad;  // floats of one 128-column result of the rows
    static constexpr int shared_bytes(int ring_bytes) {
        const int rings = kWarps * ring_bytes, result = kParts * kStride * 4;
        return result > rings ? result : rings;  // the rings become the result
    }
};

template <int CODEBOOK, int GROUPS>
__global__ void __launch_bounds__(kThreads, GROUPS == 1 ? 3 : 2) linear_rows(const ExpertsLinear c) {
    using Of = Rows<CODEBOOK, GROUPS>;
    extern __shared__ __align__(128) char memory[];
    __shared__ uint16_t order[8 * GROUPS];
    __shared__ int arrived;
    const int warp = threadIdx.x >> 5, part = blockIdx.x % c.split;
    const int column = blockIdx.x / c.split;  // of all matrices' blocks of 128
    int which = 0, block = column;
    for (; block >= c.matrix[which].n / 128; ++which) block -= c.matrix[which].n / 128;
    const ExpertsMatrix& m = c.matrix[which];
    if (threadIdx.x < 8 * GROUPS) order[threadIdx.x] = threadIdx.x;
    __syncthreads();

    float acc[Of::kTiles][GROUPS][4] = {};
    {
        const int mine = part * Of::kParts + warp / Of::kAcross, parts = c.split * Of::kParts;
        const int first = c.k / 16 * mine / parts;
        Walk w{};
        w.tiles = c.k / 16 * (mine + 1) / parts - first;
        w.step_bytes = static_cast<int64_t>(m.n / 16) * 4 * m.bits8;
        w.weights = static_cast<const char*>(m.trellis) + first * w.step_bytes +
                    (8 * block + Of::kTiles * (warp % Of::kAcross)) * 4 * m.bits8;
        w.pick_bytes = 2 * static_cast<int64_t>(c.k);
        w.inputs = static_cast<const char*>(c.rotated) + which * c.rows * w.pick_bytes + 32 * first;
        w.order = order;
        w.rows = c.rows;
        Ring ring{memory + warp * kRingBytes, 0, kNothing, 0};
        walk_bits<CODEBOOK, GROUPS, Of::kTiles, false>(
            m.bits8, w, ring, acc,
            [](bool) {
                wait_for_earlier_kernels();
                return true;
            },
            [](int, const Walk**) { return kNothing; });
    }
    __syncthreads();  // the rings become the result
    auto* result = reinterpret_cast<float*>(memory);
    put_products(result + warp / Of::kAcross * Of::kStride + 16 * Of::kTiles * (warp % Of::kAcross), acc);
    __syncthreads();
    float* partial = c.partial + static_cast<int64_t>(column) * c.split * 128;
    const int64_t row_stride = static_cast<int64_t>(c.blocks) * c.split * 128;
    float v[4];
    if (c.split > 1) {
        for (int row = warp; row < c.rows; row += kWarps) {
            add_warps<Of::kParts>(result + row * kPad, Of::kStride, v);
            put(partial + row * row_stride + 128 * part, v);
        }
        if (!last_to_arrive(c.arrived + column, c.split, &arrived)) return;
    }
    for (int row = warp; row < c.rows; row += kWarps) {
        if (c.split > 1) {
            add_parts(partial + row * row_stride, c.split, 128, v);
        } else {
            add_warps<Of::kParts>(result + row * kPad, Of::kStride, v);
        }
        store_columns(v, static_cast<const __half*>(m.svh), block, c.out, static_cast<int64_t>(row) * c.stride + m.at,
                      m.skip, m.columns, c.dtype);
    }
}

template <int CODEBOOK, int GROUPS>
int launch_rows(const ExpertsLinear& c, cudaStream_t stream) {
    const dim3 grid((c.k / 128 + kWarps - 1) / kWarps, c.rows, c.count);
    if (const int e = launch_kernel(rotate_rows, grid, 0, false, c, stream)) return e;
    const int bytes = Rows<CODEBOOK, GROUPS>::shared_bytes(c.ring_bytes);
    return launch_kernel(linear_rows<CODEBOOK, GROUPS>, dim3(c.blocks * c.split), bytes, true, c, stream);
}

template <int CODEBOOK>
int launch_rows(const ExpertsLinear& c, cudaStream_t stream) {
    switch (c.groups) {
        case 1: return launch_rows<CODEBOOK, 1>(c, stream);
        case 2: return launch_rows<CODEBOOK, 2>(c, stream);
        case 4: return launch_rows<CODEBOOK, 4>(c, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace exl3
