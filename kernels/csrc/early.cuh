// A kernel that starts while the one before it still runs, and waits for it itself, where it must.
#pragma once
#include <cuda_runtime.h>

#include "route.cuh"

namespace exl3 {

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_the_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// With `shared_bytes` of dynamic shared memory. With `early_start` it starts while the kernel before it runs: it waits for that itself, where it must.
template <typename Kernel, typename Call>
int launch_kernel(
    Kernel kernel, dim3 grid, int shared_bytes, bool early_start, const Call& c, cudaStream_t stream) {
    if (shared_bytes > 0)
        if (const cudaError_t e =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
            return e;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = early_start ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, c);
}

}  // namespace exl3
