"""Are all layers there, with routed experts where config.json says so and only there?"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.checkpoint.config import Architecture
from appliance.checkpoint.experts import Bank, check_expert_ids
from appliance.checkpoint.model import Tensor
from appliance.checkpoint.names import layer_of, place
from appliance.errors import CheckpointError


def check_layers(
    architecture: Architecture, banks: Mapping[str, Bank], rest: Mapping[str, Tensor]
) -> list[str]:
    """Warnings; raises CheckpointError for a layer, or a layer's experts, missing or too many.

    `banks` are all routed experts by prefix, `rest` what is neither expert nor table.
    """
    with_experts = _layers_with_experts(architecture, banks)
    target = {layer for layer in with_experts if layer < architecture.hidden_layers}
    routed: dict[int, str] = {}
    seen = set(with_experts)
    for name in rest:
        spot = place(name, architecture.hidden_layers)
        if spot.layer is None:
            continue
        seen.add(spot.layer)
        if spot.role == "router":
            routed[spot.layer] = name
    if not seen:
        raise CheckpointError(
            "no tensor's name has a layer (layers.0 and so on): a family unknown to this reader"
        )
    for layer in range(architecture.hidden_layers):
        if layer not in seen:
            raise CheckpointError(
                f"layer {layer} of {architecture.hidden_layers} has no tensors at all",
                fix="a shard is missing: compare the folder with the repository",
            )
    _check_target(architecture, target, routed)
    return _beyond(architecture, seen)


def _layers_with_experts(architecture: Architecture, banks: Mapping[str, Bank]) -> dict[int, str]:
    found: dict[int, str] = {}
    for prefix, bank in banks.items():
        layer, draft = layer_of(prefix + ".", architecture.hidden_layers)
        if layer is None:
            raise CheckpointError(f"{prefix} holds routed experts but names no layer")
        if layer in found:
            raise CheckpointError(
                f"layer {layer} has two sets of experts: {found[layer]} and {prefix}"
            )
        found[layer] = prefix
        count = architecture.draft_experts if draft else architecture.experts
        if bank.groups:
            check_expert_ids(prefix, {expert for expert, _, _ in bank.groups}, count)
        elif not count:
            raise CheckpointError(f"{prefix} holds experts; config.json says there are none")
    return found


def _check_target(architecture: Architecture, target: set[int], routed: Mapping[int, str]) -> None:
    # Where the config leaves it to the names, a router without experts still gives a loss away.
    expected = architecture.moe_layers
    if expected is None:
        expected = frozenset(target | {i for i in routed if i < architecture.hidden_layers})
    if architecture.experts and not (expected or target):
        raise CheckpointError(
            f"config.json says {architecture.experts} routed experts a layer; none is stored"
        )
    missing, extra = sorted(expected - target), sorted(target - expected)
    if missing:
        raise CheckpointError(
            f"layer {missing[0]} has no routed experts; by config.json and routers "
            f"{len(expected)} of {architecture.hidden_layers} layers have them"
        )
    if extra:
        raise CheckpointError(
            f"layer {extra[0]} has routed experts; config.json says that it is dense"
        )


def _beyond(architecture: Architecture, seen: set[int]) -> list[str]:
    last = architecture.hidden_layers + architecture.draft_layers
    beyond = sorted(layer for layer in seen if layer >= last)
    if not beyond:
        return []
    return [
        f"layers {beyond[0]} to {beyond[-1]} are beyond the {architecture.hidden_layers} layers "
        f"and {architecture.draft_layers} draft layers of config.json; they count as draft layers"
    ]
