"""Does the host have the memory a plan pins? Asked before a byte is loaded.

Pages that are pinned cannot be reclaimed, and a machine that pins more than is truly free hangs
(FACTS section 5, 1). So GPU plans are held against MemFree and the control group's limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from appliance.errors import DoesNotFit, PlanError
from appliance.plan.budget import SLOTS, TABLES
from appliance.plan.model import LedgerLine, RankPlan
from preflight.counted import counted
from preflight.host import Host

GIB = 1 << 30
UNLIMITED = -1
HUGE_PAGE_BYTES = 2 << 20  # of the only kind that the engine takes (engine.hostmem)


def refuse_short_host(host: Host, ranks: Sequence[RankPlan], on_node: AbstractSet[str]) -> None:
    """Raises DoesNotFit when all ranks together need more memory than the host can give.

    `on_node`: parts of the ledger that are bound to the memory node of the card.
    """
    on_cpu = ranks[0].device == "cpu"
    need = sum(rank.total_bytes("host") for rank in ranks)
    if on_cpu:
        need += sum(rank.total_bytes("device") for rank in ranks)
    reserved = 0 if on_cpu else reserved_bytes(host, ranks, on_node)
    need -= reserved
    beside = f" beside {reserved / GIB:.2f} GiB of reserved huge pages" if reserved else ""
    free, what = _free(host, on_cpu)
    if free is None:
        raise PlanError("the free memory of this host could not be read",
                        fix="run appliance preflight and plan from its facts")  # fmt: skip
    if need > free:
        raise DoesNotFit(
            f"the plan takes {need / GIB:.2f} GiB of host memory over "
            f"{counted(len(ranks), 'rank')}{beside} and {free / GIB:.2f} GiB are {what}: "
            f"{(need - free) / GIB:.2f} GiB short",
            fix=_way_out(host, ranks, need, on_cpu),
        )
    limit, used = host.limits.cgroup_memory_max_bytes, host.limits.cgroup_memory_used_bytes or 0
    if limit is not None and limit != UNLIMITED and need > limit - used:
        raise DoesNotFit(
            f"the plan takes {need / GIB:.2f} GiB of host memory over "
            f"{counted(len(ranks), 'rank')}{beside} and the control group allows "
            f"{(limit - used) / GIB:.2f} GiB more (memory.max)",
            fix="raise the memory limit of the container or service",
        )
    if not on_cpu:
        _refuse_short_node(host, ranks, on_node)


def _refuse_short_node(host: Host, ranks: Sequence[RankPlan], on_node: AbstractSet[str]) -> None:
    """Experts and tables are bound to the memory node of the card that reads them."""
    if not nodes_hold_all_memory(host):
        return
    for node in host.numa_nodes:
        mine = [rank for rank in ranks if rank.numa_node == node.index]
        if reserved_bytes(host, mine, on_node):
            continue
        bound = [line for rank in mine for line in rank.ledger if line.part in on_node]
        need = sum(line.size_bytes for line in bound)
        if node.memory_free_bytes is not None and need > node.memory_free_bytes:
            raise DoesNotFit(
                f"memory node {node.index} has {node.memory_free_bytes / GIB:.2f} GiB free and the "
                f"{_words(bound)} of {counted(len(mine), 'card')} beside it take "
                f"{need / GIB:.2f} GiB",
                fix="free memory on that node, or move a card or memory: each node must hold what "
                "its cards read",
            )


def reserved_bytes(host: Host, ranks: Sequence[RankPlan], on_node: AbstractSet[str]) -> int:
    """What of `on_node` goes to reserved huge pages: free ones are not in MemFree, nor in
    memory.max. The engine takes them on a node where all that it binds there fits, else none."""
    out = 0
    for node in {rank.numa_node for rank in ranks}:
        sizes = [line.size_bytes for rank in ranks if rank.numa_node == node
                 for line in rank.ledger if line.part in on_node]  # fmt: skip
        pages = [-(-size // HUGE_PAGE_BYTES) for size in sizes]
        pools = next((n.huge_pages for n in host.numa_nodes if n.index == node),
                     host.memory.huge_pages if node is None else ())  # fmt: skip
        free = sum(p.free or 0 for p in pools if p.page_bytes == HUGE_PAGE_BYTES)
        out += sum(sizes) if sum(pages) <= free else 0
    return out


def _words(lines: Sequence[LedgerLine]) -> str:
    tables = sum(line.size_bytes for line in lines if line.part == TABLES)
    return f"experts and {tables / GIB:.2f} GiB of lookup tables" if tables else "experts"


def nodes_hold_all_memory(host: Host) -> bool:
    """Some virtual machines describe a node that holds a small part of the memory they have."""
    total = host.memory_total_bytes
    known = sum(node.memory_total_bytes or 0 for node in host.numa_nodes if not node.gpu_memory)
    return total is not None and known > 0.9 * total


def _free(host: Host, on_cpu: bool) -> tuple[int | None, str]:
    if on_cpu:
        return host.memory_available_bytes, "available"
    if host.memory_free_bytes is not None:
        return host.memory_free_bytes, "free"
    return host.memory_available_bytes, "available (how much is free is unknown)"


def _way_out(host: Host, ranks: Sequence[RankPlan], need: int, on_cpu: bool) -> str:
    available = host.memory_available_bytes
    if not on_cpu and available is not None and available >= need:
        return (
            f"{available / GIB:.2f} GiB are available once the page cache is dropped: "
            "sync; echo 3 > /proc/sys/vm/drop_caches"
        )
    if on_cpu:
        # Memory that the machine does not have is freed by nobody.
        idle = host.memory_total_bytes is None or host.memory_total_bytes >= need
        return ("stop other programs, or serve a smaller model" if idle else
                "serve a smaller model, or use a machine with more memory")  # fmt: skip
    slots = sum(i.size_bytes for rank in ranks for i in rank.ledger if i.part == SLOTS)
    if slots:
        return (
            f"take fewer cache slots: their copies on the host are {slots / GIB:.2f} GiB of this; "
            "or add memory"
        )
    return "add memory, a card, or use a package with fewer bits"
