// A routed layer over a few tokens in one launch, weights read in place wherever they are. A part of the
// blocks rotates the inputs (rotation.cuh). All take units of work from two queues, host experts and
// device experts:
//
//   unit A   128 columns of gate and of up of one expert, a part of k; the block that brings the last
//            part adds the parts in order, then silu(gate) * up, * suh of down, rotated (a block of 128
//            is a block of the rotation): 128 of unit B's inputs
//   unit B   128 columns of down, a part of k; over the link a warp waits for its own inputs only. The
//            last part rotates, scales, weighs; the last expert of these 128 columns adds every token's
//            picks in ascending order of expert
//
// Every sum has one order, whoever does it and whenever, so the result's bits depend neither on
// homes nor on timing. A block may hold the unit it works on and the next one, whose weights come
// while this one ends. It waits only for units with smaller tickets, which blocks have that began before
// it or that were taken before its own, and works in the order in which it took them: no deadlock,
// whatever the number of blocks.
#pragma once
#include <cuda_runtime.h>

#include "early.cuh"
#include "experts.h"
#include "rotation.cuh"
#include "stream.cuh"
#include "sums.cuh"
#include "units.cuh"

namespace exl3 {

// Whether what a walk reads is there. All lanes of a warp call.
__device__ __forceinline__ bool inputs_done(const Walk& w) {
    bool done = true;
    for (int i = threadIdx.x & 31; i < w.flag_count; i += 32) done &= seen(w.flags + i) != 0;
    done = __all_sync(0xFFFFFFFFu, done);
    __syncwarp();  // what one lane may read now, all may
    return done;
}

// What a block has beside its rings and result.
struct Shared {
    Routing routing;
    int first;    // the block's first ticket
    int claimed;  // its next one, see `claim`
    int arrived;  // see `last_to_arrive`
    Walk next[kWarps];
};

// A block leaves, after a barrier, when no warp of it will look at tickets, at the entries' flags or at
// who is to be stored any more: counted, by a thread that has nothing to wait for, while the last unit ends.
constexpr int kStays = -1, kLeaver = kThreads - 32;

__device__ __forceinline__ void leave(const ExpertsDecode& c, int& left) {
    if (threadIdx.x == kLeaver && left == kStays) left = atomicAdd(c.control + Control::kExited, 1);
}

// An expert that was stored: its address becomes negative, so that no later call stores it again.
__device__ inline void mark_filled(const ExpertsDecode& c, const Routing& r, int entry) {
    const int expert = r.entry_expert[entry];
    if (entry > 0 && r.entry_expert[entry - 1] == expert) return;
    if (c.fill[expert] > 0) c.fill[expert] = -c.fill[expert];
}

// By the last block that has left: what is counted over the whole call is zero for the next one. Nothing has
// to be fenced: every count was waited for, and the end of the kernel shows the rest.
__device__ inline void clean_up(const ExpertsDecode& c, const Routing& r, int left) {
    if (threadIdx.x < kLeaver || __shfl_sync(0xFFFFFFFFu, left, 0) != static_cast<int>(gridDim.x) - 1) return;
    const int lane = threadIdx.x & 31;
    if (c.fill != nullptr)
        for (int i = lane; i < r.entries; i += 32) mark_filled(c, r, i);
    for (int i = lane; i < Control::kAct + r.entries * (c.intermediate / 128); i += 32) c.control[i] = 0;
}

template <int CODEBOOK, int GROUPS>
struct Layer {
    // A warp has TILES columns of 16; kAcross warps make 128 columns, the others are parts of k.
    static constexpr int kTiles = GROUPS <= 2 ? 8 : 16 / GROUPS;
    static constexpr int kAcross = 8 / kTiles;
    static constexpr int kPartsA = kWarps / 2 / kAcross, kPartsB = kWarps / kAcross;
    static constexpr int kRows = 8 * GROUPS;
    static constexpr int kStride = kRows * kPad;  // floats of one 128-column result of the rows
    static constexpr int kResultBytes = kPartsB * kStride * 4;  // = 2 * kPartsA * kStride * 4
    // Few rows: the result has its own memory, so that the next unit's weights can come meanwhile.
    static constexpr bool kAhead = GROUPS == 1;
    static constexpr int shared_bytes(int ring_bytes) {
        const int rings = kWarps * ring_bytes;
        return kAhead ? rings + kResultBytes : kResultBytes > rings ? kResultBytes : rings;
    }

    static __device__ __forceinline__ int projection_of(const Unit& unit, int warp) {
        return unit.down ? 2 : warp / (kWarps / 2);
    }

    // The scales that a unit's end needs, into the cache: a line of each of the first warps.
    static __device__ __forceinline__ void ask_for_scales(
        const ExpertsDecode& c, const Unit& unit, int expert, int warp) {
        if (warp >= (unit.down ? 2 : 6)) return;
        const int which = unit.down ? 8 : warp < 2 ? 2 : warp < 4 ? 5 : 7;
        const char* at = reinterpret_cast<const char*>(c.table[9 * expert + which]) + 256 * unit.block + 128 * (warp & 1);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }

    // This warp's part of a unit.
    static __device__ __forceinline__ Walk walk_of(
        const ExpertsDecode& c, const Routing& r, const Unit& unit, int warp) {
        const int picks = c.tokens * c.top_k, expert = r.entry_expert[unit.entry];
        const int projection = projection_of(unit, warp);
        const int sub = unit.down ? warp : warp % (kWarps / 2);
        const int part = unit.part * (unit.down ? kPartsB : kPartsA) + sub / kAcross;
        const int parts = unit.down ? c.split_b * kPartsB : c.split_a * kPartsA;
        const int inputs = unit.down ? c.intermediate : c.hidden;
        const int outputs = unit.down ? c.hidden : c.intermediate;
        const int first = inputs / 16 * part / parts;
        const int bits8 = c.bits8[projection];
        Walk w;
        w.tiles = inputs / 16 * (part + 1) / parts - first;
        w.step_bytes = static_cast<int64_t>(outputs / 16) * 4 * bits8;
        const int64_t skip = first * w.step_bytes + (8 * unit.block + kTiles * (sub % kAcross)) * 4 * bits8;
        w.weights = reinterpret_cast<const char*>(c.table[9 * expert + 3 * projection]) + skip;
        const bool first_entry = unit.entry == 0 || r.entry_expert[unit.entry - 1] != expert;
        const int64_t to = c.fill != nullptr && first_entry ? c.fill[expert] : 0;
        w.copy = nullptr;
        if (to > 0) {
            const int before = projection == 0 ? 0 : projection == 1 ? c.bits8[0] : c.bits8[0] + c.bits8[1];
            w.copy = reinterpret_cast<char*>(to) + static_cast<int64_t>(c.hidden) * c.intermediate / 64 * before + skip;
        }
        w.pick_bytes = 2 * static_cast<int64_t>(inputs);
        w.inputs = unit.down ? static_cast<const char*>(c.act)
                             : static_cast<const char*>(c.rotated) + projection * picks * w.pick_bytes;
        w.inputs += 32 * first;
        // Over the link a warp begins when its own inputs are there, and no more than the link needs is under way:
        // a block's other reads wait behind it. From device memory all warps of a block begin together.
        const bool over_link = unit.entry < r.host_entries;
        const int columns = c.intermediate / 128, from = over_link ? first / 8 : 0;
        const int to_column = over_link ? (first + w.tiles + 7) / 8 : columns;
        w.flags = c.control + Control::kAct + unit.entry * columns + from;
        w.flag_count = unit.down ? to_column - from : 0;
        const int stage = kWarps * kTiles * 4 * bits8;  // of all warps of a block
        w.depth = over_link ? min(4, max(2, c.link_bytes / (max(1, r.link_blocks) * stage))) : kDeepest;
        ask_for_scales(c, unit, expert, warp);
        w.order = r.order + r.entry_start[unit.entry];
        w.rows = r.entry_rows[unit.entry];
        return w;
    }

    // The first weights of the block's first unit are on their way when the rest of its beginning begins.
    static __device__ __forceinline__ void ask_first(const ExpertsDecode& c, Shared& s, Ring& ring) {
        const int warp = threadIdx.x >> 5;
        const Unit unit = unit_of(c, s.routing, s.first);
        const Walk w = walk_of(c, s.routing, unit, warp);
        if ((threadIdx.x & 31) == 0) s.next[warp] = w;
        ask_bits<CODEBOOK, GROUPS, kTiles>(c.bits8[projection_of(unit, warp)], w, ring);
        __syncwarp();
    }

    // Does the unit and returns the block's next ticket. `left` becomes what `leave` says, if it is the last.
    static __device__ __forceinline__ int run(
        const ExpertsDecode& c, Shared& s, int current, char* memory, Ring& ring, int& left, Trace& trace) {
        const Routing& r = s.routing;
        const Unit unit = unit_of(c, r, current);
        const Control at(c.tokens * c.top_k, c.hidden, c.intermediate);
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        int ticket = kNoUnit;
        float acc[kTiles][GROUPS][4] = {};
        {
            Walk w;
            const auto ready = [&](bool wait) {
                trace(c, 3, current);
                bool done = inputs_done(w);
                for (int tries = 0; wait && !done; done = inputs_done(w))
                    if (++tries == 1 << 25) __trap();  // many seconds: an error, not a hang
                if (done) trace(c, 4, current);
                return done;
            };
            const auto next = [&](int bits8, const Walk** walk) {
                ticket = claim(c, r, &s.claimed);
                if (ticket == kNoUnit) return kNothing;
                const Unit following = unit_of(c, r, ticket);
                __syncwarp();
                if (lane == 0) s.next[warp] = walk_of(c, r, following, warp);
                __syncwarp();
                *walk = &s.next[warp];
                if (c.bits8[projection_of(following, warp)] != bits8) return kNothing;
                return inputs_done(s.next[warp]) ? kWeightsAndInputs : kWeights;
            };
            if (kAhead && ring.ahead != kNothing) {
                w = s.next[warp];
            } else {
                w = walk_of(c, r, unit, warp);
            }
            walk_bits<CODEBOOK, GROUPS, kTiles, kAhead>(
                c.bits8[projection_of(unit, warp)], w, ring, acc, ready, next);
        }
        trace(c, 5, current);
        const int expert = r.entry_expert[unit.entry], rows = r.entry_rows[unit.entry];
        const uint16_t* order = r.order + r.entry_start[unit.entry];
        const Scales scales(c, unit.down, expert, unit.block);
        const float weight = unit.down && warp < rows ? weight_of(c, order[warp]) : 0.0f;
        __syncthreads();  // nobody reads the last result any more; without kAhead the rings become this one
        if (threadIdx.x == 0) atomicExch(&s.claimed, kUnclaimed);
        if (kAhead && ticket == kNoUnit) leave(c, left);
        auto* result = reinterpret_cast<float*>(kAhead ? memory + kWarps * kRingBytes : memory);
        {
            const int sub = unit.down ? warp : warp % (kWarps / 2);
            const int base = unit.down ? 0 : warp / (kWarps / 2) * kPartsA;
            put_products(result + (base + sub / kAcross) * kStride + 16 * kTiles * (sub % kAcross), acc);
        }
        __syncthreads();
        if (unit.down) {
            finish_down(c, r, unit, at, result, order, scales, weight, rows, &s.arrived);
        } else {
            finish_gate_up(c, unit, at, result, order, scales, rows, &s.arrived);
        }
        trace(c, 6, current);
        if constexpr (!kAhead) {
            ticket = claim(c, r, &s.claimed);
            __syncthreads();  // the result becomes the rings
        }
        return ticket;
    }

    static __device__ __forceinline__ void finish_gate_up(
        const ExpertsDecode& c, const Unit& unit, const Control& at, const float* result,
        const uint16_t* order, const Scales& scales, int rows, int* shared) {
        const int blocks = c.intermediate / 128;
        float* partial = c.partial_a + static_cast<int64_t>(unit.block) * c.split_a * 256;
        const int64_t pick_stride = static_cast<int64_t>(blocks) * c.split_a * 256;
        float gate[4], up[4];
        if (kAhead && c.split_a > 1) {
            for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
                add_warps<kPartsA>(result + row * kPad, kStride, gate);
                add_warps<kPartsA>(result + kPartsA * kStride + row * kPad, kStride, up);
                float* to = partial + order[row] * pick_stride + 256 * unit.part;
                put(to, gate);
                put(to + 128, up);
            }
            if (!last_to_arrive(c.control + at.a + unit.entry * blocks + unit.block, c.split_a, shared)) return;
        }
        for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
            const int pick = order[row];
            if (kAhead && c.split_a > 1) {
                add_parts(partial + pick * pick_stride, c.split_a, 256, gate);
                add_parts(partial + pick * pick_stride + 128, c.split_a, 256, up);
            } else {
                add_warps<kPartsA>(result + row * kPad, kStride, gate);
                add_warps<kPartsA>(result + kPartsA * kStride + row * kPad, kStride, up);
            }
            activate(c, scales, pick, unit.block, gate, up);
        }
        __syncthreads();
        if (threadIdx.x == 0) show(c.control + Control::kAct + unit.entry * blocks + unit.block);
    }

    static __device__ __forceinline__ void finish_down(
        const ExpertsDecode& c, const Routing& r, const Unit& unit, const Control& at, float* result,
        const uint16_t* order, const Scales& scales, float weight, int rows, int* shared) {
        const int blocks = c.hidden / 128;
        float* partial = c.partial_b + static_cast<int64_t>(unit.block) * c.split_b * 128;
        const int64_t pick_stride = static_cast<int64_t>(blocks) * c.split_b * 128;
        float v[4];
        if (kAhead && c.split_b > 1) {
            for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
                add_warps<kPartsB>(result + row * kPad, kStride, v);
                put(partial + order[row] * pick_stride + 128 * unit.part, v);
            }
            if (!last_to_arrive(c.control + at.b + unit.entry * blocks + unit.block, c.split_b, shared)) return;
        }
        for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
            const int pick = order[row];
            if (kAhead && c.split_b > 1) {
                add_parts(partial + pick * pick_stride, c.split_b, 128, v);
            } else {
                add_warps<kPartsB>(result + row * kPad, kStride, v);
            }
            weigh(scales, row < kWarps ? weight : weight_of(c, pick), v);
            if (r.entries == 1) {
                *reinterpret_cast<float4*>(result + row * kPad + 4 * (threadIdx.x & 31)) =
                    make_float4(v[0], v[1], v[2], v[3]);
            } else {
                put(c.y + static_cast<int64_t>(pick) * c.hidden + 128 * unit.block, v);
            }
        }
        if (last_to_arrive(c.control + at.done + unit.block, r.entries, shared))
            combine(c, r, unit.block, r.entries == 1 ? result : nullptr);
    }
};

// What the engine wants to know, by one block.
__device__ inline void count(const ExpertsDecode& c, const Routing& r) {
    if (threadIdx.x == 0 && c.reads != nullptr) {
        const int64_t weights = static_cast<int64_t>(c.hidden) * c.intermediate / 64;
        const int64_t bytes = weights * (c.bits8[0] + c.bits8[1] + c.bits8[2]);
        atomicAdd(reinterpret_cast<unsigned long long*>(c.reads), bytes * r.host_entries);
        if (r.not_here) atomicAdd(reinterpret_cast<unsigned long long*>(c.reads) + 1, 1ull * r.not_here);
    }
    for (int p = threadIdx.x; c.picks != nullptr && p < c.tokens * c.top_k; p += kThreads) {
        const int64_t id = id_at(c, p);
        if (id >= 0 && id < c.experts) atomicAdd(reinterpret_cast<unsigned long long*>(c.picks) + id, 1ull);
    }
}

template <int CODEBOOK, int GROUPS>
__global__ void __launch_bounds__(kThreads, 2) routed_layer(const ExpertsDecode c) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    const Routing& r = s.routing;
    Trace trace(blockIdx.x);
    trace(c, 1);
    const Rotation<(GROUPS > 1 ? 4 : 2)> rotation(c);
    rotation.share(c);
    if (threadIdx.x == 0) s.claimed = kUnclaimed;
    route(c, s.routing);
    trace(c, 2);
    if (threadIdx.x == 0) s.first = take(c, r, true);
    __syncthreads();
    Ring ring{memory + (threadIdx.x >> 5) * kRingBytes, 0, kNothing, 0};
    if (Layer<CODEBOOK, GROUPS>::kAhead && s.first != kNoUnit) {
        Layer<CODEBOOK, GROUPS>::ask_first(c, s, ring);
        trace(c, 3, s.first);
    }
    if (blockIdx.x == gridDim.x - 1) count(c, r);
    // Of a call without entries all wait, so that the last to leave finds all shares done.
    if (s.first != kNoUnit || r.entries == 0) rotation.wait(c, &s.arrived);
    int left = kStays;
    for (int ticket = s.first; ticket != kNoUnit;)
        ticket = Layer<CODEBOOK, GROUPS>::run(c, s, ticket, memory, ring, left, trace);
    if (r.entries == 0)  // nothing to add: nobody will combine
        for (int block = blockIdx.x; block < c.hidden / 128; block += gridDim.x) combine(c, r, block, nullptr);
    leave(c, left);
    clean_up(c, r, left);
    trace(c, 7);
}

template <int CODEBOOK, int GROUPS>
int launch(const ExpertsDecode& c, cudaStream_t stream) {
    const int bytes = Layer<CODEBOOK, GROUPS>::shared_bytes(c.ring_bytes);
    return launch_kernel(routed_layer<CODEBOOK, GROUPS>, dim3(c.blocks), bytes, false, c, stream);
}

template <int CODEBOOK>
int launch_groups(const ExpertsDecode& c, cudaStream_t stream) {
    switch (c.groups) {
        case 1: return launch<CODEBOOK, 1>(c, stream);
        case 2: return launch<CODEBOOK, 2>(c, stream);
        case 4: return launch<CODEBOOK, 4>(c, stream);
        case 8: return launch<CODEBOOK, 8>(c, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace exl3
