// A routed layer over a few tokens, weights read in place wherever they are.
//
//   rotate_inputs   x * suh, rotated, one row a pick, for gate and for up
//   routed_layer    blocks take units of work from two queues, host experts and device experts:
//     unit A        128 columns of gate and of up of one expert, a part of k; the block that brings
//                   the last part adds the parts in order, then silu(gate) * up, * suh of down,
//                   rotated (a block of 128 is a block of the rotation): the rows of unit B
//     unit B        128 columns of down; the last part rotates, scales, weighs; the last expert of
//                   these 128 columns adds every token's picks in ascending order of expert
//
// Every sum has one order, whoever does it and whenever, so the result's bits depend neither on
// homes nor on timing. A block may hold the unit it works on and the next one, whose weights come
// while this one ends. It waits only for units that were taken before its own, and works in the order
// in which it took them: no deadlock, whatever the number of blocks.
#pragma once
#include <cuda_runtime.h>

#include "early.cuh"
#include "experts.h"
#include "stream.cuh"
#include "sums.cuh"
#include "units.cuh"

namespace exl3 {

static __device__ void rotate_one(const ExpertsDecode& c, int pick, int projection, int block) {
    const int64_t id = id_at(c, pick);
    if (home_of(c, id) == kNowhere) return;
    const auto* suh = reinterpret_cast<const __half*>(c.table[9 * id + 3 * projection + 1]);
    const int at = 128 * block + 4 * (threadIdx.x & 31);
    float v[4], s[4];
    load4(c.x, static_cast<int64_t>(pick / c.top_k) * c.hidden + at, c.dtype, v);
    load4(suh + at, s);
    const float scale = kInverseSqrt128 * (c.weight_on_input ? c.weights[pick] : 1.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= s[i] * scale;
    hadamard(v);
    auto* row = static_cast<__half*>(c.rotated) +
                (static_cast<int64_t>(projection) * c.tokens * c.top_k + pick) * c.hidden;
    store_fragments(row, block, v);
}

static __global__ void __launch_bounds__(kThreads) rotate_inputs(const ExpertsDecode c) {
    // In this order: the main kernel must not start before what came before this one has ended.
    wait_for_earlier_kernels();
    let_the_next_kernel_start();
    const bool first = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0;
    Trace trace(c.blocks);
    if (first) trace(c, 1);
    const int block = blockIdx.x * kWarps + (threadIdx.x >> 5);
    if (block < c.hidden / 128) rotate_one(c, blockIdx.y, blockIdx.z, block);
    if (blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0 && c.picks != nullptr) {
        const int64_t id = id_at(c, blockIdx.y);
        if (id >= 0 && id < c.experts) atomicAdd(reinterpret_cast<unsigned long long*>(c.picks) + id, 1ull);
    }
    if (first) trace(c, 7);
}

// Blocks of an entry's rows of down's inputs that are done.
__device__ __forceinline__ int acts_done(const ExpertsDecode& c, int entry) {
    int seen;
    const int32_t* flag = c.control + Control::kAct + entry;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    return seen;
}

// What a block has beside its rings and result.
struct Shared {
    Routing routing;
    int claimed;  // the block's next ticket, see `claim`
    int arrived;  // see `last_to_arrive`
    Walk next[kWarps];
};

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
        ask_for_scales(c, unit, expert, warp);
        w.order = r.order + r.entry_start[unit.entry];
        w.rows = r.entry_rows[unit.entry];
        return w;
    }

    // Does the unit and returns the block's next ticket.
    static __device__ __forceinline__ int run(
        const ExpertsDecode& c, Shared& s, int current, char* memory, Ring& ring, Trace& trace) {
        const Routing& r = s.routing;
        const Unit unit = unit_of(c, r, current);
        const Control at(c.tokens * c.top_k, c.hidden, c.intermediate);
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const int blocks = c.intermediate / 128;
        int ticket = kNoUnit;
        float acc[kTiles][GROUPS][4] = {};
        {
            const auto ready = [&] {
                trace(c, 3, current);
                if (!unit.down) {
                    wait_for_earlier_kernels();
                } else {
                    for (int tries = 0; acts_done(c, unit.entry) < blocks; ++tries)
                        if (tries == 1 << 25) __trap();  // many seconds: an error, not a hang
                    __syncwarp();
                }
                trace(c, 4, current);
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
                if (following.down) {
                    const bool done = acts_done(c, following.entry) >= blocks;
                    return __all_sync(0xFFFFFFFFu, done) ? kWeightsAndInputs : kWeights;
                }
                wait_for_earlier_kernels();
                return kWeightsAndInputs;
            };
            Walk w;
            if (kAhead && ring.ahead != kNothing) {
                w = s.next[warp];
            } else {
                w = walk_of(c, r, unit, warp);
            }
            walk_bits<CODEBOOK, GROUPS, kTiles, kAhead>(
                c.bits8[projection_of(unit, warp)], w, ring, acc, ready, next);
        }
        trace(c, 5, current);
        __syncthreads();  // nobody reads the last result any more; without kAhead the rings become this one
        if (threadIdx.x == 0) atomicExch(&s.claimed, kUnclaimed);
        auto* result = reinterpret_cast<float*>(kAhead ? memory + kWarps * kRingBytes : memory);
        {
            const int sub = unit.down ? warp : warp % (kWarps / 2);
            const int base = unit.down ? 0 : warp / (kWarps / 2) * kPartsA;
            float* to = result + (base + sub / kAcross) * kStride + 16 * kTiles * (sub % kAcross);
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        to[(8 * g + 2 * (lane & 3) + (i & 1)) * kPad + 16 * t + (lane >> 2) + 8 * (i >> 1)] =
                            acc[t][g][i];
        }
        __syncthreads();
        const int expert = r.entry_expert[unit.entry], rows = r.entry_rows[unit.entry];
        const uint16_t* order = r.order + r.entry_start[unit.entry];
        if (unit.down) {
            finish_down(c, r, unit, at, result, order, expert, rows, &s.arrived);
        } else {
            finish_gate_up(c, unit, at, result, order, expert, rows, &s.arrived);
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
        const uint16_t* order, int expert, int rows, int* shared) {
        const int blocks = c.intermediate / 128;
        float* partial = c.partial_a + static_cast<int64_t>(unit.block) * c.split_a * 256;
        const int64_t pick_stride = static_cast<int64_t>(blocks) * c.split_a * 256;
        float gate[4], up[4];
        if (c.split_a > 1) {
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
            if (c.split_a > 1) {
                add_parts(partial + pick * pick_stride, c.split_a, 256, gate);
                add_parts(partial + pick * pick_stride + 128, c.split_a, 256, up);
            } else {
                add_warps<kPartsA>(result + row * kPad, kStride, gate);
                add_warps<kPartsA>(result + kPartsA * kStride + row * kPad, kStride, up);
            }
            activate(c, expert, pick, unit.block, gate, up);
        }
        __syncthreads();
        if (threadIdx.x == 0) arrive(c.control + Control::kAct + unit.entry);
    }

    static __device__ __forceinline__ void finish_down(
        const ExpertsDecode& c, const Routing& r, const Unit& unit, const Control& at, const float* result,
        const uint16_t* order, int expert, int rows, int* shared) {
        const int blocks = c.hidden / 128;
        float* partial = c.partial_b + static_cast<int64_t>(unit.block) * c.split_b * 128;
        const int64_t pick_stride = static_cast<int64_t>(blocks) * c.split_b * 128;
        float v[4];
        if (c.split_b > 1) {
            for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
                add_warps<kPartsB>(result + row * kPad, kStride, v);
                put(partial + order[row] * pick_stride + 128 * unit.part, v);
            }
            if (!last_to_arrive(c.control + at.b + unit.entry * blocks + unit.block, c.split_b, shared)) return;
        }
        for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
            const int pick = order[row];
            if (c.split_b > 1) {
                add_parts(partial + pick * pick_stride, c.split_b, 128, v);
            } else {
                add_warps<kPartsB>(result + row * kPad, kStride, v);
            }
            weigh(c, expert, pick, unit.block, v);
        }
        if (last_to_arrive(c.control + at.done + unit.block, r.entries, shared)) combine(c, r, unit.block);
    }
};

// An expert that was stored: its address becomes negative, so that no later call stores it again.
__device__ inline void mark_filled(const ExpertsDecode& c, const Routing& r, int entry) {
    const int expert = r.entry_expert[entry];
    if (entry > 0 && r.entry_expert[entry - 1] == expert) return;
    if (c.fill[expert] > 0) c.fill[expert] = -c.fill[expert];
}

template <int CODEBOOK, int GROUPS>
__global__ void __launch_bounds__(kThreads, 2) routed_layer(const ExpertsDecode c) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    const Routing& r = s.routing;
    Trace trace(blockIdx.x);
    trace(c, 1);
    if (threadIdx.x == 0) s.claimed = kUnclaimed;
    route(c, s.routing);
    trace(c, 2);
    if (blockIdx.x == 0 && threadIdx.x == 0 && c.reads != nullptr) {
        const int64_t weights = static_cast<int64_t>(c.hidden) * c.intermediate / 64;
        const int64_t bytes = weights * (c.bits8[0] + c.bits8[1] + c.bits8[2]);
        atomicAdd(reinterpret_cast<unsigned long long*>(c.reads), bytes * r.host_entries);
        if (r.not_here) atomicAdd(reinterpret_cast<unsigned long long*>(c.reads) + 1, 1ull * r.not_here);
    }
    Ring ring{memory + (threadIdx.x >> 5) * kRingBytes, 0, kNothing};
    int ticket = claim(c, r, &s.claimed);
    __syncthreads();
    if (threadIdx.x == 0) s.claimed = kUnclaimed;
    __syncthreads();
    while (ticket != kNoUnit)
        ticket = Layer<CODEBOOK, GROUPS>::run(c, s, ticket, memory, ring, trace);
    if (r.entries == 0)  // nothing to add: nobody will combine
        for (int block = blockIdx.x; block < c.hidden / 128; block += gridDim.x) combine(c, r, block);
    wait_for_earlier_kernels();
    trace(c, 7);
    // The last block to leave puts control back to zero for the next call.
    const Control at(c.tokens * c.top_k, c.hidden, c.intermediate);
    // Nothing has to be fenced: every count was waited for, and the end of the kernel shows the rest.
    __syncthreads();
    if (threadIdx.x == 0) s.arrived = atomicAdd(c.control + Control::kExited, 1);
    __syncthreads();
    if (s.arrived != static_cast<int>(gridDim.x) - 1) return;
    const int entries = r.entries;
    if (c.fill != nullptr)
        for (int i = threadIdx.x; i < entries; i += kThreads) mark_filled(c, r, i);
    for (int i = threadIdx.x; i < Control::kAct + entries; i += kThreads) c.control[i] = 0;
    for (int i = threadIdx.x; i < entries * (c.intermediate / 128); i += kThreads) c.control[at.a + i] = 0;
    for (int i = threadIdx.x; i < entries * (c.hidden / 128); i += kThreads) c.control[at.b + i] = 0;
    for (int i = threadIdx.x; i < c.hidden / 128; i += kThreads) c.control[at.done + i] = 0;
    trace(c, 8);
}

template <int CODEBOOK, int GROUPS>
int launch(const ExpertsDecode& c, cudaStream_t stream) {
    const int picks = c.tokens * c.top_k;
    const dim3 grid((c.hidden / 128 + kWarps - 1) / kWarps, picks, 2);
    if (const int e = launch_kernel(rotate_inputs, grid, 0, (c.overlap & 2) != 0, c, stream)) return e;
    const auto kernel = routed_layer<CODEBOOK, GROUPS>;
    const int bytes = Layer<CODEBOOK, GROUPS>::shared_bytes(c.ring_bytes);
    if (const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return e;
    return launch_kernel(kernel, dim3(c.blocks), bytes, (c.overlap & 1) != 0, c, stream);
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
