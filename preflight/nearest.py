"""Which memory nodes may hold experts, nearest first: by memory, CPUs and distance, never by id."""

from __future__ import annotations

from preflight.host import Host, NumaNode


def host_memory_nodes(host: Host) -> tuple[NumaNode, ...]:
    """Nodes of ordinary host memory.

    Never a GPU's own memory, never an empty node. Nodes without CPUs (CXL, HBM) count only where no
    node has both CPUs and memory.
    """
    filled = [n for n in host.numa_nodes if n.memory_total_bytes and not n.gpu_memory]
    return tuple(n for n in filled if n.cpus) or tuple(filled)


def memory_nodes_near(host: Host, node: int) -> tuple[int, ...]:
    """Ids of the nodes that may hold what CPUs or a card of `node` read, nearest first.

    Nodes of unknown distance come last. Raises ValueError where the machine has no such node.
    """
    order = [n.index for n in host.numa_nodes]
    if node not in order:
        raise ValueError(f"there is no memory node {node}; there are {order}")
    row = host.numa_nodes[order.index(node)].distances
    known = row if row and len(row) == len(order) else None

    def distance(other: int) -> tuple[int, int]:
        if other == node:
            return (0, other)
        return (known[order.index(other)] if known else 256, other)

    return tuple(sorted((n.index for n in host_memory_nodes(host)), key=distance))
