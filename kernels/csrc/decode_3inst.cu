// The routed layer for codebook 3inst; a file each, so that they compile beside each other.
#include "decode.cuh"

int experts_decode_3inst(const ExpertsDecode& call, cudaStream_t stream) {
    return exl3::launch_groups<exl3::kThreeInst>(call, stream);
}
