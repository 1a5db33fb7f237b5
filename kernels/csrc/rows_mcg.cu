// Few rows through matrices of codebook mcg; a file each, so that they compile beside each other.
#include "rows.cuh"

int experts_linear_mcg(const ExpertsLinear& call, cudaStream_t stream) {
    return exl3::launch_rows<exl3::kMcg>(call, stream);
}
