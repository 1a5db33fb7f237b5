// The routed layer for codebook mcg; a file each, so that they compile beside each other.
#include "decode.cuh"

int experts_decode_mcg(const ExpertsDecode& call, cudaStream_t stream) {
    return exl3::launch_groups<exl3::kMcg>(call, stream);
}
