"""What a running engine does now: who runs, who waits, tokens a second."""

from __future__ import annotations

import time
from dataclasses import dataclass

from appliance.errors import ServeError
from appliance.serve.client import Client

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
TOKENS = "vllm:generation_tokens_total"
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Load:
    """None: the engine did not say."""

    running: float | None
    waiting: float | None
    tokens_per_second: float | None


def look(client: Client, seconds: float = LOOK_SECONDS) -> Load | None:
    """The engine's own counters, looked at twice; None where it does not answer."""
    try:
        before, started = client.metric(TOKENS), time.monotonic()
        time.sleep(seconds)
        after, took = client.metric(TOKENS), time.monotonic() - started
        # The counter appears with the first token: absent before, it was 0.
        rate = None if after is None else (after - (before or 0.0)) / took
        return Load(client.metric(RUNNING), client.metric(WAITING), rate)
    except ServeError:
        return None


def cold_share(engine: object) -> float | None:
    """Share of all routed picks that were read from host memory; None where nothing was picked."""
    if not isinstance(engine, dict):
        return None
    picks = [rank["picks"] for rank in engine["ranks"]]
    total = sum(sum(one.values()) for one in picks)
    return sum(one["host"] for one in picks) / total if total else None
