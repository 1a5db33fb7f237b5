"""What `--measure` saw, in words: rates first, then what could not be measured and why."""

from __future__ import annotations

from collections.abc import Iterator

from preflight.checks.check import gib
from preflight.host import LinkRate, Measured, PinRate


def measured_lines(found: Measured) -> Iterator[str]:
    """A line for each rate, then one for each step that has none."""
    yield from (_link(rate) for rate in found.links)
    yield from (f"all at once, {_link(rate)}" for rate in found.links_all_at_once)
    yield from (_pin(rate) for rate in found.pins)
    if found.trial_asked_bytes is not None:
        got = found.trial_registered_bytes
        tried = "unknown" if got is None else gib(got)
        why = f" ({found.trial_stopped})" if found.trial_stopped else ""
        yield f"trial registration: {tried} of {gib(found.trial_asked_bytes)}{why}"
    if found.disk_read_bytes_per_second is not None:
        yield f"the model's disk reads {_rate(found.disk_read_bytes_per_second)}"
    if found.all_reduce is not None:
        yield f"two-rank all-reduce: {found.all_reduce}"
    yield from (f"{missed.what}: not measured, {missed.reason}" for missed in found.unmeasured)


def prometheus_lines(found: Measured) -> Iterator[str]:
    """Link rates as gauges; a rate that is unknown has no line."""
    yield "# HELP moe_appliance_link_bytes_per_second measured, one GPU at work"
    yield "# TYPE moe_appliance_link_bytes_per_second gauge"
    for rate in found.links:
        for kind in ("copy", "zero_copy"):
            value = getattr(rate, f"{kind}_bytes_per_second")
            if value is not None:
                at = f'gpu="{rate.gpu}",node="{rate.numa_node}",kind="{kind}"'
                yield f"moe_appliance_link_bytes_per_second{{{at}}} {value:.0f}"


def _link(rate: LinkRate) -> str:
    told = [f"copies {_rate(rate.copy_bytes_per_second)}"]
    if rate.zero_copy_bytes_per_second is not None:
        told.append(f"reads in place {_rate(rate.zero_copy_bytes_per_second)}")
    if rate.pcie_generation is not None and rate.pcie_width is not None:
        told.append(f"PCIe {rate.pcie_generation} x{rate.pcie_width} under load")
    return f"GPU {rate.gpu} from node {rate.numa_node}: {', '.join(told)}"


def _pin(rate: PinRate) -> str:
    kib = rate.page_bytes >> 10
    page = f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB" if kib < 1 << 20 else "1 GiB"
    return (
        f"pinning {page} pages: {rate.touch_seconds_per_gib:.3f} s/GiB to touch, "
        f"{rate.register_seconds_per_gib:.3f} s/GiB to register"
    )


def _rate(value: float | None) -> str:
    return "at an unknown rate" if value is None else f"{value / 1e9:.1f} GB/s"
