// One warp's walk along k over a few neighbouring 16-wide columns of tiles: weights come through a
// ring of cp.async stages of its own, from device or pinned host memory alike, each byte once.
#pragma once
#include <stdint.h>

#include "exl3_tile.cuh"
#include "instructions.cuh"

namespace exl3 {

// A warp's. Eight of these, a result and the routing are 112 KiB: two blocks in a multiprocessor of
// 228 KiB, one in those of 100 KiB if the rings are smaller. launch.py knows these numbers too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kRingBytes = 6144;
#else
constexpr int kRingBytes = 8192;
#endif

constexpr int kDeepest = 8;  // stages

// What a warp reads: `tiles` steps of k from the first, its columns, and the rows' fragments.
struct Walk {
    const char* weights;  // first tile of the first step
    char* copy;           // where these bytes are also stored, at the same distances; or null
    int64_t step_bytes;   // from one step of 16 k to the next: a whole row of tiles
    int tiles;
    int depth;            // stages under way at once, at most kDeepest; all of the ring while inputs are awaited
    const int32_t* flags;  // set when the inputs of 128 k are there, of those that this walk reads
    int flag_count;
    const char* inputs;   // fp16 [pick][k], fragment order, at the first step
    int64_t pick_bytes;
    const uint16_t* order;  // of the rows' picks, in shared memory
    int rows;
};

// A warp's ring between two walks: where the next walk starts and what of it is on its way already.
enum Ahead { kNothing, kWeights, kWeightsAndInputs };
struct Ring {
    char* at;
    int slot;  // bytes after `at`
    Ahead ahead;
    int asked;  // stages of the next walk, unless kNothing
};

// A ring's stages for one format: weights, then the rows' inputs.
template <int BITS8, int GROUPS, int TILES>
struct Stages {
    static constexpr int kWeightBytes = TILES * Lane<BITS8>::kTileBytes;
    static constexpr int kStageBytes = kWeightBytes + 256 * GROUPS;
    static constexpr int kStages = kRingBytes / kStageBytes < kDeepest ? kRingBytes / kStageBytes : kDeepest;
    static_assert(kStages >= 2, "the ring is too small for this format");
    static constexpr int kWeightChunks = (kWeightBytes / 16 + 31) / 32;
    static constexpr int kInputChunks = (16 * GROUPS + 31) / 32;

    static __device__ __forceinline__ int slot_of(int slot, int further) {
        constexpr int kEnd = kStages * kStageBytes;
        const int at = slot + further * kStageBytes;
        if constexpr ((kEnd & (kEnd - 1)) == 0) return at & (kEnd - 1);
        return at >= kEnd ? at - kEnd : at;
    }

    // A step's weights into a slot: this lane's 16 bytes of each 512. Pointers go on from step to step.
    template <int I = 0>
    static __device__ __forceinline__ void fetch_weights(const char* from, uint32_t lane_at) {
        if (16 * (threadIdx.x & 31) + 512 * I < kWeightBytes) copy16<512 * I, 512 * I>(lane_at, from, 16);
        if constexpr (I + 1 < kWeightChunks) fetch_weights<I + 1>(from, lane_at);
    }

    // And the rows' fragments behind them. Rows that nobody picked read nothing and are zero.
    template <int I = 0>
    static __device__ __forceinline__ void fetch_inputs(
        const char* const (&from)[kInputChunks], const bool (&row)[kInputChunks], uint32_t lane_at) {
        if ((threadIdx.x & 31) + 32 * I < 16 * GROUPS)
            copy16<kWeightBytes + 512 * I>(lane_at, from[I], row[I] ? 16 : 0);
        if constexpr (I + 1 < kInputChunks) fetch_inputs<I + 1>(from, row, lane_at);
    }
};

__device__ __forceinline__ uint32_t of_this_lane(const char* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 16 * (threadIdx.x & 31);
}

// The first weights of a walk into an empty ring.
template <int BITS8, int GROUPS, int TILES>
__device__ __forceinline__ void ask(const Walk& w, Ring& ring) {
    using Of = Stages<BITS8, GROUPS, TILES>;
    ring.ahead = kWeights;
    ring.asked = min(w.depth, Of::kStages);
    const char* from = w.weights + 16 * (threadIdx.x & 31);
    for (int s = 0; s < ring.asked; ++s, from += w.step_bytes)
        if (s < w.tiles) Of::fetch_weights(from, of_this_lane(ring.at) + s * Of::kStageBytes);
}

// Until the oldest of `depth` groups of copies, at most MOST, has come.
template <int MOST>
__device__ __forceinline__ void wait_for_oldest(int depth) {
    if (depth >= MOST) return wait_all_but<MOST - 1>();
    switch (depth) {
        case 7: return wait_all_but<6>();
        case 6: return wait_all_but<5>();
        case 5: return wait_all_but<4>();
        case 4: return wait_all_but<3>();
        case 3: return wait_all_but<2>();
        case 2: return wait_all_but<1>();
        default: return wait_all_but<0>();
    }
}

// acc[t][g]: columns of tile t (lane>>2, +8 for [2], [3]) by rows 8g + 2*(lane&3) (+1 for [1], [3]).
// `ready(wait)` is called before inputs are read, after the first weights are on their way. With AHEAD,
// `next(bits8, &walk)` is called once, when the last of this walk's weights are on their way: it gives
// the next walk, and those of its first stages come into the slots that become free meanwhile. SHALLOW:
// not all of the ring is under way; the number of stages is a number then, which costs 3 % of decoding.
template <int BITS8, int CODEBOOK, int GROUPS, int TILES, bool AHEAD, bool SHALLOW, typename Ready, typename Next>
__device__ __forceinline__ void walk(
    const Walk& w, Ring& ring, float (&acc)[TILES][GROUPS][4], const Ready& ready, const Next& next) {
    using Of = Stages<BITS8, GROUPS, TILES>;
    constexpr int kWeightBytes = Of::kWeightBytes, kStages = Of::kStages;
    const int lane_index = threadIdx.x & 31;
    const Lane<BITS8> lane(lane_index);
    uint32_t lane_at = of_this_lane(ring.at);
    asm("" : "+r"(lane_at));  // kept: five instructions a step otherwise
    int slot = AHEAD ? ring.slot : 0;
    int asked = AHEAD && ring.ahead != kNothing ? ring.asked : 0;
    // Of the next step to be fetched, this lane's.
    const char* weights_at = w.weights + 16 * lane_index + asked * w.step_bytes;
    const char* input_at[Of::kInputChunks];
    bool input_row[Of::kInputChunks];
    const auto find_inputs = [&](const Walk& of, int step) {
#pragma unroll
        for (int i = 0; i < Of::kInputChunks; ++i) {
            const int row = (lane_index + 32 * i) >> 1;
            input_row[i] = row < of.rows;
            const int pick = input_row[i] ? of.order[row] : of.order[0];
            input_at[i] = of.inputs + pick * of.pick_bytes + 16 * (lane_index & 1) + 32 * step;
        }
    };
    const auto fetch_weights = [&](int64_t step_bytes, int slot) {
        Of::fetch_weights(weights_at, lane_at + slot);
        weights_at += step_bytes;
    };
    const auto fetch_inputs = [&](int slot) {
        Of::fetch_inputs(input_at, input_row, lane_at + slot);
#pragma unroll
        for (int i = 0; i < Of::kInputChunks; ++i) input_at[i] += 32;
    };
    // From the stage, so that no byte is read a second time.
    const auto store_weights = [&](int step, int slot) {
        char* to = w.copy + step * w.step_bytes;
#pragma unroll
        for (int i = 0; i < Of::kWeightChunks; ++i) {
            const int at = 16 * (lane_index + 32 * i);
            if (at < kWeightBytes)
                *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(ring.at + slot + at);
        }
    };
    int depth = kStages;
    if constexpr (SHALLOW) depth = max(asked, min(w.depth, kStages));
    const auto ask_more = [&](int from) {
        for (int s = from; s < depth; ++s)
            if (s < w.tiles) fetch_weights(w.step_bytes, Of::slot_of(slot, s));
    };
    ask_more(asked);
    if (!AHEAD || ring.ahead != kWeightsAndInputs) {
        asked = 0;
        const bool done = ready(!SHALLOW);
        if constexpr (SHALLOW) {
            if (!done) {
                const int before = depth;
                depth = kStages;
                ask_more(before);
                ready(true);
            }
        }
    }
    find_inputs(w, asked);
    for (int s = asked; s < depth; ++s) {
        if (s < w.tiles) fetch_inputs(Of::slot_of(slot, s));
        commit();
    }
    const Walk* following = nullptr;
    Ahead ahead = kNothing;
    if (AHEAD && w.tiles < depth) next(0, &following);
    const int groups = (w.rows + 7) >> 3;
    const bool copies = w.copy != nullptr;
    const int64_t step_bytes = w.step_bytes;
    for (int left = w.tiles - depth; left > -depth; --left) {  // steps that are not asked for yet
        if constexpr (SHALLOW) {
            wait_for_oldest<kStages>(depth);
        } else {
            wait_all_but<kStages - 1>();
        }
        __syncwarp();
        const char* stage = ring.at + slot;
        if (copies) store_weights(w.tiles - depth - left, slot);
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
        const int free = SHALLOW ? Of::slot_of(slot, depth) : slot;
        if (left > 0) {
            fetch_weights(step_bytes, free);
            fetch_inputs(free);
        } else if constexpr (AHEAD) {
            if (left == 0) {
                ahead = next(BITS8, &following);
                // A walk shorter than what is under way: then every slot starts anew.
                if (ahead != kNothing && following->tiles < depth) ahead = kNothing;
                if (ahead != kNothing) weights_at = following->weights + 16 * lane_index;
                if (ahead == kWeightsAndInputs) find_inputs(*following, 0);
            }
            if (ahead != kNothing) fetch_weights(following->step_bytes, free);
            if (ahead == kWeightsAndInputs) fetch_inputs(free);
        }
        commit();
        slot = Of::slot_of(slot, 1);
    }
    if constexpr (AHEAD) {
        ring.slot = ahead == kNothing ? 0 : slot;
        ring.ahead = ahead;
        ring.asked = depth;
    } else {
        wait_all_but<0>();
    }
}

// `DO(B)` for the BITS8 that is bits8.
#define EXL3_FOR_BITS(bits8, CODEBOOK, DO)                                            \
    switch (bits8) {                                                                  \
        DO(8) DO(16) DO(24) DO(32) DO(40) DO(48) DO(56) DO(64)                        \
        default:                                                                      \
            if constexpr (CODEBOOK == kMul1) switch (bits8) { DO(12) DO(20) DO(28) }  \
    }

template <int CODEBOOK, int GROUPS, int TILES>
__device__ __forceinline__ void ask_bits(int bits8, const Walk& w, Ring& ring) {
#define EXL3_CASE(B) \
    case B: ask<B, GROUPS, TILES>(w, ring); break;
    EXL3_FOR_BITS(bits8, CODEBOOK, EXL3_CASE)
#undef EXL3_CASE
}

template <int CODEBOOK, int GROUPS, int TILES, bool AHEAD, typename Ready, typename Next>
__device__ __forceinline__ void walk_bits(
    int bits8, const Walk& w, Ring& ring, float (&acc)[TILES][GROUPS][4], const Ready& ready, const Next& next) {
    if (AHEAD && w.depth < kDeepest) {
#define EXL3_CASE(B) \
    case B: walk<B, CODEBOOK, GROUPS, TILES, AHEAD, AHEAD>(w, ring, acc, ready, next); break;
        EXL3_FOR_BITS(bits8, CODEBOOK, EXL3_CASE)
#undef EXL3_CASE
        return;
    }
#define EXL3_CASE(B) \
    case B: walk<B, CODEBOOK, GROUPS, TILES, AHEAD, false>(w, ring, acc, ready, next); break;
    EXL3_FOR_BITS(bits8, CODEBOOK, EXL3_CASE)
#undef EXL3_CASE
}
#undef EXL3_FOR_BITS

}  // namespace exl3
