// The instructions that C++ has no words for.
#pragma once
#include <stdint.h>

namespace exl3 {

// To shared memory, TO bytes after `to`, from FROM bytes after `from`: distances cost no instruction.
template <int TO = 0, int FROM = 0>
__device__ __forceinline__ void copy16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0+%3], [%1+%4], 16, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(TO), "n"(FROM)
                 : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_all_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// Four 8 x 8 matrices of 16-bit numbers; a lane gives the address of a row of 16 bytes.
__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(from));
}

// Matrix products of a warpgroup read shared memory by themselves and go on beside other work. Only
// code for sm_90a has them; elsewhere a product is done when its mma is.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define EXPERTS_WARPGROUPS
#endif

// What cp.async wrote, before a barrier after which products read it.
__device__ __forceinline__ void show_to_products() {
#ifdef EXPERTS_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// All products but the last N of this warp have ended.
template <int N>
__device__ __forceinline__ void wait_products() {
#ifdef EXPERTS_WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

#ifdef EXPERTS_WARPGROUPS
// A [rows][k] matrix in shared memory: rows of 128 bytes, 16-byte chunks swizzled over eight rows, the
// eights behind each other.
__device__ __forceinline__ uint64_t swizzled_matrix(uint32_t at) {
    constexpr uint64_t kEightRows = 1024 >> 4, kSwizzle128 = 1;
    return kSwizzle128 << 62 | kEightRows << 32 | 1ull << 16 | (at & 0x3FFFF) >> 4;
}

// d[g]: a warp's 16 rows of a by columns 8g.. of b: 128 rows of 16 k as `swizzled_matrix` has them. With
// `add` 0 d was not set before: sums that start as zeros would make the compiler wait for each product.
__device__ __forceinline__ void multiply_group(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
#endif

}  // namespace exl3
