// The inputs of a routed layer, x * suh, rotated, one row a pick, for gate and for up: by a part of the main
// kernel's blocks, before they do anything else.
#pragma once
#include "control.h"
#include "experts.h"
#include "rotate.cuh"
#include "route.cuh"
#include "sums.cuh"

namespace exl3 {

// Blocks of 128 of one row that a warp does together: their reads are under way at once.
constexpr int kChunk = 4;

// Who does it: `blocks` of them from `first`, the last ones: these read nothing over the link, and where every
// block has a unit they have those that wait for others' anyway.
struct Rotation {
    int chunks, items, first, blocks;
    __device__ explicit Rotation(const ExpertsDecode& c) {
        const int grid = gridDim.x;
        chunks = (c.hidden / 128 + kChunk - 1) / kChunk;
        items = 2 * c.tokens * c.top_k * chunks;
        blocks = min((items + kWarps - 1) / kWarps, grid > c.host_blocks ? grid - c.host_blocks : grid);
        first = grid - blocks;
    }
};

static __device__ void rotate_chunk(const ExpertsDecode& c, const Rotation& of, int item) {
    const int projection = item / of.chunks & 1, pick = item / of.chunks >> 1, lane = threadIdx.x & 31;
    const int first = item % of.chunks * kChunk, count = min(kChunk, c.hidden / 128 - first);
    const int at = 128 * first + 4 * lane;
    float v[kChunk][4], s[kChunk][4];
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
        if (i < count) load4(c.x, static_cast<int64_t>(pick / c.top_k) * c.hidden + at + 128 * i, c.dtype, v[i]);
    const int64_t id = id_at(c, pick);
    if (home_of(c, id) == kNowhere) return;
    const auto* suh = reinterpret_cast<const __half*>(c.table[9 * id + 3 * projection + 1]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
        if (i < count) load4(suh + at + 128 * i, s[i]);
    const float scale = kInverseSqrt128 * (c.weight_on_input ? c.weights[pick] : 1.0f);
    auto* row = static_cast<__half*>(c.rotated) +
                (static_cast<int64_t>(projection) * c.tokens * c.top_k + pick) * c.hidden;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        if (i >= count) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] *= s[i][j] * scale;
        hadamard(v[i]);
        store_fragments(row, first + i, v[i]);
    }
}

// This block's share, if it has one, before anything else: others wait for it.
__device__ inline void rotate_share(const ExpertsDecode& c, const Rotation& of) {
    const int mine = blockIdx.x - of.first;
    if (mine < 0 || mine >= of.blocks) return;
    for (int item = mine * kWarps + (threadIdx.x >> 5); item < of.items; item += of.blocks * kWarps)
        rotate_chunk(c, of, item);
    __syncthreads();
    if (threadIdx.x == 0) arrive(c.control + Control::kRotated);
}

// Until all inputs are rotated. Who waits for milliseconds does it all itself: the blocks whose share it is
// may come only when this one has ended. The same bits, whoever writes them.
__device__ inline void wait_for_rotation(const ExpertsDecode& c, const Rotation& of, int* late) {
    if (threadIdx.x == 0) {
        int tries = 0;
        while (seen(c.control + Control::kRotated) < of.blocks && ++tries < 1 << 12) {}
        *late = tries == 1 << 12;
    }
    __syncthreads();
    if (!*late) return;
    for (int item = threadIdx.x >> 5; item < of.items; item += kWarps) rotate_chunk(c, of, item);
    __syncthreads();
}

}  // namespace exl3
