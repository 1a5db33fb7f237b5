"""What a person reads about a running appliance, as rows of name and value."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from appliance.render import duration, size

if TYPE_CHECKING:
    from appliance.agent import Agent
    from appliance.checkpoint.model import Checkpoint
    from appliance.metrics import Serving
    from appliance.plan.model import Plan
    from appliance.serve.local import Status
    from appliance.serve.state import Files, State
    from appliance.settings import Settings
    from preflight import Host, Report

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
        ("exl3 is served by", _owners(found.engine)),
        ("since", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since))),
    ]
    if found.gateway is not None:
        rows.append(("in flight", f"{found.gateway['in_flight']} requests"))
    return rows + home_rows(found.engine)


def _owners(engine: Any) -> str | None:
    if engine is None:
        return None
    return ", ".join(sorted({rank["method_owner"] for rank in engine["ranks"]}))


def home_rows(engine: Any) -> list[Row]:
    """Where each rank's experts live, and what it read from the host since it serves.

    By rank: ranks that share every expert count the same picks, so a sum would count them twice.
    """
    rows: list[Row] = []
    for rank in engine["ranks"] if engine is not None else ():
        name = f"rank {rank['rank']}"
        for home, held in rank["homes"].items():
            rows.append((f"{name}, {home}", f"{held['experts']:,} experts, {size(held['bytes'])}"))
        picks, read = rank["picks"], size(rank["host_bytes_read"])
        total = sum(picks.values())
        share = (
            f"{picks['host'] / total:.1%} of {total:,} picks were there" if total else "no picks"
        )
        rows.append((f"{name}, read from host", f"{read}; {share}"))
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


def serving_facts(state: State | None) -> Serving | None:
    """A state for /metrics."""
    from typing import get_args

    from appliance.metrics import Serving
    from appliance.serve.state import Phase

    if state is None:
        return None
    return Serving(
        phase=state.phase,
        phases=get_args(Phase),
        since=state.since,
        expected_load_seconds=state.expected_load_seconds,
        ready_after_seconds=state.ready_after_seconds,
    )


def health_of(found: Status) -> dict[str, Any]:
    """What the agent would say, where it has no port."""
    state = found.state
    return {"phase": state.phase, "since": state.since, "message": state.message}


def metrics_page(
    agent: Agent,
    files: Files,
    settings: Settings,
    *,
    host: Host | None = None,
    report: Report | None = None,
    plan: Plan | None = None,
) -> str:
    """The text of /metrics; the engine is asked only while it serves."""
    from appliance import metrics
    from appliance.serve import local
    from appliance.serve.state import SERVING

    serving = agent.state is not None and agent.state.phase in SERVING and agent.hang is None
    found = local.status(files) if serving else None
    return metrics.page(
        metrics.Facts(
            host=host,
            report=report,
            plan=plan,
            serving=serving_facts(agent.state),
            engine=None if found is None else found.engine,
            exposition=agent.exposition,
            hung=agent.hang is not None,
            restarts=agent.restarts,
            release=settings.release,
            image_digest=settings.image_digest,
        )
    )
