// What prefill needs around its matrix products: rows gathered and rotated, the activation between,
// the weighted sum after. One warp a (row, block of 128); rows are a group of picks sorted by expert.
#include <cuda_runtime.h>

#include "experts.h"
#include "rotate.cuh"

namespace exl3 {

constexpr int kPrefillWarps = 4;

__device__ __forceinline__ void store_row(__half* row, int at, const float (&v)[4]) {
    *reinterpret_cast<uint2*>(row + at) = {pack(v[0], v[1]), pack(v[2], v[3])};
}

__device__ __forceinline__ const int64_t* row_of(const ExpertsPrefill& c, int64_t pick) {
    const int64_t id = c.ids_are_64 ? static_cast<const int64_t*>(c.ids)[pick]
                                    : static_cast<const int32_t*>(c.ids)[pick];
    return c.table + 9 * id;
}

__device__ __forceinline__ const __half* scale(const int64_t* row, int projection, int which) {
    return reinterpret_cast<const __half*>(row[3 * projection + 1 + which]);
}

__global__ void gather_rotate(const ExpertsPrefill c) {
    const int block = blockIdx.x * kPrefillWarps + (threadIdx.x >> 5), row = blockIdx.y;
    if (block >= c.hidden / 128) return;
    const int64_t pick = c.order[c.first + row];
    const int at = 128 * block + 4 * (threadIdx.x & 31);
    float x[4], s[4];
    load4(c.x, pick / c.top_k * c.hidden + at, c.dtype, x);
    load4(scale(row_of(c, pick), blockIdx.z, 0) + at, s);
    const float factor = kInverseSqrt128 * (c.weight_on_input ? c.weights[pick] : 1.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] *= x[i] * factor;
    hadamard(s);
    auto* to = static_cast<__half*>(blockIdx.z ? c.input_up : c.input_gate);
    store_row(to + static_cast<int64_t>(row) * c.hidden, at, s);
}

__device__ __forceinline__ void activate_row(const ExpertsPrefill& c, const int64_t* addresses, int row) {
    const int block = blockIdx.x * kPrefillWarps + (threadIdx.x >> 5);
    if (block >= c.intermediate / 128) return;
    const int at = 128 * block + 4 * (threadIdx.x & 31);
    float gate[4], up[4], g[4], u[4], s[4];
    load4(c.gate, static_cast<int64_t>(row) * c.intermediate + at, EXPERTS_FLOAT32, gate);
    load4(c.up, static_cast<int64_t>(row) * c.intermediate + at, EXPERTS_FLOAT32, up);
    load4(scale(addresses, 0, 1) + at, g);
    load4(scale(addresses, 1, 1) + at, u);
    load4(scale(addresses, 2, 0) + at, s);
    swiglu(gate, up, g, u, s, c.swiglu_limit);
    store_row(static_cast<__half*>(c.act) + static_cast<int64_t>(row) * c.intermediate, at, s);
}

__global__ void activate_rows(const ExpertsPrefill c) {
    const int row = c.at + blockIdx.y;
    activate_row(c, row_of(c, c.order[c.first + row]), row);
}

__global__ void activate_pieces(const ExpertsPrefill c, const ExpertsPiece* pieces) {
    const ExpertsPiece& piece = pieces[blockIdx.z];
    if (blockIdx.y < piece.rows) activate_row(c, c.table + 9 * piece.expert, piece.at + blockIdx.y);
}

// A token's picks in the group, experts ascending (that is the order of the sort), onto out: one
// order for every sum, so no atomics and the same bits every time. A block a token: most tokens of a
// long prefill have no pick in a group, and are looked at by few warps.
__global__ void weigh_add(const ExpertsPrefill c) {
    const int token = blockIdx.x, lane = threadIdx.x & 31;
    const int64_t pick = static_cast<int64_t>(token) * c.top_k + lane;
    int64_t row = lane < c.top_k ? c.place[pick] - c.first : -1;
    if (row >= c.group_rows) row = -1;
    const uint32_t mine = __ballot_sync(0xFFFFFFFFu, row >= 0);
    if (mine == 0) return;
    for (int block = threadIdx.x >> 5; block < c.hidden / 128; block += kPrefillWarps) {
        const int at = 128 * block + 4 * lane;
        float sum[4];
        load4(c.out, static_cast<int64_t>(token) * c.hidden + at, EXPERTS_FLOAT32, sum);
        for (uint32_t left = mine; left;) {
            int who = 0;
            int64_t first = INT64_MAX;
            for (uint32_t mask = left; mask; mask &= mask - 1) {
                const int64_t other = __shfl_sync(0xFFFFFFFFu, row, __ffs(mask) - 1);
                if (other < first) first = other, who = __ffs(mask) - 1;
            }
            left &= ~(1u << who);
            const int64_t chosen = static_cast<int64_t>(token) * c.top_k + who;
            float y[4], s[4];
            load4(c.y, first * c.hidden + at, EXPERTS_FLOAT32, y);
            load4(scale(row_of(c, chosen), 2, 1) + at, s);
            hadamard(y);
            const float factor = kInverseSqrt128 * (c.weight_on_input ? 1.0f : c.weights[chosen]);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += y[i] * s[i] * factor;
        }
        store4(c.out, static_cast<int64_t>(token) * c.hidden + at, EXPERTS_FLOAT32, sum);
    }
}

}  // namespace exl3

namespace {

dim3 grid(int size, int rows, int projections) {
    const int blocks = size / 128;
    return dim3((blocks + exl3::kPrefillWarps - 1) / exl3::kPrefillWarps, rows, projections);
}

}  // namespace

extern "C" int experts_prefill(const ExpertsPrefill* call, int step, void* stream) {
    const ExpertsPrefill& c = *call;
    if (c.group_rows < 1 || c.group_rows > 65535 || c.hidden % 128 || c.intermediate % 128 || c.top_k > 32 ||
        c.tokens < 1 || c.tokens > 65535)
        return cudaErrorInvalidValue;
    const int threads = 32 * exl3::kPrefillWarps;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (step) {
        case EXPERTS_GATHER: exl3::gather_rotate<<<grid(c.hidden, c.group_rows, 2), threads, 0, on>>>(c); break;
        case EXPERTS_ACTIVATE: exl3::activate_rows<<<grid(c.intermediate, c.rows, 1), threads, 0, on>>>(c); break;
        case EXPERTS_ADD: exl3::weigh_add<<<c.tokens, threads, 0, on>>>(c); break;
        default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

int experts_products(
    const ExpertsPrefill& c, const ExpertsPiece* pieces, int count, int projection, int projections, int bits8,
    int codebook, cudaStream_t stream);

extern "C" int experts_pieces(
    const ExpertsPrefill* call, const ExpertsPiece* pieces, int count, const int* bits8, int codebook, void* stream) {
    const ExpertsPrefill& c = *call;
    if (count < 1 || count > 65535 || c.hidden % 128 || c.intermediate % 128) return cudaErrorInvalidValue;
    const auto on = static_cast<cudaStream_t>(stream);
    const int together = bits8[0] == bits8[1] ? 2 : 1;
    for (int p = 0; p < 2; p += together)
        if (const int e = experts_products(c, pieces, count, p, together, bits8[p], codebook, on)) return e;
    exl3::activate_pieces<<<grid(c.intermediate, EXPERTS_PIECE_ROWS, count), 32 * exl3::kPrefillWarps, 0, on>>>(
        c, pieces);
    if (const cudaError_t e = cudaGetLastError()) return e;
    return experts_products(c, pieces, count, 2, 1, bits8[2], codebook, on);
}

extern "C" int experts_copy(void* to, const void* from, int64_t bytes, void* stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
}
