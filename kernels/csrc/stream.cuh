// One warp's walk along k over a few neighbouring 16-wide columns of tiles: weights come through a
// ring of cp.async stages of its own, from device or pinned host memory alike, each byte once.
#pragma once
#include <stdint.h>

#include "exl3_tile.cuh"

namespace exl3 {

constexpr int kRingBytes = 8192;  // a warp's; eight of these and the routing fit sm_120 too

__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// What a warp reads: `tiles` steps of k from the first, its columns, and the rows' fragments.
struct Walk {
    const char* weights;  // first tile of the first step
    char* copy;           // where these bytes are also stored, at the same distances; or null
    int64_t step_bytes;   // from one step of 16 k to the next: a whole row of tiles
    int tiles;
    const char* inputs;   // fp16 [pick][k], fragment order, at the first step
    int64_t pick_bytes;
    const uint16_t* order;  // of the rows' picks, in shared memory
    int rows;
};

// acc[t][g]: columns of tile t (lane>>2, +8 for [2], [3]) by rows 8g + 2*(lane&3) (+1 for [1], [3]).
// `ready` is called once, after the first weights are on their way and before inputs are read.
template <int BITS8, int CODEBOOK, int GROUPS, int TILES, typename Ready>
__device__ __forceinline__ void walk(
    const Walk& w, char* ring, float (&acc)[TILES][GROUPS][4], const Ready& ready) {
    constexpr int kWeightBytes = TILES * Lane<BITS8>::kTileBytes;
    constexpr int kStageBytes = kWeightBytes + 256 * GROUPS;
    constexpr int kStages = kRingBytes / kStageBytes < 8 ? kRingBytes / kStageBytes : 8;
    static_assert(kStages >= 2, "the ring is too small for this format");
    constexpr int kWeightChunks = (kWeightBytes / 16 + 31) / 32;
    constexpr int kInputChunks = (16 * GROUPS + 31) / 32;
    const int lane_index = threadIdx.x & 31;
    const Lane<BITS8> lane(lane_index);
    const uint32_t ring_at = static_cast<uint32_t>(__cvta_generic_to_shared(ring));

    const char* input_at[kInputChunks];
    bool input_row[kInputChunks];
#pragma unroll
    for (int i = 0; i < kInputChunks; ++i) {
        const int row = (lane_index + 32 * i) >> 1;
        input_row[i] = row < w.rows;
        const int pick = input_row[i] ? w.order[row] : w.order[0];
        input_at[i] = w.inputs + pick * w.pick_bytes + 16 * (lane_index & 1);
    }
    const auto fetch_weights = [&](int step, int slot) {
        const char* from = w.weights + step * w.step_bytes;
#pragma unroll
        for (int i = 0; i < kWeightChunks; ++i) {
            const int at = 16 * (lane_index + 32 * i);
            if (at < kWeightBytes) copy16(ring_at + slot * kStageBytes + at, from + at, 16);
        }
    };
    // From the stage, so that no byte is read a second time.
    const auto store_weights = [&](int step, int slot) {
        char* to = w.copy + step * w.step_bytes;
#pragma unroll
        for (int i = 0; i < kWeightChunks; ++i) {
            const int at = 16 * (lane_index + 32 * i);
            if (at < kWeightBytes)
                *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(ring + slot * kStageBytes + at);
        }
    };
    const auto fetch_inputs = [&](int step, int slot) {
#pragma unroll
        for (int i = 0; i < kInputChunks; ++i) {
            const int chunk = lane_index + 32 * i;
            // Rows that nobody picked read nothing and are zero.
            if (chunk < 16 * GROUPS)
                copy16(ring_at + slot * kStageBytes + kWeightBytes + 16 * chunk, input_at[i] + 32 * step,
                       input_row[i] ? 16 : 0);
        }
    };
    for (int s = 0; s < kStages; ++s)
        if (s < w.tiles) fetch_weights(s, s);
    ready();
    for (int s = 0; s < kStages; ++s) {
        if (s < w.tiles) fetch_inputs(s, s);
        commit();
    }
    const int groups = (w.rows + 7) >> 3;
    int slot = 0;
    for (int step = 0; step < w.tiles; ++step) {
        wait_all_but<kStages - 1>();
        __syncwarp();
        const char* stage = ring + slot * kStageBytes;
        if (w.copy != nullptr) store_weights(step, slot);
        uint2 b[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            b[g] = *reinterpret_cast<const uint2*>(stage + kWeightBytes + 256 * g + 8 * lane_index);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            uint32_t a[4];
            fragment<BITS8, CODEBOOK>(
                reinterpret_cast<const uint32_t*>(stage + t * Lane<BITS8>::kTileBytes), lane, a);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                if (GROUPS == 1 || g < groups) mma(acc[t][g], a, b[g]);
        }
        __syncwarp();
        if (step + kStages < w.tiles) {
            fetch_weights(step + kStages, slot);
            fetch_inputs(step + kStages, slot);
        }
        commit();
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    wait_all_but<0>();
}

}  // namespace exl3
