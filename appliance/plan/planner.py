"""plan(): host facts, checkpoint, routing counts and a request in; plan.json out. Pure.

The same inputs give the same bytes. Raises UsageError, UnsupportedError, PlanError or DoesNotFit,
each one sentence with the numbers and the way out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.support import require_exl3
from appliance.errors import DoesNotFit
from appliance.plan.budget import GIB, SLOTS, Demand, device_lines
from appliance.plan.cards import Card, choose_cards
from appliance.plan.context import choose_context
from appliance.plan.forecast import forecast
from appliance.plan.kernel_curve import H200, KernelCurve
from appliance.plan.kv import context_limit
from appliance.plan.model import CacheRules, MadeFrom, ModelFacts, Plan, RankPlan, Serving
from appliance.plan.placement import Homes
from appliance.plan.predict import predict, step_layers
from appliance.plan.promise import promised_cold_share
from appliance.plan.ranks import plan_ranks
from appliance.plan.refuse import (
    refuse_foreign_heat,
    refuse_impossible_split,
    refuse_kv_dtype,
    refuse_too_many_experts,
    refuse_too_many_slots,
)
from appliance.plan.request import Policy
from appliance.plan.room import refuse_short_host
from appliance.plan.routing import Counts, Heat
from appliance.plan.slots import host_rooms
from preflight.host import Host
from preflight.identity import host_digest

__all__ = ["Policy", "plan"]

# Facts that change while nothing about the machine does: two plans of one machine must be equal.


def plan(
    host: Host,
    checkpoint: Checkpoint,
    heat: Heat | None,
    policy: Policy,
    curve: KernelCurve = H200,
) -> Plan:
    """Where every expert lives on this machine, and what it costs.

    `curve`: what `appliance calibrate` measured on this card, else what was measured on an H200.
    """
    require_exl3(checkpoint)
    cards = choose_cards(host, policy)
    refuse_impossible_split(checkpoint, len(cards), policy.expert_parallel, policy.draft)
    refuse_too_many_slots(checkpoint, policy, len(cards))
    if cards[0].device == "cuda":
        refuse_too_many_experts(checkpoint, len(cards), policy.expert_parallel)
    if heat is not None:
        refuse_foreign_heat(heat, checkpoint)
    demand, notes = _settle(checkpoint, cards, heat, policy, curve)
    ranks = _placed(demand, cards, heat, host)
    layers = step_layers(demand, ranks, heat)
    disk = None if host.measured is None else host.measured.disk_read_bytes_per_second
    return Plan(
        made_from=MadeFrom(
            host=host_digest(host),
            checkpoint=checkpoint.digest,
            heat=None if heat is None else heat.digest,
            policy=policy.digest,
            curve=None if curve == H200 else curve.digest,
        ),
        model=_model_facts(checkpoint),
        tensor_parallel=len(cards),
        expert_parallel=policy.expert_parallel,
        serving=Serving(
            streams=policy.streams,
            context_tokens=demand.context_tokens,
            prefill_chunk_tokens=policy.prefill_chunk_tokens,
            kv_cache_bytes=demand.kv_bytes,
            kv_bytes_per_token=demand.kv.bytes_per_token,
            kv_cache_dtype=policy.kv_dtype,
            kv_block_tokens=_kv_block_tokens(checkpoint, ranks),
        ),
        cache=_cache_rules(demand, ranks, heat),
        ranks=ranks,
        predictions=predict(demand, ranks, layers),
        forecast=forecast(demand, ranks, layers, heat, disk),
        notes=(*notes, *_slot_notes(demand, ranks)),
    )


def _placed(
    demand: Demand, cards: Sequence[Card], heat: Heat | None, host: Host
) -> tuple[RankPlan, ...]:
    rooms = host_rooms(host, [card.numa_node for card in cards])
    try:
        ranks = plan_ranks(demand, cards, heat, rooms)
    except DoesNotFit:
        # Its way out is to leave the share to the plan: where that fits nowhere, say so at once.
        if demand.policy.host_share is not None:
            free = replace(demand, policy=replace(demand.policy, host_share=None))
            refuse_short_host(host, plan_ranks(free, cards, heat, rooms), demand.on_node)
        raise
    refuse_short_host(host, ranks, demand.on_node)
    return ranks


def _kv_block_tokens(checkpoint: Checkpoint, ranks: tuple[RankPlan, ...]) -> int | None:
    """DeepSeek-V4 on sm_120 has one size that its attention and its indexer both take."""
    on_sm120 = any((rank.compute_capability or "").startswith("12.") for rank in ranks)
    return 128 if on_sm120 and checkpoint.model_type.startswith("deepseek_v4") else None


def _settle(
    checkpoint: Checkpoint,
    cards: Sequence[Card],
    heat: Heat | None,
    policy: Policy,
    curve: KernelCurve,
) -> tuple[Demand, tuple[str, ...]]:
    """Fill in what the request left open, and say so."""
    card = min(cards, key=lambda card: card.capacity_bytes)
    refuse_kv_dtype(policy, cards)
    open_demand = Demand(
        checkpoint, len(cards), policy.expert_parallel, 0, 0, policy, card.device, curve
    )
    rest = card.capacity_bytes - sum(i.size_bytes for i in device_lines(open_demand, card))
    room = choose_context(
        policy, open_demand.kv, context_limit(checkpoint), card.capacity_bytes, rest
    )
    demand = replace(open_demand, context_tokens=room.context_tokens, kv_bytes=room.kv_bytes)
    notes = list(room.notes)
    known = (
        sum(heat.of(layer.index) is not None for layer in checkpoint.target_layers) if heat else 0
    )
    total = len(checkpoint.target_layers)
    if known < total:
        notes.append(
            f"routing counts are known for {known} of {total} layers: in the others every expert "
            "is taken as equally likely and the lower numbers start on the device"
        )
    drafts = [layer for layer in checkpoint.layers if layer.draft]
    if drafts and not policy.draft:
        notes.append(f"{len(drafts)} draft layers are not loaded")
    if card.device == "cpu" and policy.host_share is None and policy.device_capacity_bytes is None:
        notes.append("no GPU: both homes are RAM, and half of the experts go to each")
    return demand, (*notes, *checkpoint.warnings)


def _slot_notes(demand: Demand, ranks: tuple[RankPlan, ...]) -> Iterator[str]:
    """What the slots cost in host memory, which is easily overlooked, and how many are missing."""
    asked = demand.policy.cache_slots
    layers = [place.cache_slots for place, layer in zip(ranks[0].layers, demand.layers, strict=True)
              if not layer.draft]  # fmt: skip
    if asked is not None and min(layers) < asked:
        yield (
            f"{asked:,} cache slots a layer are asked for, and the layers have "
            f"{min(layers):,} to {max(layers):,}: as many as they have experts on the host, and "
            "room for on the device"
        )
    slots = sum(place.cache_slots for place in ranks[0].layers)
    copies = sum(line.size_bytes for rank in ranks for line in rank.ledger if line.part == SLOTS)
    if slots:
        yield (
            f"{slots:,} of the experts each device holds are cache slots, which follow the traffic;"
            f" host memory keeps a copy of each, {copies / GIB:.1f} GiB over all ranks"
        )


def _cache_rules(
    demand: Demand, ranks: tuple[RankPlan, ...], heat: Heat | None
) -> CacheRules | None:
    """The policy's defaults, and what this plan promises of the topics it knows."""
    if not any(place.cache_slots for rank in ranks for place in rank.layers):
        return None
    rules = CacheRules()
    if heat is None:
        return rules
    pools = {la.index: demand.block_bytes(la) for la in demand.layers} if rules.pooled else None
    # Each rank holds its own cold picks against the promise: the one with most must keep it.
    share = max(
        promised_cold_share(
            _picked_on(rank, heat) if demand.expert_parallel else heat, _homes(rank), pools
        )
        for rank in ranks
    )
    return rules.model_copy(update={"promised_cold_share": round(share, 6)})


def _homes(rank: RankPlan) -> dict[int, Homes]:
    return {
        mine.layer: Homes(
            tuple(sorted(mine.device_experts)),
            tuple(sorted(mine.slot_experts)),
            tuple(sorted(mine.host_experts)),
        )
        for mine in rank.layers
    }


def _picked_on(rank: RankPlan, heat: Heat) -> Heat:
    """The picks of experts that this rank has: all that it counts under expert parallelism."""
    mine = {place.layer: place.device_experts | place.host_experts for place in rank.layers}

    def cut(part: Counts) -> Counts:
        return {
            layer: tuple(n if e in mine.get(layer, ()) else 0.0 for e, n in enumerate(row))
            for layer, row in part.items()
        }

    return Heat(cut(heat.counts), {name: cut(part) for name, part in heat.topics.items()})


def _model_facts(checkpoint: Checkpoint) -> ModelFacts:
    first = checkpoint.target_layers[0]
    return ModelFacts(
        family=checkpoint.family,
        hidden_size=checkpoint.hidden_size,
        intermediate_size=checkpoint.intermediate_size,
        layers=len(checkpoint.target_layers),
        experts=len(first.experts),
        top_k=first.top_k,
        expert_bytes=first.experts[0].size_bytes,
        size_bytes=checkpoint.size_bytes,
    )
