"""Judges what --measure saw; silent where nothing was measured."""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, gib
from preflight.checks.links import rate
from preflight.host import Gpu, Host, LinkRate
from preflight.needs import Needs

SLOW_COPY = 0.75
SLOW_ZERO_COPY = 0.85
SHARED = 0.9
NEAR = 0.97
SLOW_PIN_SECONDS = 0.2
SLOW_DISK = 1e9


def _links(host: Host) -> tuple[LinkRate, ...]:
    return host.measured.links if host.measured else ()


def _gpu(host: Host, index: int) -> Gpu | None:
    return next((gpu for gpu in host.gpus or () if gpu.index == index), None)


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"


def copies_fast(host: Host, needs: Needs) -> Result:
    for link in _links(host):
        gpu, possible = _gpu(host, link.gpu), rate(link.pcie_generation, link.pcie_width)
        if gpu is None or gpu.numa_node != link.numa_node:
            continue
        if link.copy_bytes_per_second is None or possible is None:
            yield Unseen(f"copy rate of GPU {link.gpu}")
        elif link.copy_bytes_per_second < SLOW_COPY * possible:
            yield Saw(f"GPU {link.gpu} copies {_gb(link.copy_bytes_per_second)} from its node; "
                      f"the link gives {_gb(possible)}")  # fmt: skip


def zero_copy_keeps_up(host: Host, needs: Needs) -> Result:
    for link in _links(host):
        if link.zero_copy_bytes_per_second is None:
            yield Unseen(f"zero-copy rate of GPU {link.gpu} from node {link.numa_node}")
        elif link.copy_bytes_per_second:
            share = link.zero_copy_bytes_per_second / link.copy_bytes_per_second
            if share < SLOW_ZERO_COPY:
                yield Saw(f"GPU {link.gpu} reads node {link.numa_node} in place at {share:.0%} of "
                          f"the copy rate ({_gb(link.zero_copy_bytes_per_second)})")  # fmt: skip


def link_full_under_load(host: Host, needs: Needs) -> Result:
    seen = set()
    for link in _links(host):
        gpu = _gpu(host, link.gpu)
        if gpu is None or link.gpu in seen:
            continue
        seen.add(link.gpu)
        if link.pcie_generation is None or link.pcie_width is None:
            yield Unseen(f"the link of GPU {link.gpu} under load")
        elif (link.pcie_generation, link.pcie_width) != (
            gpu.pcie_generation_max,
            gpu.pcie_width_max,
        ):
            yield Saw(f"under load GPU {link.gpu} runs at gen {link.pcie_generation} "
                      f"x{link.pcie_width}, not gen {gpu.pcie_generation_max} "
                      f"x{gpu.pcie_width_max}")  # fmt: skip


def own_node_is_fastest(host: Host, needs: Needs) -> Result:
    for gpu in host.gpus or ():
        rates = {r.numa_node: r.copy_bytes_per_second for r in _links(host) if r.gpu == gpu.index}
        if len(rates) < 2:
            continue
        own = rates.get(gpu.numa_node) if gpu.numa_node is not None else None
        known = {node: value for node, value in rates.items() if value is not None}
        if own is None or len(known) < len(rates):
            yield Unseen(f"copy rate of GPU {gpu.index} from each node")
            continue
        node, best = max(known.items(), key=lambda item: item[1])
        if own < NEAR * best:
            yield Saw(f"GPU {gpu.index} is said to be on node {gpu.numa_node} ({_gb(own)}), yet "
                      f"node {node} is faster ({_gb(best)})")  # fmt: skip


def links_are_independent(host: Host, needs: Needs) -> Result:
    alone = {(r.gpu, r.numa_node): r.copy_bytes_per_second for r in _links(host)}
    for link in host.measured.links_all_at_once if host.measured else ():
        before, now = alone.get((link.gpu, link.numa_node)), link.copy_bytes_per_second
        if before is None or now is None:
            yield Unseen(f"copy rate of GPU {link.gpu} with all GPUs at work")
        elif now < SHARED * before:
            yield Saw(f"GPU {link.gpu} copies {_gb(before)} alone and {_gb(now)} when all do")


def pins_fast(host: Host, needs: Needs) -> Result:
    if host.measured is None:
        return
    if not host.measured.pins:
        yield Unseen("the pin rate")
        return
    best = min(p.touch_seconds_per_gib + p.register_seconds_per_gib for p in host.measured.pins)
    if best > SLOW_PIN_SECONDS:
        seconds = best * needs.pinned_bytes / (1 << 30)
        yield Saw(f"pinning takes {best:.2f} s/GiB: {seconds:.0f} s for {gib(needs.pinned_bytes)}")


def trial_succeeds(host: Host, needs: Needs) -> Result:
    if host.measured is None:
        return
    asked, got = host.measured.trial_asked_bytes, host.measured.trial_registered_bytes
    if asked is None or got is None:
        yield Unseen("the trial registration")
    elif got < asked:
        why = host.measured.trial_stopped or "the driver refused more"
        yield Saw(f"{gib(got)} of {gib(asked)} could be registered: {why}")


def disk_fast(host: Host, needs: Needs) -> Result:
    if host.measured is None:
        return
    found = host.measured.disk_read_bytes_per_second
    if found is None:
        yield Unseen("the read rate of the model disk")
    elif found < SLOW_DISK:
        minutes = 300 * (1 << 30) / found / 60
        yield Saw(f"the model disk reads {_gb(found)}: 300 GiB take {minutes:.0f} min a start")


def ranks_agree(host: Host, needs: Needs) -> Result:
    if host.measured is None or len(host.gpus or ()) < 2:
        return
    found = host.measured.all_reduce
    if found is None:
        yield Unseen("a two-rank all-reduce")
    elif found != "ok":
        yield Saw(f"a two-rank all-reduce did not finish: {found}")


AREA = "measured"
H200 = "measured on an H200, PCIe 5.0 x16"
CHECKS = (
    Check("copy-slow", AREA, WARN, copies_fast, "75 % of the trained link's raw rate",
          f"{H200}: 55 of 63 GB/s", "move the card to a root port of its own; check BIOS relaxed "
          "ordering and max read request"),
    Check("zero-copy-slow", AREA, WARN, zero_copy_keeps_up, "85 % of the copy rate",
          f"{H200}: 0.925 to 0.93", "report it with a recording: experts are read this way"),
    Check("link-down-under-load", AREA, WARN, link_full_under_load, "highest generation and width",
          "NVML while copying; idle gen 1 is normal", "reseat the card, replace the riser, set the "
          "slot's speed to Auto in firmware"),
    Check("own-node-not-fastest", AREA, WARN, own_node_is_fastest, "within 3 % of the fastest node",
          "the firmware's word against a measurement", "plan with the measured matrix"),
    Check("links-share-bandwidth", AREA, WARN, links_are_independent, "90 % of the rate alone",
          "two H200 links: 100 GB/s together", "move one card to another root complex"),
    Check("pin-slow", AREA, WARN, pins_fast, "0.2 s/GiB", f"{H200}: 0.05 with huge pages",
          "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
    Check("trial-registration-failed", AREA, FAIL, trial_succeeds, "all bytes of the plan",
          "a registration at the planned scale", "plan with fewer experts on the host; this is the "
          "host's pin limit, not GPU memory"),
    Check("disk-slow", AREA, WARN, disk_fast, "1 GB/s", "300 GiB in five minutes",
          "put the checkpoint on an NVMe disk"),
    Check("all-reduce-hangs", AREA, FAIL, ranks_agree, "done within its time limit",
          "NCCL issues 667 and 1999", "NCCL_P2P_DISABLE=1 and no custom all-reduce, or iommu=pt"),
)  # fmt: skip
