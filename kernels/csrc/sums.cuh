// What follows a product: parts of k added in order, the activation, the weighted sum over a token's
// picks. Every sum has one order, whoever does it and whenever.
#pragma once
#include "control.h"
#include "experts.h"
#include "rotate.cuh"
#include "route.cuh"

namespace exl3 {

constexpr int kWarps = kThreads / 32;
constexpr int kPad = 132;  // floats from row to row of 128: 8 columns by 4 rows hit 32 banks

// One more at *counter, by one thread after a barrier: what the block has written before can be read by
// who sees it, and what others had before theirs by the block after its next barrier.
__device__ __forceinline__ int arrive(int32_t* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ __forceinline__ int seen(const int32_t* word) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// By one thread after a barrier: who sees the flag sees what the block has written.
__device__ __forceinline__ void show(int32_t* flag) {
    asm volatile("st.release.gpu.global.b32 [%0], 1;" ::"l"(flag) : "memory");
}

// True in the block whose arrival at *counter is the `expected`-th: then everything written before
// the others' arrivals can be read, and the counter is zero for the next call. Called by all threads.
__device__ inline bool last_to_arrive(int32_t* counter, int expected, int* shared) {
    __syncthreads();
    if (expected == 1) return true;
    if (threadIdx.x == 0) {
        const int before = arrive(counter);
        if (before == expected - 1) *counter = 0;
        *shared = before;
    }
    __syncthreads();
    return *shared == expected - 1;
}

// A warp's products, as mma leaves them in a lane, to the rows of a result: 16 columns a tile, 8 rows a group.
template <int TILES, int GROUPS>
__device__ __forceinline__ void put_products(float* to, const float (&acc)[TILES][GROUPS][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                to[(8 * g + 2 * (lane & 3) + (i & 1)) * kPad + 16 * t + (lane >> 2) + 8 * (i >> 1)] = acc[t][g][i];
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

// What the end of a unit multiplies by, this lane's four columns: svh of gate and of up and suh of down,
// or svh of down. Read before the block's slower warps end.
struct Scales {
    uint2 of[3];
    __device__ __forceinline__ Scales(const ExpertsDecode& c, bool down, int64_t expert, int block) {
        const int64_t* row = c.table + 9 * expert;
        const int which[3] = {down ? 8 : 2, 5, 7};
#pragma unroll
        for (int i = 0; i < 3; ++i)
            of[i] = i == 0 || !down ? reinterpret_cast<const uint2*>(row[which[i]])[32 * block + (threadIdx.x & 31)]
                                    : make_uint2(0, 0);
    }
};

// gate and up of a row's 128 columns, still rotated -> the row of down's inputs.
__device__ inline void activate(
    const ExpertsDecode& c, const Scales& scales, int pick, int block, float (&gate)[4], float (&up)[4]) {
    float g[4], u[4], s[4];
    unpack4(scales.of[0], g);
    unpack4(scales.of[1], u);
    unpack4(scales.of[2], s);
    swiglu(gate, up, g, u, s, c.swiglu_limit);
    store_fragments(static_cast<__half*>(c.act) + static_cast<int64_t>(pick) * c.intermediate, block, s);
}

__device__ __forceinline__ float weight_of(const ExpertsDecode& c, int pick) {
    return c.weight_on_input ? 1.0f : c.weights[pick];
}

__device__ inline void weigh(const Scales& scales, float weight, float (&v)[4]) {
    float s[4];
    unpack4(scales.of[0], s);
    hadamard(v);
    const float scale = kInverseSqrt128 * weight;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= s[i] * scale;
}

// The sum over every token's picks of 128 columns, experts ascending, then slots ascending. `near`: the rows
// of the only entry, if there is only one, which need no trip through memory.
__device__ inline void combine(const ExpertsDecode& c, const Routing& r, int block, const float* near) {
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
        constexpr int kTogether = 6;  // reads under way at once, also of rows that are not added then
        for (int first = 0; first < c.top_k; first += kTogether) {
            float v[kTogether][4];
            uint32_t who[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                who[i] = __ballot_sync(0xFFFFFFFFu, added && place == first + i);
                const int pick = base + max(0, __ffs(who[i]) - 1);
                if (near == nullptr) {
                    add_parts(c.y + static_cast<int64_t>(pick) * c.hidden + 128 * block, 1, 0, v[i]);
                } else {
                    add_warps<1>(near + (r.rank[pick] < kNotHere ? r.rank[pick] : 0) * kPad, 0, v[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                if (who[i] == 0) continue;
                const bool here = r.rank[base + __ffs(who[i]) - 1] != kNotHere;
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] += here ? v[i][j] : __int_as_float(0x7FC00000);  // never silently wrong
            }
        }
        store4(c.out, static_cast<int64_t>(token) * c.hidden + 128 * block + 4 * lane, c.dtype, sum);
    }
}

}  // namespace exl3
