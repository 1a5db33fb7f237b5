"""How many of the experts a device holds are spare slots, where the operator leaves it open.

Slots cost a plan that knows its traffic nothing on the device: they start with the hottest of the
others, and nothing moves while the plan keeps its promise. They cost host memory, a copy each. On
real counts a third of what is held is enough for a topic nobody planned for: fewer leave more cold,
more take longer to fill (docs/measurements, slot policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.plan.placement import LayerDemand
from appliance.plan.room import UNLIMITED, nodes_hold_all_memory
from preflight.host import Host

PARTS = 3
# Of all memory, not of what is free at the moment: that must not change a plan. Copies are a wish,
# so they leave the system more than the plan's other needs do.
HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host bytes one rank may take in all, and of its card's memory node; None: unknown."""

    total_bytes: int | None
    node_bytes: int | None

    def left(self, fixed_bytes: int, expert_bytes: int, fixed_on_node: int = 0) -> int:
        """For copies, beside the rank's other host memory and the experts it keeps there anyway.

        `fixed_on_node`: what of the other memory is bound to the card's memory node, too.
        """
        if self.total_bytes is None:
            return 0
        left = self.total_bytes - fixed_bytes - expert_bytes
        if self.node_bytes is not None:
            left = min(left, self.node_bytes - expert_bytes - fixed_on_node)
        return max(0, left)


def host_rooms(host: Host, nodes: Sequence[int | None]) -> tuple[HostRoom, ...]:
    """One for each rank, whose cards sit on these memory nodes."""
    limits = [host.memory_total_bytes, host.limits.cgroup_memory_max_bytes]
    known = [limit for limit in limits if limit is not None and limit != UNLIMITED]
    total = None if host.memory_total_bytes is None else _share(min(known), len(nodes))
    sizes = {node.index: node.memory_total_bytes for node in host.numa_nodes}
    if not nodes_hold_all_memory(host):
        sizes = {}
    out = []
    for node in nodes:
        size = None if node is None else sizes.get(node)
        out.append(HostRoom(total, None if size is None else _share(size, nodes.count(node))))
    return tuple(out)


def choose_slots(layers: Sequence[LayerDemand], held: Sequence[int], room: int) -> tuple[int, ...]:
    """Slots of each layer, out of the `held` experts; `room`: host bytes for their copies.

    A third, and all of a layer about which nothing is known: its residents would be anybody. A
    layer that is held whole needs none. Where room is short every layer gets less, in proportion.
    """
    wanted = [
        0 if n == len(layer.experts) else n // PARTS if layer.known else n
        for layer, n in zip(layers, held, strict=True)
    ]
    need = sum(n * layer.block_bytes for n, layer in zip(wanted, layers, strict=True))
    if need <= room:
        return tuple(wanted)
    return tuple(n * room // need for n in wanted)


def _share(size_bytes: int, parts: int) -> int:
    return int(size_bytes * HOST_SHARE) // parts
