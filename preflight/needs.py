"""What this machine must offer: from a profile before there is a plan, from plan.json after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from preflight.host import Facts

GIB = 1 << 30
# Before a plan: the smallest host arena worth having, and what an engine takes beside it.
SMALLEST_ARENA_BYTES = 4 * GIB
ENGINE_BYTES_PER_RANK = 6 * GIB
STAGING_BYTES_PER_RANK = 2 * GIB
SHM_BYTES = 1 * GIB
CHUNK_BYTES = 1 * GIB


class Needs(Facts):
    """Thresholds of the checks. Bytes are bytes; None means that nothing asks for it."""

    device: Literal["cuda", "cpu"] = "cuda"
    deployment: Literal["local", "docker", "kubernetes"] = "local"
    gpus: int = 1
    # The cards a plan names; empty: every card of the machine is looked at.
    gpu_uuids: tuple[str, ...] = ()
    gpu_bytes: int | None = None
    pinned_bytes: int = SMALLEST_ARENA_BYTES
    pinned_bytes_by_node: dict[int, int] = Field(default_factory=dict)
    load_peak_bytes: int = SMALLEST_ARENA_BYTES + ENGINE_BYTES_PER_RANK + STAGING_BYTES_PER_RANK
    registrations: int = 4
    largest_registration_bytes: int | None = CHUNK_BYTES
    # Set when the arena is to lie in reserved huge pages of this size.
    huge_page_bytes: int | None = None
    model_disk_bytes: int | None = None
    cache_disk_bytes: int | None = None
    docker_disk_bytes: int | None = None
    shm_bytes: int = SHM_BYTES
    port: int | None = None
    from_plan: bool = False


def profile(
    *,
    gpus: int = 1,
    device: Literal["cuda", "cpu"] = "cuda",
    deployment: Literal["local", "docker", "kubernetes"] = "local",
    host_bytes: int | None = None,
    gpu_bytes: int | None = None,
    download_bytes: int | None = None,
    port: int | None = None,
) -> Needs:
    """Needs before there is a plan: cards, host bytes to pin (all ranks), bytes to download."""
    pinned = SMALLEST_ARENA_BYTES if host_bytes is None else host_bytes
    ranks = max(1, gpus)
    return Needs(
        device=device,
        deployment=deployment,
        gpus=gpus if device == "cuda" else 0,
        gpu_bytes=gpu_bytes,
        pinned_bytes=pinned,
        load_peak_bytes=pinned + ranks * (ENGINE_BYTES_PER_RANK + STAGING_BYTES_PER_RANK),
        registrations=_pieces(pinned, CHUNK_BYTES),
        model_disk_bytes=download_bytes,
        port=port,
    )


def plan_needs(
    plan: Mapping[str, Any],
    *,
    deployment: Literal["local", "docker", "kubernetes"] = "local",
    chunk_bytes: int = CHUNK_BYTES,
    huge_page_bytes: int | None = None,
    download_bytes: int | None = None,
    port: int | None = None,
) -> Needs:
    """The exact needs of a plan.json, given as the dict it parses to.

    Raises KeyError where it is not a plan: read it with the planner's own loader first.
    """
    by_node: dict[int, int] = {}
    peak, total, pieces, cards, device = 0, 0, 0, [], 0
    for rank in plan["ranks"]:
        on_host = [line for line in rank["ledger"] if line["home"] == "host"]
        # The ledger has lines of its own for the shard that is read and for the engine.
        peak += sum(line["size_bytes"] for line in on_host)
        # Nothing is registered with a driver where there is no GPU.
        on_card = rank["device"] == "cuda"
        pinned = sum(line["size_bytes"] for line in on_host if line["pinned"]) if on_card else 0
        total += pinned
        pieces += _pieces(pinned, chunk_bytes)
        if rank["numa_node"] is not None:
            by_node[rank["numa_node"]] = by_node.get(rank["numa_node"], 0) + pinned
        if rank["gpu"]:
            cards.append(rank["gpu"])
        on_device = sum(line["size_bytes"] for line in rank["ledger"] if line["home"] == "device")
        device = max(device, on_device)
    on_gpu = any(rank["device"] == "cuda" for rank in plan["ranks"])
    return Needs(
        device="cuda" if on_gpu else "cpu",
        deployment=deployment,
        gpus=len(cards),
        gpu_uuids=tuple(cards),
        gpu_bytes=device if on_gpu else None,
        pinned_bytes=total,
        pinned_bytes_by_node=by_node,
        load_peak_bytes=peak,
        registrations=pieces,
        largest_registration_bytes=chunk_bytes,
        huge_page_bytes=huge_page_bytes,
        model_disk_bytes=download_bytes,
        port=port,
        from_plan=True,
    )


def _pieces(total: int, chunk: int) -> int:
    return -(-total // chunk)
