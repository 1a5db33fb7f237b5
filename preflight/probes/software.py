"""Versions and switches: kernel, driver, container tools, clock, ports, the kernel's own log."""

from __future__ import annotations

import re
from typing import Any

from preflight.answers import Unreadable
from preflight.host import Software
from preflight.looking import Looking
from preflight.probes.kernel_log import memory_kills, xids

KERNEL_LOG = ("dmesg",)
DOCKER = ("docker", "info", "--format",
          "{{.ServerVersion}}|{{.CgroupDriver}}|{{.DockerRootDir}}")  # fmt: skip
TOOLKIT = ("nvidia-ctk", "--version")
# What is asked on every machine; any of them may be slow where its daemon is.
COMMANDS = (KERNEL_LOG, DOCKER, TOOLKIT)
LISTENING = "0A"
UNITS = {" ": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
CDI = ("/etc/cdi", "/var/run/cdi")
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")


def cpu(look: Looking) -> tuple[str | None, bool | None]:
    """The processor's name, and whether a hypervisor shows itself to it."""
    text = look.text("/proc/cpuinfo")
    if not text:
        return None, None
    name = re.search(r"^(?:model name|cpu model|cpu)\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    virtual = "hypervisor" in flags.group(1).split() if flags else None
    return (name.group(1) if name else None), virtual


def software(look: Looking, refused: Unreadable | None, virtual: bool | None) -> Software:
    """What runs here. `refused` is NVML's reason not to start, if it did not."""
    kernel = look.text("/proc/sys/kernel/osrelease")
    cuda = look.nvml("nvmlSystemGetCudaDriverVersion") if not refused else None
    module = module_version(look.text("/proc/driver/nvidia/version"))
    modules = look.names("/sys/module")
    clock = look.trial("clock")
    return Software(
        kernel=kernel,
        operating_system=_operating_system(look),
        architecture=look.text("/proc/sys/kernel/arch") or _architecture(look),
        driver=look.nvml("nvmlSystemGetDriverVersion") if not refused else module,
        nvml=_library(look) if refused else look.nvml("nvmlSystemGetNVMLVersion"),
        cuda_driver=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        nvml_error=refused.reason if refused else None,
        nvml_error_code=refused.code if refused else None,
        kernel_module=module,
        nouveau_loaded="nouveau" in modules if modules is not None else None,
        uvm_loaded="nvidia_uvm" in modules if modules is not None else None,
        iommu=_iommu(look),
        virtualisation=None if virtual is None else "virtual" if virtual else "none",
        wsl="microsoft" in kernel.lower() if kernel else None,
        container=_container(look),
        cuda_compat=_cuda_compat(look),
        clock_synchronised={"synchronised": True, "unsynchronised": False}.get(clock or ""),
        cpu_governor=look.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        ports_listening=_ports(look),
        **_kernel_log(look),
        kubelet_huge_pages_bytes=_kubelet_huge_pages(look),
        **_docker(look),
    )


def module_version(text: str | None) -> str | None:
    """The kernel module's version in /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text or "")
    return match.group(1) if match else None


def _library(look: Looking) -> str | None:
    """Version in the name of the installed libnvidia-ml, for when NVML does not start."""
    for folder in LIBRARIES:
        for name in look.names(folder) or ():
            match = re.fullmatch(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)", name)
            if match:
                return match.group(1)
    return None


def _operating_system(look: Looking) -> str | None:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', look.text("/etc/os-release") or "", re.M)
    return match.group(1) if match else None


def _architecture(look: Looking) -> str | None:
    ran = look.run("uname", "-m")
    return ran.out.strip() or None if ran and ran.code == 0 else None


def _iommu(look: Looking) -> str | None:
    """off, identity or translated, from the type of every group."""
    groups = look.names("/sys/kernel/iommu_groups")
    if groups is None:
        return None
    kinds = {look.text(f"/sys/kernel/iommu_groups/{group}/type") for group in groups}
    if not kinds:
        return "off"
    if None in kinds:
        return None
    return "identity" if kinds == {"identity"} else "translated"


def _container(look: Looking) -> str | None:
    if look.names("/run/secrets/kubernetes.io") or look.names("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if look.text(path) is not None:
            return name
    return "none"


def _cuda_compat(look: Looking) -> str | None:
    """Version of a forward-compatibility libcuda in the usual place."""
    for name in look.names("/usr/local/cuda/compat") or ():
        match = re.fullmatch(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", name)
        if match:
            return match.group(1)
    return None


def _ports(look: Looking) -> tuple[int, ...] | None:
    tables = [look.text(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    if tables[0] is None:
        return None
    found = set()
    for line in "\n".join(t for t in tables if t).splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == LISTENING and ":" in words[1]:
            found.add(int(words[1].rsplit(":", 1)[1], 16))
    return tuple(sorted(found))


def _kernel_log(look: Looking) -> dict[str, Any]:
    ran = look.run(*KERNEL_LOG)
    if ran is None or ran.code != 0:
        return {}
    return {"xids": xids(ran.out), "memory_kills": memory_kills(ran.out)}


def _kubelet_huge_pages(look: Looking) -> dict[int, int] | None:
    """What the first node offers to pods; asked only where a kubelet is."""
    if look.names("/var/lib/kubelet") is None:
        return None
    where = "jsonpath={.items[0].status.allocatable}"
    ran = look.run("kubectl", "get", "nodes", "--request-timeout=1s", "-o", where)
    if ran is None or ran.code != 0:
        return None
    told = re.findall(r'"hugepages-(\d+)([KMG])i":"(\d+)([KMG]i)?"', ran.out)
    return {int(n) * UNITS[u]: int(size) * UNITS[(unit or " ")[0]] for n, u, size, unit in told}


def _docker(look: Looking) -> dict[str, Any]:
    ran = look.run(*DOCKER)
    words = ran.out.strip().split("|") if ran and ran.code == 0 else []
    toolkit = look.run(*TOOLKIT)
    version = re.search(r"version (\S+)", toolkit.out) if toolkit else None
    specs = [name for folder in CDI for name in look.names(folder) or ()]
    refused = any(unread.what in CDI for unread in look.unread)
    facts: dict[str, Any] = {
        "container_toolkit": version.group(1) if version else None,
        "cdi_specs": None if refused else tuple(sorted(set(specs))),
    }
    if len(words) == 3:
        facts |= {"docker": words[0], "docker_cgroup_driver": words[1], "docker_root": words[2]}
    return facts
