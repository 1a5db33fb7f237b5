// Sizes and offsets of the C interface's structs, as this compiler lays them out, and the control
// buffer's size.
#include <stddef.h>
#include <stdio.h>

#include "control.h"
#include "experts.h"

#define OF(S, F) printf("%s.%s %zu\n", #S, #F, offsetof(S, F))

int main() {
    printf("EXPERTS_ABI %d\n", EXPERTS_ABI);
    printf("ExpertsDecode %zu\n", sizeof(ExpertsDecode));
    printf("ExpertsPrefill %zu\n", sizeof(ExpertsPrefill));
    OF(ExpertsDecode, table); OF(ExpertsDecode, host_begin); OF(ExpertsDecode, rotated);
    OF(ExpertsDecode, control); OF(ExpertsDecode, reads); OF(ExpertsDecode, fill); OF(ExpertsDecode, ids_are_64);
    OF(ExpertsDecode, tokens); OF(ExpertsDecode, bits8); OF(ExpertsDecode, codebook);
    OF(ExpertsDecode, groups); OF(ExpertsDecode, link_percent); OF(ExpertsDecode, link_bytes);
    OF(ExpertsDecode, swiglu_limit);
    OF(ExpertsPrefill, table); OF(ExpertsPrefill, order); OF(ExpertsPrefill, input_up);
    OF(ExpertsPrefill, act); OF(ExpertsPrefill, y); OF(ExpertsPrefill, first);
    OF(ExpertsPrefill, rows); OF(ExpertsPrefill, weight_on_input); OF(ExpertsPrefill, swiglu_limit);
    printf("ExpertsMatrix %zu\n", sizeof(ExpertsMatrix));
    printf("ExpertsLinear %zu\n", sizeof(ExpertsLinear));
    OF(ExpertsMatrix, svh); OF(ExpertsMatrix, n); OF(ExpertsMatrix, skip); OF(ExpertsMatrix, at);
    OF(ExpertsLinear, x); OF(ExpertsLinear, arrived); OF(ExpertsLinear, count); OF(ExpertsLinear, codebook);
    OF(ExpertsLinear, blocks); OF(ExpertsLinear, ring_bytes);
    printf("EXPERTS_MATRICES %d\n", EXPERTS_MATRICES);
    printf("ExpertsPiece %zu\n", sizeof(ExpertsPiece));
    OF(ExpertsPiece, expert); OF(ExpertsPiece, at); OF(ExpertsPiece, rows);
    printf("EXPERTS_PIECE_ROWS %d\n", EXPERTS_PIECE_ROWS);
    printf("kMaxExperts %d\n", exl3::kMaxExperts);
    printf("kMaxPicks %d\n", exl3::kMaxPicks);
    printf("kMaxTokens %d\n", exl3::kMaxTokens);
    return 0;
}
