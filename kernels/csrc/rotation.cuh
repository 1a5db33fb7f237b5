// The inputs of a routed layer, x * suh, rotated, one row a pick, for gate and for up: by the last of the main
// kernel's blocks, before they do anything else. These read nothing over the link, and where every block
// has a unit they have those that wait for others' anyway.
#pragma once
#include "control.h"
#include "experts.h"
#include "rotate.cuh"
#include "route.cuh"
#include "sums.cuh"

namespace exl3 {

// A warp rotates CHUNK blocks of 128 of a row together, so that their reads are under way at once.
template <int CHUNK>
struct Rotation {
    int chunks, items, first, blocks;  // of a row; of all rows; the blocks that do them
    __device__ explicit Rotation(const ExpertsDecode& c) {
        const int grid = gridDim.x;
        chunks = (c.hidden / 128 + CHUNK - 1) / CHUNK;
        items = 2 * c.tokens * c.top_k * chunks;
        blocks = min((items + kWarps - 1) / kWarps, grid > c.host_blocks ? grid - c.host_blocks : grid);
        first = grid - blocks;
    }

    __device__ void rotate(const ExpertsDecode& c, int item) const {
        const int projection = item / chunks & 1, pick = item / chunks >> 1;
        const int begin = item % chunks * CHUNK, count = min(CHUNK, c.hidden / 128 - begin);
        const int at = 128 * begin + 4 * (threadIdx.x & 31);
        const int64_t id = id_at(c, pick);
        float v[CHUNK][4], s[CHUNK][4];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (i < count) load4(c.x, static_cast<int64_t>(pick / c.top_k) * c.hidden + at + 128 * i, c.dtype, v[i]);
        if (id < 0 || id >= c.experts) return;
        const auto* suh = reinterpret_cast<const __half*>(c.table[9 * id + 3 * projection + 1]);
        if (suh == nullptr) return;  // not here: nobody reads this row
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (i < count) load4(suh + at + 128 * i, s[i]);
        const float scale = kInverseSqrt128 * (c.weight_on_input ? c.weights[pick] : 1.0f);
        auto* row = static_cast<__half*>(c.rotated) +
                    (static_cast<int64_t>(projection) * c.tokens * c.top_k + pick) * c.hidden;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (i >= count) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) v[i][j] *= s[i][j] * scale;
            hadamard(v[i]);
            store_fragments(row, begin + i, v[i]);
        }
    }

    // This block's share, if it has one: others wait for it.
    __device__ void share(const ExpertsDecode& c) const {
        const int mine = blockIdx.x - first;
        if (mine < 0) return;
        for (int item = mine * kWarps + (threadIdx.x >> 5); item < items; item += blocks * kWarps) rotate(c, item);
        __syncthreads();
        if (threadIdx.x == 0) arrive(c.control + Control::kRotated);
    }

    // Until all inputs are rotated. Who waits for milliseconds does it all itself: the blocks whose share it
    // is may come only when this one has ended. The same bits, whoever writes them.
    __device__ void wait(const ExpertsDecode& c, int* late) const {
        if (threadIdx.x == 0) {
            int tries = 0;
            while (seen(c.control + Control::kRotated) < blocks && ++tries < 1 << 12) {}
            *late = tries == 1 << 12;
        }
        __syncthreads();
        if (!*late) return;
        for (int item = threadIdx.x >> 5; item < items; item += kWarps) rotate(c, item);
        __syncthreads();
    }
};

}  // namespace exl3
