"""Models made in memory, and plans of them: what a measurement on a GPU needs and no disk holds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PLANNED = "planned"


@dataclass(frozen=True)
class Case:
    """Slots a layer, and the share of the experts that is in VRAM, slots included."""

    slots: int
    vram: float = 0.70
    whole_layers: bool = False  # what is on the host are the last layers, as offload does it


def model_spec(small: bool, layers: int) -> Any:
    from appliance.checkpoint.synth import SynthSpec

    if small:
        return SynthSpec(layers=3, dense_layers=0, hidden_size=256, intermediate_size=256,
                         experts=384, top_k=6)  # fmt: skip
    return SynthSpec(layers=layers, dense_layers=0, hidden_size=5120, intermediate_size=2304,
                     experts=384, top_k=6, heads=32, kv_heads=8)  # fmt: skip


def make_model(folder: Path, spec: Any) -> None:
    """A checkpoint whose experts but the first are holes."""
    from appliance.checkpoint.synth import qwen3_moe, tokenizer
    from appliance.checkpoint.synth.blocks import CONTEXT
    from appliance.checkpoint.synth.make import quantization
    from appliance.checkpoint.synth.write import new_folder, write_json, write_shards

    if folder.exists():
        return
    with new_folder(folder) as out:
        text, quiet = tokenizer.train(spec.vocab_size)
        tokenizer.write(out, text, CONTEXT)
        kept = "model.layers.0.mlp.experts.0."
        parts = [
            replace(p, draw=None) if ".experts." in p.name and not p.name.startswith(kept) else p
            for p in qwen3_moe.parts(spec, quiet)
        ]
        config = qwen3_moe.config(spec) | {"quantization_config": quantization(spec, parts)}
        write_json(out / "config.json", config)
        write_shards(out, parts, shards=8, seed=0, note={"content": "experts are holes"})


Topics = dict[str, dict[int, list[float]]]  # topic -> layer -> counts


def traffic(files: Sequence[Path], layers: int, held_out: str) -> Topics:
    """The files' layers in turn, numbers shuffled; PLANNED: all topics but the one held out."""
    read = [json.loads(file.read_text()) for file in files]
    names = [k.removeprefix("counts_") for k in read[0] if k.startswith("counts_")]
    out: Topics = {name: {} for name in [*names, PLANNED]}
    for layer in range(layers):
        counts = read[layer % len(read)]
        order = list(range(len(counts["counts"])))
        random.Random(f"experts of layer {layer}").shuffle(order)
        for name in names:
            out[name][layer] = [float(counts[f"counts_{name}"][e]) for e in order]
        known = [out[name][layer] for name in names if name != held_out]
        out[PLANNED][layer] = [sum(column) for column in zip(*known, strict=True)]
    return out


def heat_of(topics: Topics, held_out: str) -> Any:
    from appliance.plan.routing import Heat

    known = {k: v for k, v in topics.items() if k not in (PLANNED, held_out)}
    return Heat(
        {layer: tuple(row) for layer, row in topics[PLANNED].items()},
        {k: {layer: tuple(row) for layer, row in v.items()} for k, v in known.items()},
    )


def make_plan(
    checkpoint: Path,
    case: Case,
    heat: Any,
    device: str,
    ranks: int,
    ep: bool,
    links: Sequence[float] | None = None,
) -> Any:
    """`links`: bytes a second of each rank's; None: what the planner takes them for."""
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.plan.planner import plan
    from appliance.plan.request import Policy
    from preflight import inspect
    from preflight.source import Live

    read = read_checkpoint(checkpoint)
    experts = len(read.target_layers[0].experts)
    policy = Policy(
        device=device,
        tensor_parallel=ranks,
        expert_parallel=ep,
        host_share=1 - case.vram + case.slots / experts,
        cache_slots=case.slots,
        streams=6,
        conversations=6,
        context_tokens=4096,
        link_bytes_per_second=None if links is None else tuple(links),
        reserve_bytes=4 << 30 if device == "cuda" else None,
        host_reserve_bytes=8 << 30 if device == "cuda" else 1 << 30,
    )
    made = plan(inspect(Live()), read, heat, policy)
    unbound = tuple(rank.model_copy(update={"numa_node": None}) for rank in made.ranks)
    made = made.model_copy(update={"ranks": unbound})  # one node; its container may not bind
    return _by_layers(made) if case.whole_layers else made


def _by_layers(made: Any) -> Any:
    """The same bytes on the host, as whole layers: the last ones, and part of one."""
    from appliance.plan.model import format_ids

    ranks = []
    for rank in made.ranks:
        left = sum(len(p.host_experts) for p in rank.layers)
        layers = []
        for place in reversed(rank.layers):
            owned = sorted(place.device_experts | place.host_experts)
            away = set(owned[len(owned) - min(left, len(owned)) :])
            left -= len(away)
            homes = {"host": format_ids(away), "device": format_ids(set(owned) - away)}
            layers.append(place.model_copy(update=homes))
        ranks.append(rank.model_copy(update={"layers": tuple(reversed(layers))}))
    return made.model_copy(update={"ranks": tuple(ranks)})
