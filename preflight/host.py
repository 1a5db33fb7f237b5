"""What this machine is: frozen facts, JSON both ways. Unknown is None: neither zero nor fine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Facts(BaseModel):
    """A group of facts. Unknown keys are refused, so a newer recording is an error, not a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(Facts):
    """One GPU as NVML and sysfs describe it. Bytes are bytes; a CPU list is text like `0-15,32`."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    compute_capability: str | None = None
    pci_address: str | None = None
    numa_node: int | None = None
    cpus: str | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    mig_enabled: bool | None = None


class HugePages(Facts):
    """Reserved pages of one size on one node."""

    page_bytes: int
    total: int | None = None
    free: int | None = None


class NumaNode(Facts):
    """One memory node. A node may have no CPUs (CXL, GPU memory) or no memory."""

    index: int
    cpus: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    huge_pages: tuple[HugePages, ...] = ()
    distances: tuple[int, ...] | None = None


class Limits(Facts):
    """What this process may take. `unlimited` is -1."""

    memlock_soft_bytes: int | None = None
    memlock_hard_bytes: int | None = None
    cgroup_memory_max_bytes: int | None = None
    max_map_count: int | None = None
    shm_bytes: int | None = None


class Software(Facts):
    """Versions: the kernel, the driver, and what CUDA the driver can run."""

    kernel: str | None = None
    driver: str | None = None
    cuda_driver: str | None = None


class Host(Facts):
    """The machine. `gpus` is None when nobody could look, () when there are none."""

    schema_version: int = 1
    cpu_model: str | None = None
    cpus_online: str | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    transparent_huge_pages: str | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    limits: Limits = Limits()
    software: Software = Software()
