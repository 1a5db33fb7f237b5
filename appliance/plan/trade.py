"""plan trade: the same card split otherwise, side by side: KV cache, residents, slots, speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.checkpoint.model import Checkpoint
from appliance.errors import DoesNotFit
from appliance.plan.budget import GIB, KV_CACHE
from appliance.plan.model import Plan
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.plan.routing import Heat
from preflight.counted import counted
from preflight.host import Host


def trade_lines(
    host: Host, checkpoint: Checkpoint, heat: Heat | None, policy: Policy
) -> Iterator[str]:
    """A row for the plan as asked for, and for each other split, planned the same way."""
    asked = plan(host, checkpoint, heat, policy)
    yield (
        f"{'split':<34}{'KV GiB':>8}{'KV tokens':>12}{'experts held':>14}{'slots':>8}"
        f"{'host GiB':>10}{'cold':>7}{'left out':>10}{'tokens/s':>10}"
    )
    yield _row("as planned", asked, policy.streams)
    for words, other in _splits(asked, policy):
        try:
            yield _row(words, plan(host, checkpoint, heat, other), policy.streams)
        except DoesNotFit as refusal:
            yield f"{words:<34}does not fit: {refusal.message}"


def _splits(asked: Plan, policy: Policy) -> Iterator[tuple[str, Policy]]:
    """Fewer and more kept conversations, half the context, fp8, fewer and more slots."""
    streams, context = policy.streams, asked.serving.context_tokens
    for times in (1, 2, 4, 8):
        words = f"{times * streams} contexts of {context:,}"
        yield words, replace(policy, conversations=times * streams, context_tokens=context)
    if context > 4096:
        shorter = replace(policy, conversations=2 * streams, context_tokens=context // 2)
        yield f"{2 * streams} contexts of {context // 2:,}", shorter
    if policy.kv_dtype == "auto" and asked.ranks[0].device == "cuda":
        yield "KV cache in fp8", replace(policy, kv_dtype="fp8")
    slots = max(place.cache_slots for place in asked.ranks[0].layers)
    most = max(len(p.device_experts) + len(p.host_experts) for p in asked.ranks[0].layers)
    for number in sorted({0, slots // 2, min(most, 2 * slots)} - {slots}):
        yield f"{counted(number, 'slot')} a layer", replace(policy, cache_slots=number)


def _row(words: str, made: Plan, streams: int) -> str:
    rank = made.ranks[0]
    size = {line.part: line.size_bytes for line in rank.ledger}
    kv, each = size.get(KV_CACHE, 0), made.serving.kv_bytes_per_token
    tokens = f"{kv // each:,}" if each else "unknown"
    held = sum(len(p.device_experts) + len(p.slot_experts) for p in rank.layers)
    slots = sum(place.cache_slots for place in rank.layers)
    at_host = sum(rank.total_bytes("host") for rank in made.ranks) / GIB
    step = next((step for step in made.predictions if step.streams >= streams), None)
    speed = step.tokens_per_second if step else None
    cold = made.forecast.cold if made.forecast else None
    left_out = cold and (cold.held_out_settled if slots else cold.held_out)
    return (
        f"{words:<34}{kv / GIB:>8.2f}{tokens:>12}{held:>14,}{slots:>8,}{at_host:>10.1f}"
        f"{'-' if step is None else f'{step.cold_share:.1%}':>7}"
        f"{'-' if left_out is None else f'{left_out:.1%}':>10}"
        f"{'-' if speed is None else f'{speed.likely:.0f}':>10}"
    )
