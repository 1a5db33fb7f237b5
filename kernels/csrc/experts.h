// The C interface of the expert kernels. No torch, no C++ types: ctypes loads it, whatever the
// engine's torch. Every call enqueues on `stream` and returns a cudaError_t; nothing waits.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Changes whenever a struct or a function here does; expert_kernels.interface checks it at load.
#define EXPERTS_ABI 11

enum { EXPERTS_FLOAT32 = 0, EXPERTS_FLOAT16 = 1, EXPERTS_BFLOAT16 = 2 };

// One routed layer over at most 64 tokens. Device addresses; `table` as in expert_kernels.ops.
typedef struct {
    const int64_t* table;        // [experts][gate|up|down][trellis|suh|svh]
    const void* ids;             // [tokens][top_k], int32 or int64; -1: nothing to add
    const float* weights;        // [tokens][top_k]
    const void* x;               // [tokens][hidden], dtype
    void* out;                   // [tokens][hidden], dtype
    uint64_t host_begin, host_end;  // trellis addresses in [begin, end) are host memory: read first
    void* rotated;               // fp16 [2][picks][hidden]
    void* act;                   // fp16 [picks][intermediate]
    float* partial_a;            // [picks][intermediate/128][split_a][256], unused if split_a == 1
    float* partial_b;            // [picks][hidden/128][split_b][128], unused if split_b == 1
    float* y;                    // [picks][hidden]
    int32_t* control;            // zero before the first call; every call leaves it zero
    int64_t* picks;              // [experts] counted up, or null
    int64_t* reads;              // [2]: bytes read from host homes, picks of an expert not here; or null
    int64_t* fill;               // [experts] where a touched expert is also stored, 0: nowhere; or null
    int64_t* trace;              // [blocks][EXPERTS_TRACE][3], zero: when a block did what; or null
    int32_t ids_are_64;
    int32_t dtype;
    int32_t tokens, top_k, experts, hidden, intermediate;
    int32_t bits8[3];            // 8*K of gate, up, down
    int32_t codebook;            // 0 3inst, 1 mcg, 2 mul1
    int32_t split_a, split_b;    // parts of k that different blocks work on; 1 where there are several groups
    int32_t groups;              // 8 rows each: 1, 2, 4 or 8; an expert with more rows is read again
    int32_t blocks;              // thread blocks of the main kernel
    int32_t host_blocks;         // of them, those that take host experts at all: at least one
    int32_t link_percent;        // of the blocks that are host entries' share, so many look for these first
    int32_t link_bytes;          // under way over the link in all, or as many as there are stages for
    int32_t ring_bytes;          // of a warp, as stream.cuh has it for the device's architecture
    int32_t weight_on_input;
    float swiglu_limit;          // <= 0: none
} ExpertsDecode;

// Records of a block's trace: globaltimer in ns, clocks of its multiprocessor, and what << 32 | the
// unit's ticket: 1 the block began, 2 it knows the routing, 3 weights asked for, 4 inputs here, 5 the
// first warp's products done, 6 the unit done, 7 the block ends.
enum { EXPERTS_TRACE = 64 };

// A group of picks of one routed layer, sorted by expert, around matrix products that others do.
// Scratch holds the group's picks: row 0 is the group's first.
typedef struct {
    const int64_t* table;
    const void* ids;
    const float* weights;
    const void* x;
    float* out;              // float32 [tokens][hidden], added to
    const int64_t* order;    // picks by expert; the group's are [first, first + group_rows)
    const int64_t* place;    // of a pick in order
    void *input_gate, *input_up;  // fp16 [group_rows][hidden], rotated
    float *gate, *up;        // float32 [group_rows][intermediate], products with W_hat
    void* act;               // fp16 [group_rows][intermediate], rotated
    float* y;                // float32 [group_rows][hidden], product with W_hat
    int64_t first;
    int32_t group_rows;
    int32_t at, rows;        // ACTIVATE: rows [at, at + rows) of the group
    int32_t ids_are_64, dtype, tokens, top_k, experts, hidden, intermediate, weight_on_input;
    float swiglu_limit;      // <= 0: none
} ExpertsPrefill;

// At most EXPERTS_PIECE_ROWS rows of one expert, from row `at` of a group's scratch.
enum { EXPERTS_PIECE_ROWS = 128 };
typedef struct {
    uint64_t trellis[3];     // of gate, up, down: addresses that the device reads fast
    int64_t expert;          // row of the table
    int32_t at, rows;
} ExpertsPiece;

// A few rows through up to EXPERTS_MATRICES matrices of the same k, outputs side by side.
enum { EXPERTS_MATRICES = 4 };
typedef struct {
    const void *trellis, *suh, *svh;
    int32_t n, bits8;
    int32_t skip, columns;   // of its n outputs [skip, skip + columns) are wanted
    int32_t at;              // and start here in a row of out
} ExpertsMatrix;

typedef struct {
    ExpertsMatrix matrix[EXPERTS_MATRICES];
    const void* x;           // [rows][k], dtype
    void* out;               // [rows][stride], dtype
    void* rotated;           // fp16 [count][rows][k]
    float* partial;          // [rows][blocks][split][128], unused if split == 1
    int32_t* arrived;        // [blocks]
    int32_t count, rows, k, stride, dtype, codebook;
    int32_t blocks;          // of 128 outputs, of all matrices
    int32_t split;           // parts of k that different thread blocks work on
    int32_t groups;          // of 8 rows: 1, 2 or 4
    int32_t ring_bytes;      // of a warp, as stream.cuh has it for the device's architecture
} ExpertsLinear;

enum { EXPERTS_GATHER = 0, EXPERTS_ACTIVATE = 1, EXPERTS_ADD = 2 };

int experts_abi(void);
// Digest of the sources that this library was built from.
const char* experts_source(void);
const char* experts_error(int code);
// Bytes of `control` that a call with these sizes may use.
int64_t experts_control_bytes(int picks, int hidden, int intermediate);
int experts_decode(const ExpertsDecode* call, void* stream);

// W_hat fp16 [k][n] (the rotated basis) of one trellis at any address the device can read.
int experts_reconstruct(
    const void* trellis, void* out, int k, int n, int bits8, int codebook, void* stream);

// The three of an expert: gate and up [hidden][intermediate], down [intermediate][hidden].
int experts_reconstruct_expert(
    const void* const* trellis, void* const* out, int hidden, int intermediate, const int* bits8, int codebook,
    void* stream);

int experts_linear(const ExpertsLinear* call, void* stream);

// Around a product with one W_hat: x [rows][k] * suh, rotated, as fp16; and from the product y float32
// [rows][n], rotated, * svh, columns [skip, skip + columns) to out [rows][stride].
int experts_rotate_in(const void* x, const void* suh, void* out, int rows, int k, int dtype, void* stream);
int experts_rotate_out(
    const float* y, const void* svh, void* out, int rows, int n, int skip, int columns, int stride, int dtype,
    void* stream);

// GATHER: input_gate, input_up from x. ACTIVATE: act from gate, up. ADD: out from y.
int experts_prefill(const ExpertsPrefill* call, int step, void* stream);
// From inputs to y for `count` pieces of the group at once; `pieces` is in device memory.
int experts_pieces(
    const ExpertsPrefill* call, const ExpertsPiece* pieces, int count, const int* bits8, int codebook, void* stream);
// Rows of a table at any address the device can read, decoded into out [count][256]; ids[i] == -1
// gives zeros, another number outside gives NaN. With `place` the ids are sorted, place[i] is where
// row i goes, and equal ids are read once. Layouts: expert_kernels/lookup.py.
enum { EXPERTS_INT4 = 0, EXPERTS_FP8 = 1, EXPERTS_LOOKUP_VALUES = 256 };
int experts_lookup(
    const void* table, int64_t rows, const int64_t* ids, const int64_t* place, int64_t count, void* out, int format,
    int dtype, void* stream);
// cudaMemcpyAsync between any two addresses.
int experts_copy(void* to, const void* from, int64_t bytes, void* stream);

#ifdef __cplusplus
}
#endif
