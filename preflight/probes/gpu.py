"""GPUs as NVML tells them, with sysfs for what belongs to the machine. NVML first, never judged."""

from __future__ import annotations

from typing import Any

from preflight.answers import Unreadable
from preflight.host import Gpu, GpuProcess, Link
from preflight.looking import Looking, as_list
from preflight.nvml import FUNCTION_NOT_FOUND, GPU_IS_LOST, NOT_SUPPORTED, RESET_REQUIRED
from preflight.probes import pci

MEMORY_V2 = 0x02000028
UNKNOWN_ERROR = 999
FAULTS = (GPU_IS_LOST, RESET_REQUIRED, UNKNOWN_ERROR)
NODE_SCOPE = 0
CLOCK_SM = 1
UNCORRECTED, SINCE_BOOT = 1, 0
FIELD_RECOVERY_ACTION = 230
RECOVERY_ACTIONS = ("none", "reset the GPU", "reboot the node", "drain P2P", "drain and reset",
                    "recover the IMEX domain", "reset the bus", "reboot the system")  # fmt: skip
FABRIC = ("none", "not started", "in progress", "completed")
P2P_READ = 0
P2P = ("ok", "chipset not supported", "GPU not supported", "topology not supported",
       "disabled by a registry key", "not supported", "unknown")  # fmt: skip
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
THROTTLE = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def gpus(look: Looking, only_node: int | None) -> tuple[tuple[Gpu, ...] | None, Unreadable | None]:
    """Every card NVML counts, or None and NVML's refusal.

    `only_node` is the machine's single memory node, if it has one: then every card is on it.
    """
    try:
        count = int(look.source.nvml("nvmlDeviceGetCount"))
    except Unreadable as error:
        return None, error
    return tuple(_gpu(look, index, only_node) for index in range(count)), None


class _Card:
    """Asks NVML about one card and remembers the first sign of a fault."""

    def __init__(self, look: Looking, index: int) -> None:
        self.look = look
        self.index = index
        self.fault: str | None = None
        # Calls this card has no answer to by its nature: that is an answer, not a refusal.
        self.unsupported: set[str] = set()

    def ask(self, call: str, *args: int) -> Any:
        if self.fault:
            # A card that fell off the bus can block every further call for seconds.
            return None
        try:
            return self.look.source.nvml(call, (self.index,), *args)
        except Unreadable as error:
            if error.code in FAULTS:
                self.fault = error.reason
            if error.code == NOT_SUPPORTED:
                self.unsupported.add(call)
            if error.code == FUNCTION_NOT_FOUND:
                self.look.no_such_call = True
            return None

    def flag(self, call: str, at: int | None = None) -> bool | None:
        """A yes or no; `at` picks it from a list. A card without the feature says no."""
        found = self.ask(call)
        if found is None:
            return False if call in self.unsupported else None
        return bool(found if at is None else found[at])


def _gpu(look: Looking, index: int, only_node: int | None) -> Gpu:
    card = _Card(look, index)
    bus = card.ask("nvmlDeviceGetPciInfo")
    address = pci.sysfs_address(bus["busId"]) if bus else None
    capability = card.ask("nvmlDeviceGetCudaComputeCapability")
    facts: dict[str, Any] = {
        "name": card.ask("nvmlDeviceGetName"),
        "uuid": card.ask("nvmlDeviceGetUUID"),
        "compute_capability": ".".join(map(str, capability)) if capability else None,
        "mig_enabled": card.flag("nvmlDeviceGetMigMode", 0),
        **_memory(card),
        **_health(card),
        **_speed(card),
        **_place(card, address, only_node),
    }
    return Gpu(index=index, pci_address=address, fault=card.fault, **facts)


def _memory(card: _Card) -> dict[str, Any]:
    found = card.ask("nvmlDeviceGetMemoryInfo", MEMORY_V2) or card.ask("nvmlDeviceGetMemoryInfo")
    bar = card.ask("nvmlDeviceGetBAR1MemoryInfo")
    processes = card.ask("nvmlDeviceGetComputeRunningProcesses")
    facts: dict[str, Any] = {"bar1_total_bytes": bar["bar1Total"] if bar else None}
    if "nvmlDeviceGetMemoryInfo" in card.unsupported and not found:
        facts["memory_unified"] = True
    if found:
        facts["memory_unified"] = False
        facts |= {f"memory_{word}_bytes": found[word] for word in ("total", "free", "used")}
    if processes is not None:
        facts["processes"] = tuple(
            GpuProcess(pid=p["pid"], used_bytes=p.get("usedGpuMemory")) for p in processes
        )
    return facts


def _health(card: _Card) -> dict[str, Any]:
    fields = card.ask("nvmlDeviceGetFieldValues", FIELD_RECOVERY_ACTION)
    action = fields[0]["value"] if fields and fields[0].get("nvmlReturn") == 0 else None
    fabric = card.ask("nvmlDeviceGetGpuFabricInfo")
    state = FABRIC[fabric["state"]] if fabric and fabric["state"] in range(len(FABRIC)) else None
    return {
        "fabric": "none" if "nvmlDeviceGetGpuFabricInfo" in card.unsupported else state,
        "ecc_enabled": card.flag("nvmlDeviceGetEccMode", 0),
        "ecc_enabled_pending": card.flag("nvmlDeviceGetEccMode", 1),
        "ecc_uncorrected_errors": card.ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, SINCE_BOOT),
        "retired_pages_pending": card.flag("nvmlDeviceGetRetiredPagesPendingStatus"),
        "remapped_rows_pending": card.flag("nvmlDeviceGetRemappedRows", 2),
        "remapped_rows_failed": card.flag("nvmlDeviceGetRemappedRows", 3),
        "persistence": None
        if (persistence := card.ask("nvmlDeviceGetPersistenceMode")) is None
        else bool(persistence),
        "recovery_action": RECOVERY_ACTIONS[action]
        if isinstance(action, int) and action < len(RECOVERY_ACTIONS)
        else None,
    }


def _speed(card: _Card) -> dict[str, Any]:
    reasons = card.ask("nvmlDeviceGetCurrentClocksEventReasons")
    return {
        "power_limit_milliwatts": card.ask("nvmlDeviceGetEnforcedPowerLimit"),
        "power_limit_default_milliwatts": card.ask("nvmlDeviceGetPowerManagementDefaultLimit"),
        "clock_sm_mhz": card.ask("nvmlDeviceGetClockInfo", CLOCK_SM),
        "clock_sm_max_mhz": card.ask("nvmlDeviceGetMaxClockInfo", CLOCK_SM),
        "temperature_celsius": card.ask("nvmlDeviceGetTemperature", 0),
        "throttle_reasons": None
        if reasons is None
        else tuple(name for bit, name in THROTTLE.items() if reasons & bit),
        "pcie_replays": card.ask("nvmlDeviceGetPcieReplayCounter"),
        "pcie_generation_device_max": card.ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
        "pcie_generation": card.ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": card.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": card.ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": card.ask("nvmlDeviceGetMaxPcieLinkWidth"),
    }


def _place(card: _Card, address: str | None, only_node: int | None) -> dict[str, Any]:
    """Where the card sits. sysfs is trusted; NVML stands in only where sysfs lacks the card."""
    look = card.look
    told = _bits(card.ask("nvmlDeviceGetMemoryAffinity", 1, NODE_SCOPE))
    near = _bits(card.ask("nvmlDeviceGetCpuAffinity", 16))
    witness = next(iter(told)) if len(told) == 1 else None
    facts: dict[str, Any] = {
        "numa_node_nvml": witness,
        "memory_numa_node": card.ask("nvmlDeviceGetNumaNodeId"),
    }
    node, cpus, known = pci.node_and_cpus(look, address) if address else (None, None, False)
    facts["numa_node"] = node if known else witness
    facts["cpus"] = cpus if known else as_list(near)
    if facts["numa_node"] is None and only_node is not None:
        facts["numa_node"] = only_node
    if address and known:
        minor = pci.minor_number(look, address)
        nodes = look.names("/dev")
        facts |= {
            "bridges": pci.bridges(look, address),
            "iommu_group_type": pci.iommu_group_type(look, address),
            "device_node": None if minor is None or nodes is None else f"nvidia{minor}" in nodes,
        }
    return facts


def _bits(words: list[int] | None) -> list[int]:
    return [
        64 * at + bit for at, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1
    ]


def with_sysfs_links(look: Looking, found: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Where NVML does not tell a card's link, what sysfs says of it."""
    done = []
    for gpu in found:
        link: dict[str, int | None] = {}
        if gpu.pci_address:
            link = pci.link(look, gpu.pci_address)
        missing: dict[str, int | None] = {
            f"pcie_{name}": value
            for name, value in link.items()
            if value is not None and getattr(gpu, f"pcie_{name}") is None
        }
        if gpu.pcie_generation_device_max is None and link.get("generation_max") is not None:
            missing["pcie_generation_device_max"] = link["generation_max"]
        done.append(gpu.model_copy(update=missing))
    return tuple(done)


def links(look: Looking, count: int) -> tuple[Link, ...]:
    """Every pair of cards: the nearest common ancestor and whether one may read the other."""
    found = []
    for a in range(count):
        for b in range(a + 1, count):
            peer = look.nvml("nvmlDeviceGetP2PStatus", (a, b), P2P_READ)
            path = ANCESTORS.get(look.nvml("nvmlDeviceGetTopologyCommonAncestor", (a, b)))
            status = P2P[peer] if isinstance(peer, int) and peer < len(P2P) else None
            found.append(Link(a=a, b=b, path=path, peer=status))
    return tuple(found)
