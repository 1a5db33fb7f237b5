/* fake_nvml.c: libnvidia-ml.so.1 for machines with no GPU. Answers from a text file of recorded values
   ($FAKE_NVML_FILE), lines "key value": driver, cuda, count, gpuN.name, gpuN.uuid, gpuN.bus, gpuN.mem_total,
   gpuN.mem_used, gpuN.numa, gpuN.cpus (hex mask), gpuN.pcie_gen, gpuN.pcie_width, gpuN.util, gpuN.mig, topo.I.J, p2p.I.J
   A missing key gives NVML_ERROR_NOT_SUPPORTED; "key !NN" gives the NVML error NN. The file is re-read on every call. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "nvml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
static __thread char V[512];
static int up;
static nvmlReturn_t get(const char *key) {
    const char *p = getenv("FAKE_NVML_FILE"); char line[768]; FILE *f;
    if (!p || !(f = fopen(p, "r"))) return NVML_ERROR_DRIVER_NOT_LOADED;
    nvmlReturn_t r = NVML_ERROR_NOT_SUPPORTED; size_t n = strlen(key);
    while (fgets(line, sizeof line, f)) if (!strncmp(line, key, n) && line[n] == ' ') {
        line[strcspn(line, "\n")] = 0; snprintf(V, sizeof V, "%s", line + n + 1);
        r = V[0] == '!' ? (nvmlReturn_t)atoi(V + 1) : NVML_SUCCESS; break; }
    fclose(f); return r;
}
static long idx(nvmlDevice_t d) { return (long)d - 1; }
static nvmlReturn_t dev(nvmlDevice_t d, const char *k) { char b[96]; if (!up) return NVML_ERROR_UNINITIALIZED;
    snprintf(b, sizeof b, "gpu%ld.lost", idx(d)); if (get(b) == NVML_SUCCESS) return NVML_ERROR_GPU_IS_LOST;
    snprintf(b, sizeof b, "gpu%ld.%s", idx(d), k); return get(b); }
#define STR(out, len) do { if (strlen(V) + 1 > (len)) return NVML_ERROR_INSUFFICIENT_SIZE; strcpy(out, V); return NVML_SUCCESS; } while (0)
#define NUM(expr, out, T) do { nvmlReturn_t r_ = (expr); if (r_) return r_; *(out) = (T)strtoull(V, 0, 0); return NVML_SUCCESS; } while (0)
nvmlReturn_t nvmlInit_v2(void) { nvmlReturn_t r = get("driver"); if (r) return r; up++; return r; }
nvmlReturn_t nvmlInitWithFlags(unsigned f) { (void)f; return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { if (!up) return NVML_ERROR_UNINITIALIZED; up--; return NVML_SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t r) { static char b[32]; snprintf(b, sizeof b, "fake NVML error %d", r); return b; }
nvmlReturn_t nvmlSystemGetDriverVersion(char *o, unsigned n) { nvmlReturn_t r = get("driver"); if (r) return r; STR(o, n); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *o, unsigned n) { nvmlReturn_t r = get("nvml"); if (r) return r; STR(o, n); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *o) { NUM(get("cuda"), o, int); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *o) { return nvmlSystemGetCudaDriverVersion_v2(o); }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *o) { if (!up) return NVML_ERROR_UNINITIALIZED; NUM(get("count"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d) { unsigned n; nvmlReturn_t r = nvmlDeviceGetCount_v2(&n); if (r) return r;
    if (i >= n) return NVML_ERROR_INVALID_ARGUMENT; *d = (nvmlDevice_t)(long)(i + 1); return NVML_SUCCESS; }
static nvmlReturn_t find(const char *k, const char *v, nvmlDevice_t *d) { unsigned n, i; nvmlReturn_t r = nvmlDeviceGetCount_v2(&n); if (r) return r;
    for (i = 0; i < n; i++) if (!dev((nvmlDevice_t)(long)(i + 1), k) && !strcasecmp(V, v)) { *d = (nvmlDevice_t)(long)(i + 1); return NVML_SUCCESS; } return NVML_ERROR_NOT_FOUND; }
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *u, nvmlDevice_t *d) { return find("uuid", u, d); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *b, nvmlDevice_t *d) { return find("bus", b, d); }
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *o) { *o = (unsigned)idx(d); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *o, unsigned n) { nvmlReturn_t r = dev(d, "name"); if (r) return r; STR(o, n); }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *o, unsigned n) { nvmlReturn_t r = dev(d, "uuid"); if (r) return r; STR(o, n); }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) { nvmlReturn_t r = dev(d, "bus"); if (r) return r; memset(p, 0, sizeof *p);
    unsigned a, b, c, f; if (sscanf(V, "%x:%x:%x.%x", &a, &b, &c, &f) != 4) return NVML_ERROR_UNKNOWN; p->domain = a; p->bus = b; p->device = c;
    snprintf(p->busId, sizeof p->busId, "%08X:%02X:%02X.%X", a, b, c, f); snprintf(p->busIdLegacy, sizeof p->busIdLegacy, "%04X:%02X:%02X.%X", a & 0xffff, b, c, f); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) { nvmlReturn_t r = dev(d, "mem_total"); if (r) return r; m->total = strtoull(V, 0, 0);
    m->used = dev(d, "mem_used") ? 0 : strtoull(V, 0, 0); m->free = m->total - m->used; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m) { nvmlMemory_t a; nvmlReturn_t r = nvmlDeviceGetMemoryInfo(d, &a); if (r) return r;
    m->total = a.total; m->used = a.used; m->free = a.free; m->reserved = dev(d, "mem_reserved") ? 0 : strtoull(V, 0, 0); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "numa"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "pcie_gen"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "pcie_width"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "pcie_gen_max"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "pcie_width_max"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, nvmlTemperatureSensors_t s, unsigned *o) { (void)s; NUM(dev(d, "temp"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "power_mw"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t d, unsigned *o) { NUM(dev(d, "power_limit_mw"), o, unsigned); }
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) { nvmlReturn_t r = dev(d, "util"); if (r) return r; u->gpu = atoi(V); u->memory = dev(d, "util_mem") ? 0 : atoi(V); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *c, unsigned *p) { nvmlReturn_t r = dev(d, "mig"); if (r) return r; *c = *p = atoi(V); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *a, int *b) { nvmlReturn_t r = dev(d, "cc"); if (r) return r; return sscanf(V, "%d.%d", a, b) == 2 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN; }
nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t d, unsigned n, unsigned long *s) { nvmlReturn_t r = dev(d, "cpus"); if (r) return r; memset(s, 0, n * sizeof *s); s[0] = strtoul(V, 0, 16); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t d, unsigned n, unsigned long *s, nvmlAffinityScope_t sc) { (void)sc; nvmlReturn_t r = dev(d, "numa"); if (r) return r; memset(s, 0, n * sizeof *s); s[0] = 1ul << atoi(V); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *o) { char k[64]; snprintf(k, sizeof k, "topo.%ld.%ld", idx(a), idx(b)); NUM(get(k), o, nvmlGpuTopologyLevel_t); }
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t c, nvmlGpuP2PStatus_t *o) { (void)c; char k[64]; snprintf(k, sizeof k, "p2p.%ld.%ld", idx(a), idx(b)); NUM(get(k), o, nvmlGpuP2PStatus_t); }
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *p) { nvmlReturn_t r = dev(d, "proc"); if (r == NVML_ERROR_NOT_SUPPORTED) { *n = 0; return NVML_SUCCESS; } if (r) return r;
    if (*n < 1) { *n = 1; return NVML_ERROR_INSUFFICIENT_SIZE; } memset(p, 0, sizeof *p); unsigned long long m = 0; sscanf(V, "%u %llu", &p->pid, &m); p->usedGpuMemory = m; *n = 1; return NVML_SUCCESS; }
