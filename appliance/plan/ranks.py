"""One rank of a plan: its budget, the experts that stay on its device, its ledger."""

from __future__ import annotations

from appliance.errors import DoesNotFit
from appliance.plan.budget import GIB, Demand, device_lines, expert_lines, host_lines
from appliance.plan.cards import Card
from appliance.plan.cost import row_probabilities, touched
from appliance.plan.model import LayerPlacement, LedgerLine, RankPlan, format_ids
from appliance.plan.placement import LayerDemand, fill, take
from appliance.plan.routing import Heat


def plan_rank(demand: Demand, card: Card, heat: Heat | None) -> RankPlan:
    fixed = device_lines(demand, card)
    taken = sum(line.size_bytes for line in fixed)
    layers = [_layer_demand(demand, card.rank, i, heat) for i in range(len(demand.layers))]
    ranked = [layer for layer, moe in zip(layers, demand.layers, strict=True) if not moe.draft]
    if taken > card.capacity_bytes:
        raise DoesNotFit(
            f"{card.name} needs {taken / GIB:.2f} GiB before its first expert "
            f"({_largest(fixed)}) and has {card.capacity_bytes / GIB:.2f} GiB",
            fix="ask for a shorter --context, fewer streams or conversations, or more cards",
        )
    quotas = _quotas(demand, card, ranked, card.capacity_bytes - taken)
    placements, sizes = _placements(demand, layers, quotas)
    gpu = card.gpu
    return RankPlan(
        rank=card.rank,
        device=card.device,
        gpu=gpu.uuid if gpu else None,
        gpu_name=gpu.name if gpu else None,
        numa_node=card.numa_node,
        cpus=gpu.cpus if gpu else None,
        link=card.link,
        link_bytes_per_second=card.link_bytes_per_second,
        device_capacity_bytes=card.capacity_bytes,
        ledger=(*expert_lines(*sizes), *fixed, *host_lines(demand, card)),
        layers=placements,
    )


def _layer_demand(demand: Demand, rank: int, position: int, heat: Heat | None) -> LayerDemand:
    layer = demand.layers[position]
    owned = demand.owned(layer, rank)
    counts = heat.of(layer.index) if heat and not layer.draft else None
    rows = row_probabilities(counts, len(layer.experts), layer.top_k)
    reads = tuple(touched(rows[e], demand.policy.streams) for e in owned)
    return LayerDemand(layer.index, tuple(owned), demand.block_bytes(layer), reads)


def _quotas(
    demand: Demand, card: Card, layers: list[LayerDemand], budget: int
) -> tuple[tuple[int, int], ...]:
    """For each layer the experts that are resident, and the cache slots beside them."""
    policy = demand.policy
    share = policy.host_share
    if share is None and card.device == "cpu" and policy.device_capacity_bytes is None:
        share = 0.5
    if share is None:
        held = fill(layers, budget)
        return tuple(
            (n, 0) if n == len(layer.experts) else (n - min(n, policy.cache_slots),
                                                    min(n, policy.cache_slots))
            for n, layer in zip(held, layers, strict=True)
        )  # fmt: skip
    total = sum(len(layer.experts) for layer in layers)
    resident = take(layers, total - round(share * total))
    quotas = tuple(
        (n, min(policy.cache_slots, len(layer.experts) - n))
        for n, layer in zip(resident, layers, strict=True)
    )
    need = sum(sum(q) * layer.block_bytes for q, layer in zip(quotas, layers, strict=True))
    if need > budget:
        raise _too_many_resident(card, layers, need, budget, share)
    return quotas


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
        "--host-share and the plan does it",
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
        order = layer.hottest_first
        out.append(
            LayerPlacement(layer=layer.layer, device=format_ids(order[:keep]),
                           host=format_ids(order[keep:]), cache_slots=spare)
        )  # fmt: skip
        resident += keep * layer.block_bytes
        slots += spare * layer.block_bytes
        on_host += (len(order) - keep) * layer.block_bytes
        exact = moe.experts[0].trellis_bytes // demand.expert_ranks
        padding += len(order) * (layer.block_bytes - exact)
    return tuple(out), (resident, slots, on_host, padding)


def _largest(lines: tuple[LedgerLine, ...]) -> str:
    top = sorted(lines, key=lambda line: -line.size_bytes)[:3]
    return ", ".join(f"{line.part} {line.size_bytes / GIB:.2f}" for line in top)
