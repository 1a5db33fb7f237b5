// The C interface: checks what only a bug gets wrong, and hands over.
#include "experts.h"

#include <cuda_runtime.h>

#include "control.h"
#include "exl3_tile.cuh"

int experts_decode_3inst(const ExpertsDecode& call, cudaStream_t stream);
int experts_decode_mcg(const ExpertsDecode& call, cudaStream_t stream);
int experts_decode_mul1(const ExpertsDecode& call, cudaStream_t stream);
int experts_linear_3inst(const ExpertsLinear& call, cudaStream_t stream);
int experts_linear_mcg(const ExpertsLinear& call, cudaStream_t stream);
int experts_linear_mul1(const ExpertsLinear& call, cudaStream_t stream);
int reconstruct(const void* trellis, void* out, int k, int n, int bits8, int codebook, cudaStream_t stream);

extern "C" int experts_abi(void) { return EXPERTS_ABI; }

#ifndef EXPERTS_SOURCE
#define EXPERTS_SOURCE ""
#endif
extern "C" const char* experts_source(void) { return EXPERTS_SOURCE; }

extern "C" const char* experts_error(int code) {
    return cudaGetErrorString(static_cast<cudaError_t>(code));
}

extern "C" int64_t experts_control_bytes(int picks, int hidden, int intermediate) {
    return 4 * static_cast<int64_t>(exl3::Control(picks, hidden, intermediate).end);
}

extern "C" int experts_decode(const ExpertsDecode* call, void* stream) {
    const ExpertsDecode& c = *call;
    if (c.tokens < 1 || c.tokens > exl3::kMaxTokens || c.top_k < 1 || c.top_k > 32 ||
        c.tokens * c.top_k > exl3::kMaxPicks || c.experts > exl3::kMaxExperts || c.hidden % 128 ||
        c.intermediate % 128 || c.blocks < 1 || c.host_blocks < 1 || c.split_a < 1 || c.split_b < 1 ||
        (c.groups > 1 && (c.split_a > 1 || c.split_b > 1)))
        return cudaErrorInvalidValue;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (c.codebook) {
        case exl3::kThreeInst: return experts_decode_3inst(c, on);
        case exl3::kMcg: return experts_decode_mcg(c, on);
        case exl3::kMul1: return experts_decode_mul1(c, on);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" int experts_linear(const ExpertsLinear* call, void* stream) {
    const ExpertsLinear& c = *call;
    if (c.rows < 1 || c.rows > 8 * c.groups || c.count < 1 || c.count > EXPERTS_MATRICES || c.k < 128 || c.k % 128 ||
        c.split < 1)
        return cudaErrorInvalidValue;
    int blocks = 0;
    for (int i = 0; i < c.count; ++i) {
        const ExpertsMatrix& m = c.matrix[i];
        if (m.n < 128 || m.n % 128 || m.skip < 0 || m.columns < 1 || m.skip + m.columns > m.n || m.at < 0 ||
            m.at + m.columns > c.stride)
            return cudaErrorInvalidValue;
        blocks += m.n / 128;
    }
    if (blocks != c.blocks) return cudaErrorInvalidValue;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (c.codebook) {
        case exl3::kThreeInst: return experts_linear_3inst(c, on);
        case exl3::kMcg: return experts_linear_mcg(c, on);
        case exl3::kMul1: return experts_linear_mul1(c, on);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" int experts_reconstruct(
    const void* trellis, void* out, int k, int n, int bits8, int codebook, void* stream) {
    return reconstruct(trellis, out, k, n, bits8, codebook, static_cast<cudaStream_t>(stream));
}

extern "C" int experts_reconstruct_expert(
    const void* const* trellis, void* const* out, int hidden, int intermediate, const int* bits8, int codebook,
    void* stream) {
    for (int p = 0; p < 3; ++p) {
        const int k = p == 2 ? intermediate : hidden, n = p == 2 ? hidden : intermediate;
        const int code = reconstruct(trellis[p], out[p], k, n, bits8[p], codebook, static_cast<cudaStream_t>(stream));
        if (code) return code;
    }
    return cudaSuccess;
}
