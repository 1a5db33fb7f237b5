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
// homes nor on timing. A block waits only for units with lower tickets of its own queue, which
// other blocks hold already: no deadlock, whatever the number of blocks.
#pragma once
#include <cuda_runtime.h>

#include "control.h"
#include "experts.h"
#include "rotate.cuh"
#include "route.cuh"
#include "stream.cuh"

namespace exl3 {

constexpr int kWarps = kThreads / 32;
constexpr int kPad = 132;  // floats from row to row of 128: 8 columns by 4 rows hit 32 banks

static __device__ void rotate_one(const ExpertsDecode& c, int pick, int projection, int block) {
    const int64_t id = id_at(c, pick);
    if (!is_here(c, id)) return;
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
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    const int block = blockIdx.x * kWarps + (threadIdx.x >> 5);
    if (block < c.hidden / 128) rotate_one(c, blockIdx.y, blockIdx.z, block);
    if (blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0 && c.picks != nullptr) {
        const int64_t id = id_at(c, blockIdx.y);
        if (id >= 0 && id < c.experts) atomicAdd(reinterpret_cast<unsigned long long*>(c.picks) + id, 1ull);
    }
}

struct Unit {
    bool down;
    int entry, block, part;  // block of 128 columns, part of k
};

// Takes the next unit of this block's queue, or of the other; false when both are empty.
__device__ inline bool take(const ExpertsDecode& c, const Routing& r, bool host_first, Unit& unit, int* ticket) {
    const int units_a = c.intermediate / 128 * c.split_a, units_b = c.hidden / 128 * c.split_b;
    for (int attempt = 0; attempt < 2; ++attempt) {
        const bool host = host_first == (attempt == 0);
        const int first = host ? 0 : r.host_entries;
        const int entries = (host ? r.host_entries : r.entries) - first;
        if (entries == 0 || (host && static_cast<int>(blockIdx.x) >= c.host_blocks)) continue;
        __syncthreads();
        if (threadIdx.x == 0)
            *ticket = atomicAdd(c.control + (host ? Control::kTicketHost : Control::kTicketDevice), 1);
        __syncthreads();
        int at = *ticket;
        if (at >= entries * (units_a + units_b)) continue;
        unit.down = at >= entries * units_a;
        if (unit.down) at -= entries * units_a;
        const int per_entry = unit.down ? units_b : units_a, split = unit.down ? c.split_b : c.split_a;
        unit.entry = first + at / per_entry;
        unit.block = at % per_entry / split;
        unit.part = at % per_entry % split;
        return true;
    }
    return false;
}

// True in the block whose arrival at *counter is the `expected`-th: then everything written before
// the others' arrivals can be read. Called by all threads.
__device__ inline bool last_to_arrive(int32_t* counter, int expected, int* shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *shared = atomicAdd(counter, 1);
    __syncthreads();
    const bool last = *shared == expected - 1;
    __threadfence();
    return last;
}

// The four columns of this lane in a row, the parts of k added in order: first this block's warps'.
template <int PARTS>
__device__ __forceinline__ void add_warps(const float* buffer, int stride, float (&v)[4]) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const float4 f = *reinterpret_cast<const float4*>(buffer + part * stride + 4 * (threadIdx.x & 31));
        v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w;
    }
}

__device__ __forceinline__ void add_parts(const float* from, int parts, int stride, float (&v)[4]) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
    for (int part = 0; part < parts; ++part) {
        const float4 f = __ldcg(reinterpret_cast<const float4*>(from + part * stride) + (threadIdx.x & 31));
        v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w;
    }
}

__device__ __forceinline__ void put(float* to, const float (&v)[4]) {
    __stcg(reinterpret_cast<float4*>(to) + (threadIdx.x & 31), make_float4(v[0], v[1], v[2], v[3]));
}

// gate and up of a row's 128 columns, still rotated -> the row of down's inputs.
__device__ inline void activate(
    const ExpertsDecode& c, int64_t expert, int pick, int block, float (&gate)[4], float (&up)[4]) {
    const int64_t* row = c.table + 9 * expert;
    const int at = 128 * block + 4 * (threadIdx.x & 31);
    float g[4], u[4], s[4];
    load4(reinterpret_cast<const __half*>(row[2]) + at, g);
    load4(reinterpret_cast<const __half*>(row[5]) + at, u);
    load4(reinterpret_cast<const __half*>(row[7]) + at, s);
    swiglu(gate, up, g, u, s, c.swiglu_limit);
    store_fragments(static_cast<__half*>(c.act) + static_cast<int64_t>(pick) * c.intermediate, block, s);
}

__device__ inline void weigh(const ExpertsDecode& c, int64_t expert, int pick, int block, float (&v)[4]) {
    const int at = 128 * block + 4 * (threadIdx.x & 31);
    float s[4];
    load4(reinterpret_cast<const __half*>(c.table[9 * expert + 8]) + at, s);
    hadamard(v);
    const float scale = kInverseSqrt128 * (c.weight_on_input ? 1.0f : c.weights[pick]);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= s[i] * scale;
    put(c.y + static_cast<int64_t>(pick) * c.hidden + 128 * block, v);
}

// The sum over every token's picks of 128 columns, experts ascending, then slots ascending.
__device__ inline void combine(const ExpertsDecode& c, const Routing& r, int block) {
    const int lane = threadIdx.x & 31;
    for (int token = threadIdx.x >> 5; token < c.tokens; token += kWarps) {
        const int base = token * c.top_k;
        const int64_t mine = lane < c.top_k ? id_at(c, base + lane) : INT64_MAX;
        const bool added = lane < c.top_k && r.rank[base + lane] != kNobody;
        int place = 0;
        for (int slot = 0; slot < c.top_k; ++slot) {
            const int64_t other = __shfl_sync(0xFFFFFFFFu, mine, slot);
            place += other < mine || (other == mine && slot < lane);
        }
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int i = 0; i < c.top_k; ++i) {
            const uint32_t who = __ballot_sync(0xFFFFFFFFu, added && place == i);
            if (who == 0) continue;
            const int pick = base + __ffs(who) - 1;
            float v[4];
            if (r.rank[pick] == kNotHere) {
                v[0] = v[1] = v[2] = v[3] = __int_as_float(0x7FC00000);  // never silently wrong
            } else {
                add_parts(c.y + static_cast<int64_t>(pick) * c.hidden + 128 * block, 1, 0, v);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[j] += v[j];
        }
        store4(c.out, static_cast<int64_t>(token) * c.hidden + 128 * block + 4 * lane, c.dtype, sum);
    }
}

template <int CODEBOOK, int GROUPS, int TILES, typename Ready>
__device__ __forceinline__ void walk_bits(
    int bits8, const Walk& w, char* ring, float (&acc)[TILES][GROUPS][4], const Ready& ready) {
    switch (bits8) {
#define EXL3_CASE(B) \
    case B: walk<B, CODEBOOK, GROUPS, TILES>(w, ring, acc, ready); break;
        EXL3_CASE(8) EXL3_CASE(16) EXL3_CASE(24) EXL3_CASE(32)
        EXL3_CASE(40) EXL3_CASE(48) EXL3_CASE(56) EXL3_CASE(64)
        default:
            if constexpr (CODEBOOK == kMul1) {
                switch (bits8) { EXL3_CASE(12) EXL3_CASE(20) EXL3_CASE(28) }
            }
#undef EXL3_CASE
    }
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
    static constexpr int kRingsBytes = kWarps * kRingBytes;
    static constexpr int kSharedBytes = kResultBytes > kRingsBytes ? kResultBytes : kRingsBytes;

    static __device__ __forceinline__ void run(const ExpertsDecode& c, const Routing& r, const Unit& unit,
                                               char* memory, int* shared) {
        const Control at(c.tokens * c.top_k, c.hidden, c.intermediate);
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const int picks = c.tokens * c.top_k;
        const int expert = r.entry_expert[unit.entry], rows = r.entry_rows[unit.entry];
        const uint16_t* order = r.order + r.entry_start[unit.entry];
        float acc[kTiles][GROUPS][4] = {};
        {
            const int projection = unit.down ? 2 : warp / (kWarps / 2);
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
            w.weights = reinterpret_cast<const char*>(c.table[9 * expert + 3 * projection]) +
                        first * w.step_bytes + (8 * unit.block + kTiles * (sub % kAcross)) * 4 * bits8;
            const bool first_entry = unit.entry == 0 || r.entry_expert[unit.entry - 1] != expert;
            const int64_t to = c.fill != nullptr && first_entry ? c.fill[expert] : 0;
            w.copy = nullptr;
            if (to > 0) {
                const int before = projection == 0 ? 0 : projection == 1 ? c.bits8[0] : c.bits8[0] + c.bits8[1];
                w.copy = reinterpret_cast<char*>(to) + static_cast<int64_t>(c.hidden) * c.intermediate / 64 * before +
                         (w.weights - reinterpret_cast<const char*>(c.table[9 * expert + 3 * projection]));
            }
            w.pick_bytes = 2 * static_cast<int64_t>(inputs);
            w.inputs = unit.down ? static_cast<const char*>(c.act)
                                 : static_cast<const char*>(c.rotated) + projection * picks * w.pick_bytes;
            w.inputs += 32 * first;
            w.order = order;
            w.rows = rows;
            const auto ready = [&] {
                if (!unit.down) {
#if __CUDA_ARCH__ >= 900
                    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
                } else {
                    const int32_t* flag = c.control + Control::kAct + unit.entry;
                    int seen = 0;
                    for (int tries = 0; seen < c.intermediate / 128; ++tries) {
                        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
                        if (tries == 1 << 25) __trap();  // many seconds: an error, not a hang
                    }
                    __syncwarp();
                }
            };
            walk_bits<CODEBOOK, GROUPS, kTiles>(bits8, w, memory + warp * kRingBytes, acc, ready);
        }
        __syncthreads();  // the rings become the result
        auto* result = reinterpret_cast<float*>(memory);
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
        if (unit.down) {
            finish_down(c, r, unit, at, result, order, expert, rows, shared);
        } else {
            finish_gate_up(c, unit, at, result, order, expert, rows, shared);
        }
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
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(c.control + Control::kAct + unit.entry, 1);
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
    __shared__ Routing r;
    __shared__ int shared;
    route(c, r);
    if (blockIdx.x == 0 && threadIdx.x == 0 && c.reads != nullptr) {
        const int64_t weights = static_cast<int64_t>(c.hidden) * c.intermediate / 64;
        const int64_t bytes = weights * (c.bits8[0] + c.bits8[1] + c.bits8[2]);
        atomicAdd(reinterpret_cast<unsigned long long*>(c.reads), bytes * r.host_entries);
        if (r.not_here) atomicAdd(reinterpret_cast<unsigned long long*>(c.reads) + 1, 1ull * r.not_here);
    }
    Unit unit;
    while (take(c, r, static_cast<int>(blockIdx.x) < c.link_blocks, unit, &shared))
        Layer<CODEBOOK, GROUPS>::run(c, r, unit, memory, &shared);
    if (r.entries == 0)  // nothing to add: nobody will combine
        for (int block = blockIdx.x; block < c.hidden / 128; block += gridDim.x) combine(c, r, block);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // The last block to leave puts control back to zero for the next call.
    const Control at(c.tokens * c.top_k, c.hidden, c.intermediate);
    if (!last_to_arrive(c.control + Control::kExited, gridDim.x, &shared)) return;
    const int entries = r.entries;
    if (c.fill != nullptr)
        for (int i = threadIdx.x; i < entries; i += kThreads) mark_filled(c, r, i);
    for (int i = threadIdx.x; i < Control::kAct + entries; i += kThreads) c.control[i] = 0;
    for (int i = threadIdx.x; i < entries * (c.intermediate / 128); i += kThreads) c.control[at.a + i] = 0;
    for (int i = threadIdx.x; i < entries * (c.hidden / 128); i += kThreads) c.control[at.b + i] = 0;
    for (int i = threadIdx.x; i < c.hidden / 128; i += kThreads) c.control[at.done + i] = 0;
}

template <int CODEBOOK, int GROUPS>
int launch(const ExpertsDecode& c, cudaStream_t stream) {
    using L = Layer<CODEBOOK, GROUPS>;
    const int picks = c.tokens * c.top_k;
    const dim3 grid((c.hidden / 128 + kWarps - 1) / kWarps, picks, 2);
    rotate_inputs<<<grid, kThreads, 0, stream>>>(c);
    if (const cudaError_t e = cudaGetLastError()) return e;
    const auto kernel = routed_layer<CODEBOOK, GROUPS>;
    if (const cudaError_t e = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSharedBytes))
        return e;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(c.blocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = L::kSharedBytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = c.overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, c);
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
