"""One rank of a plan: its budget, the experts that stay on its device, its ledger."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.errors import DoesNotFit
from appliance.plan.budget import GIB, Demand, device_lines, expert_lines, host_lines
from appliance.plan.cards import Card
from appliance.plan.cost import gains, layer_costs, row_probabilities, touched
from appliance.plan.links import divide, seconds_by_count
from appliance.plan.model import LayerPlacement, LedgerLine, RankPlan, format_ids
from appliance.plan.placement import LayerDemand, choose_homes, fill, take
from appliance.plan.request import Policy
from appliance.plan.routing import Heat
from appliance.plan.slots import HostRoom, choose_slots


def plan_ranks(
    demand: Demand, cards: Sequence[Card], heat: Heat | None, rooms: Sequence[HostRoom]
) -> tuple[RankPlan, ...]:
    """A plan for each card and its part of host memory. Ranks that hold slices of the same experts
    behind equal links see the same layers, so those are worked out once."""
    seen: dict[tuple[float | None, int], list[LayerDemand]] = {}
    layers = []
    for card in cards:
        key = (card.link_bytes_per_second, card.rank if demand.expert_parallel else 0)
        if key not in seen:
            seen[key] = [_layer_demand(demand, card, i, heat) for i in range(len(demand.layers))]
        layers.append(seen[key])
    ranked = [_ranked(demand, mine) for mine in layers]
    shares = host_shares(demand.policy, cards, ranked)
    return tuple(
        _plan_rank(demand, card, mine, room, share)
        for card, mine, room, share in zip(cards, layers, rooms, shares, strict=True)
    )


def _ranked(demand: Demand, layers: Sequence[LayerDemand]) -> list[LayerDemand]:
    return [layer for layer, moe in zip(layers, demand.layers, strict=True) if not moe.draft]


def host_shares(
    policy: Policy, cards: Sequence[Card], layers: Sequence[Sequence[LayerDemand]]
) -> tuple[float | None, ...]:
    """The share of its experts that each card leaves on the host; None: whatever does not fit.

    Of an asked share each card takes what its link reads in the same time.
    """
    asked, rates = policy.host_share, [card.link_bytes_per_second for card in cards]
    if asked is None:
        return tuple(
            0.5 if card.device == "cpu" and policy.device_capacity_bytes is None else None
            for card in cards
        )
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or len(set(known)) == 1 or asked in (0, 1):
        return (asked,) * len(cards)
    experts = [sum(len(layer.experts) for layer in mine) for mine in layers]
    slots = policy.cache_slots or 0
    seconds = [
        seconds_by_count(mine, rate, slots) for mine, rate in zip(layers, known, strict=True)
    ]
    counts = divide(round(asked * sum(experts)), seconds)
    return tuple(count / all_ for count, all_ in zip(counts, experts, strict=True))


def _plan_rank(
    demand: Demand, card: Card, layers: list[LayerDemand], room: HostRoom, share: float | None
) -> RankPlan:
    fixed = device_lines(demand, card)
    taken = sum(line.size_bytes for line in fixed)
    ranked = _ranked(demand, layers)
    if taken > card.capacity_bytes:
        raise DoesNotFit(
            f"{card.name} needs {taken / GIB:.2f} GiB before its first expert "
            f"({_largest(fixed)}) and has {card.capacity_bytes / GIB:.2f} GiB",
            fix="ask for a shorter --context, fewer streams or conversations, or more "
            + ("cards" if card.device == "cuda" else "memory"),
        )
    quotas = _quotas(demand, card, ranked, card.capacity_bytes - taken, room, share)
    placements, sizes = _placements(demand, layers, quotas)
    gpu = card.gpu
    return RankPlan(
        rank=card.rank,
        device=card.device,
        gpu=gpu.uuid if gpu else None,
        gpu_name=gpu.name if gpu else None,
        compute_capability=gpu.compute_capability if gpu else None,
        numa_node=card.numa_node,
        cpus=gpu.cpus if gpu else None,
        link=card.link,
        link_bytes_per_second=card.link_bytes_per_second,
        device_capacity_bytes=card.capacity_bytes,
        ledger=(*expert_lines(*sizes), *fixed, *host_lines(demand, card)),
        layers=placements,
    )


def _layer_demand(demand: Demand, card: Card, position: int, heat: Heat | None) -> LayerDemand:
    layer = demand.layers[position]
    owned = tuple(demand.owned(layer, card.rank))
    counts = heat.of(layer.index) if heat and not layer.draft else None
    rows = row_probabilities(counts, len(layer.experts), layer.top_k)
    steady = (heat.steady(layer.index) if heat and not layer.draft else None) or rows
    reads = tuple(touched(rows[e], demand.policy.streams) for e in owned)
    block, rate = demand.block_bytes(layer), card.link_bytes_per_second
    saved = (
        # Nobody knows what a host read costs here: fewer of them is all there is to go by.
        tuple(sorted(reads, reverse=True))
        if rate is None
        else gains(layer_costs(reads, block, rate, demand.curve))
    )
    steadily = tuple(steady[e] for e in owned)
    return LayerDemand(layer.index, owned, block, reads, steadily, saved, counts is not None)


def _quotas(
    demand: Demand,
    card: Card,
    layers: list[LayerDemand],
    budget: int,
    room: HostRoom,
    share: float | None,
) -> tuple[tuple[int, int], ...]:
    """For each layer the experts that are resident, and the cache slots beside them."""
    policy = demand.policy
    if share is None:
        held = fill(layers, budget)
        slots = _slots(demand, card, layers, held, room)
        return tuple((n - spare, spare) for n, spare in zip(held, slots, strict=True))
    total = sum(len(layer.experts) for layer in layers)
    resident = take(layers, total - round(share * total))
    quotas = tuple(
        (n, min(policy.cache_slots or 0, len(layer.experts) - n))
        for n, layer in zip(resident, layers, strict=True)
    )
    need = sum(sum(q) * layer.block_bytes for q, layer in zip(quotas, layers, strict=True))
    if need > budget:
        if card.device == "cpu" and policy.device_capacity_bytes is None:
            raise _larger_than_memory(demand, card, layers, budget)
        raise _too_many_resident(card, layers, need, budget, share)
    return quotas


def _slots(
    demand: Demand,
    card: Card,
    layers: list[LayerDemand],
    held: tuple[int, ...],
    room: HostRoom,
) -> tuple[int, ...]:
    """How many of the experts held are slots: as asked for, else as slots.py chooses. Without a
    GPU both homes are RAM, and nothing is gained."""
    asked = demand.policy.cache_slots
    if asked is None and card.device == "cuda":
        away = sum((len(layer.experts) - n) * layer.block_bytes
                   for n, layer in zip(held, layers, strict=True))  # fmt: skip
        lines = host_lines(demand, card)
        fixed = sum(line.size_bytes for line in lines)
        near = sum(line.size_bytes for line in lines if line.part in demand.on_node)
        return choose_slots(layers, held, room.left(fixed, away, near))
    return tuple(
        0 if n == len(layer.experts) else min(n, asked or 0)
        for n, layer in zip(held, layers, strict=True)
    )


def _too_many_resident(
    card: Card, layers: list[LayerDemand], need: int, budget: int, share: float
) -> DoesNotFit:
    has, wants = card.capacity_bytes, card.capacity_bytes - budget + need
    total = sum(len(layer.experts) for layer in layers)
    least = total - sum(fill(layers, budget))
    asked = "every expert" if share == 0 else f"{1 - share:.0%} of the experts"
    return DoesNotFit(
        f"{card.name} needs {wants / GIB:.2f} GiB with {asked} resident and has "
        f"{has / GIB:.2f} GiB: {(wants - has) / GIB:.2f} GiB too much",
        fix=f"leave at least {least:,} of its {total:,} experts on the host: leave out "
        "--host-share (APPLIANCE_HOST_SHARE) and the plan does it",
    )


def _larger_than_memory(
    demand: Demand, card: Card, layers: list[LayerDemand], budget: int
) -> DoesNotFit:
    """Without a GPU both homes are RAM: what of it the experts' device is changes nothing."""
    has = card.capacity_bytes
    experts = sum(len(layer.experts) * layer.block_bytes for layer in layers)
    beside = sum(line.size_bytes for line in host_lines(demand, card))
    short = experts + beside - budget
    less = "ask for a shorter --context, " if short < demand.kv_bytes else ""
    return DoesNotFit(
        f"{card.name} has no GPU, so all its experts are in RAM whatever their home: that takes "
        f"{(has + short) / GIB:.2f} GiB, {experts / GIB:.2f} of it experts, and it has "
        f"{has / GIB:.2f} GiB: {short / GIB:.2f} GiB short",
        fix=f"{less}serve a smaller model, or use a machine with more memory",
    )


def _placements(
    demand: Demand, layers: list[LayerDemand], quotas: tuple[tuple[int, int], ...]
) -> tuple[tuple[LayerPlacement, ...], tuple[int, int, int, int]]:
    """The lists, and the bytes that are resident, in slots, on the host, and padding."""
    out: list[LayerPlacement] = []
    resident = slots = on_host = padding = 0
    remaining = iter(quotas)
    for layer, moe in zip(layers, demand.layers, strict=True):
        if moe.draft:
            out.append(LayerPlacement(layer=layer.layer, device=format_ids(layer.experts), host=""))
            continue
        keep, spare = next(remaining)
        homes = choose_homes(layer, keep, spare)
        out.append(
            LayerPlacement(
                layer=layer.layer,
                device=format_ids(homes.device),
                host=format_ids(homes.host),
                cache_slots=spare,
                in_slots=format_ids(homes.slots),
            )
        )
        resident += keep * layer.block_bytes
        slots += spare * layer.block_bytes
        on_host += len(homes.host) * layer.block_bytes
        exact = moe.experts[0].trellis_bytes // demand.expert_ranks
        padding += len(layer.experts) * (layer.block_bytes - exact)
    return tuple(out), (resident, slots, on_host, padding)


def _largest(lines: tuple[LedgerLine, ...]) -> str:
    top = sorted(lines, key=lambda line: -line.size_bytes)[:3]
    return ", ".join(f"{line.part} {line.size_bytes / GIB:.2f}" for line in top)
