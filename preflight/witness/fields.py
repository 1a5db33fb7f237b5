"""One card's facts from nvidia-smi's names for them: the same table for XML, -q text and CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from preflight.host import Gpu
from preflight.probes.pci import sysfs_address
from preflight.witness.words import fault, milliwatts, number, size, switch, value

Reader = Callable[[str | None], Any]


def _address(text: str | None) -> str | None:
    found = value(text)
    return sysfs_address(found) if found and ":" in found else None


def _recovery(text: str | None) -> str | None:
    word = (text or "").strip()
    return "none" if word == "None" else value(word)


# fact -> (reader, path in XML, path in -q text, name in CSV without its unit)
FIELDS: dict[str, tuple[Reader, str, str, str]] = {
    "name": (value, "product_name", "Product Name", "name"),
    "uuid": (value, "uuid", "GPU UUID", "uuid"),
    "pci_address": (_address, "pci/pci_bus_id", "PCI/Bus Id", "pci.bus_id"),
    "memory_total_bytes": (size, "fb_memory_usage/total", "FB Memory Usage/Total", "memory.total"),
    "memory_used_bytes": (size, "fb_memory_usage/used", "FB Memory Usage/Used", "memory.used"),
    "memory_free_bytes": (size, "fb_memory_usage/free", "FB Memory Usage/Free", "memory.free"),
    "bar1_total_bytes": (size, "bar1_memory_usage/total", "BAR1 Memory Usage/Total", ""),
    "compute_capability": (value, "", "", "compute_cap"),
    "mig_enabled": (switch, "mig_mode/current_mig", "MIG Mode/Current", "mig.mode.current"),
    "persistence": (switch, "persistence_mode", "Persistence Mode", "persistence_mode"),
    "recovery_action": (_recovery, "gpu_recovery_action", "GPU Recovery Action",
                        "gpu_recovery_action"),
    "pcie_generation": (
        number, "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
        "PCI/GPU Link Info/PCIe Generation/Current", "pcie.link.gen.current"),
    "pcie_generation_max": (
        number, "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
        "PCI/GPU Link Info/PCIe Generation/Max", "pcie.link.gen.max"),
    "pcie_generation_device_max": (
        number, "pci/pci_gpu_link_info/pcie_gen/max_device_link_gen",
        "PCI/GPU Link Info/PCIe Generation/Device Max", "pcie.link.gen.gpumax"),
    "pcie_width": (
        number, "pci/pci_gpu_link_info/link_widths/current_link_width",
        "PCI/GPU Link Info/Link Width/Current", "pcie.link.width.current"),
    "pcie_width_max": (
        number, "pci/pci_gpu_link_info/link_widths/max_link_width",
        "PCI/GPU Link Info/Link Width/Max", "pcie.link.width.max"),
    "pcie_replays": (number, "pci/replay_counter", "PCI/Replays Since Reset", ""),
    "ecc_enabled": (switch, "ecc_mode/current_ecc", "ECC Mode/Current", "ecc.mode.current"),
    "ecc_enabled_pending": (switch, "ecc_mode/pending_ecc", "ECC Mode/Pending", "ecc.mode.pending"),
    "ecc_uncorrected_errors": (number, "", "", "ecc.errors.uncorrected.volatile.total"),
    "remapped_rows_pending": (switch, "remapped_rows/remapped_row_pending",
                              "Remapped Rows/Pending", ""),
    "remapped_rows_failed": (switch, "remapped_rows/remapped_row_failure",
                             "Remapped Rows/Remapping Failure Occurred", ""),
    "temperature_celsius": (number, "temperature/gpu_temp", "Temperature/GPU Current Temp",
                            "temperature.gpu"),
    "clock_sm_mhz": (number, "clocks/sm_clock", "Clocks/SM", "clocks.current.sm"),
    "clock_sm_max_mhz": (number, "max_clocks/sm_clock", "Max Clocks/SM", "clocks.max.sm"),
    "power_limit_milliwatts": (milliwatts, "gpu_power_readings/current_power_limit",
                               "GPU Power Readings/Current Power Limit", "power.limit"),
    "power_limit_default_milliwatts": (milliwatts, "gpu_power_readings/default_power_limit",
                                       "GPU Power Readings/Default Power Limit",
                                       "power.default_limit"),
}  # fmt: skip
XML, TEXT, CSV = 1, 2, 3


def gpu(index: int, told: Mapping[str, str | None], form: int) -> Gpu:
    """Facts of one card from `told`: the form's own name or path -> text.

    A value that says it is an error becomes the card's fault, and every such value is unknown.
    """
    facts: dict[str, Any] = {}
    broken = None
    for fact, row in FIELDS.items():
        reader, path = row[0], str(row[form])
        text = told.get(path) if path else None
        facts[fact] = reader(text)
    for text in told.values():
        broken = broken or fault(text)
    return Gpu(index=index, fault=broken, **facts)


ARCHITECTURES = {
    "Maxwell": "5.x", "Pascal": "6.x", "Volta": "7.0", "Turing": "7.5", "Ampere": "8.x",
    "Ada Lovelace": "8.9", "Hopper": "9.0",
}  # fmt: skip
# Device numbers of the PCI id list: (first, last, capability), where no architecture is named.
DEVICES = ((0x1340, 0x15EF, "5.x"), (0x15F0, 0x15FF, "6.x"), (0x1600, 0x17FF, "5.x"),
           (0x1B00, 0x1D7F, "6.x"), (0x1D80, 0x1DFF, "7.0"))  # fmt: skip


def capability(architecture: str | None, device: str | None) -> str | None:
    """Compute capability from the architecture's name, else from an old card's device number."""
    if architecture and architecture.strip() in ARCHITECTURES:
        return ARCHITECTURES[architecture.strip()]
    text = (device or "").strip().removeprefix("0x")
    if len(text) != 8 or not text.upper().endswith("10DE"):
        return None
    try:
        number = int(text[:4], 16)
    except ValueError:
        return None
    return next((told for first, last, told in DEVICES if first <= number <= last), None)
