"""DeepSeek-V4.1 on vLLM 0.33.0: what its class does not leave to a quantisation method.

Its Engram tables are FP8 by construction, and its head gets no quantisation config. So, before the
model is built: a table whose rows the checkpoint stores in int4 is ours, and a head stored as EXL3
is made dense as it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from appliance.checkpoint.model import Checkpoint
from appliance.engine import compat
from appliance.engine.config import V41
from appliance.engine.hostmem import Node
from appliance.engine.linear import codebook_of
from appliance.engine.rank import open_state
from appliance.engine.tables import Int4Table
from appliance.plan.model import parse_ids
from expert_kernels import reference

HEAD = "head."
Weights = Iterable[tuple[str, torch.Tensor]]


def prepare(checkpoint: Checkpoint) -> None:
    """Make vLLM's class ready for this checkpoint. Nothing for other models; may be repeated."""
    if checkpoint.model_type != V41:
        return
    int4 = {table.layer: table.name for table in checkpoint.tables if table.format == "int4"}
    if int4:
        compat.replace_engram_table(lambda layer, **facts: _table(int4.get(layer), **facts))
    if f"{HEAD}trellis" in checkpoint.tensors:
        compat.filter_v41_weights(dense_head)


def _table(stored: str | None, head_sizes: tuple[int, ...], dim: int) -> Int4Table | None:
    """Ours, on this rank's node; None where the checkpoint's table is not int4."""
    if stored is None:
        return None
    rank, ranks, replicas = compat.engram_ranks()
    if replicas > 1:
        raise ValueError(
            f"{stored}: int4 tables are not shared by data-parallel replicas ({replicas} here). "
            "Try: --data-parallel-size 1, a table in FP8"
        )
    device = torch.empty(0).device  # vLLM's loader sets the default device
    state = open_state(rank, ranks, device)
    plan = state.arena.plan
    cpus = parse_ids(plan.cpus) if plan.cpus else frozenset()
    node = None if plan.numa_node is None else Node(plan.numa_node, cpus)
    table = Int4Table(head_sizes, dim, stored, device, rank=rank, ranks=ranks, node=node)
    state.tables.append(table)
    return table


def dense_head(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, with `head.weight` in bf16 in the place of the head's EXL3 tensors."""
    parts: dict[str, Any] = {}
    for name, tensor in weights:
        if name.startswith(HEAD) and name != f"{HEAD}weight":
            parts[name.removeprefix(HEAD)] = tensor
        else:
            yield name, tensor
    if parts:
        missing = {"trellis", "suh", "svh"} - set(parts)
        if missing:
            raise ValueError(f"{HEAD}trellis came without {', '.join(sorted(missing))}")
        kinds = (parts["trellis"], parts["suh"], parts["svh"])
        dense = reference.dequantise(*kinds, codebook_of(set(parts)))
        yield f"{HEAD}weight", dense.T.to(torch.bfloat16).contiguous()
