// Few rows through matrices of codebook 3inst; a file each, so that they compile beside each other.
#include "rows.cuh"

int experts_linear_3inst(const ExpertsLinear& call, cudaStream_t stream) {
    return exl3::launch_rows<exl3::kThreeInst>(call, stream);
}
