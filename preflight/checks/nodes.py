"""Memory nodes: are they told right, where do the cards sit, is there memory beside them?"""

from __future__ import annotations

from itertools import combinations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, called, gib, live
from preflight.host import Host, NumaNode
from preflight.looking import ids
from preflight.needs import Needs

LARGE_MACHINE_CPUS = 64


def with_memory(host: Host) -> tuple[NumaNode, ...]:
    """Nodes that hold host memory: never a GPU's own, never an empty one."""
    return tuple(n for n in host.numa_nodes if not n.gpu_memory and n.memory_total_bytes != 0)


def with_cpus(host: Host) -> tuple[NumaNode, ...]:
    return tuple(n for n in host.numa_nodes if n.cpus)


def map_is_sound(host: Host, needs: Needs) -> Result:
    if not host.numa_nodes:
        yield Unseen("the memory nodes")
        return
    sets = {n.index: ids(n.cpus) for n in host.numa_nodes}
    unread = [str(index) for index, cpus in sets.items() if cpus is None]
    if unread:
        yield Unseen(f"the CPUs of node {', '.join(unread)}")
        return
    for one, two in combinations(sets, 2):
        both = (sets[one] or frozenset()) & (sets[two] or frozenset())
        if both:
            yield Saw(f"CPU {min(both)} is in node {one} and in node {two}: the map is wrong")
            return
    if not any(sets.values()):
        yield Saw("no node has a CPU: the map is wrong")


def card_nodes_known(host: Host, needs: Needs) -> Result:
    if not host.numa_nodes and live(host, needs):
        yield Unseen("the memory nodes")
    elif len(with_cpus(host)) > 1:
        for gpu in live(host, needs):
            if gpu.numa_node is None:
                yield Saw(f"the firmware does not say which of {len(with_cpus(host))} nodes "
                          f"{called(gpu)} is on: its memory is not pinned to a node")  # fmt: skip


def cards_share_a_node(host: Host, needs: Needs) -> Result:
    found = live(host, needs)
    if len(found) < 2 or len(with_cpus(host)) < 2:
        return
    nodes = {gpu.numa_node for gpu in found}
    if None in nodes:
        yield Unseen("the nodes of all cards")
    elif len(nodes) > 1:
        told = ", ".join(f"GPU {gpu.index} on node {gpu.numa_node}" for gpu in found)
        yield Saw(f"the cards are on different nodes ({told}): 1.17 to 1.51 times slower")


def node_witnesses_agree(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if len(host.numa_nodes) < 2 or gpu.numa_node is None:
            continue
        told = {"NVML": gpu.numa_node_nvml, "nvidia-smi topo -m": gpu.numa_node_topo}
        if set(told.values()) == {None}:
            yield Unseen(f"what NVML and topo -m say of the node of {called(gpu)}")
        for witness, node in told.items():
            if node not in (None, gpu.numa_node):
                yield Saw(f"{called(gpu)} is on node {gpu.numa_node} for sysfs and on node "
                          f"{node} for {witness}")  # fmt: skip


def card_nodes_have_memory(host: Host, needs: Needs) -> Result:
    total = {n.index: n.memory_total_bytes for n in host.numa_nodes}
    for node in sorted({g.numa_node for g in live(host, needs) if g.numa_node is not None}):
        if total.get(node) == 0 or (node not in total and total):
            yield Saw(f"node {node}, where a card is, has no memory: {_nearest(host, node)}")
        elif total.get(node) is None:
            yield Unseen(f"the memory of node {node}")


def _nearest(host: Host, node: int) -> str:
    order = [n.index for n in host.numa_nodes]
    row = next((n.distances for n in host.numa_nodes if n.index == node), None)
    if not row or len(row) != len(order):
        return "the nearest node with memory is not known"
    others = [(row[order.index(n.index)], n.index) for n in with_memory(host)
              if n.index != node and n.memory_total_bytes]  # fmt: skip
    return f"node {min(others)[1]} is nearest" if others else "no node has memory"


def every_cpu_node_has_memory(host: Host, needs: Needs) -> Result:
    empty = [n.index for n in with_cpus(host) if n.memory_total_bytes == 0]
    if any(n.memory_total_bytes is None for n in with_cpus(host)):
        yield Unseen("the memory of every node")
    elif empty:
        full = ", ".join(str(n.index) for n in with_memory(host))
        yield Saw(f"node {', '.join(map(str, empty))} has CPUs and no memory; only {full} has")


def every_memory_node_has_cpus(host: Host, needs: Needs) -> Result:
    """CXL, HBM and GPU memory look like nodes without CPUs."""
    for node in with_memory(host):
        if node.cpus is None:
            yield Unseen(f"the CPUs of node {node.index}")
        elif not ids(node.cpus) and node.memory_total_bytes:
            yield Saw(f"node {node.index} has {gib(node.memory_total_bytes)} and no CPUs (CXL, HBM "
                      "or a GPU's memory): no expert is put there")  # fmt: skip


def nodes_are_shown(host: Host, needs: Needs) -> Result:
    count = len(ids(host.cpus_online) or ())
    if len(host.numa_nodes) != 1 or count < LARGE_MACHINE_CPUS:
        return
    if host.software.virtualisation is None:
        yield Unseen("whether this is a virtual machine")
    elif host.software.virtualisation == "virtual":
        yield Saw(f"{count} CPUs and one memory node: the hypervisor hides the real nodes")


def node_memory_enough(host: Host, needs: Needs) -> Result:
    nodes = {n.index: n for n in host.numa_nodes}
    if len(nodes) < 2 and needs.pinned_bytes_by_node:
        return  # one node: host-memory-short has the whole story
    for index, wanted in sorted(needs.pinned_bytes_by_node.items()):
        free = nodes[index].memory_free_bytes if index in nodes else None
        if free is None:
            yield Unseen(f"free memory of node {index}")
        elif free < wanted:
            yield Saw(f"{gib(wanted)} are to be pinned on node {index}, which has {gib(free)} free",
                      _spill(host, index))  # fmt: skip


def _spill(host: Host, index: int) -> str:
    order = [n.index for n in host.numa_nodes]
    row = next((n.distances for n in host.numa_nodes if n.index == index), None)
    if not row or len(row) != len(order):
        return "plan again for the memory that is free, or put memory modules on that node"
    near = [n for n in with_memory(host) if n.index != index and row[order.index(n.index)] < 20]
    if not near:
        return "plan again for the memory that is free, or put memory modules on that node"
    names = ", ".join(str(n.index) for n in near)
    return (f"spread the arena over the nodes of the socket ({index}, {names}: "
            f"{gib(sum(n.memory_free_bytes or 0 for n in near))} more are free there), or set NPS1 "
            "or SNC off in firmware")  # fmt: skip


AREA = "nodes"
CHECKS = (
    Check("numa-map-wrong", AREA, WARN, map_is_sound, "each CPU in exactly one node", "sysfs",
          "update the firmware; until then the nodes are taken as unknown", must_see=True),
    Check("gpu-node-unknown", AREA, WARN, card_nodes_known, "a node for each card",
          "sysfs, numa_node", "update the firmware, or measure each pair with --measure"),
    Check("gpus-on-different-nodes", AREA, WARN, cards_share_a_node, "one node for all cards",
          "public measurements of this model on two cards: 1.17x to 1.51x",
          "move a card to a slot of the other's socket, or choose cards of one node with --gpus"),
    Check("gpu-node-witnesses-disagree", AREA, WARN, node_witnesses_agree,
          "sysfs, NVML and topo -m name one node", "sysfs is used", "update firmware and driver"),
    Check("gpu-node-without-memory", AREA, FAIL, card_nodes_have_memory,
          "memory on each card's node", "sysfs", "put memory modules on that node, or set NPS1"),
    Check("node-without-memory", AREA, WARN, every_cpu_node_has_memory,
          "memory on each node with CPUs", "sysfs", "populate every channel, or set NPS1"),
    Check("node-without-cpus", AREA, WARN, every_memory_node_has_cpus,
          "CPUs on each node with memory", "sysfs", "nothing to do: that memory is left out"),
    Check("nodes-hidden", AREA, WARN, nodes_are_shown, "more than one node from 64 CPUs on",
          "large machines have several nodes", "let the hypervisor pass its nodes on (vNUMA)"),
    Check("node-memory-short", AREA, FAIL, node_memory_enough,
          "free memory of the node >= bytes pinned there", "the plan", "plan again", must_see=True),
)  # fmt: skip
