// csrc/exl3_tile.cuh compiled for the CPU: every lane's states of a tile, and what the codebooks
// make of a state before the halves are added.
#include "exl3_tile.cuh"

namespace {

template <int BITS8>
void tile(const uint32_t* words, uint32_t* states) {
    for (int l = 0; l < 32; ++l) {
        const exl3::Lane<BITS8> lane(l);
        uint32_t w[exl3::Lane<BITS8>::kLoads], s[8];
        for (int i = 0; i < exl3::Lane<BITS8>::kLoads; ++i) w[i] = words[lane.word[i]];
        lane.states(w, s);
        for (int j = 0; j < 8; ++j) states[8 * l + j] = s[j];
    }
}

}  // namespace

extern "C" int tile_states(int bits8, const uint32_t* words, uint32_t* states) {
    switch (bits8) {
#define CASE(B) case B: tile<B>(words, states); return 0;
        CASE(8) CASE(12) CASE(16) CASE(20) CASE(24) CASE(28)
        CASE(32) CASE(40) CASE(48) CASE(56) CASE(64)
    }
    return 1;
}

extern "C" uint32_t mixed(int codebook, uint32_t state) {
    switch (codebook) {
        case exl3::kThreeInst: return exl3::two_halves<exl3::kThreeInst>(state);
        case exl3::kMcg: return exl3::two_halves<exl3::kMcg>(state);
        default: return exl3::mul1_sum(state);
    }
}
