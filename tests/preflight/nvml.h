/* The few types of NVIDIA's NVML API that fake_nvml.c answers with, laid out as nvidia-ml-py reads
   them (pynvml.py: c_nvmlPciInfo_t, c_nvmlMemory_t, c_nvmlMemory_v2_t, c_nvmlUtilization_t,
   c_nvmlProcessInfo_v3_t). Written from those layouts; NVIDIA's own header is not needed. */
#pragma once
typedef int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_NOT_FOUND = 6, NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9, NVML_ERROR_GPU_IS_LOST = 15, NVML_ERROR_UNKNOWN = 999
};
typedef void *nvmlDevice_t;
typedef int nvmlTemperatureSensors_t;
typedef unsigned nvmlAffinityScope_t;
typedef unsigned nvmlGpuTopologyLevel_t;
typedef unsigned nvmlGpuP2PCapsIndex_t;
typedef unsigned nvmlGpuP2PStatus_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
