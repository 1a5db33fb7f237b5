// Rows of a lookup table in any memory the device can read, decoded. A warp takes four positions at
// once, so that their reads are in flight together; of equal neighbours only the first reads.
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "experts.h"
#include "rotate.cuh"

namespace exl3 {

constexpr int kLookupWarps = 4, kLookupRows = 4;
constexpr int kValues = EXPERTS_LOOKUP_VALUES;

struct Lookup {
    const char* table;
    const int64_t* ids;    // [count], sorted if `place` is given
    const int64_t* place;  // position in out of each, or null: its own
    void* out;             // [count][kValues], dtype
    int64_t rows, count;
    int dtype;
};

template <int FORMAT>
constexpr int kLookupBytes = FORMAT == EXPERTS_INT4 ? 144 : 264;

// 2^(e - 127), as E8M0 has it.
__device__ __forceinline__ float power(uint32_t e) {
    return __uint_as_float(e == 0 ? 0x00400000u : e == 255 ? 0x7FC00000u : e << 23);
}

// The lane's eight values of a row: one group of 32 has one scale.
template <int FORMAT>
__device__ __forceinline__ void decode(const char* row, int lane, float (&v)[8]) {
    if constexpr (FORMAT == EXPERTS_INT4) {
        const uint32_t bits = reinterpret_cast<const uint32_t*>(row)[lane];
        const float scale = __half2float(reinterpret_cast<const __half*>(row + 128)[lane >> 2]);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(static_cast<int>((bits >> (4 * i)) & 15u) - 8) * scale;
    } else {
        const uint2 bits = reinterpret_cast<const uint2*>(row)[lane];
        const float scale = power(static_cast<uint8_t>(row[256 + (lane >> 2)]));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto one = static_cast<__nv_fp8_storage_t>((i < 4 ? bits.x : bits.y) >> (8 * (i & 3)));
            v[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(one, __NV_E4M3))) * scale;
        }
    }
}

template <int FORMAT>
__global__ void __launch_bounds__(32 * kLookupWarps) lookup(const Lookup l) {
    constexpr int kChunks = kLookupBytes<FORMAT> / 8;
    constexpr int kLoads = (kLookupRows * kChunks + 31) / 32;
    __shared__ __align__(16) uint2 shared[kLookupWarps][kLookupRows * kChunks];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * kLookupWarps + warp) * kLookupRows;
    const auto reads = [&](int i) {
        const int64_t at = first + i;
        if (at >= l.count) return false;
        const int64_t id = l.ids[at];
        return id >= 0 && id < l.rows && !(l.place != nullptr && at > 0 && l.ids[at - 1] == id);
    };
    uint2 words[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int at = lane + 32 * i, row = at / kChunks;
        if (row < kLookupRows && reads(row))
            words[i] = reinterpret_cast<const uint2*>(l.table + l.ids[first + row] * kLookupBytes<FORMAT>)[at % kChunks];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
        if (lane + 32 * i < kLookupRows * kChunks) shared[warp][lane + 32 * i] = words[i];
    __syncwarp();
    for (int row = 0; row < kLookupRows && first + row < l.count; ++row) {
        const int64_t id = l.ids[first + row];
        const bool outside = id < 0 || id >= l.rows;
        if (!outside && !reads(row)) continue;
        float v[8];
        if (outside) {
            // -1 asks for nothing; any other number is a bug, and never silently zero.
            for (int i = 0; i < 8; ++i) v[i] = id == -1 ? 0.0f : __int_as_float(0x7FC00000);
        } else {
            decode<FORMAT>(reinterpret_cast<const char*>(&shared[warp][row * kChunks]), lane, v);
        }
        const float low[4] = {v[0], v[1], v[2], v[3]}, high[4] = {v[4], v[5], v[6], v[7]};
        for (int64_t at = first + row; at < l.count && l.ids[at] == id; ++at) {
            const int64_t to = (l.place == nullptr ? at : l.place[at]) * kValues + 8 * lane;
            store4(l.out, to, l.dtype, low);
            store4(l.out, to + 4, l.dtype, high);
            if (l.place == nullptr || outside) break;  // each has a warp of its own
        }
    }
}

}  // namespace exl3

extern "C" int experts_lookup(
    const void* table, int64_t rows, const int64_t* ids, const int64_t* place, int64_t count, void* out, int format,
    int dtype, void* stream) {
    if (count < 1 || rows < 1 || reinterpret_cast<uint64_t>(table) % 16) return cudaErrorInvalidValue;
    const exl3::Lookup l{static_cast<const char*>(table), ids, place, out, rows, count, dtype};
    constexpr int kABlock = exl3::kLookupWarps * exl3::kLookupRows;
    const auto blocks = static_cast<unsigned>((count + kABlock - 1) / kABlock);
    const auto on = static_cast<cudaStream_t>(stream);
    switch (format) {
        case EXPERTS_INT4: exl3::lookup<EXPERTS_INT4><<<blocks, 32 * exl3::kLookupWarps, 0, on>>>(l); break;
        case EXPERTS_FP8: exl3::lookup<EXPERTS_FP8><<<blocks, 32 * exl3::kLookupWarps, 0, on>>>(l); break;
        default: return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}
