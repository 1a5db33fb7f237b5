"""Is this plan for this machine and this checkpoint, and does it add up? Asked before serving."""

from __future__ import annotations

from appliance.checkpoint.model import Checkpoint, MoeLayer
from appliance.errors import PlanError
from appliance.plan.budget import KV_CACHE, ON_HOST, RESIDENT, SLOTS
from appliance.plan.model import LayerPlacement, Plan, RankPlan, expert_block_bytes
from appliance.plan.split import owned_experts
from preflight.counted import counted
from preflight.host import Host


def check_plan(plan: Plan, host: Host, checkpoint: Checkpoint) -> None:
    """Raises PlanError for a plan made for another checkpoint or GPU, or edited into nonsense."""
    if plan.made_from.checkpoint != checkpoint.digest:
        raise PlanError(
            f"the plan was made for another checkpoint ({plan.made_from.checkpoint[:12]}) than "
            f"{checkpoint.path} ({checkpoint.digest[:12]})",
            fix="make the plan again for this one",
        )
    if len(plan.ranks) != plan.tensor_parallel:
        raise PlanError(
            f"the plan says tensor parallel {plan.tensor_parallel} and has "
            f"{counted(len(plan.ranks), 'rank')}",
            fix="make the plan again",
        )
    _check_ranks(plan)
    for rank in plan.ranks:
        _check_gpu(rank, host)
        _check_experts(plan, rank, checkpoint)
        used, capacity = rank.total_bytes("device"), rank.device_capacity_bytes
        if used > capacity:
            raise PlanError(f"rank {rank.rank} plans {used:,} bytes on a device of {capacity:,}",
                            fix="make the plan again")  # fmt: skip


def _check_ranks(plan: Plan) -> None:
    """The engine takes ranks by their place, gives each a GPU, and the KV cache what is served."""
    numbers = [rank.rank for rank in plan.ranks]
    if numbers != list(range(len(numbers))):
        raise PlanError(f"the plan numbers its ranks {numbers}, and they are 0 to "
                        f"{len(numbers) - 1} in that order", fix="make the plan again")  # fmt: skip
    gpus = [rank.gpu for rank in plan.ranks if rank.gpu is not None]
    if len(set(gpus)) < len(gpus):
        raise PlanError(f"the plan gives two ranks the same GPU: {', '.join(gpus)}",
                        fix="make the plan again")  # fmt: skip
    served = plan.serving.kv_cache_bytes
    for rank in plan.ranks:
        planned = rank.sizes_by_part()[KV_CACHE]
        if planned != served:
            raise PlanError(f"rank {rank.rank} plans {planned:,} bytes of KV cache and the engine "
                            f"is told {served:,}", fix="make the plan again")  # fmt: skip


def _check_gpu(rank: RankPlan, host: Host) -> None:
    if rank.device == "cpu":
        return
    present = {gpu.uuid: gpu for gpu in host.gpus or ()}
    gpu = present.get(rank.gpu)
    if rank.gpu is None or gpu is None:
        has = ", ".join(str(uuid) for uuid in present) or "no GPU"
        raise PlanError(
            f"rank {rank.rank} of the plan is for GPU {rank.gpu}, which is not here (here: {has})",
            fix="make the plan again on this machine",
        )
    total = gpu.memory_total_bytes
    if total is not None and total < rank.device_capacity_bytes:
        raise PlanError(
            f"GPU {rank.gpu} has {total:,} bytes and the plan counts on "
            f"{rank.device_capacity_bytes:,}",
            fix="make the plan again on this machine",
        )


def _check_experts(plan: Plan, rank: RankPlan, checkpoint: Checkpoint) -> None:
    layers = {layer.index: layer for layer in checkpoint.layers}
    listed = [placement.layer for placement in rank.layers]
    missing = [la.index for la in checkpoint.target_layers if la.index not in listed]
    if missing or len(set(listed)) != len(listed):
        raise PlanError(f"rank {rank.rank} of the plan lists layers {listed}: layer {missing} is "
                        "missing or one is twice", fix="make the plan again")  # fmt: skip
    sizes = dict.fromkeys((RESIDENT, SLOTS, ON_HOST), 0)
    for placement in rank.layers:
        layer = layers.get(placement.layer)
        if layer is None:
            raise PlanError(f"the plan places experts of layer {placement.layer}, which the model "
                            "does not have", fix="make the plan again")  # fmt: skip
        _check_homes(plan, rank, layer, placement)
        if not layer.draft:
            block = expert_block_bytes(
                layer.experts[0], 1 if plan.expert_parallel else plan.tensor_parallel
            )
            sizes[RESIDENT] += block * len(placement.device_experts)
            sizes[SLOTS] += block * placement.cache_slots
            sizes[ON_HOST] += block * len(placement.host_experts)
    ledger = rank.sizes_by_part()
    for part, size in sizes.items():
        if ledger[part] != size:
            raise PlanError(
                f"rank {rank.rank}: the ledger says {ledger[part]:,} bytes of {part} and "
                f"the lists of experts make {size:,}",
                fix="make the plan again",
            )


def _check_homes(plan: Plan, rank: RankPlan, layer: MoeLayer, placement: LayerPlacement) -> None:
    owned = owned_experts(layer, rank.rank, plan.tensor_parallel, plan.expert_parallel)
    device, host = placement.device_experts, placement.host_experts
    if device & host:
        raise PlanError(f"rank {rank.rank}, layer {layer.index}: expert {min(device & host)} has "
                        "two homes", fix="make the plan again")  # fmt: skip
    if (device | host) != set(owned):
        odd = min((device | host) ^ set(owned))
        what = "has no home" if odd in owned else "is not this rank's"
        raise PlanError(f"rank {rank.rank}, layer {layer.index}: expert {odd} {what}",
                        fix="make the plan again")  # fmt: skip
    slots = placement.slot_experts
    if not slots <= host or len(slots) > placement.cache_slots:
        raise PlanError(
            f"rank {rank.rank}, layer {layer.index}: {counted(len(slots), 'expert')} to start "
            f"in {counted(placement.cache_slots, 'slot')}, and each needs its copy on the host",
            fix="make the plan again",
        )
