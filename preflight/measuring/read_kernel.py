"""The zero-copy read: a kernel that reads every 16 bytes once and keeps nothing.

PTX instead of a compiler: the driver finishes it for any card from compute capability 8.0 on. It
is what nvcc makes of

    void read_all(const uint4 *data, u64 count, unsigned *sink) {
        u64 step = gridDim.x * blockDim.x;
        unsigned seen = 0;
        for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at + 3 * step < count; at += 4 * step)
            seen ^= the 16 words of data[at], data[at + step], data[at + 2 * step], [at + 3 * step];
        if (seen == 0x9e3779b9) *sink = seen;    // keeps the loads; never true for zeros
    }

Launch with count a multiple of 4 * gridDim.x * blockDim.x: a remainder is not read.
"""

NAME = b"read_all"
BLOCKS, THREADS = 32, 512
LOADS = 4
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry read_all(.param .u64 data, .param .u64 count, .param .u64 sink)
{
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b32 %v<17>;
    .reg .b64 %d<16>;
    ld.param.u64 %d1, [data];
    ld.param.u64 %d2, [count];
    ld.param.u64 %d3, [sink];
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r1, %nctaid.x;
    mov.u32 %r2, %ntid.x;
    mul.wide.u32 %d4, %r1, %r2;
    mov.u32 %r3, %ctaid.x;
    mul.wide.u32 %d5, %r3, %r2;
    mov.u32 %r4, %tid.x;
    cvt.u64.u32 %d6, %r4;
    add.u64 %d5, %d5, %d6;
    mul.lo.u64 %d7, %d4, 3;
    shl.b64 %d8, %d4, 4;
    shl.b64 %d9, %d4, 2;
    mov.u32 %r5, 0;
NEXT:
    add.u64 %d10, %d5, %d7;
    setp.ge.u64 %p1, %d10, %d2;
    @%p1 bra DONE;
    shl.b64 %d11, %d5, 4;
    add.u64 %d11, %d1, %d11;
    add.u64 %d12, %d11, %d8;
    add.u64 %d13, %d12, %d8;
    add.u64 %d14, %d13, %d8;
    ld.global.v4.u32 {%v1, %v2, %v3, %v4}, [%d11];
    ld.global.v4.u32 {%v5, %v6, %v7, %v8}, [%d12];
    ld.global.v4.u32 {%v9, %v10, %v11, %v12}, [%d13];
    ld.global.v4.u32 {%v13, %v14, %v15, %v16}, [%d14];
    xor.b32 %r5, %r5, %v1;
    xor.b32 %r5, %r5, %v2;
    xor.b32 %r5, %r5, %v3;
    xor.b32 %r5, %r5, %v4;
    xor.b32 %r5, %r5, %v5;
    xor.b32 %r5, %r5, %v6;
    xor.b32 %r5, %r5, %v7;
    xor.b32 %r5, %r5, %v8;
    xor.b32 %r5, %r5, %v9;
    xor.b32 %r5, %r5, %v10;
    xor.b32 %r5, %r5, %v11;
    xor.b32 %r5, %r5, %v12;
    xor.b32 %r5, %r5, %v13;
    xor.b32 %r5, %r5, %v14;
    xor.b32 %r5, %r5, %v15;
    xor.b32 %r5, %r5, %v16;
    add.u64 %d5, %d5, %d9;
    bra NEXT;
DONE:
    setp.ne.u32 %p2, %r5, 0x9e3779b9;
    @%p2 bra END;
    cvta.to.global.u64 %d15, %d3;
    st.global.u32 [%d15], %r5;
END:
    ret;
}
\0"""


def whole_reads(size_bytes: int) -> int:
    """How many 16-byte pieces of a buffer one launch reads: a multiple of its stride."""
    stride = BLOCKS * THREADS * LOADS
    return size_bytes // 16 // stride * stride
