// One lane's eight weights of a 16x16 EXL3 tile: which bits, and which value.
//
// The layout (FACTS: a tile is a ring of 256*K bits, most significant bit of each little-endian
// uint32 first; position t owns the 16 bits that end after floor(K*(t+1)) bits; lane t>>3, j = t&7)
// puts a lane's eight positions next to each other, and they are its own fragment of
// mma.m16n8k16's A operand when A is the tile transposed: {j0,j1}, {j4,j5}, {j2,j3}, {j6,j7}.
//
// Compiled twice from this text: by nvcc for the GPU and by g++ for the tests that need none.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define EXL3_FN __host__ __device__ __forceinline__
#else
#define EXL3_FN inline
#endif

namespace exl3 {

enum Codebook { kThreeInst = 0, kMcg = 1, kMul1 = 2 };

// The low 32 bits of (high:low) >> shift, shift in 0..31.
EXL3_FN uint32_t funnel(uint32_t low, uint32_t high, int shift) {
#ifdef __CUDA_ARCH__
    return __funnelshift_r(low, high, shift);
#else
    return shift ? (low >> shift) | (high << (32 - shift)) : low;
#endif
}

// 16 bits of v, from bit `from` in 0..16 up. A shift to the left is a multiplication, for which the GPU has
// other units than for the rest here; the compiler would make it a shift to the right and a mask.
EXL3_FN uint32_t sixteen(uint32_t v, int from) {
    if (from == 0) return v & 0xFFFFu;
#ifdef __CUDA_ARCH__
    if (from < 16) asm("shl.b32 %0, %0, %1;" : "+r"(v) : "r"(16 - from));
#else
    v <<= 16 - from;
#endif
    return v >> 16;
}

// BITS8 = 8*K: the bits of one lane's eight weights (8, 12, 16, 20, 24, 28, 32, ..., 64), which is
// also the number of uint32 words of a tile.
template <int BITS8>
struct Lane {
    static constexpr int kWords = BITS8;
    static constexpr int kTileBytes = 4 * BITS8;
    // The first of the eight windows starts this many bits before the lane's end.
    static constexpr int kSpan = 16 + BITS8 - BITS8 / 8;
    static constexpr int kMaxShift = BITS8 % 32 == 0 ? 0 : BITS8 % 16 == 0 ? 16 : BITS8 % 8 == 0 ? 24 : 28;
    static constexpr int kAligned = (kSpan + 31) / 32;
    static constexpr int kLoads = (kSpan + kMaxShift + 31) / 32;

    int word[kLoads];  // indices of the tile's words, last one first
    int shift;         // of the lane's last bit from the end of word[0]

    EXL3_FN explicit Lane(int lane) {
        const int end = BITS8 * (lane + 1);
        const int last = (end - 1) >> 5;
        shift = 32 * (last + 1) - end;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) word[i] = last - i < 0 ? last - i + kWords : last - i;
    }

    // The eight 16-bit states of this lane, from its words.
    EXL3_FN void states(const uint32_t (&w)[kLoads], uint32_t (&state)[8]) const {
        uint32_t v[kAligned + 1];
#pragma unroll
        for (int i = 0; i < kAligned; ++i) {
            const uint32_t high = i + 1 < kLoads ? w[i + 1 < kLoads ? i + 1 : 0] : 0u;
            v[i] = kMaxShift == 0 ? w[i] : funnel(w[i], high, shift);
        }
        v[kAligned] = 0u;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int down = BITS8 - BITS8 * (j + 1) / 8;
            const int i = down >> 5, s = down & 31;
            state[j] = s + 16 <= 32 ? sixteen(v[i], s) : funnel(v[i], v[i + 1], s) & 0xFFFFu;
        }
    }
};

// 3INST and mcg: the value is half(low 16 bits) + half(high 16 bits) of this.
template <int CODEBOOK>
EXL3_FN uint32_t two_halves(uint32_t state) {
    const uint32_t x = CODEBOOK == kMcg ? state * 0xCBAC1FEDu : state * 89226354u + 64248484u;
#ifdef __CUDA_ARCH__
    uint32_t out;  // as one instruction, which the compiler would not do with two constants
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(out) : "r"(x), "r"(0x8FFF8FFFu), "r"(0x3B603B60u));
    return out;
#else
    return (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
#endif
}

// mul1: the sum of the four bytes of this, plus 0x6400, which as a half is 1024 + sum.
EXL3_FN uint32_t mul1_sum(uint32_t state) {
    const uint32_t x = state * 0x83DCD12Du;
#ifdef __CUDA_ARCH__
    return __dp4a(x, 0x01010101u, 0x6400u);
#else
    return 0x6400u + (x & 255u) + ((x >> 8) & 255u) + ((x >> 16) & 255u) + (x >> 24);
#endif
}
constexpr uint16_t kMul1Scale = 0x1EEE, kMul1Bias = 0xC931;

#ifdef __CUDACC__
// Two weights as packed halves, the first in the low half.
template <int CODEBOOK>
__device__ __forceinline__ uint32_t two_values(uint32_t first, uint32_t second) {
    __half2 value;
    if constexpr (CODEBOOK == kMul1) {
        const uint32_t sums = __byte_perm(mul1_sum(first), mul1_sum(second), 0x5410);
        const __half2 scale = __half2half2(__ushort_as_half(kMul1Scale));
        const __half2 bias = __half2half2(__ushort_as_half(kMul1Bias));
        value = __hfma2(reinterpret_cast<const __half2&>(sums), scale, bias);
    } else {
        const uint32_t a = two_halves<CODEBOOK>(first), b = two_halves<CODEBOOK>(second);
        const auto &x = reinterpret_cast<const __half2&>(a), &y = reinterpret_cast<const __half2&>(b);
        value = __halves2half2(__hadd(__low2half(x), __high2half(x)), __hadd(__low2half(y), __high2half(y)));
    }
    return reinterpret_cast<const uint32_t&>(value);
}

// The lane's fragment of A = tile^T for mma.m16n8k16, from the tile's words in shared memory.
template <int BITS8, int CODEBOOK>
__device__ __forceinline__ void fragment(
    const uint32_t* tile, const Lane<BITS8>& lane, uint32_t (&a)[4]) {
    uint32_t w[Lane<BITS8>::kLoads], s[8];
#pragma unroll
    for (int i = 0; i < Lane<BITS8>::kLoads; ++i) w[i] = tile[lane.word[i]];
    lane.states(w, s);
    a[0] = two_values<CODEBOOK>(s[0], s[1]);
    a[1] = two_values<CODEBOOK>(s[4], s[5]);
    a[2] = two_values<CODEBOOK>(s[2], s[3]);
    a[3] = two_values<CODEBOOK>(s[6], s[7]);
}
#endif

}  // namespace exl3
