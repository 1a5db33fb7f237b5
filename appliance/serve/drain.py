"""Take no new requests and wait for the accepted ones; take requests again."""

from __future__ import annotations

import time

from appliance.errors import ServeError
from appliance.serve.client import Client
from appliance.serve.keys import first_key
from appliance.serve.state import SERVING, Files, read_state
from preflight.counted import counted

TICK_SECONDS = 0.2


def drain(files: Files, limit_seconds: float) -> bool:
    """True once no request is in flight any more; False where nothing serves.

    Raises ServeError where some still run after `limit_seconds`: they go on, and new ones are
    refused until `admit`.
    """
    client = _control(files)
    if client is None:
        return False
    deadline = time.monotonic() + limit_seconds
    in_flight = client.post("/gateway/drain")["in_flight"]
    while in_flight:
        if time.monotonic() > deadline:
            raise ServeError(
                f"{counted(in_flight, 'request')} still running after {limit_seconds:.0f} s",
                fix="try again later, or raise APPLIANCE_DRAIN_SECONDS",
            )
        time.sleep(TICK_SECONDS)
        in_flight = client.get("/gateway/state")["in_flight"]
    return True


def admit(files: Files) -> bool:
    """What was drained takes requests again; False where nothing serves."""
    client = _control(files)
    if client is None:
        return False
    client.post("/gateway/admit")
    return True


def _control(files: Files) -> Client | None:
    state = read_state(files)
    if state is None or state.phase not in SERVING or not state.supervisor_is_running:
        return None
    return Client(state.host, state.port, first_key(files.control_key), state.certificate)
