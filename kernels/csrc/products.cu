// Which product of a group of pieces, and which codebook.
#include "products.cuh"

int experts_products(
    const ExpertsPrefill& c, const ExpertsPiece* pieces, int count, int projection, int projections, int bits8,
    int codebook, cudaStream_t stream) {
    const bool down = projection == 2;
    exl3::Products p{};
    p.pieces = pieces;
    p.projection = projection;
    p.k = down ? c.intermediate : c.hidden;
    p.n = down ? c.hidden : c.intermediate;
    const void* left[3] = {c.input_gate, c.input_up, c.act};
    float* out[3] = {c.gate, c.up, c.y};
    for (int z = 0; z < projections; ++z) {
        p.left[z] = static_cast<const __half*>(left[projection + z]);
        p.out[z] = out[projection + z];
    }
    const dim3 grid(p.n / 128, count, projections);
    switch (codebook) {
        case exl3::kThreeInst: return exl3::launch_products<exl3::kThreeInst>(p, bits8, grid, stream);
        case exl3::kMcg: return exl3::launch_products<exl3::kMcg>(p, bits8, grid, stream);
        case exl3::kMul1: return exl3::launch_products<exl3::kMul1>(p, bits8, grid, stream);
        default: return cudaErrorInvalidValue;
    }
}
