"""Writes the recordings of machines that are put together from recorded parts, and says so in each.

    python tests/machines/compose.py SHARED

Parts: shared/tools/two-rtx-pro-6000.nvml.txt (NVML values of two cards), shared/recorded/h200-1gpu
(a capture of the one-GPU test machine). What no part holds is plain text written here, chosen so
that nothing is wrong: a fault fixture then adds exactly one fault.
"""

import json
import re
import sys
from pathlib import Path

GIB = 1 << 30
THP = "/sys/kernel/mm/transparent_hugepage"
HERE = Path(__file__).resolve().parent
PORT_SPEED = {3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}


def values(text):
    """The `key value` lines that the fake NVML library reads."""
    return dict(line.split(" ", 1) for line in text.splitlines() if line.strip())


def nvml_of_card(index, v, gpu):
    """Answers of one healthy card; the values of `v` where it has them."""
    at = f"gpu{index}"
    total = int(v[f"{at}.mem_total"], 0)
    used = int(v.get(f"{at}.mem_used", "0"), 0)
    major, minor = v[f"{at}.cc"].split(".")
    node = int(v[f"{at}.numa"])
    answers = {
        "nvmlDeviceGetPciInfo": {"busId": v[f"{at}.bus"]},
        "nvmlDeviceGetName": v[f"{at}.name"],
        "nvmlDeviceGetUUID": v[f"{at}.uuid"],
        "nvmlDeviceGetCudaComputeCapability": [int(major), int(minor)],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetBAR1MemoryInfo": {"bar1Total": gpu["bar1"], "bar1Used": 1 << 20},
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetEnforcedPowerLimit": gpu["power"],
        "nvmlDeviceGetPowerManagementDefaultLimit": gpu["power"],
        "nvmlDeviceGetCurrentClocksEventReasons": 1,
        "nvmlDeviceGetPcieReplayCounter": 0,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkGeneration": int(v.get(f"{at}.pcie_gen", 5)),
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": int(v.get(f"{at}.pcie_width", 16)),
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
    }
    found = {f"{call} {at}": answer for call, answer in answers.items()}
    found[f"nvmlDeviceGetMemoryInfo {at} {0x02000028}"] = {
        "total": total, "used": used, "free": total - used, "reserved": 0}  # fmt: skip
    found[f"nvmlDeviceGetTotalEccErrors {at} 1 0"] = 0
    found[f"nvmlDeviceGetFieldValues {at} 230"] = [{"nvmlReturn": 0, "value": 0}]
    found[f"nvmlDeviceGetGpuFabricInfo {at}"] = {"state": 0}
    found[f"nvmlDeviceGetClockInfo {at} 1"] = 420
    found[f"nvmlDeviceGetMaxClockInfo {at} 1"] = gpu["clock"]
    found[f"nvmlDeviceGetTemperature {at} 0"] = 34
    found[f"nvmlDeviceGetMemoryAffinity {at} 1 0"] = [1 << node]
    mask = int(v[f"{at}.cpus"], 16)
    found[f"nvmlDeviceGetCpuAffinity {at} 16"] = [mask] + [0] * 15
    found[f"nvmlDeviceGetRetiredPagesPendingStatus {at}"] = 0
    return found


def meminfo(total_kib, free_kib):
    return (
        "".join(
            f"{name + ':':<16}{kib:>12} kB\n"
            for name, kib in (
                ("MemTotal", total_kib),
                ("MemFree", free_kib),
                ("MemAvailable", free_kib),
                ("SwapTotal", 0),
                ("SwapFree", 0),
                ("CommitLimit", total_kib // 2),
                ("Committed_AS", 1 << 20),
            )
        )
        + "HugePages_Total:       0\nHugepagesize:       2048 kB\n"
    )


def machine_files(arch_flags, nodes, kernel):
    """/proc and /sys of a healthy host. `nodes`: id -> (cpus, total KiB, free KiB, distances)."""
    total = sum(n[1] for n in nodes.values())
    free = sum(n[2] for n in nodes.values())
    cpus = max(int(n[0].split("-")[-1]) for n in nodes.values())
    ids = f"0-{len(nodes) - 1}" if len(nodes) > 1 else "0"
    files = {
        "/proc/meminfo": meminfo(total, free),
        "/proc/cpuinfo": f"model name\t: {arch_flags[0]}\nflags\t\t: {arch_flags[1]}\n",
        "/proc/sys/kernel/osrelease": f"{kernel}\n",
        "/proc/sys/kernel/arch": "x86_64\n",
        "/proc/sys/kernel/hostname": "host\n",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/proc/sys/vm/swappiness": "10\n",
        "/proc/sys/vm/overcommit_memory": "1\n",
        "/proc/sys/vm/zone_reclaim_mode": "0\n",
        "/proc/sys/vm/max_map_count": "1048576\n",
        "/proc/self/limits": LIMITS,
        "/proc/self/status": f"Name:\tpython\nCapEff:\t000001ffffffffff\nSeccomp:\t0\n"
        f"Cpus_allowed_list:\t0-{cpus}\nMems_allowed_list:\t{ids}\n",
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory hugetlb pids\n",
        "/proc/self/mounts": "/dev/nvme0n1p2 / ext4 rw,relatime 0 0\n"
        "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n",
        "/proc/self/net/tcp": "  sl  local_address rem_address   st\n"
        "   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000\n",
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        "/sys/devices/system/cpu/online": f"0-{cpus}\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "/sys/devices/system/node/online": f"{ids}\n",
        f"{THP}/enabled": "always [madvise] never\n",
        f"{THP}/defrag": "always defer defer+madvise [madvise] never\n",
        "/sys/module/nvidia/version": "580\n",
        "/sys/module/nvidia_uvm/version": "580\n",
        "/sys/devices/pci0000:00/nvme/block/nvme0n1/queue/rotational": "0\n",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0\n",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages": "0\n",
        "/etc/cdi/nvidia.yaml": "cdiVersion: 0.6.0\n",
        "/dev/null": "",
    }  # fmt: skip
    for node, (cpu_list, node_total, node_free, distances) in nodes.items():
        folder = f"/sys/devices/system/node/node{node}"
        files |= {
            f"{folder}/cpulist": f"{cpu_list}\n",
            f"{folder}/distance": f"{distances}\n",
            _package(cpu_list): f"{node}\n",
            f"{folder}/meminfo": f"Node {node} MemTotal: {node_total} kB\n"
            f"Node {node} MemFree: {node_free} kB\n",
            f"{folder}/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
            f"{folder}/hugepages/hugepages-2048kB/free_hugepages": "0\n",
        }
    return files


def _package(cpu_list):
    first = cpu_list.split("-")[0]
    return f"/sys/devices/system/cpu/cpu{first}/topology/physical_package_id"


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
TARGETS = {"/sys/class/block/nvme0n1p2": "/sys/devices/pci0000:00/nvme/block/nvme0n1/nvme0n1p2"}


def card_files(address, index, node, cpus, device, root, driver):
    """sysfs and /proc of one card below its own root port, IOMMU in passthrough."""
    files, targets = {}, {}
    for at, extra in ((address, {"class": "0x030200\n"}), (root, {"class": "0x060400\n"})):
        folder = f"/sys/bus/pci/devices/{at}"
        is_card = at == address
        files |= {
            f"{folder}/vendor": "0x10de\n" if is_card else "0x8086\n",
            f"{folder}/device": f"{device}\n" if is_card else "0x352a\n",
            f"{folder}/class": extra["class"],
            f"{folder}/numa_node": f"{node}\n",
            f"{folder}/local_cpulist": f"{cpus}\n",
            f"{folder}/current_link_speed": "32.0 GT/s PCIe\n",
            f"{folder}/max_link_speed": "32.0 GT/s PCIe\n",
            f"{folder}/current_link_width": "16\n",
            f"{folder}/max_link_width": "16\n",
        }
        targets[f"{folder}/iommu_group"] = f"/sys/kernel/iommu_groups/{index}"
    bus = address.split(":")[1]
    targets[f"/sys/bus/pci/devices/{address}"] = f"/sys/devices/pci0000:{bus}/{root}/{address}"
    files |= {
        f"/sys/kernel/iommu_groups/{index}/type": "identity\n",
        f"/proc/driver/nvidia/gpus/{address}/information": f"Device Minor: \t {index}\n",
        f"/dev/nvidia{index}": "",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
        f"{driver}  Release Build\n",
    }
    return files, targets


def topo_m(rows):
    """The matrix as the tool prints it. `rows`: per card (cells, cpus, node)."""
    names = [f"GPU{n}" for n in range(len(rows))]
    head = "\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    body = [
        "\t".join([name, *cells, cpus, f"{node}\t", "N/A"])
        for name, (cells, cpus, node) in zip(names, rows, strict=True)
    ]
    return "\n".join([head, *body]) + "\n\nLegend:\n\n  X    = Self\n"


def config_space():
    """4 KiB with an ACS capability at 0x148 whose control register redirects nothing."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    return space.hex()


def recording(label, files, targets, nvml, runs, binaries):
    lines = {p: {"lines": t.split("\n")} if t.count("\n") > 1 else t for p, t in files.items()}
    answers = {
        "read": lines,
        "target": {**TARGETS, **targets},
        "binary": binaries,
        "nvml": nvml,
        "run": {argv: {"code": 0, "out": out.split("\n")} for argv, out in runs.items()},
        "space": {"/dev/shm": [64 * GIB, 64 * GIB], "/tmp": [2000 * GIB, 1500 * GIB],
                  "/var/lib/docker": [2000 * GIB, 1500 * GIB]},
        "trial": {"memory-policy": "allowed", "clock": "synchronised", "direct-io /tmp": "yes",
                  "direct-io /var/lib/docker": "yes"},
    }  # fmt: skip
    return {"format": 1, "label": label, "answers": answers}


DOCKER = "docker info --format {{.ServerVersion}}|{{.CgroupDriver}}|{{.DockerRootDir}}"
RUNS = {
    "dmesg": "",
    DOCKER: "28.3.0|cgroupfs|/var/lib/docker",
    "nvidia-ctk --version": "NVIDIA Container Toolkit CLI version 1.17.8",
}


def two_cards(shared, second_node, label):
    """Two RTX PRO 6000 in a two-node, 512 GiB host; the second card on `second_node`."""
    v = values((shared / "tools/two-rtx-pro-6000.nvml.txt").read_text())
    if second_node == 0:
        v |= {"gpu1.numa": "0", "gpu1.cpus": "ffff", "gpu1.pcie_gen": "5", "gpu1.pcie_width": "16"}
        v |= {"gpu0.mem_used": "0", "topo.0.1": "40", "p2p.0.1": "0"}
    driver, nvml = v["driver"], {"nvmlDeviceGetCount": 2}
    nvml |= {"nvmlSystemGetDriverVersion": driver, "nvmlSystemGetNVMLVersion": v["nvml"],
             "nvmlSystemGetCudaDriverVersion": int(v["cuda"])}  # fmt: skip
    nodes = {
        0: ("0-15", 263_979_008, 255_852_544, "10 21"),
        1: ("16-31", 264_200_192, 258_998_272, "21 10"),
    }
    files = machine_files(
        ("INTEL(R) XEON(R) GOLD 6544Y", "fpu vme sse2"), nodes, "6.8.0-87-generic"
    )
    targets, binaries, rows = {}, {}, []
    for index, (bus, node) in enumerate((("01", 0), ("81", second_node))):
        address, root, cpus = (
            f"0000:{bus}:00.0",
            f"0000:{int(bus, 16) - 1:02x}:01.0",
            nodes[node][0],
        )
        nvml |= nvml_of_card(index, v, {"bar1": 128 * GIB, "power": 600_000, "clock": 3090})
        f, t = card_files(address, index, node, cpus, "0x2bb1", root, driver)
        if index == 1 and second_node == 1:
            at = f"/sys/bus/pci/devices/{root}"
            f |= {f"{at}/current_link_width": "8\n", f"{at}/current_link_speed": "16.0 GT/s PCIe\n"}
        files |= f
        targets |= t
        binaries[f"/sys/bus/pci/devices/{root}/config"] = config_space()
        near = "NODE" if second_node == 0 else "SYS"
        rows.append(([" X ", near] if index == 0 else [near, " X "], cpus, node))
    nvml["nvmlDeviceGetTopologyCommonAncestor gpu0 gpu1"] = int(v["topo.0.1"])
    nvml["nvmlDeviceGetP2PStatus gpu0 gpu1 0"] = int(v["p2p.0.1"])
    runs = {**RUNS, "nvidia-smi topo -m": topo_m(rows)}
    return recording(label, files, targets, nvml, runs, binaries)


def h200(shared):
    """The captured one-GPU machine; limits, disks and tools that the capture lacks are added."""
    folder = shared / "recorded/h200-1gpu"
    query = (folder / "nvidia-smi-query.csv").read_text().splitlines()[1].split(", ")
    pci = (folder / "sys_bus_pci.txt").read_text().split("== /sys/bus/pci/devices/0000:00:06.0 ")[1]
    kernel = (folder / "uname.txt").read_text().split()[2]
    files = machine_files(("", ""), {0: ("0-15", 131981020, 130711652, "10")}, kernel)
    files |= {
        "/proc/meminfo": (folder / "proc_meminfo.txt").read_text(),
        "/proc/self/limits": (folder / "proc_self_limits.txt").read_text(),
        "/proc/cpuinfo": (folder / "proc_cpuinfo.txt").read_text().split("\n\n")[0] + "\n",
        "/etc/os-release": (folder / "os-release.txt").read_text(),
        "/sys/devices/system/node/node0/meminfo": _section(folder, "./node0/meminfo"),
        "/proc/sys/vm/max_map_count": "8250342\n",
    }
    driver = query[13]
    total, used, free = (int(word.split()[0]) << 20 for word in query[10:13])
    v = {"gpu0.bus": query[3], "gpu0.name": query[1], "gpu0.uuid": query[2], "gpu0.cc": query[14],
         "gpu0.mem_total": str(total), "gpu0.mem_used": str(used), "gpu0.numa": "0",
         "gpu0.cpus": "ffff"}  # fmt: skip
    nvml = {
        "nvmlDeviceGetCount": 1,
        "nvmlSystemGetDriverVersion": driver,
        "nvmlSystemGetNVMLVersion": f"13.{driver}",
        "nvmlSystemGetCudaDriverVersion": 13000,
    }
    nvml |= nvml_of_card(0, v, {"bar1": 262144 << 20, "power": 700_000, "clock": 1980})
    nvml[f"nvmlDeviceGetMemoryInfo gpu0 {0x02000028}"] = {
        "total": total, "used": used, "free": free, "reserved": 616 << 20}  # fmt: skip
    at = "0000:00:06.0"
    for line in pci.splitlines()[1:10]:
        name, _, value = line.partition(" ")
        if name in ("vendor", "device", "class", "numa_node", "local_cpulist",
                    "current_link_speed", "current_link_width", "max_link_speed",
                    "max_link_width"):  # fmt: skip
            files[f"/sys/bus/pci/devices/{at}/{name}"] = f"{value}\n"
    text = (folder / "proc_driver_nvidia.txt").read_text()
    for part in re.split(r"^== ", text, flags=re.M)[1:]:
        path, _, body = part.partition("\n")
        if path.endswith(("/version", "/information")):
            files[path] = body
    files["/dev/nvidia0"] = ""
    targets = {f"/sys/bus/pci/devices/{at}": f"/sys/devices/pci0000:00/{at}"}
    runs = {**RUNS, "nvidia-smi topo -m": (folder / "nvidia-smi-topo-m.txt").read_text()}
    made = recording(
        "h200-1gpu, with limits, disks and tools added", files, targets, nvml, runs, {}
    )
    made["answers"]["names"] = {"/sys/kernel/iommu_groups": []}
    return made


def _section(folder, name):
    text = (folder / "sys_devices_system_node.txt").read_text()
    return text.split(f"== {name}\n")[1].split("\n== ")[0] + "\n"


def main(shared):
    made = {
        "two-rtx-pro-6000": two_cards(
            shared, 1, "composed: second card on the other node, at gen 4 x8"
        ),
        "two-rtx-pro-6000-healthy": two_cards(shared, 0, "composed: both cards on node 0"),
        "h200-1gpu": h200(shared),
    }
    for name, data in made.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        text = json.dumps(data, indent=1, sort_keys=True) + "\n"
        (folder / "recording.json").write_text(text, encoding="utf-8")
        print(folder / "recording.json", len(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
