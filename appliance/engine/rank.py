"""Everything one engine process holds of routed experts: arena, tables, counters, live layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from appliance.checkpoint.model import Checkpoint, MoeLayer
from appliance.engine import compat
from appliance.engine.addresses import AddressBook
from appliance.engine.arena import Arena
from appliance.engine.behind import Behind
from appliance.engine.cache import SlotCache, open_cache, read_learned
from appliance.engine.config import checkpoint_of
from appliance.engine.counters import Counters
from appliance.engine.tables import Int4Table
from appliance.plan.model import Plan, load_plan
from appliance.weights.arena_file import open_arena
from expert_kernels import ops
from expert_kernels.cuda import DeviceCounters
from preflight.counted import counted


@dataclass
class RankState:
    """Everything this process holds: one arena, tables and counters, and the live layers."""

    arena: Arena
    book: AddressBook
    counters: Counters
    cache: SlotCache | None  # None: the plan has no spare slots
    live: dict[int, LiveLayer] = field(default_factory=dict)
    by_name: dict[str, LiveLayer] = field(default_factory=dict)
    behind: Behind = field(default_factory=lambda: Behind({}))
    tables: list[Int4Table] = field(default_factory=list)


@dataclass
class LiveLayer:
    """One MoE layer as it serves: the table, its scales, and what the checkpoint says of it."""

    shape: MoeLayer
    table: ops.ExpertTable
    scales: torch.Tensor  # fp16, flat: keeps the memory behind the table's scale addresses
    experts: list[int]  # global numbers of the table's rows
    expert_map: torch.Tensor | None
    block_bytes: int
    fill: torch.Tensor | None  # int64 [experts]: see ops.experts; None: this rank has no slots
    counters: DeviceCounters | None  # None: the engine records what it sees (CPU)
    swiglu_limit: float | None
    weight_on_input: bool


_state: RankState | None = None


def state() -> RankState:
    """This process's experts. Raises RuntimeError before a model with experts was built."""
    if _state is None:
        raise RuntimeError("no model with routed EXL3 experts is loaded in this process")
    return _state


def slot_cache() -> SlotCache | None:
    """The cache of this process's slots; None without slots, and where no expert is ours."""
    return None if _state is None else _state.cache


def open_state(rank: int, ranks: int, device: torch.device) -> RankState:
    """This process's experts, made at the first call from what the launcher set.

    Raises ValueError without a plan, and for a plan of another checkpoint or number of ranks.
    """
    global _state
    if _state is None:
        settings = compat.appliance_settings()
        missing = [key for key in ("plan", "checkpoint") if not settings.get(key)]
        if missing:
            raise ValueError(
                f"the EXL3 engine needs --additional-config appliance.{missing[0]}: it places no "
                "expert without a plan. Try: start it with `appliance up`"
            )
        plan = load_plan(Path(settings["plan"]))
        checkpoint = checkpoint_of(settings["checkpoint"])
        if plan.made_from.checkpoint != checkpoint.digest:
            raise ValueError(
                f"the plan {settings['plan']} was made for another checkpoint "
                f"({plan.made_from.checkpoint[:12]}, this is {checkpoint.digest[:12]}). "
                "Try: make the plan again"
            )
        if ranks != len(plan.ranks):
            raise ValueError(
                f"the plan {settings['plan']} is for {counted(len(plan.ranks), 'rank')} and this "
                f"engine has {ranks}: its experts are cut otherwise. Try: start it with `appliance "
                "up`, or make the plan again"
            )
        _state = _new_state(plan, rank, checkpoint, device, settings)
    return _state


def _new_state(
    plan: Plan, rank: int, checkpoint: Checkpoint, device: torch.device, settings: dict[str, Any]
) -> RankState:
    learned = read_learned(settings.get("learned"))
    parts = 1 if plan.expert_parallel else plan.tensor_parallel
    stored = None
    if settings.get("arena"):
        share = 0 if plan.expert_parallel else rank
        stored = open_arena(Path(settings["arena"]), checkpoint, share, parts)
    arena = Arena(plan, rank, checkpoint, device, learned, stored)
    rows = {
        place.layer: sorted(place.device_experts | place.host_experts)
        for place in arena.plan.layers
    }
    book = AddressBook(rows, device)
    counters = Counters(book)
    cache = None
    if plan.cache is not None and any(arena.slots.values()):
        cache = open_cache(arena, book, counters, plan.cache, learned)
    # A host without pins may keep the shards for the next start.
    read = checkpoint.tensors.values() if arena.bytes_in("host") else ()
    behind = Behind({tensor.name: checkpoint.path / tensor.file for tensor in read})
    return RankState(arena, book, counters, cache, behind=behind)
