// The routed layer for codebook mul1; a file each, so that they compile beside each other.
#include "decode.cuh"

int experts_decode_mul1(const ExpertsDecode& call, cudaStream_t stream) {
    return exl3::launch_groups<exl3::kMul1>(call, stream);
}
