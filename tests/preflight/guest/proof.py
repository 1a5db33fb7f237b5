"""Runs inside the two-node guest: pinning and its proof on a kernel that really has two nodes.

Every line it prints is something that was tried there; the exit code is 0 only if all held.
"""

import os
import sys
from pathlib import Path

from preflight import Live, Needs, check, inspect
from preflight.measuring.hostmem import HUGE, SMALL, Area, bind
from preflight.nearest import memory_nodes_near
from preflight.placement import Home, Placed, prove
from preflight.tune import TuneError, advise, apply, undo

MIB = 1 << 20
RECORD = Path("/tmp/tune.json")
failed = 0


def told(what: str, right: bool, detail: object = "") -> None:
    global failed
    failed += not right
    print(f"{'ok  ' if right else 'FAIL'} {what} {detail}", flush=True)


def placed(area: Area, node: int) -> Placed:
    home = Home("area", area.address, area.size_bytes, node)
    (found,) = prove(Path("/proc/self/numa_maps").read_text(), [home])
    return found


def free_pages() -> list[int | None]:
    host = inspect(Live(), {})
    return [p.free for n in host.numa_nodes for p in n.huge_pages if p.page_bytes == HUGE]


def facts() -> None:
    host = inspect(Live(), {})
    told("two nodes with their CPUs", [n.cpus for n in host.numa_nodes] == ["0-1", "2-3"])
    told("their distance", host.numa_nodes[0].distances == (10, 21))
    told("their sockets", [n.socket for n in host.numa_nodes] == [0, 1])
    told("the nearest node", memory_nodes_near(host, 1) == (1, 0))
    told("mbind is allowed", host.limits.memory_policy == "allowed")


def binding() -> None:
    os.sched_setaffinity(0, {0})
    for page_bytes in (SMALL, HUGE):
        with Area(32 * MIB, node=1, page_bytes=page_bytes) as area:
            area.touch()
            found = placed(area, 1)
            told(f"bound to node 1 from a CPU of node 0, pages of {page_bytes}", found.proved,
                 found.sentence)  # fmt: skip
    with Area(32 * MIB, node=0) as area:
        area.touch()
        found = placed(area, 1)
        told("a wrong binding is caught", found.wrong_bytes_by_node == {0: 32 * MIB},
             found.sentence)  # fmt: skip
    with Area(32 * MIB) as area:
        area.touch()
        bind(area.address, area.size_bytes, 1)
        found = placed(area, 1)
        told("a binding after the first touch is caught", not found.proved, found.sentence)
    with Area(32 * MIB, node=1) as area:
        found = placed(area, 1)
        told("memory never touched is no proof", found.missing_bytes == 32 * MIB)


def pools() -> None:
    by_node = {0: 32 * MIB, 1: 64 * MIB}
    needs = Needs(device="cpu", gpus=0, pinned_bytes=96 * MIB, load_peak_bytes=96 * MIB,
                  pinned_bytes_by_node=by_node, huge_page_bytes=HUGE)  # fmt: skip
    before = inspect(Live(), {})
    said = {f.check for f in check(before, needs).failures}
    told("too few pages are found before any is touched", "node-huge-pages-short" in said)
    apply(advise(before, needs), RECORD)
    told("each node has its own pool", free_pages() == [16, 32], free_pages())
    said = {f.check for f in check(inspect(Live(), {}), needs).failures}
    told("then the check is silent", "node-huge-pages-short" not in said)
    with Area(64 * MIB, node=1, page_bytes=HUGE, reserved=True) as area:
        area.touch()
        found = placed(area, 1)
        told("reserved pages of node 1 hold the arena", found.proved, found.sentence)
        told("node 1's pages are taken, node 0's are not", free_pages() == [16, 0], free_pages())
    undo(RECORD)
    told("undo gives the pages back", free_pages() == [0, 0], free_pages())


def too_many() -> None:
    needs = Needs(device="cpu", gpus=0, pinned_bytes_by_node={1: 4096 * MIB}, huge_page_bytes=HUGE)
    try:
        apply(advise(inspect(Live(), {}), needs), RECORD)
        told("more pages than the node has are refused", False)
    except TuneError as error:
        told("more pages than the node has are refused", "no more to give" in str(error), error)
    undo(RECORD)
    told("and undone", free_pages() == [0, 0], free_pages())


for part in (facts, binding, pools, too_many):
    part()
sys.exit(1 if failed else 0)
