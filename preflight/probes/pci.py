"""NVIDIA cards on the PCI bus, from sysfs alone: nodes, CPUs, links, the bridges above them."""

from __future__ import annotations

import re

from preflight.host import Bridge
from preflight.looking import Looking, whole

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6}
ACS_CAPABILITY = 0x000D
# ACS control: request redirect (bit 2) and completion redirect (bit 3).
ACS_REDIRECT = 0b1100


def nvidia_cards(look: Looking) -> tuple[str, ...] | None:
    """Addresses of NVIDIA display devices (class 03xx), or None where sysfs cannot be read."""
    addresses = look.names(DEVICES)
    if addresses is None:
        return None
    found = []
    for address in addresses:
        if look.text(f"{DEVICES}/{address}/vendor") == NVIDIA:
            kind = look.text(f"{DEVICES}/{address}/class")
            if kind is not None and kind.startswith("0x03"):
                found.append(address)
    return tuple(found)


def sysfs_address(bus_id: str) -> str:
    """NVML's `00000000:01:00.0` as sysfs writes it: `0000:01:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{rest}"


def generation(speed: str | None) -> int | None:
    """PCIe generation of `32.0 GT/s PCIe`; None for `Unknown`."""
    return GENERATIONS.get((speed or "").split(" ")[0])


def node_and_cpus(look: Looking, address: str) -> tuple[int | None, str | None, bool]:
    """NUMA node (None where the firmware says -1), local CPUs, and whether sysfs has the card."""
    folder = f"{DEVICES}/{address}"
    node = look.number(f"{folder}/numa_node")
    return (
        node if node is not None and node >= 0 else None,
        look.text(f"{folder}/local_cpulist") or None,
        node is not None,
    )


def link(look: Looking, address: str) -> dict[str, int | None]:
    """Generation and width of one device's link, now and at most."""
    folder = f"{DEVICES}/{address}"
    width, widest = (look.number(f"{folder}/{n}_link_width") for n in ("current", "max"))
    return {
        "generation": generation(look.text(f"{folder}/current_link_speed")),
        "generation_max": generation(look.text(f"{folder}/max_link_speed")),
        # 255 is what a dead link reads as; 0 is an integrated device.
        "width": width if width in range(1, 33) else None,
        "width_max": widest if widest in range(1, 33) else None,
    }


def bridges(look: Looking, address: str) -> tuple[Bridge, ...] | None:
    """The ports between a card and its root, nearest first; () where it sits on the root."""
    path = look.target(f"{DEVICES}/{address}")
    if path is None:
        return None
    above = [part for part in path.split("/") if ADDRESS.fullmatch(part) and part != address]
    return tuple(
        Bridge(address=port, acs_redirect=acs_redirect(look, port), **link(look, port))
        for port in reversed(above)
    )


def acs_redirect(look: Looking, address: str) -> bool | None:
    """Whether a port sends peer-to-peer traffic up to the root.

    None where configuration space past its first 64 bytes cannot be read (it takes root).
    """
    space = look.binary(f"{DEVICES}/{address}/config")
    if space is None or len(space) <= 0x100:
        return None
    offset, seen = 0x100, set[int]()
    while offset and offset not in seen and offset + 8 <= len(space):
        seen.add(offset)
        header = int.from_bytes(space[offset : offset + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            control = int.from_bytes(space[offset + 6 : offset + 8], "little")
            return bool(control & ACS_REDIRECT)
        offset = header >> 20
    return False


def iommu_group_type(look: Looking, address: str) -> str | None:
    """identity, DMA or DMA-FQ; `none` where no IOMMU group holds the card."""
    group = look.target(f"{DEVICES}/{address}/iommu_group")
    if group is None:
        has_card = look.text(f"{DEVICES}/{address}/vendor") is not None
        return "none" if has_card else None
    return look.text(f"/sys/kernel/iommu_groups/{group.rsplit('/', 1)[-1]}/type")


def minor_number(look: Looking, address: str) -> int | None:
    """N of /dev/nvidiaN, as the driver says."""
    text = look.text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
    match = re.search(r"^Device Minor:\s*(\d+)", text, re.M)
    return whole(match.group(1)) if match else None
