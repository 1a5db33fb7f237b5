"""plan(): host facts, checkpoint, routing counts and a request in; plan.json out. Pure.

The same inputs give the same bytes. Raises UsageError, UnsupportedError, PlanError or DoesNotFit,
each one sentence with the numbers and the way out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.support import require_exl3
from appliance.errors import UsageError
from appliance.plan.budget import Demand
from appliance.plan.cards import Card, choose_cards
from appliance.plan.forecast import forecast
from appliance.plan.kernel_curve import H200, KernelCurve
from appliance.plan.kv import DEFAULT_CONTEXT_LIMIT, context_limit
from appliance.plan.model import CacheRules, MadeFrom, ModelFacts, Plan, RankPlan, Serving
from appliance.plan.placement import Homes
from appliance.plan.predict import predict, step_layers
from appliance.plan.promise import promised_cold_share
from appliance.plan.ranks import plan_ranks
from appliance.plan.refuse import (
    refuse_foreign_heat,
    refuse_impossible_split,
)
from appliance.plan.request import Policy
from appliance.plan.room import refuse_short_host
from appliance.plan.routing import Heat
from preflight.host import Host

__all__ = ["Policy", "plan"]

# With no context asked for, the longest whose KV cache leaves most of the device to experts.
LARGEST_KV_SHARE, SMALLEST_CONTEXT = 0.25, 4096
# Facts that change while nothing about the machine does: two plans of one machine must be equal.
_VOLATILE_NODE = {"memory_free_bytes", "huge_pages"}
_VOLATILE_GPU = {"memory_free_bytes", "pcie_generation"}


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
    refuse_impossible_split(checkpoint, len(cards), policy.expert_parallel)
    if heat is not None:
        refuse_foreign_heat(heat, checkpoint)
    demand, notes = _settle(checkpoint, len(cards), heat, policy, cards[0])
    demand = replace(demand, curve=curve)
    ranks = plan_ranks(demand, cards, heat)
    refuse_short_host(host, ranks)
    layers = step_layers(demand, ranks, heat)
    disk = None if host.measured is None else host.measured.disk_read_bytes_per_second
    return Plan(
        made_from=MadeFrom(
            host=_host_digest(host),
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
            kv_block_tokens=_kv_block_tokens(checkpoint, ranks),
        ),
        cache=_cache_rules(demand, ranks, heat) if policy.cache_slots else None,
        ranks=ranks,
        predictions=predict(demand, ranks, layers),
        forecast=forecast(demand, ranks, layers, heat, disk),
        notes=notes,
    )


def _kv_block_tokens(checkpoint: Checkpoint, ranks: tuple[RankPlan, ...]) -> int | None:
    """DeepSeek-V4 on sm_120 has one size that its attention and its indexer both take."""
    on_sm120 = any((rank.compute_capability or "").startswith("12.") for rank in ranks)
    return 128 if on_sm120 and checkpoint.model_type.startswith("deepseek_v4") else None


def _settle(
    checkpoint: Checkpoint, ranks: int, heat: Heat | None, policy: Policy, card: Card
) -> tuple[Demand, tuple[str, ...]]:
    """Fill in what the request left open, and say so."""
    notes: list[str] = []
    limit = context_limit(checkpoint)
    asked = policy.context_tokens
    if limit is not None and asked is not None and asked > limit:
        raise UsageError(
            f"a context of {asked:,} tokens is asked for and the model was made for {limit:,}",
            fix=f"ask for at most {limit}",
        )
    context = asked or min(limit or DEFAULT_CONTEXT_LIMIT, DEFAULT_CONTEXT_LIMIT)
    demand = Demand(checkpoint, ranks, policy.expert_parallel, context,
                    policy.kept_conversations, policy, card.device)  # fmt: skip
    while (
        asked is None
        and demand.context_tokens > SMALLEST_CONTEXT
        and (demand.kv_bytes > card.capacity_bytes * LARGEST_KV_SHARE)
    ):
        demand = replace(demand, context_tokens=demand.context_tokens // 2)
    if demand.context_tokens < context:
        notes.append(
            f"a context of {demand.context_tokens:,} tokens was chosen: {context:,} would take "
            f"more than {LARGEST_KV_SHARE:.0%} of the device for the KV cache"
        )
    known = (
        sum(heat.of(layer.index) is not None for layer in checkpoint.target_layers) if heat else 0
    )
    total = len(checkpoint.target_layers)
    if known < total:
        notes.append(
            f"routing counts are known for {known} of {total} layers: in the others every expert "
            "is taken as equally likely and the lower numbers stay resident"
        )
    drafts = [layer for layer in checkpoint.layers if layer.draft]
    if drafts and not policy.draft:
        notes.append(f"{len(drafts)} draft layers are not loaded")
    if card.device == "cpu" and policy.host_share is None and policy.device_capacity_bytes is None:
        notes.append("no GPU: both homes are RAM, and half of the experts go to each")
    return demand, (*notes, *checkpoint.warnings)


def _cache_rules(demand: Demand, ranks: tuple[RankPlan, ...], heat: Heat | None) -> CacheRules:
    """The policy's defaults, and what this plan promises of the topics it knows."""
    rules = CacheRules()
    if heat is None:
        return rules
    homes: dict[int, Homes] = {}
    for rank in ranks:
        for mine in rank.layers:
            before = homes.get(mine.layer, Homes((), (), ()))
            homes[mine.layer] = Homes(
                tuple(mine.device_experts.union(before.device)),
                tuple(mine.slot_experts.union(before.slots)),
                tuple(mine.host_experts.union(before.host)),
            )
    pools = {la.index: demand.block_bytes(la) for la in demand.layers} if rules.pooled else None
    share = promised_cold_share(heat, homes, pools)
    return rules.model_copy(update={"promised_cold_share": round(share, 6)})


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


def _host_digest(host: Host) -> str:
    facts = host.model_dump(mode="json", exclude={"memory_available_bytes"})
    for group, volatile in (("numa_nodes", _VOLATILE_NODE), ("gpus", _VOLATILE_GPU)):
        for item in facts[group] or ():
            for key in volatile:
                del item[key]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
