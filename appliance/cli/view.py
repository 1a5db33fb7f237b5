"""What a person reads about a running appliance, as rows of name and value."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.render import counted, duration, size

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
SCRAPE_ANSWER_SECONDS = 3.0  # twice that is within Prometheus' usual limit of 10


def now_of(found: Status, settings: Settings) -> dict[str, Any]:
    """What the state file does not say: release, image, and what the engine does now.

    Takes a second where it serves. None: not known.
    """
    from importlib.metadata import PackageNotFoundError, version

    from appliance.serve.client import Client
    from appliance.serve.keys import first_key
    from appliance.serve.load import cold_share, look

    state, files = found.state, settings.state_dir
    try:
        here = version("moe-appliance")
    except PackageNotFoundError:
        here = None
    load = None
    if found.is_serving:
        key = first_key(files / "control-key")
        load = look(Client(state.host, state.port, key, state.certificate))
    left = None
    if state.phase in ("starting", "proving"):
        left = max(0.0, state.expected_load_seconds - state.seconds)
    return {
        "release": settings.release or here,
        "image_digest": settings.image_digest,
        "record": settings.record,
        "load_eta_seconds": left,
        "running": None if load is None else load.running,
        "waiting": None if load is None else load.waiting,
        "tokens_per_second": None if load is None else load.tokens_per_second,
        "cold_share": cold_share(found.engine),
        "last_finding": _last_finding(files),
    }


def _last_finding(folder: Path) -> str | None:
    """Why the container's last start failed, where it did."""
    try:
        failure = json.loads((folder / "failure.json").read_text())
        return f"{failure['step']} failed: {failure['message']}"
    except (OSError, ValueError, KeyError):
        return None


def status_rows(found: Status, now: dict[str, Any]) -> list[Row]:
    state = found.state
    rows: list[Row] = [
        (
            "state",
            state.words if found.orphaned else f"{state.words} for {duration(state.seconds)}",
        ),
        ("", state.message),
        ("fix", state.fix if state.phase == "failed" else None),
        ("release", now["release"]),
        ("image digest", now["image_digest"]),
        ("deployment", now["record"]),
        ("model", f"{state.served_name} ({state.model})"),
        ("address", f"{state.url}/v1"),
        ("API key", state.keys),
        ("plan", f"{state.plan} ({state.plan_digest[:12]})"),
        ("log", state.log),
        ("exl3 is served by", _owners(found.engine)),
        ("since", None if found.orphaned else _clock(state.since)),
    ]
    if now["load_eta_seconds"] is not None:
        rows.append(("ready in about", duration(now["load_eta_seconds"])))
    if found.gateway is not None:
        rows.append(("in flight", f"{counted(found.gateway['in_flight'], 'request')}"))
    if now["running"] is not None:
        rows.append(("running, waiting", f"{now['running']:.0f}, {now['waiting']:.0f}"))
    if now["tokens_per_second"] is not None:
        rows.append(("now", f"{now['tokens_per_second']:.1f} tok/s"))
    if now["cold_share"] is not None:
        rows.append(("read from host", f"{now['cold_share']:.1%} of all picks"))
    rows.append(("last finding", now["last_finding"]))
    return rows + home_rows(found.engine)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


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
            if home == "slot" and not held["bytes"]:
                continue  # the plan has no slots
            rows.append(
                (
                    f"{name}, {home}",
                    f"{counted(held['experts'], 'expert')}, {size(held['bytes'])}",
                )
            )
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


def serving_facts(state: State | None, *, held: bool = False) -> Serving | None:
    """A state for /metrics; a failed start that is `held` may have come to none."""
    from typing import get_args

    from appliance.metrics import Serving
    from appliance.serve.state import Phase

    if state is None:
        return Serving(phase="failed", phases=get_args(Phase)) if held else None
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


def health_rows(ready: bool, body: Mapping[str, Any]) -> list[Row]:
    """For people: a moment as a clock shows it, and counts without a fraction."""
    rows: list[Row] = [("ready", "yes" if ready else "no")]
    for name, value in body.items():
        if name == "since" and value is not None:
            value = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        elif isinstance(value, float) and value.is_integer():
            value = int(value)
        rows.append((name, value))
    return rows


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
    from appliance.errors import ServeError
    from appliance.serve import local
    from appliance.serve.state import SERVING

    serving = agent.state is not None and agent.state.phase in SERVING and agent.hang is None
    found = None
    if serving:
        # What the engine does not say must not hide what is known without it.
        with contextlib.suppress(ServeError):
            found = local.status(files, SCRAPE_ANSWER_SECONDS)
    return metrics.page(
        metrics.Facts(
            host=host,
            report=report,
            plan=plan,
            serving=serving_facts(agent.state, held=agent.held),
            engine=None if found is None else found.engine,
            exposition=agent.exposition,
            hung=agent.hang is not None,
            restarts=agent.restarts,
            release=settings.release,
            image_digest=settings.image_digest,
        )
    )
