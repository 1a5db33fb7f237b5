// Few rows through matrices of codebook mul1; a file each, so that they compile beside each other.
#include "rows.cuh"

int experts_linear_mul1(const ExpertsLinear& call, cudaStream_t stream) {
    return exl3::launch_rows<exl3::kMul1>(call, stream);
}
