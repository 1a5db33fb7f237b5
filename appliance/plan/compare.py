"""plan diff: which experts moved between two plans, and what that is expected to do."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.errors import UsageError
from appliance.plan.explain import amount
from appliance.plan.model import Plan, RankPlan, format_ids
from preflight.counted import counted


def diff_lines(before: Plan, after: Plan) -> list[str]:
    """What changed from one plan to the other, in words; one line says so where nothing did.

    Raises UsageError for plans of different models.
    """
    if before.made_from.checkpoint != after.made_from.checkpoint:
        raise UsageError(
            "the plans are for different checkpoints: their experts cannot be compared",
            fix="compare plans of one checkpoint",
        )
    if before == after:
        return ["the plans are equal"]
    lines = [*_inputs(before, after), *_shape(before, after)]
    if len(before.ranks) == len(after.ranks):
        for old, new in zip(before.ranks, after.ranks, strict=True):
            lines += [*_moved(old, new), *_bytes(old, new)]
    return lines + list(_effect(before, after))


def _inputs(before: Plan, after: Plan) -> Iterator[str]:
    for name in ("host", "heat", "policy"):
        old, new = getattr(before.made_from, name), getattr(after.made_from, name)
        if old != new:
            yield f"made from another {name}: {(old or 'none')[:12]} -> {(new or 'none')[:12]}"


def _shape(before: Plan, after: Plan) -> Iterator[str]:
    pairs = {
        "ranks": (len(before.ranks), len(after.ranks)),
        "expert parallel": (before.expert_parallel, after.expert_parallel),
        "streams": (before.serving.streams, after.serving.streams),
        "context": (before.serving.context_tokens, after.serving.context_tokens),
        "prefill chunk": (before.serving.prefill_chunk_tokens, after.serving.prefill_chunk_tokens),
    }
    for name, (old, new) in pairs.items():
        if old != new:
            yield f"{name}: {old} -> {new}"


def _moved(old: RankPlan, new: RankPlan) -> Iterator[str]:
    """Experts that changed home, layer by layer."""
    to_device = to_host = 0
    lines = []
    layers = {place.layer: place for place in old.layers}
    for place in new.layers:
        if place.layer not in layers:
            continue
        before, after = layers[place.layer].device_experts, place.device_experts
        came, went = after - before, before - after
        to_device += len(came)
        to_host += len(went)
        parts = [f"{format_ids(ids)} to the {home}"
                 for ids, home in ((came, "device"), (went, "host")) if ids]  # fmt: skip
        slots = place.cache_slots - layers[place.layer].cache_slots
        if slots:
            parts.append(f"{slots:+d} slots")
        if parts:
            lines.append(f"  layer {place.layer}: {', '.join(parts)}")
    if lines:
        moved = counted(to_device, "expert")
        yield f"rank {new.rank}: {moved} to the device, {to_host:,} to the host"
        yield from lines


def _bytes(old: RankPlan, new: RankPlan) -> Iterator[str]:
    before = {(i.home, i.part, i.note): i.size_bytes for i in old.ledger}
    after = {(i.home, i.part, i.note): i.size_bytes for i in new.ledger}
    totals: dict[tuple[str, str], int] = {}
    for key in before.keys() | after.keys():
        change = after.get(key, 0) - before.get(key, 0)
        totals[key[:2]] = totals.get(key[:2], 0) + change
    for (home, part), change in sorted(totals.items()):
        if change:
            yield f"rank {new.rank}: {part} ({home}) {'+' * (change > 0)}{amount(change)}"


def _effect(before: Plan, after: Plan) -> Iterator[str]:
    old = {step.streams: step for step in before.predictions}
    for new in after.predictions:
        was = old.get(new.streams)
        if was is None or was == new:
            continue
        line = (
            f"{counted(new.streams, 'stream')}: {was.cold_share:.1%} -> {new.cold_share:.1%} of "
            f"picks on the host, {was.link_bytes_per_step / 1e6:,.0f} -> "
            f"{new.link_bytes_per_step / 1e6:,.0f} MB over the link a step"
        )
        if was.tokens_per_second and new.tokens_per_second:
            line += (f", {was.tokens_per_second.likely:.0f} -> {new.tokens_per_second.likely:.0f} "
                     "tokens/s each")  # fmt: skip
        yield line
