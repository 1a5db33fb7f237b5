"""The contract of each op: shapes, dtypes, alignment, bytes moved; argument checks; dispatch.

An expert is addresses, not a tensor. A layer's `ExpertTable` has one row per local expert:

    addresses  int64 [experts, 3, 3]   [gate | up | down] x [trellis | suh | svh], bytes, absolute
    bits       [3]                     K of gate, up, down (1..8, 1.5, 2.5, 3.5)
    codebook   "3inst" | "mcg" | "mul1"

A trellis address points at int16 [k/16, n/16, 16*K], contiguous, 128-byte aligned, in any memory
the device can read: its own, or pinned host memory. suh is fp16 [k],
svh fp16 [n], in device memory.
"""
