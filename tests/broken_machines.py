"""One fault each, as edits of a healthy recording: what a question answers on a broken machine.

A key is `kind question`; the answer None takes it away (nobody could read it). `{card}` and
`{port}` stand for the PCI addresses of the first card and of the port above it.
"""

from dataclasses import dataclass, field
from typing import Any

from machines import recorded

from preflight.answers import Source, Unreadable
from preflight.host import Host
from preflight.inspect import inspect
from preflight.needs import Needs

GIB = 1 << 30
TWO, H200 = "two-rtx-pro-6000-healthy", "h200-1gpu"
CARD = {TWO: "0000:01:00.0", H200: "0000:00:06.0"}
PORT = "0000:00:01.0"
OTHER_CARD = "0000:81:00.0"
FOLDERS = {"model": "/tmp", "cache": "/tmp"}
MEMORY_V2 = 0x02000028
ARENA = 64 * GIB
PCI = "/sys/bus/pci/devices"
NODE = "/sys/devices/system/node"
THP = "/sys/kernel/mm/transparent_hugepage"


class Edited(Source):
    """A recording with some answers replaced."""

    def __init__(self, source: Source, edits: dict[str, Any]) -> None:
        self.source, self.edits = source, edits

    def answer(self, kind: str, *words: str) -> Any:
        key = " ".join((kind, *words))
        if key not in self.edits:
            return self.source.answer(kind, *words)
        found = self.edits[key]
        if found is None:
            raise Unreadable("permission denied", 13)
        if isinstance(found, Unreadable):
            raise found
        return found


@dataclass(frozen=True)
class Fault:
    """`blind`: edits that take away what the check looks at; `dark`: the same as facts or needs."""

    edits: dict[str, Any] = field(default_factory=dict)
    blind: dict[str, Any] = field(default_factory=dict)
    machines: tuple[str, ...] = (TWO, H200)
    needs: dict[str, Any] = field(default_factory=dict)
    dark: dict[str, Any] = field(default_factory=dict)


def host_with(machine: str, edits: dict[str, Any]) -> Host:
    """The facts of a machine with these edits."""
    words = {"{card}": CARD[machine], "{port}": PORT}
    placed = {}
    for key, value in edits.items():
        for word, address in words.items():
            key = key.replace(word, address)
        placed[key] = value
    return inspect(Edited(recorded(machine), placed), FOLDERS)


def needs_for(machine: str, **changes: Any) -> Needs:
    """A plan of the reference kind for each machine: half of it on the host."""
    count = 2 if machine == TWO else 1
    usual: dict[str, Any] = {
        "gpus": count,
        "gpu_bytes": 90 * GIB,
        "pinned_bytes": ARENA,
        "pinned_bytes_by_node": {0: ARENA},
        "load_peak_bytes": ARENA + count * 8 * GIB,
        "registrations": 64,
        "deployment": "docker",
        "port": 8000,
        "model_disk_bytes": 300 * GIB,
    }
    return Needs(**(usual | changes))


def limits(memlock: str, files: str = "1048576") -> str:
    soft, _, hard = memlock.partition("/")
    return (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max open files            {files:<20} {files:<20} files\n"
        f"Max locked memory         {soft:<20} {hard or soft:<20} bytes\n"
    )


def status(cpus: str = "0-15", nodes: str = "0", capabilities: str = "000001ffffffffff") -> str:
    return (
        f"CapEff:\t{capabilities}\nSeccomp:\t0\n"
        f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{nodes}\n"
    )


def meminfo(**changed: int) -> str:
    """Values in GiB over a healthy machine."""
    usual = {"MemTotal": 125, "MemFree": 120, "MemAvailable": 120, "SwapTotal": 0, "SwapFree": 0,
             "CommitLimit": 60, "Committed_AS": 1}  # fmt: skip
    return "".join(f"{k}: {v << 20} kB\n" for k, v in (usual | changed).items())


def memory(total: int, used: int) -> dict[str, int]:
    return {"total": total, "used": used, "free": total - used, "reserved": 0}


def refused(code: int, text: str) -> Unreadable:
    return Unreadable(text, code)


NO_IPC_LOCK = "0000000000000000"
SWITCH = {
    f"target {PCI}/{{card}}": "/sys/devices/pci0000:00/0000:00:01.0/0000:05:00.0/{c}",
    f"read {PCI}/0000:05:00.0/current_link_width": "8",
    f"read {PCI}/0000:05:00.0/max_link_width": "16",
    f"read {PCI}/0000:05:00.0/max_link_speed": "16.0 GT/s PCIe",
}


def below(*ports: str, card: str) -> str:
    return "/".join(["/sys/devices/pci0000:00", *ports, card])


def acs(control: int) -> str:
    space = bytearray(4096)
    space[0x100:0x104] = (0x000D | 1 << 16).to_bytes(4, "little")
    space[0x106:0x108] = control.to_bytes(2, "little")
    return space.hex()


DOCKER = "run docker info --format {{.ServerVersion}}|{{.CgroupDriver}}|{{.DockerRootDir}}"
RESET = refused(16, "GPU requires reset")
LOST = refused(15, "GPU is lost")
XID = "[  12.5] NVRM: Xid (PCI:{slot}): {code}, pid=7, text"


def log(*lines: str) -> list[Any]:
    return [0, "\n".join(lines)]


DRIVER = {
    "nvml-starts": Fault(
        {"nvml nvmlDeviceGetCount": refused(9, "Driver Not Loaded")}, dark={"gpus": None}
    ),
    "driver-library-mismatch": Fault(
        {"nvml nvmlDeviceGetCount": refused(18, "Driver/library version mismatch")},
        {"read /proc/driver/nvidia/version": None},
    ),
    "driver-too-old": Fault(
        {
            "nvml nvmlSystemGetDriverVersion": "535.288.01",
            "nvml nvmlSystemGetNVMLVersion": "12.535.288.01",
            "read /proc/driver/nvidia/version": "NVRM version: Kernel Module  535.288.01  x\n",
        },
        {"nvml nvmlSystemGetDriverVersion": None},
    ),
    "nouveau-loaded": Fault(
        {"names /sys/module": ["nouveau", "nvidia", "nvidia_uvm"]}, {"names /sys/module": None}
    ),
    "uvm-module-missing": Fault({"names /sys/module": ["nvidia"]}, {"names /sys/module": None}),
    "cuda-compat-older-than-driver": Fault(
        {"names /usr/local/cuda/compat": ["libcuda.so.550.54.14"]},
        {
            "names /usr/local/cuda/compat": ["libcuda.so.550.54.14"],
            "nvml nvmlSystemGetDriverVersion": None,
        },
    ),
    "gpus-too-few": Fault(needs={"gpus": 3}, dark={"gpus": None}),
    "gpus-missing-from-driver": Fault(
        {
            f"read {PCI}/0000:c1:00.0/{n}": v
            for n, v in (("vendor", "0x10de"), ("class", "0x030200"))
        }
        | {f"names {PCI}": ["0000:01:00.0", OTHER_CARD, "0000:c1:00.0"]},
        {f"names {PCI}": None},
        (TWO,),
    ),
    "gpu-device-node-missing": Fault({"names /dev": ["null", "nvidia7"]}, {"names /dev": None}),
}
CARDS = {
    "gpu-fault": Fault(
        {"nvml nvmlDeviceGetPciInfo gpu0": LOST, "nvml nvmlDeviceGetName gpu0": LOST},
        {"nvml nvmlDeviceGetName gpu0": None, "nvml nvmlDeviceGetUUID gpu0": None},
    ),
    "gpu-recovery-needed": Fault(
        {"nvml nvmlDeviceGetFieldValues gpu0 230": [{"nvmlReturn": 0, "value": 1}]},
        {"nvml nvmlDeviceGetFieldValues gpu0 230": None},
    ),
    "compute-capability-too-old": Fault(
        {"nvml nvmlDeviceGetCudaComputeCapability gpu0": [6, 0]},
        {"nvml nvmlDeviceGetCudaComputeCapability gpu0": None},
    ),
    "mig-enabled": Fault(
        {"nvml nvmlDeviceGetMigMode gpu0": [1, 1]},
        {"nvml nvmlDeviceGetMigMode gpu0": None},
    ),
    "gpus-differ": Fault(
        {"nvml nvmlDeviceGetName gpu0": "NVIDIA L40S"},
        {"nvml nvmlDeviceGetName gpu0": None},
        (TWO,),
    ),
    "gpu-memory-too-small": Fault(
        {f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}": memory(48 * GIB, 0)},
        {f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}": None},
    ),
    "gpu-memory-is-host-memory": Fault(
        {f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}": refused(3, "Not Supported")},
        {f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}": None},
    ),
    "gpu-memory-held": Fault(
        {
            f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}": memory(95 * GIB, 58 * GIB),
            "nvml nvmlDeviceGetComputeRunningProcesses gpu0": [{"pid": 7, "usedGpuMemory": None}],
        },
        {"nvml nvmlDeviceGetComputeRunningProcesses gpu0": None},
    ),
    "gpu-memory-held-by-nobody": Fault(
        {f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}": memory(95 * GIB, 58 * GIB)},
        {"nvml nvmlDeviceGetComputeRunningProcesses gpu0": None},
    ),
    "ecc-errors": Fault(
        {"nvml nvmlDeviceGetTotalEccErrors gpu0 1 0": 4},
        {"nvml nvmlDeviceGetTotalEccErrors gpu0 1 0": None},
    ),
    "ecc-change-pending": Fault(
        {"nvml nvmlDeviceGetEccMode gpu0": [1, 0]}, {"nvml nvmlDeviceGetEccMode gpu0": None}
    ),
    "retired-pages-pending": Fault(
        {"nvml nvmlDeviceGetRetiredPagesPendingStatus gpu0": 1},
        {"nvml nvmlDeviceGetRetiredPagesPendingStatus gpu0": None},
    ),
    "remapped-rows-pending": Fault(
        {"nvml nvmlDeviceGetRemappedRows gpu0": [0, 1, 1, 0]},
        {"nvml nvmlDeviceGetRemappedRows gpu0": None},
    ),
    "remapped-rows-failed": Fault(
        {"nvml nvmlDeviceGetRemappedRows gpu0": [0, 1, 0, 1]},
        {"nvml nvmlDeviceGetRemappedRows gpu0": None},
    ),
    "fabric-not-ready": Fault(
        {"nvml nvmlDeviceGetGpuFabricInfo gpu0": {"state": 1}},
        {"nvml nvmlDeviceGetGpuFabricInfo gpu0": None},
    ),
    "persistence-off": Fault(
        {"nvml nvmlDeviceGetPersistenceMode gpu0": 0},
        {"nvml nvmlDeviceGetPersistenceMode gpu0": None},
    ),
    "power-limit-lowered": Fault(
        {"nvml nvmlDeviceGetEnforcedPowerLimit gpu0": 300_000},
        {"nvml nvmlDeviceGetEnforcedPowerLimit gpu0": None},
    ),
    "clocks-throttled": Fault(
        {"nvml nvmlDeviceGetCurrentClocksEventReasons gpu0": 0x48},
        {"nvml nvmlDeviceGetCurrentClocksEventReasons gpu0": None},
    ),
    "gpu-hot": Fault(
        {"nvml nvmlDeviceGetTemperature gpu0 0": 91},
        {"nvml nvmlDeviceGetTemperature gpu0 0": None},
    ),
    "bar1-small": Fault(
        {"nvml nvmlDeviceGetBAR1MemoryInfo gpu0": {"bar1Total": 256 << 20}},
        {"nvml nvmlDeviceGetBAR1MemoryInfo gpu0": None},
    ),
}
LINKS = {
    "pcie-generation-limited": Fault(
        {
            "nvml nvmlDeviceGetMaxPcieLinkGeneration gpu0": 3,
            "nvml nvmlDeviceGetCurrPcieLinkGeneration gpu0": 1,
        },
        {
            "nvml nvmlDeviceGetMaxPcieLinkGeneration gpu0": None,
            f"read {PCI}/{{card}}/max_link_speed": "Unknown",
        },
    ),
    "pcie-width-reduced": Fault(
        {"nvml nvmlDeviceGetCurrPcieLinkWidth gpu0": 8},
        {
            "nvml nvmlDeviceGetCurrPcieLinkWidth gpu0": None,
            f"read {PCI}/{{card}}/current_link_width": None,
        },
    ),
    "pcie-upstream-narrower": Fault(
        {
            f"target {PCI}/{CARD[TWO]}": below(PORT, "0000:05:00.0", card=CARD[TWO]),
            f"read {PCI}/{PORT}/current_link_width": "8",
            f"binary {PCI}/0000:05:00.0/config": acs(0),
        },
        {f"target {PCI}/{CARD[TWO]}": None},
        (TWO,),
    ),
    "pcie-uplink-shared": Fault(
        {
            f"target {PCI}/{CARD[TWO]}": below(PORT, "0000:05:00.0", card=CARD[TWO]),
            f"target {PCI}/{OTHER_CARD}": below(PORT, "0000:05:01.0", card=OTHER_CARD),
            f"binary {PCI}/0000:05:00.0/config": acs(0),
            f"binary {PCI}/0000:05:01.0/config": acs(0),
        },
        {
            f"target {PCI}/{CARD[TWO]}": None,
            "nvml nvmlDeviceGetTopologyCommonAncestor gpu0 gpu1": None,
        },
        (TWO,),
    ),
    "pcie-replays": Fault(
        {"nvml nvmlDeviceGetPcieReplayCounter gpu0": 52_000},
        {"nvml nvmlDeviceGetPcieReplayCounter gpu0": None},
    ),
    "acs-redirect": Fault(
        {f"binary {PCI}/{PORT}/config": acs(0b1100)},
        {f"binary {PCI}/{PORT}/config": "00" * 64},
        (TWO,),
    ),
    "iommu-translates": Fault(
        {f"read /sys/kernel/iommu_groups/{n}/type": "DMA-FQ" for n in (0, 1)},
        {"names /sys/kernel/iommu_groups": None},
        (TWO,),
    ),
    "peer-traffic-hangs": Fault(
        {
            "read /sys/kernel/iommu_groups/0/type": "DMA",
            f"binary {PCI}/{PORT}/config": acs(0b1100),
        },
        {"read /sys/kernel/iommu_groups/0/type": "DMA", f"binary {PCI}/{PORT}/config": "00" * 64},
        (TWO,),
    ),
    "gpus-cannot-peer": Fault(
        {"nvml nvmlDeviceGetP2PStatus gpu0 gpu1 0": 2},
        {"nvml nvmlDeviceGetP2PStatus gpu0 gpu1 0": None},
        (TWO,),
    ),
    "link-witnesses-disagree": Fault(
        {"nvml nvmlDeviceGetTopologyCommonAncestor gpu0 gpu1": 30},
        {"run nvidia-smi topo -m": [255, "ERROR: Option -m is missing its value.\n"]},
        (TWO,),
    ),
    "sys-link-on-one-node": Fault(
        {
            "nvml nvmlDeviceGetTopologyCommonAncestor gpu0 gpu1": 50,
            "run nvidia-smi topo -m": [0, "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"],
            f"read {NODE}/online": "0",
        },
        {
            "nvml nvmlDeviceGetTopologyCommonAncestor gpu0 gpu1": 50,
            f"read {NODE}/online": None,
            f"names {NODE}": None,
            f"read {PCI}/{CARD[TWO]}/numa_node": "-1",
        },
        (TWO,),
    ),
}
NODES = {
    "numa-map-wrong": Fault(
        {f"read {NODE}/node1/cpulist": "8-31"}, {f"read {NODE}/node1/cpulist": None}, (TWO,)
    ),
    "gpu-node-unknown": Fault(
        {f"read {PCI}/{CARD[TWO]}/numa_node": "-1", f"read {PCI}/{OTHER_CARD}/numa_node": "-1"},
        {f"read {NODE}/online": None, f"names {NODE}": None},
        (TWO,),
    ),
    "gpus-on-different-nodes": Fault(
        {
            f"read {PCI}/{OTHER_CARD}/numa_node": "1",
            f"read {PCI}/{OTHER_CARD}/local_cpulist": "16-31",
            "nvml nvmlDeviceGetMemoryAffinity gpu1 1 0": [2],
            "run nvidia-smi topo -m": [255, "ERROR"],
        },
        {f"read {PCI}/{OTHER_CARD}/numa_node": "-1"},
        (TWO,),
    ),
    "gpu-node-witnesses-disagree": Fault(
        {"nvml nvmlDeviceGetMemoryAffinity gpu0 1 0": [2]},
        {
            "nvml nvmlDeviceGetMemoryAffinity gpu0 1 0": None,
            "run nvidia-smi topo -m": [255, "ERROR"],
        },
        (TWO,),
    ),
    "gpu-node-without-memory": Fault(
        {
            f"read {NODE}/node0/meminfo": "Node 0 MemTotal: 0 kB\nNode 0 MemFree: 0 kB\n",
            f"read {NODE}/node0/cpulist": "",
        },
        {f"read {NODE}/node0/meminfo": None},
        (TWO,),
        {"pinned_bytes_by_node": {1: ARENA}},
    ),
    "node-without-memory": Fault(
        {f"read {NODE}/node1/meminfo": "Node 1 MemTotal: 0 kB\nNode 1 MemFree: 0 kB\n"},
        {f"read {NODE}/node1/meminfo": None},
        (TWO,),
    ),
    "node-without-cpus": Fault(
        {f"read {NODE}/node1/cpulist": ""}, {f"read {NODE}/node1/cpulist": None}, (TWO,)
    ),
    "nodes-hidden": Fault(
        {"read /sys/devices/system/cpu/online": "0-119"},
        {"read /sys/devices/system/cpu/online": "0-119", "read /proc/cpuinfo": None},
        (H200,),
    ),
    "node-memory-short": Fault(
        {f"read {NODE}/node0/meminfo": f"Node 0 MemTotal: {9 << 24} kB\nNode 0 MemFree: 9 kB\n"},
        {f"read {NODE}/node0/meminfo": f"Node 0 MemTotal: {9 << 24} kB\n"},
        (TWO,),
    ),
    "cpuset-excludes-gpu-cpus": Fault(
        {"read /proc/self/status": status(cpus="16-31", nodes="0-1")},
        {"read /proc/self/status": None},
    ),
    "cpuset-excludes-gpu-node": Fault(
        {"read /proc/self/status": status(nodes="1")}, {"read /proc/self/status": None}
    ),
    "memory-policy-refused": Fault(
        {"trial memory-policy": "operation not permitted"}, {"trial memory-policy": None}
    ),
    "numa-balancing-on": Fault(
        {"read /proc/sys/kernel/numa_balancing": "1"},
        {"read /proc/sys/kernel/numa_balancing": None},
        (TWO,),
    ),
    "zone-reclaim-on": Fault(
        {"read /proc/sys/vm/zone_reclaim_mode": "1"}, {"read /proc/sys/vm/zone_reclaim_mode": None}
    ),
}
POOL = "/sys/kernel/mm/hugepages/hugepages-2048kB"
POOL_IN_USE = {f"read {POOL}/nr_hugepages": "40960", f"read {POOL}/free_hugepages": "40960"}
KUBECTL = "run kubectl get nodes --request-timeout=1s -o jsonpath={.items[0].status.allocatable}"
MEMORY = {
    "host-memory-short": Fault(
        {"read /proc/meminfo": meminfo(MemFree=30, MemAvailable=40)},
        {"read /proc/meminfo": "MemFree: 900000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"},
    ),
    "host-memory-cached": Fault(
        {"read /proc/meminfo": meminfo(MemFree=20)},
        {"read /proc/meminfo": "MemAvailable: 900000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"},
    ),
    "load-peak-short": Fault(
        {"read /proc/meminfo": meminfo(MemFree=65, MemAvailable=66)},
        {"read /proc/meminfo": "MemFree: 900000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"},
    ),
    "cgroup-memory-short": Fault(
        {
            "read /proc/self/cgroup": "0::/pod/engine\n",
            "read /sys/fs/cgroup/pod/engine/memory.max": "max",
            "read /sys/fs/cgroup/pod/memory.max": str(32 * GIB),
        },
        {"read /proc/self/cgroup": None},
    ),
    "swap-in-use": Fault(
        {"read /proc/meminfo": meminfo(SwapTotal=16, SwapFree=4)},
        {"read /proc/meminfo": "MemFree: 900000000 kB\nMemAvailable: 900000000 kB\n"},
    ),
    "swappiness-high": Fault(
        {
            "read /proc/meminfo": meminfo(SwapTotal=16, SwapFree=16),
            "read /proc/sys/vm/swappiness": "60",
        },
        {
            "read /proc/meminfo": meminfo(SwapTotal=16, SwapFree=16),
            "read /proc/sys/vm/swappiness": None,
        },
    ),
    "huge-pages-off": Fault(
        {f"read {THP}/enabled": "always madvise [never]"}, {f"read {THP}/enabled": None}
    ),
    "huge-page-defrag-always": Fault(
        {f"read {THP}/defrag": "[always] defer never"}, {f"read {THP}/defrag": None}
    ),
    "overcommit-strict": Fault(
        {"read /proc/sys/vm/overcommit_memory": "2", "read /proc/meminfo": meminfo(CommitLimit=40)},
        {"read /proc/sys/vm/overcommit_memory": None},
    ),
    "node-huge-pages-short": Fault(
        {f"read {NODE}/node0/hugepages/hugepages-2048kB/free_hugepages": "100"},
        {f"read {NODE}/node0/hugepages/hugepages-2048kB/free_hugepages": None},
        (TWO,),
        {"huge_page_bytes": 2 << 20},
    ),
    "cgroup-huge-pages-short": Fault(
        {
            "names /sys/fs/cgroup": ["hugetlb.2MB.max"],
            "read /sys/fs/cgroup/hugetlb.2MB.max": "0",
            f"read {NODE}/node0/hugepages/hugepages-2048kB/free_hugepages": "40000",
        },
        {
            "names /sys/fs/cgroup": ["hugetlb.1GB.max"],
            "read /sys/fs/cgroup/hugetlb.1GB.max": "max",
        },
        (TWO,),
        {"huge_page_bytes": 2 << 20},
    ),
    "kubelet-huge-pages-stale": Fault(
        {**POOL_IN_USE, "names /var/lib/kubelet": ["pki"], KUBECTL: [0, '{"hugepages-2Mi":"0"}']},
        POOL_IN_USE,
        (TWO,),
        {"huge_page_bytes": 2 << 20, "deployment": "kubernetes", "pinned_bytes_by_node": {}},
    ),
    "huge-pages-idle": Fault(
        {f"read {POOL}/free_hugepages": "4096", f"read {POOL}/nr_hugepages": "4096"},
        {f"read {POOL}/free_hugepages": None},
    ),
}
LIMITS = {
    "memlock-low": Fault(
        {
            "read /proc/self/limits": limits("8388608"),
            "read /proc/self/status": status(capabilities=NO_IPC_LOCK),
        },
        {
            "read /proc/self/limits": limits("?"),
            "read /proc/self/status": status(capabilities=NO_IPC_LOCK),
        },
    ),
    "memlock-soft-low": Fault(
        {
            "read /proc/self/limits": limits("65536/unlimited"),
            "read /proc/self/status": status(capabilities=NO_IPC_LOCK),
        },
        {
            "read /proc/self/limits": limits("?"),
            "read /proc/self/status": status(capabilities=NO_IPC_LOCK),
        },
    ),
    "max-map-count-low": Fault(
        {"read /proc/sys/vm/max_map_count": "20010"}, {"read /proc/sys/vm/max_map_count": None}
    ),
    "kernel-pin-limit": Fault(
        {"read /proc/sys/kernel/osrelease": "6.12.0-9-generic"},
        {"read /proc/sys/kernel/osrelease": None},
        needs={"largest_registration_bytes": 4 * GIB},
    ),
    "registration-too-large": Fault(
        needs={"largest_registration_bytes": 600 * GIB}, dark={"largest_registration_bytes": None}
    ),
    "wsl": Fault(
        {"read /proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2"},
        {"read /proc/sys/kernel/osrelease": None},
    ),
    "shm-small": Fault({"space /dev/shm": [64 << 20, 64 << 20]}, {"space /dev/shm": None}),
    "open-files-low": Fault(
        {"read /proc/self/limits": limits("unlimited", "1024")}, {"read /proc/self/limits": None}
    ),
    "cpu-quota-low": Fault(
        {"read /sys/fs/cgroup/cpu.max": "150000 100000"}, {"read /proc/self/cgroup": None}
    ),
    "cpus-few": Fault(
        {"read /proc/self/status": status(cpus="0-1", nodes="0")}, {"read /proc/self/status": None}
    ),
}
SYSTEM = {
    "architecture-unsupported": Fault(
        {"read /proc/sys/kernel/arch": "ppc64le"}, {"read /proc/sys/kernel/arch": None}
    ),
    "kernel-old": Fault(
        {"read /proc/sys/kernel/osrelease": "4.18.0-553.el8"},
        {"read /proc/sys/kernel/osrelease": None},
    ),
    "cpu-governor-powersave": Fault(
        {"read /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave"},
        {"read /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": None},
        (TWO,),
    ),
    "clock-unsynchronised": Fault({"trial clock": "unsynchronised"}, {"trial clock": None}),
    "port-taken": Fault(needs={"port": 22}, blind={"read /proc/self/net/tcp": None}),
    "gpu-off-the-bus": Fault(
        {"run dmesg": log(XID.format(slot="0000:01:00", code=79))}, {"run dmesg": None}
    ),
    "xid-fatal": Fault(
        {"run dmesg": log(*(XID.format(slot="0000:01:00", code=c) for c in (119, 154)))},
        {"run dmesg": [1, "dmesg: read kernel buffer failed: Operation not permitted"]},
    ),
    "xid-seen": Fault(
        {"run dmesg": log(XID.format(slot="0000:01:00", code=31))}, {"run dmesg": None}
    ),
    "memory-kills-seen": Fault(
        {"run dmesg": log("Memory cgroup out of memory: Killed process 9 (VLLM::Worker_TP) "
                          "anon-rss:3131928kB, shmem-rss:150143716kB")},
        {"run dmesg": None},
    ),
    "docker-missing": Fault({DOCKER: [1, "Cannot connect to the Docker daemon"]}, {DOCKER: None}),
    "container-toolkit-missing": Fault(
        {"run nvidia-ctk --version": refused(2, "no such file")}, {"run nvidia-ctk --version": None}
    ),
    "cdi-missing": Fault({"names /etc/cdi": ["vendor.yaml"]}, {"names /etc/cdi": None}),
    "docker-loses-devices": Fault(
        {DOCKER: [0, "24.0|systemd|/var/lib/docker"], "names /etc/cdi": []},
        {DOCKER: [0, "24.0|systemd|/var/lib/docker"], "names /etc/cdi": None},
    ),
}  # fmt: skip
MODEL = "/dev/nvme0n1p2 / ext4 rw 0 0\n{} /tmp {} {} 0 0\n"
STORAGE = {
    "model-disk-full": Fault({"space /tmp": [GIB * 400, GIB * 200]}, {"space /tmp": None}),
    "cache-disk-full": Fault(
        {"space /tmp": [GIB * 400, GIB * 5]}, {"space /tmp": None}, needs={"model_disk_bytes": None}
    ),
    "docker-disk-full": Fault(
        {"space /var/lib/docker": [GIB * 40, GIB * 9]}, {"space /var/lib/docker": None}
    ),
    "model-on-network-disk": Fault(
        {"read /proc/self/mounts": MODEL.format("host:/models", "nfs4", "rw")},
        {"read /proc/self/mounts": None},
    ),
    "model-in-memory": Fault(
        {"read /proc/self/mounts": MODEL.format("tmpfs", "tmpfs", "rw")},
        {"read /proc/self/mounts": None},
    ),
    "model-disk-spins": Fault(
        {"read /sys/devices/pci0000:00/nvme/block/nvme0n1/queue/rotational": "1"},
        {"read /sys/devices/pci0000:00/nvme/block/nvme0n1/queue/rotational": None},
    ),
    "direct-io-refused": Fault(
        {"trial direct-io /tmp": "invalid argument"}, {"trial direct-io /tmp": None}
    ),
    "model-disk-read-only": Fault(
        {"read /proc/self/mounts": MODEL.format("/dev/nvme0n1p2", "ext4", "ro")},
        {"read /proc/self/mounts": None},
    ),
}
FAULTS: dict[str, Fault] = {
    **DRIVER, **CARDS, **LINKS, **NODES, **MEMORY, **LIMITS, **SYSTEM, **STORAGE
}  # fmt: skip
