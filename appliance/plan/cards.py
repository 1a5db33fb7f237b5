"""The ranks' devices: which GPU, how much of it, which memory node, how fast its link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.errors import PlanError, UsageError
from appliance.plan.hardware import C2C_BYTES_PER_SECOND, recognise
from appliance.plan.request import Policy
from preflight.counted import counted
from preflight.host import Gpu, Host, LinkRate

# A kernel reads host memory at 0.925 of 55 GB/s on a trained PCIe 5.0 x16 link: 81 % of the
# 63.0 GB/s that 16 lanes of 32 GT/s carry after 128b/130b coding (FACTS section 3).
ZERO_COPY_SHARE = 0.81
_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True, slots=True)
class Card:
    """One rank's device. `capacity_bytes` is what it may hold, `name` what messages call it."""

    rank: int
    device: Literal["cuda", "cpu"]
    capacity_bytes: int
    name: str
    gpu: Gpu | None = None
    link: Literal["pcie", "c2c", "memory"] = "pcie"
    link_bytes_per_second: float | None = None

    @property
    def numa_node(self) -> int | None:
        return self.gpu.numa_node if self.gpu else None


def choose_cards(host: Host, policy: Policy) -> tuple[Card, ...]:
    """One card per rank, in index order. Raises PlanError where the host has not enough."""
    device = policy.device or ("cpu" if host.gpus == () else "cuda")
    cards = _cpu_cards(host, policy) if device == "cpu" else _gpu_cards(host, policy)
    rates = policy.link_bytes_per_second
    if rates is not None and len(rates) != len(cards):
        raise UsageError(
            f"{counted(len(rates), 'link rate')} given for {counted(len(cards), 'rank')}"
        )
    return cards


def link_bytes_per_second(host: Host, gpu: Gpu) -> float | None:
    """What a kernel reads from the card's own memory node: measured if it was, else by the link."""
    measured = _measured(host, gpu)
    if measured is not None:
        return measured
    model = recognise(gpu.name)
    if model is not None and model.link == "c2c":
        return C2C_BYTES_PER_SECOND * ZERO_COPY_SHARE
    return pcie_bytes_per_second(gpu)


def _measured(host: Host, gpu: Gpu) -> float | None:
    """Alone, less what the card loses while all others copy, too: they decode together."""
    if host.measured is None:
        return None

    def near(rates: tuple[LinkRate, ...]) -> LinkRate | None:
        mine = (rate for rate in rates if rate.gpu == gpu.index)
        return next((r for r in mine if gpu.numa_node in (None, r.numa_node)), None)

    alone, together = near(host.measured.links), near(host.measured.links_all_at_once)
    if together is not None and together.zero_copy_bytes_per_second:
        return together.zero_copy_bytes_per_second
    if alone is None or not alone.zero_copy_bytes_per_second:
        return None
    if together is None or not (together.copy_bytes_per_second and alone.copy_bytes_per_second):
        return alone.zero_copy_bytes_per_second
    kept = min(1.0, together.copy_bytes_per_second / alone.copy_bytes_per_second)
    return alone.zero_copy_bytes_per_second * kept


def pcie_bytes_per_second(gpu: Gpu) -> float | None:
    """What a kernel reads over this card's link, from generation and width; None where unknown.

    The maximum generation counts, because an idle link trains down; the width is the current one.
    """
    transfers = _GIGATRANSFERS.get(gpu.pcie_generation_max or gpu.pcie_generation or 0)
    if transfers is None or gpu.pcie_width is None:
        return None
    coding = 128 / 130 if transfers >= 8 else 0.8
    return round(gpu.pcie_width * transfers * 1e9 / 8 * coding * ZERO_COPY_SHARE)


def _gpu_cards(host: Host, policy: Policy) -> tuple[Card, ...]:
    if host.gpus is None:
        raise PlanError("nobody could look for GPUs on this host",
                        fix="run appliance preflight, or plan with --device cpu")  # fmt: skip
    count = policy.tensor_parallel or len(host.gpus)
    if count > len(host.gpus) or not host.gpus:
        asked = counted(max(count, 1), "GPU")
        raise PlanError(f"{asked} asked for and the host has {len(host.gpus)}",
                        fix="ask for fewer, or plan with --device cpu")  # fmt: skip
    chosen = _nearest(host.gpus, count)
    return tuple(_gpu_card(rank, gpu, host, policy) for rank, gpu in enumerate(chosen))


def _nearest(gpus: Sequence[Gpu], count: int) -> list[Gpu]:
    """The first cards by index that all sit on one memory node, else the first: cards on different
    nodes are slower together. Cards that do not answer come last."""
    order = sorted(gpus, key=lambda gpu: (gpu.fault is not None, gpu.index))
    for first in order:
        beside = [g for g in order if g.numa_node == first.numa_node and g.fault is None]
        if first.numa_node is not None and len(beside) >= count:
            return beside[:count]
    return order[:count]


def _gpu_card(rank: int, gpu: Gpu, host: Host, policy: Policy) -> Card:
    if gpu.fault is not None:
        raise PlanError(
            f"GPU {gpu.index} cannot be used: {gpu.fault}",
            fix="repair it (appliance preflight says how), or plan without it",
        )
    if gpu.mig_enabled:
        raise PlanError(
            f"GPU {gpu.index} is split into MIG instances: its memory is not one whole",
            fix=f"nvidia-smi -i {gpu.index} -mig 0, or use another card",
        )
    capacity, asked = gpu.memory_total_bytes, policy.device_capacity_bytes
    if capacity is None and asked is None:
        raise PlanError(f"the memory of GPU {gpu.index} could not be read",
                        fix="say how much it has with --device-memory")  # fmt: skip
    if capacity is not None and asked is not None and asked > capacity:
        raise PlanError(
            f"--device-memory asks for {asked:,} bytes and GPU {gpu.index} has {capacity:,}",
            fix="ask for less, or leave it out to use all of it",
        )
    rates = policy.link_bytes_per_second
    rate = rates[rank] if rates and rank < len(rates) else link_bytes_per_second(host, gpu)
    model = recognise(gpu.name)
    link = "pcie" if model is None else model.link
    return Card(rank, "cuda", asked or capacity or 0, f"card {rank}", gpu, link, rate)


def _cpu_cards(host: Host, policy: Policy) -> tuple[Card, ...]:
    """Without a GPU both homes are RAM: a rank's device is its part of all there is.

    What is free at the moment is checked once the plan is made (room.py), so that it does not
    change the plan.
    """
    ranks = policy.tensor_parallel or 1
    asked, total = policy.device_capacity_bytes, host.memory_total_bytes
    if asked is None and total is None:
        raise PlanError("the memory of this host could not be read",
                        fix="say how much to use with --device-memory")  # fmt: skip
    capacity = asked if asked is not None else (total or 0) // ranks
    rates = policy.link_bytes_per_second
    return tuple(
        Card(rank, "cpu", capacity, f"rank {rank}", None, "memory",
             rates[rank] if rates and rank < len(rates) else None)
        for rank in range(ranks)
    )  # fmt: skip
