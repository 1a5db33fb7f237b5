"""What a person reads about a running appliance, as rows of name and value."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from appliance.render import duration, size

if TYPE_CHECKING:
    from appliance.checkpoint.model import Checkpoint
    from appliance.serve.local import Status

Row = tuple[str, Any]


def status_rows(found: Status) -> list[Row]:
    state = found.state
    rows: list[Row] = [
        ("state", f"{state.words} for {duration(state.seconds)}"),
        ("", state.message),
        ("model", f"{state.served_name} ({state.model})"),
        ("address", f"{state.url}/v1"),
        ("API key", state.keys),
        ("plan", f"{state.plan} ({state.plan_digest[:12]})"),
        ("log", state.log),
        ("since", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since))),
    ]
    if found.gateway is not None:
        rows.append(("in flight", f"{found.gateway['in_flight']} requests"))
    return rows + home_rows(found.engine)


def home_rows(engine: Any) -> list[Row]:
    """Where the experts live and what was read from the host, over all ranks."""
    if engine is None:
        return []
    rows: list[Row] = []
    for rank in engine["ranks"]:
        for home, held in rank["homes"].items():
            where = f"rank {rank['rank']}, {home}"
            rows.append((where, f"{held['experts']:,} experts, {size(held['bytes'])}"))
    picks = {
        home: sum(rank["picks"][home] for rank in engine["ranks"]) for home in ("device", "host")
    }
    total = sum(picks.values())
    if total:
        share = picks["host"] / total
        rows.append(("routed picks", f"{total:,}, of these {share:.1%} of experts on the host"))
    read = sum(rank["host_bytes_read"] for rank in engine["ranks"])
    rows.append(("from host memory", f"{size(read)} since it serves"))
    return rows


def checkpoint_rows(checkpoint: Checkpoint) -> list[Row]:
    """Name and value; names that end in `bytes` hold bytes."""
    layers = checkpoint.target_layers
    shapes = {p for layer in layers for e in layer.experts for p in e.projections}
    rows: list[Row] = [
        ("folder", str(checkpoint.path)),
        ("family", checkpoint.family),
        ("quantisation", checkpoint.quantisation),
        ("layers with routed experts", len(layers)),
        ("experts", checkpoint.expert_count),
        ("bits", ", ".join(f"{bits:g}" for bits in sorted({p.bits for p in shapes})) or None),
        ("codebooks", ", ".join(sorted({p.codebook for p in shapes})) or None),
        ("routed expert bytes", sum(layer.size_bytes for layer in layers)),
        ("draft expert bytes", sum(la.size_bytes for la in checkpoint.layers if la.draft) or None),
        ("lookup table bytes", sum(t.size_bytes for t in checkpoint.tables) or None),
    ]
    roles: dict[str, int] = {}
    for part in checkpoint.dense:
        roles[part.role] = roles.get(part.role, 0) + part.size_bytes
    rows += [(f"{role} bytes", size_bytes) for role, size_bytes in roles.items() if size_bytes]
    return [*rows, ("all bytes", checkpoint.size_bytes), ("digest", checkpoint.digest)]
