"""A plan in words: its ledger, its summary, and why one expert lives where it does. No printing."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.errors import PlanError, UsageError
from appliance.plan.budget import GIB, KV_CACHE, ON_HOST, RESIDENT, SLOTS
from appliance.plan.model import Home, LayerPlacement, Plan, RankPlan
from appliance.plan.outlook_lines import forecast_lines, step_line
from appliance.plan.routing import Heat
from preflight.counted import counted


def ledger_lines(plan: Plan) -> list[str]:
    """Every line of every rank's ledger to the byte, and whether all experts would have fitted."""
    lines = [line for rank in plan.ranks for line in _rank_ledger(plan, rank)]
    return lines + list(_node_lines(plan))


def show_lines(plan: Plan) -> list[str]:
    """The plan on one screen: model, what it is for, ranks, homes, predictions, notes."""
    model, serving = plan.model, plan.serving
    split = "expert parallel" if plan.expert_parallel else "tensor parallel"
    lines = [
        f"model    {model.family}: {model.layers} layers x {model.experts} experts, "
        f"top-{model.top_k}, {amount(model.size_bytes)}",
        f"serving  {counted(serving.streams, 'stream')}, "
        f"{serving.context_tokens:,} tokens of context, "
        f"KV cache {amount(serving.kv_cache_bytes)} a rank",
        f"ranks    {len(plan.ranks)}, {split}",
    ]
    for rank in plan.ranks:
        lines += [
            f"  {_rank_title(rank)}",
            f"    {_homes(rank)}",
            f"    {_all_resident(plan, rank)}",
        ]
    lines += _trades(plan)
    lines += [step_line(step) for step in plan.predictions]
    if plan.forecast is not None:
        lines += forecast_lines(plan.forecast)
    return lines + [f"note: {note}" for note in plan.notes]


def _trades(plan: Plan) -> list[str]:
    """What one more expert a layer costs in context, and one more slot in host memory."""
    rank = plan.ranks[0]
    sizes, (held, on_host) = rank.sizes_by_part(), _expert_counts(rank)
    known = sizes.get(RESIDENT, 0) + sizes.get(ON_HOST, 0)
    if not on_host or not known:
        return []
    # Mean block; draft experts stand in the lists and not in these lines.
    each = known / (held + on_host) * len(rank.layers)
    lines = []
    if plan.serving.kv_bytes_per_token:
        tokens = round(each / plan.serving.kv_bytes_per_token)
        lines.append(f"trade    one more expert a layer on the device: {amount(each)}, "
                     f"{tokens:,} tokens of KV cache")  # fmt: skip
    copies = each * len(plan.ranks) / (len(plan.ranks) if plan.expert_parallel else 1)
    lines.append(f"trade    one more slot a layer instead of a resident: {amount(copies)} of "
                 "host memory for its copy")  # fmt: skip
    return lines


def explain(plan: Plan, layer: int, expert: int, heat: Heat | None = None) -> str:
    """Where one expert lives on each rank, and why. With the plan's own counts, its rank too."""
    if heat is not None and heat.digest != plan.made_from.heat:
        raise PlanError("these are not the routing counts the plan was made from",
                        fix="give the counts named when planning")  # fmt: skip
    homes: dict[str, list[str]] = {}
    for rank in plan.ranks:
        placement = _placement(rank, layer, plan)
        home = _home(placement, expert)
        if home is not None:
            at = "in a cache slot" if expert in placement.slot_experts else f"on the {home}"
            why = f"{at} of {{}}: {_because(plan, placement, expert)}"
            homes.setdefault(why, []).append(f"rank {rank.rank}")
    if not homes:
        raise UsageError(
            f"layer {layer} has experts 0 to {plan.model.experts - 1}; {expert} is not one of them"
        )
    where = "; ".join(why.format(" and ".join(ranks)) for why, ranks in homes.items())
    return f"Layer {layer} expert {expert} is {where}. {_heat_words(heat, layer, expert)}"


def _rank_ledger(plan: Plan, rank: RankPlan) -> Iterator[str]:
    yield _rank_title(rank)
    homes: tuple[Home, ...] = ("device", "host")
    for home in homes:
        yield f"  {home}"
        for part, words, size in _parts(rank, home):
            yield _row(part, size, words)
        yield _row("sum", rank.total_bytes(home), "")
        if home == "device":
            spare = rank.device_capacity_bytes - rank.total_bytes("device")
            yield _row("device has", rank.device_capacity_bytes, f"{spare:,} B are not used")
    if rank.device == "cpu":
        yield _row("both, of one RAM", sum(map(rank.total_bytes, homes)), "")
    yield f"  {_all_resident(plan, rank)}"
    yield f"  {_what_fits(rank)}"


def _parts(rank: RankPlan, home: Home) -> Iterator[tuple[str, str, int]]:
    """Name, words and bytes of each line that says anything; lines that say the same are one."""
    sizes: dict[tuple[str, str], int] = {}
    for line in rank.ledger:
        if line.home == home and line.size_bytes:
            words = line.source + (f"  {line.note}" if line.note else "")
            sizes[line.part, words] = sizes.get((line.part, words), 0) + line.size_bytes
    for (part, words), size in sizes.items():
        yield part, words, size


def _node_lines(plan: Plan) -> Iterator[str]:
    """What is pinned on each memory node, over all ranks beside it."""
    nodes = sorted({rank.numa_node for rank in plan.ranks if rank.numa_node is not None})
    for node in nodes:
        mine = [rank for rank in plan.ranks if rank.numa_node == node]
        pinned = [line for rank in mine for line in rank.ledger if line.pinned]
        yield f"memory node {node}, ranks {', '.join(str(rank.rank) for rank in mine)}"
        for part in dict.fromkeys(line.part for line in pinned):
            yield _row(part, sum(i.size_bytes for i in pinned if i.part == part), "pinned")


def _row(part: str, size: int, words: str) -> str:
    return f"    {part:<28}{size:>18,} B {amount(size):>13}  {words}".rstrip()


def _rank_title(rank: RankPlan) -> str:
    if rank.device == "cpu":
        return f"rank {rank.rank}  no GPU: both homes are RAM"
    node = "memory node unknown" if rank.numa_node is None else f"memory node {rank.numa_node}"
    rate = rank.link_bytes_per_second
    speed = "rate unknown" if rate is None else f"{rate / 1e9:.1f} GB/s"
    return f"rank {rank.rank}  {rank.gpu_name} {rank.gpu}, {node}, {rank.link} {speed}"


def _all_resident(plan: Plan, rank: RankPlan) -> str:
    """With every expert on the device: by how much that fits, or does not."""
    sizes = rank.sizes_by_part()
    need = rank.total_bytes("device") - sizes.get(SLOTS, 0) + sizes.get(ON_HOST, 0)
    over = need - rank.device_capacity_bytes
    weights = _weights(rank) - sizes.get(SLOTS, 0) + sizes.get(ON_HOST, 0)
    verdict = f"does not fit, {amount(over)} too much" if over > 0 else "fits"
    return (
        f"all experts resident: {amount(need)} ({_bare(weights)} of weights) on "
        f"{amount(rank.device_capacity_bytes)}: {verdict}"
    )


def _what_fits(rank: RankPlan) -> str:
    held, on_host = _expert_counts(rank)
    return (
        f"this plan: {amount(rank.total_bytes('device'))} ({_bare(_weights(rank))} of "
        f"weights, {_bare(rank.sizes_by_part().get(KV_CACHE, 0))} of KV cache), {on_host:,} of "
        f"{held + on_host:,} experts on the host only"
    )


def amount(size_bytes: float) -> str:
    """`309.31 GiB`; below one GiB in the unit that leaves digits: `4.5 MiB`, `288.0 KiB`, `0 B`."""
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:.2f} GiB"
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def _bare(size_bytes: int) -> str:
    """Beside an amount in GiB, another one needs no unit."""
    return amount(size_bytes).removesuffix(" GiB")


def _weights(rank: RankPlan) -> int:
    """Bytes that come from the checkpoint and stay on the device."""
    return sum(
        line.size_bytes for line in rank.ledger if line.home == "device" and line.source == "header"
    )


def _homes(rank: RankPlan) -> str:
    held, on_host = _expert_counts(rank)
    sizes = rank.sizes_by_part()
    slots, copies = sum(p.cache_slots for p in rank.layers), sizes.get(SLOTS, 0)
    spare = f", {slots:,} of them in cache slots" if slots else ""
    return (
        f"experts: {held:,} on the device ({amount(sizes.get(RESIDENT, 0) + copies)}){spare}, "
        f"{on_host:,} on the host ({amount(sizes.get(ON_HOST, 0) - copies)})"
        + (f" and {amount(copies)} of copies there" if slots else "")
    )


def _expert_counts(rank: RankPlan) -> tuple[int, int]:
    """On the device, for good or in a slot at the start; and on the host only."""
    slots = sum(len(placement.slot_experts) for placement in rank.layers)
    return (sum(len(placement.device_experts) for placement in rank.layers) + slots,
            sum(len(placement.host_experts) for placement in rank.layers) - slots)  # fmt: skip


def _placement(rank: RankPlan, layer: int, plan: Plan) -> LayerPlacement:
    for placement in rank.layers:
        if placement.layer == layer:
            return placement
    known = [placement.layer for placement in plan.ranks[0].layers]
    raise UsageError(f"the plan has no layer {layer}: its MoE layers are {min(known)}-{max(known)}")


def _home(placement: LayerPlacement, expert: int) -> Home | None:
    if expert in placement.device_experts:
        return "device"
    return "host" if expert in placement.host_experts else None


def _because(plan: Plan, placement: LayerPlacement, expert: int) -> str:
    resident, on_host = len(placement.device_experts), len(placement.host_experts)
    total, slots = resident + on_host, placement.cache_slots
    if expert in placement.slot_experts:
        return (f"{slots} of the {total} of this layer start in slots, which follow the traffic, "
                "and keep a copy on the host")  # fmt: skip
    if not on_host:
        return f"all {total} of this layer fit there"
    if not resident:
        return f"none of the {total} of this layer stays on the device"
    if plan.made_from.heat is None:
        return f"the device keeps {resident} of {total} of this layer, lower numbers first"
    among = "among them" if expert in placement.device_experts else "colder"
    hot = "steadiest" if slots else "hottest"
    more = f", {slots} more start in its slots," if slots and among == "colder" else ""
    return (
        f"the device keeps the {resident} {hot} of {total} of this layer{more} and this is {among}"
    )


def _heat_words(heat: Heat | None, layer: int, expert: int) -> str:
    row = heat.of(layer) if heat else None
    if row is None:
        return "No routing counts of this layer are at hand."
    order = sorted(range(len(row)), key=lambda e: (-row[e], e))
    return (
        f"It is number {order.index(expert) + 1} of {len(row)} by heat, with "
        f"{row[expert] / sum(row):.3%} of the layer's picks."
    )
