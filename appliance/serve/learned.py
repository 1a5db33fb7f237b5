"""What the engine's cache learned, kept from one run to the next in the state directory."""

from __future__ import annotations

from pathlib import Path

from appliance.durable import write_file
from appliance.errors import ServeError
from appliance.plan.routing import Heat
from appliance.serve.client import Client

EVERY_SECONDS = 600.0  # an engine that dies forgets no more than this
ANSWER_SECONDS = 60.0  # the question waits for the step that is running


def keep_learned(client: Client, target: Path) -> None:
    """Ask every rank for its recent picks and write them. Raises ServeError where that fails.

    Ranks hold slices of the same experts and counted the same, or experts of their own and zeros
    for the others': the largest of the ranks is right for both.
    """
    ranks = client.get("/appliance/learned", timeout_seconds=ANSWER_SECONDS)["ranks"]
    if any(rank is None for rank in ranks):
        raise ServeError("the engine has no cache slots, and its plan has")
    counts = {
        int(layer): tuple(max(picks) for picks in zip(*(r[layer] for r in ranks), strict=True))
        for layer in ranks[0]
    }
    try:
        write_file(target, Heat(counts).to_json().encode())
    except OSError as error:
        raise ServeError(f"cannot write {target}: {error.strerror}") from error
