"""The roads: PCIe links, the bridges above them, and what lies between two cards."""

from __future__ import annotations

from itertools import combinations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, called, live
from preflight.host import Bridge, Gpu, Host
from preflight.needs import Needs

MANY_REPLAYS = 1000
# Bytes per second and lane, after encoding.
LANE_RATE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def rate(generation: int | None, width: int | None) -> float | None:
    """Raw bytes per second of a link in one direction."""
    per_lane = LANE_RATE.get(generation or 0)
    return per_lane * width if per_lane and width else None


def generation_unlimited(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        here, alone = gpu.pcie_generation_max, gpu.pcie_generation_device_max
        if here is None or alone is None:
            yield Unseen(f"PCIe generation of {called(gpu)}")
        elif here < alone:
            yield Saw(
                f"the slot or riser holds {called(gpu)} at PCIe gen {here}; it can do {alone}"
            )


def width_full(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.pcie_width is None or gpu.pcie_width_max is None:
            yield Unseen(f"PCIe width of {called(gpu)}")
        elif gpu.pcie_width < gpu.pcie_width_max:
            yield Saw(f"{called(gpu)} runs on {gpu.pcie_width} of {gpu.pcie_width_max} lanes")


def upstream_wide_enough(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.bridges is None:
            yield Unseen(f"the bridges above {called(gpu)}")
            continue
        # The nearest port is the other end of the card's own link.
        for port in gpu.bridges[1:]:
            yield from _narrower(gpu, port)


def _narrower(gpu: Gpu, port: Bridge) -> Result:
    # An idle link may have dropped its speed, never its width: take the speed it can reach.
    up, own = rate(port.generation_max, port.width), rate(gpu.pcie_generation_max, gpu.pcie_width)
    if up is None and port.width is None and port.width_max is None:
        return  # a switch's inner ports have no link of their own
    if up is None or own is None:
        yield Unseen(f"the link of {port.address} above {called(gpu)}")
    elif up < 0.9 * own:
        yield Saw(f"{called(gpu)} can take {own / 1e9:.0f} GB/s, but {port.address} above it "
                  f"carries {up / 1e9:.0f} (gen {port.generation_max} x{port.width})")  # fmt: skip


def uplink_unshared(host: Host, needs: Needs) -> Result:
    found = live(host, needs)
    if len(found) < 2:
        return
    for one, two in combinations(found, 2):
        if one.bridges is None or two.bridges is None:
            paths = {ln.path for ln in host.links if {ln.a, ln.b} == {one.index, two.index}}
            if paths & {"PIX", "PXB"}:
                yield Saw(f"{called(one)} and {called(two)} sit behind one switch: its uplink is "
                          "shared, so each has a part of the host's bandwidth")  # fmt: skip
            elif not paths or paths == {None}:
                yield Unseen(f"whether {called(one)} and {called(two)} share an uplink")
            continue
        shared = [b.address for b in one.bridges if b.address in {x.address for x in two.bridges}]
        if shared:
            yield Saw(f"{called(one)} and {called(two)} share {shared[0]}: each has a part of the "
                      "host's bandwidth when both read experts")  # fmt: skip


def few_replays(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.pcie_replays is None:
            yield Unseen(f"PCIe replays of {called(gpu)}")
        elif gpu.pcie_replays > MANY_REPLAYS:
            yield Saw(f"{called(gpu)} had {gpu.pcie_replays:,} PCIe replays: a bad riser or slot")


def _redirecting(host: Host, needs: Needs) -> list[str] | None:
    ports = [port for gpu in live(host, needs) for port in gpu.bridges or ()]
    if any(gpu.bridges is None for gpu in live(host, needs)):
        return None
    if any(port.acs_redirect is None for port in ports) and not any(p.acs_redirect for p in ports):
        return None
    return [port.address for port in ports if port.acs_redirect]


def no_acs_redirect(host: Host, needs: Needs) -> Result:
    if len(live(host, needs)) < 2 or host.software.iommu == "translated":
        return
    found = _redirecting(host, needs)
    if found is None:
        yield Unseen("ACS of the bridges (run as root)")
    elif found:
        yield Saw(f"{', '.join(found)} sends traffic between the cards up to the root (ACS)")


def no_translation(host: Host, needs: Needs) -> Result:
    if len(live(host, needs)) < 2:
        return
    if host.software.iommu is None:
        yield Unseen("the IOMMU's mode")
    elif host.software.iommu == "translated" and not _redirecting(host, needs):
        yield Saw("the IOMMU translates the cards' addresses: traffic between them may be slow")


def peers_can_not_hang(host: Host, needs: Needs) -> Result:
    if len(live(host, needs)) < 2 or host.software.iommu != "translated":
        return
    found = _redirecting(host, needs)
    if found is None:
        yield Unseen("ACS of the bridges, with the IOMMU translating (run as root)")
    elif found:
        yield Saw(f"the IOMMU translates and {', '.join(found)} redirects (ACS): NCCL hangs "
                  "without a word, whatever nvidia-smi topo -p2p says")  # fmt: skip


def peers_reach_each_other(host: Host, needs: Needs) -> Result:
    numbers = {gpu.index for gpu in live(host, needs)}
    for link in host.links:
        if {link.a, link.b} <= numbers:
            if link.peer is None:
                yield Unseen(f"peer access between GPU {link.a} and GPU {link.b}")
            elif link.peer != "ok":
                yield Saw(f"GPU {link.a} and GPU {link.b} cannot read each other ({link.peer}): "
                          "their all-reduce goes through host memory")  # fmt: skip


def witnesses_agree(host: Host, needs: Needs) -> Result:
    if host.software.topo_error and len(live(host, needs)) > 1:
        yield Unseen(f"nvidia-smi topo -m as a witness: {host.software.topo_error}")
        return
    for link in host.links:
        told = link.path_in_topo
        if told and link.path and not told.startswith("NV") and told != link.path:
            yield Saw(f"between GPU {link.a} and GPU {link.b}: NVML says {link.path}, "
                      f"nvidia-smi topo -m says {told}")  # fmt: skip


def sys_means_two_nodes(host: Host, needs: Needs) -> Result:
    """A SYS link crosses nodes; with several nodes it may still stay in a socket."""
    found = live(host, needs)
    numbers = {gpu.index for gpu in found}
    pairs = [f"GPU {ln.a} and GPU {ln.b}" for ln in host.links
             if ln.path == "SYS" and {ln.a, ln.b} <= numbers]  # fmt: skip
    nodes: set[int | None] = {n.index for n in host.numa_nodes}
    nodes = nodes or {gpu.numa_node for gpu in found}
    if pairs and (None in nodes or not nodes):
        yield Unseen("the nodes of all cards")
    elif pairs and len(nodes) == 1:
        yield Saw(f"the link between {pairs[0]} is SYS, yet there is one node only: what is shown "
                  "is not the machine's topology")  # fmt: skip


AREA = "links"
CHECKS = (
    Check("pcie-generation-limited", AREA, WARN, generation_unlimited,
          "the card's own highest generation", "NVML, card maximum against system maximum",
          "move the card to a faster slot, replace the riser, or set the slot to Auto in firmware"),
    Check("pcie-width-reduced", AREA, WARN, width_full, "all lanes of card and slot",
          "sysfs and NVML link width; width does not drop when idle",
          "reseat the card, move it to an x16 slot; or plan fewer cold experts for it"),
    Check("pcie-upstream-narrower", AREA, WARN, upstream_wide_enough,
          "at least 90 % of the card's own link", "PCI Express base specification, lane rates",
          "move the card to a root port of its own"),
    Check("pcie-uplink-shared", AREA, WARN, uplink_unshared, "each card has an uplink of its own",
          "host reads of several cards share the switch's uplink",
          "move one card to another root port; or measure with --measure and plan on that"),
    Check("pcie-replays", AREA, WARN, few_replays, "at most 1,000 since the driver was loaded",
          "NVML, PCIe replay counter", "reseat the card, replace the riser or cable"),
    Check("acs-redirect", AREA, WARN, no_acs_redirect, "no redirect on ports above the cards",
          "NCCL troubleshooting guide, PCI access control services",
          "switch ACS off in the firmware, or: sudo setpci -s PORT ECAP_ACS+6.w=0000"),
    Check("iommu-translates", AREA, WARN, no_translation, "off or passthrough",
          "NCCL troubleshooting guide", "add iommu=pt to the kernel command line and reboot"),
    Check("peer-traffic-hangs", AREA, FAIL, peers_can_not_hang,
          "never both: translating IOMMU and ACS redirect", "NCCL issues 667 and 1999",
          "add iommu=pt to the kernel command line and reboot; until then set NCCL_P2P_DISABLE=1 "
          "and switch custom all-reduce off"),
    Check("gpus-cannot-peer", AREA, WARN, peers_reach_each_other, "every pair can read each other",
          "NVML, P2P status", "nothing to do where the cards lack it; else load the driver without "
          "the registry key that disables it"),
    Check("link-witnesses-disagree", AREA, WARN, witnesses_agree, "NVML and topo -m agree",
          "nvidia-smi truncates and shifts cells", "send us a recording (appliance preflight "
          "--record DIR); NVML's answer is used"),
    Check("sys-link-on-one-node", AREA, WARN, sys_means_two_nodes,
          "a SYS link means two nodes", "nvidia-smi topo legend",
          "let the hypervisor show its nodes to this machine, or switch NPS/SNC on in firmware"),
)  # fmt: skip
