"""Which machine a plan was made for: the facts that stay the same from one look to the next.

Named one by one. What is free, used, warm or counted changes between two looks at one machine, and
a fact that is added to Host later is not a part of its identity by itself.
"""

from __future__ import annotations

import hashlib
import json

from preflight.host import Host

_HOST = {"label", "cpu_model", "memory_total_bytes"}
_NODE = {"index", "cpus", "memory_total_bytes", "distances", "gpu_memory", "socket"}
_GPU = {
    "index", "uuid", "name", "memory_total_bytes", "compute_capability", "pci_address", "numa_node",
    "cpus", "pcie_generation_max", "pcie_width_max", "mig_enabled", "mig_slices_bytes",
    "memory_unified", "memory_numa_node",
}  # fmt: skip
_LINK = {"a", "b", "path", "nvlinks"}


def host_digest(host: Host) -> str:
    """sha256 of the machine's lasting facts, and of its links' measured rates where there are any:
    a measurement changes what is planned, and is kept until the next."""
    facts = host.model_dump(
        mode="json",
        include={
            **dict.fromkeys(_HOST, True),
            "numa_nodes": {"__all__": _NODE},
            "gpus": {"__all__": _GPU},
            "links": {"__all__": _LINK},
            "measured": {"links"},
        },
    )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
