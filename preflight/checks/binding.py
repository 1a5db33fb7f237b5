"""May this process use the CPUs and the memory beside the cards, and will pages stay there?"""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, called, live
from preflight.checks.nodes import with_cpus
from preflight.host import Host
from preflight.looking import ids
from preflight.needs import Needs


def our_cpus_are_near(host: Host, needs: Needs) -> Result:
    ours = ids(host.limits.cpus_allowed)
    for gpu in live(host, needs):
        near = ids(gpu.cpus)
        if ours is None or near is None:
            if ours is None or gpu.numa_node is not None:
                yield Unseen(f"our CPUs and those near {called(gpu)}")
        elif near and not ours & near:
            yield Saw(f"this process may use CPUs {host.limits.cpus_allowed}, none of them near "
                      f"{called(gpu)} ({gpu.cpus})",
                      f"--cpuset-cpus={gpu.cpus}, or leave the cpuset out")  # fmt: skip


def our_nodes_hold_the_cards(host: Host, needs: Needs) -> Result:
    ours = ids(host.limits.memory_nodes_allowed)
    nodes = {g.numa_node for g in live(host, needs) if g.numa_node is not None}
    if nodes and ours is None:
        yield Unseen("the memory nodes this process may use")
    for node in sorted(nodes - (ours or nodes)):
        yield Saw(f"this process may take memory of node {host.limits.memory_nodes_allowed} only, "
                  f"and a card is on node {node}")  # fmt: skip


def policy_is_allowed(host: Host, needs: Needs) -> Result:
    answer = host.limits.memory_policy
    if len(with_cpus(host)) < 2 and answer == "allowed":
        return
    if answer is None or answer.startswith("unknown"):
        yield Unseen("whether mbind is allowed")
    elif answer != "allowed":
        yield Saw(f"the kernel refuses mbind ({answer}): pinning to a node would be silently lost")


def no_balancing(host: Host, needs: Needs) -> Result:
    if len(with_cpus(host)) < 2:
        return
    if host.memory.numa_balancing is None:
        yield Unseen("kernel.numa_balancing")
    elif host.memory.numa_balancing:
        yield Saw(
            "automatic NUMA balancing is on: it unmaps pages to watch them, and stalls readers"
        )


def no_zone_reclaim(host: Host, needs: Needs) -> Result:
    if host.memory.zone_reclaim is None:
        yield Unseen("vm.zone_reclaim_mode")
    elif host.memory.zone_reclaim:
        yield Saw(f"vm.zone_reclaim_mode is {host.memory.zone_reclaim}: filling a node reclaims "
                  "page cache first, which stalls the load")  # fmt: skip


AREA = "nodes"
KERNEL = "Linux kernel documentation"
CHECKS = (
    Check("cpuset-excludes-gpu-cpus", AREA, WARN, our_cpus_are_near,
          "some CPU near each card", "/proc/self/status", "leave the cpuset out"),
    Check("cpuset-excludes-gpu-node", AREA, FAIL, our_nodes_hold_the_cards,
          "the cards' nodes are allowed", "/proc/self/status",
          "--cpuset-mems= with the cards' nodes"),
    Check("memory-policy-refused", AREA, WARN, policy_is_allowed, "a trial mbind succeeds",
          "Docker's default seccomp profile refuses it without SYS_NICE",
          "docker run --cap-add SYS_NICE, or cap_add: [SYS_NICE] in compose"),
    Check("numa-balancing-on", AREA, WARN, no_balancing, "0", f"{KERNEL}, numa_balancing",
          "sudo sysctl kernel.numa_balancing=0"),
    Check("zone-reclaim-on", AREA, WARN, no_zone_reclaim, "0", f"{KERNEL}, zone_reclaim_mode",
          "sudo sysctl vm.zone_reclaim_mode=0"),
)  # fmt: skip
