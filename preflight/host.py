"""What this machine is: frozen facts, JSON both ways. Unknown is None: neither zero nor fine.

Bytes are bytes, rates are bytes per second, CPU and node lists are text like `0-15,32`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Facts(BaseModel):
    """A group of facts. Unknown keys are refused, so a newer recording is an error, not a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Unread(Facts):
    """Something nobody could look at, and why."""

    what: str
    reason: str


class GpuProcess(Facts):
    """A process that holds GPU memory; `used_bytes` is None where the driver does not say."""

    pid: int
    used_bytes: int | None = None


class Bridge(Facts):
    """A PCIe port above a GPU, nearest first. `acs_redirect`: sends peer traffic to the root."""

    address: str
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    acs_redirect: bool | None = None


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
    mig_slices_bytes: tuple[int, ...] | None = None
    # Why NVML cannot answer for this card: lost, requires reset, unknown error.
    fault: str | None = None
    recovery_action: str | None = None
    memory_used_bytes: int | None = None
    # The card has no memory of its own and says so: it takes the host's.
    memory_unified: bool | None = None
    processes: tuple[GpuProcess, ...] | None = None
    # What the card alone could do, whatever the slot allows.
    pcie_generation_device_max: int | None = None
    pcie_replays: int | None = None
    bridges: tuple[Bridge, ...] | None = None
    bar1_total_bytes: int | None = None
    ecc_enabled: bool | None = None
    ecc_enabled_pending: bool | None = None
    ecc_uncorrected_errors: int | None = None
    retired_pages_pending: bool | None = None
    remapped_rows_pending: bool | None = None
    remapped_rows_failed: bool | None = None
    persistence: bool | None = None
    power_limit_milliwatts: int | None = None
    power_limit_default_milliwatts: int | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    temperature_celsius: int | None = None
    device_node: bool | None = None
    iommu_group_type: str | None = None
    # The GPU's own memory as a NUMA node (GH200, POWER9): never host memory.
    memory_numa_node: int | None = None
    numa_node_nvml: int | None = None
    numa_node_topo: int | None = None
    # NVSwitch fabric: none, not started, in progress, completed.
    fabric: str | None = None


class Link(Facts):
    """Between two GPUs: `path` is NV, PIX, PXB, PHB, NODE or SYS; `peer` is P2P read status."""

    a: int
    b: int
    path: str | None = None
    nvlinks: int | None = None
    peer: str | None = None
    path_in_topo: str | None = None


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
    # In the order of Host.numa_nodes: ids may have gaps.
    distances: tuple[int, ...] | None = None
    gpu_memory: bool = False
    socket: int | None = None


class Limits(Facts):
    """What this process may take. `unlimited` is -1."""

    memlock_soft_bytes: int | None = None
    memlock_hard_bytes: int | None = None
    cgroup_memory_max_bytes: int | None = None
    max_map_count: int | None = None
    shm_bytes: int | None = None
    open_files_soft: int | None = None
    open_files_hard: int | None = None
    cgroup_version: int | None = None
    cgroup_memory_used_bytes: int | None = None
    # Page cache within what is used: it gives way.
    cgroup_memory_cache_bytes: int | None = None
    # Bytes of huge pages of each size this cgroup may hold; -1 is unlimited.
    cgroup_huge_pages_max_bytes: dict[int, int] | None = None
    cpu_quota: float | None = None
    cpus_allowed: str | None = None
    memory_nodes_allowed: str | None = None
    ipc_lock: bool | None = None
    sys_nice: bool | None = None
    seccomp: int | None = None
    # "allowed", or what the kernel answered to a trial mbind of one page.
    memory_policy: str | None = None


class Memory(Facts):
    """How this kernel hands out memory."""

    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    swappiness: int | None = None
    defrag: str | None = None
    overcommit: int | None = None
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None
    zone_reclaim: int | None = None
    numa_balancing: int | None = None
    huge_pages: tuple[HugePages, ...] = ()
    huge_pages_overcommit: dict[int, int] | None = None


class Disk(Facts):
    """The file system that holds one of our folders. `role`: model, cache, temporary or docker."""

    role: str
    path: str
    mount: str | None = None
    filesystem: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    rotational: bool | None = None
    read_only: bool | None = None
    direct_io: bool | None = None


class Xid(Facts):
    """A driver error of the kernel log since boot, or a card gone without one (code None)."""

    pci_address: str | None = None
    code: int | None = None
    text: str


class Software(Facts):
    """Versions: the kernel, the driver, and what CUDA the driver can run."""

    kernel: str | None = None
    driver: str | None = None
    cuda_driver: str | None = None
    operating_system: str | None = None
    architecture: str | None = None
    nvml: str | None = None
    nvml_error: str | None = None
    nvml_error_code: int | None = None
    kernel_module: str | None = None
    nouveau_loaded: bool | None = None
    uvm_loaded: bool | None = None
    iommu: str | None = None
    virtualisation: str | None = None
    wsl: bool | None = None
    container: str | None = None
    docker: str | None = None
    docker_cgroup_driver: str | None = None
    docker_root: str | None = None
    container_toolkit: str | None = None
    cdi_specs: tuple[str, ...] | None = None
    cuda_compat: str | None = None
    # Bytes of huge pages of each size that the kubelet offers to pods.
    kubelet_huge_pages_bytes: dict[int, int] | None = None
    clock_synchronised: bool | None = None
    cpu_governor: str | None = None
    ports_listening: tuple[int, ...] | None = None
    xids: tuple[Xid, ...] | None = None
    # Processes the kernel killed for want of memory since boot.
    memory_kills: tuple[str, ...] | None = None
    topo_error: str | None = None


class LinkRate(Facts):
    """Measured from one GPU against memory of one node."""

    gpu: int
    numa_node: int
    copy_bytes_per_second: float | None = None
    zero_copy_bytes_per_second: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None


class PinRate(Facts):
    """Seconds per GiB to touch and register host memory of one page kind."""

    page_bytes: int
    touch_seconds_per_gib: float
    register_seconds_per_gib: float


class Measured(Facts):
    """What `--measure` saw; the planner uses it instead of data-sheet rates."""

    links: tuple[LinkRate, ...] = ()
    links_all_at_once: tuple[LinkRate, ...] = ()
    pins: tuple[PinRate, ...] = ()
    trial_asked_bytes: int | None = None
    trial_registered_bytes: int | None = None
    trial_stopped: str | None = None
    disk_read_bytes_per_second: float | None = None
    all_reduce: str | None = None
    unmeasured: tuple[Unread, ...] = ()


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
    # A machine put together from parts for tests says so.
    label: str | None = None
    memory_free_bytes: int | None = None
    memory: Memory = Memory()
    links: tuple[Link, ...] = ()
    disks: tuple[Disk, ...] = ()
    # NVIDIA display devices on the PCI bus; None when sysfs could not be read.
    pci_gpus: tuple[str, ...] | None = None
    measured: Measured | None = None
    unread: tuple[Unread, ...] = ()
