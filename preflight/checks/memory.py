"""Host memory: enough of it, truly free, in pages that pin fast, and not about to be swapped."""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, gib
from preflight.host import Host
from preflight.needs import Needs

UNLIMITED = -1
SWAP_USED_BYTES = 1 << 30
HIGH_SWAPPINESS = 10
IDLE_POOL_BYTES = 1 << 30
STRICT = 2


def memory_enough(host: Host, needs: Needs) -> Result:
    available = host.memory_available_bytes
    if available is None:
        yield Unseen("available memory")
    elif available + _reserved(host, needs) < needs.pinned_bytes:
        yield Saw(f"{gib(needs.pinned_bytes)} are to be pinned and {gib(available)} are available")


def free_enough(host: Host, needs: Needs) -> Result:
    free, available = host.memory_free_bytes, host.memory_available_bytes
    if free is None or available is None:
        yield Unseen("free memory")
        return
    reserved = _reserved(host, needs)
    if free + reserved < needs.pinned_bytes <= available + reserved:
        yield Saw(f"{gib(needs.pinned_bytes)} are to be pinned and {gib(free)} are truly free; "
                  f"page cache holds the rest of the {gib(available)} available")  # fmt: skip


def _reserved(host: Host, needs: Needs) -> int:
    """Free reserved pages that the arena would use: they are not in MemFree."""
    return sum((p.free or 0) * p.page_bytes for p in host.memory.huge_pages
               if p.page_bytes == needs.huge_page_bytes)  # fmt: skip


def load_fits(host: Host, needs: Needs) -> Result:
    available = host.memory_available_bytes
    if available is None:
        yield Unseen("available memory")
        return
    offered = available + _reserved(host, needs)
    # Below the pinned bytes themselves it is host-memory-short that speaks.
    if needs.pinned_bytes <= offered < needs.load_peak_bytes:
        yield Saw(f"loading peaks at {gib(needs.load_peak_bytes)} (pinned experts, engine, "
                  f"staging) and {gib(offered)} are available")  # fmt: skip


def group_allows(host: Host, needs: Needs) -> Result:
    most, used = host.limits.cgroup_memory_max_bytes, host.limits.cgroup_memory_used_bytes
    used = max(0, (used or 0) - (host.limits.cgroup_memory_cache_bytes or 0))
    if most is None:
        yield Unseen("the control group's memory limit")
    elif most != UNLIMITED and most - used < needs.load_peak_bytes:
        taken = f", {gib(used)} of them taken" if used else ""
        yield Saw(f"the control group allows {gib(most)}{taken}; all ranks together need "
                  f"{gib(needs.load_peak_bytes)}")  # fmt: skip


def swap_unused(host: Host, needs: Needs) -> Result:
    total, free = host.memory.swap_total_bytes, host.memory.swap_free_bytes
    if total is None or free is None:
        yield Unseen("swap")
    elif total - free > SWAP_USED_BYTES:
        yield Saw(f"{gib(total - free)} of swap are in use: this machine is short of memory")


def swaps_late(host: Host, needs: Needs) -> Result:
    total, level = host.memory.swap_total_bytes, host.memory.swappiness
    if total == 0:
        return
    if total is None or level is None:
        yield Unseen("vm.swappiness")
    elif level > HIGH_SWAPPINESS:
        yield Saw(f"vm.swappiness is {level} and there is swap: the engine's memory goes first")


def huge_pages_on_offer(host: Host, needs: Needs) -> Result:
    free = [p.free for p in host.memory.huge_pages]
    if host.transparent_huge_pages is None:
        yield Unseen("transparent huge pages")
    elif host.transparent_huge_pages == "never" and not any(free):
        yield Saw("no huge pages: transparent ones are off and none is reserved, so pinning takes "
                  "about twice as long")  # fmt: skip


def compacts_only_when_asked(host: Host, needs: Needs) -> Result:
    if host.memory.defrag is None:
        yield Unseen("the defrag mode of transparent huge pages")
    elif host.memory.defrag == "always":
        yield Saw("defrag of transparent huge pages is always: any allocation may stall")


def commit_is_lenient(host: Host, needs: Needs) -> Result:
    mode, most, taken = (host.memory.overcommit, host.memory.commit_limit_bytes,
                         host.memory.committed_bytes)  # fmt: skip
    if mode is None:
        yield Unseen("vm.overcommit_memory")
    elif mode == STRICT:
        if most is None or taken is None:
            yield Unseen("the commit limit")
        elif most - taken < needs.load_peak_bytes:
            yield Saw(f"vm.overcommit_memory is 2 and {gib(most - taken)} may still be promised; "
                      f"{gib(needs.load_peak_bytes)} are needed")  # fmt: skip


def node_pools_enough(host: Host, needs: Needs) -> Result:
    size = needs.huge_page_bytes
    if size is None:
        return
    for index, wanted in sorted(needs.pinned_bytes_by_node.items()):
        node = next((n for n in host.numa_nodes if n.index == index), None)
        free = (
            next((p.free for p in node.huge_pages if p.page_bytes == size), None) if node else None
        )
        pages = -(-wanted // size)
        if free is None:
            yield Unseen(f"huge pages of node {index}")
        elif free < pages:
            yield Saw(f"node {index} has {free:,} free pages of {size >> 20} MiB and the plan "
                      f"needs {pages:,}: touching one too many ends the engine (SIGBUS)",
                      f"echo {pages} | sudo tee /sys/devices/system/node/node{index}/hugepages/"
                      f"hugepages-{size >> 10}kB/nr_hugepages")  # fmt: skip


def group_allows_huge_pages(host: Host, needs: Needs) -> Result:
    size = needs.huge_page_bytes
    if size is None:
        return
    most = (host.limits.cgroup_huge_pages_max_bytes or {}).get(size)
    if most is None:
        if (
            host.limits.cgroup_huge_pages_max_bytes is not None
            or host.limits.cgroup_version is None
        ):
            yield Unseen(f"the control group's limit of {size >> 20} MiB pages")
    elif most != UNLIMITED and most < needs.pinned_bytes:
        yield Saw(f"the control group allows {gib(most)} of {size >> 20} MiB pages and the plan "
                  f"needs {gib(needs.pinned_bytes)}: touching them is SIGBUS")  # fmt: skip


def kubelet_knows_the_pool(host: Host, needs: Needs) -> Result:
    size = needs.huge_page_bytes
    if size is None or needs.deployment != "kubernetes":
        return
    offered = (host.software.kubelet_huge_pages_bytes or {}).get(size)
    pool = next((p.total for p in host.memory.huge_pages if p.page_bytes == size), None)
    if offered is None or pool is None:
        yield Unseen("the huge pages that the kubelet offers")
    elif offered < pool * size:
        yield Saw(f"{gib(pool * size)} are reserved in pages of {size >> 20} MiB and the kubelet "
                  f"offers {gib(offered)}: the pod would stay Pending")  # fmt: skip


def no_idle_pools(host: Host, needs: Needs) -> Result:
    if any(p.free is None for p in host.memory.huge_pages):
        yield Unseen("free huge pages")
        return
    idle = sum((p.free or 0) * p.page_bytes for p in host.memory.huge_pages
               if p.page_bytes != needs.huge_page_bytes)  # fmt: skip
    if idle > IDLE_POOL_BYTES:
        yield Saw(f"{gib(idle)} are reserved as huge pages that nothing here uses")


AREA = "memory"
KERNEL = "Linux kernel documentation"
CHECKS = (
    Check("host-memory-short", AREA, FAIL, memory_enough, "available memory >= bytes to pin",
          "/proc/meminfo, MemAvailable", "plan with fewer experts on the host, or add memory",
          must_see=True),
    Check("host-memory-cached", AREA, WARN, free_enough, "truly free memory >= bytes to pin",
          "pins that wait for page cache: a 125 GiB machine hung on 81 GiB",
          "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches"),
    Check("load-peak-short", AREA, FAIL, load_fits, "available memory >= the peak while loading",
          "the plan: pinned bytes + 8 GiB a rank", "plan with fewer experts on the host"),
    Check("cgroup-memory-short", AREA, FAIL, group_allows,
          "memory.max and memory.high of each group above, less its use, >= the peak of all ranks",
          f"{KERNEL}, control groups", "raise the container's memory limit (--memory, or "
          "resources.limits.memory)", must_see=True),
    Check("swap-in-use", AREA, WARN, swap_unused, "at most 1 GiB of swap in use", "/proc/meminfo",
          "sudo swapoff -a && sudo swapon -a, and find what took the memory"),
    Check("swappiness-high", AREA, WARN, swaps_late, "at most 10 where there is swap",
          f"{KERNEL}, vm.swappiness", "sudo sysctl vm.swappiness=1"),
    Check("huge-pages-off", AREA, WARN, huge_pages_on_offer, "madvise, always, or reserved pages",
          "measured on an H200: 0.05 s/GiB with huge pages, about twice with 4 KiB pages",
          "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
    Check("huge-page-defrag-always", AREA, WARN, compacts_only_when_asked, "not always",
          f"{KERNEL}, transparent huge pages",
          "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/defrag"),
    Check("overcommit-strict", AREA, FAIL, commit_is_lenient, "room under the commit limit",
          f"{KERNEL}, overcommit accounting", "sudo sysctl vm.overcommit_memory=0"),
    Check("node-huge-pages-short", AREA, FAIL, node_pools_enough,
          "free reserved pages of the node >= the plan's", "the plan; the node's own counters",
          "appliance tune --apply"),
    Check("cgroup-huge-pages-short", AREA, FAIL, group_allows_huge_pages,
          "hugetlb.<size>.max >= the plan's bytes", f"{KERNEL}, hugetlb control group",
          "ask for them (resources.limits: hugepages-2Mi), or lift the hugetlb limit"),
    Check("kubelet-huge-pages-stale", AREA, FAIL, kubelet_knows_the_pool,
          "the kubelet offers every reserved page", "kubectl get nodes, status.allocatable",
          "sudo systemctl restart kubelet"),
    Check("huge-pages-idle", AREA, WARN, no_idle_pools, "at most 1 GiB reserved and unused",
          "reserved pages are lost for everything else",
          "plan with --huge-pages, or: echo 0 | sudo tee /proc/sys/vm/nr_hugepages"),
)  # fmt: skip
