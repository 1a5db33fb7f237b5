"""Models, splits and counts that this engine would serve wrongly, refused before planning."""

from __future__ import annotations

from appliance.checkpoint.model import Checkpoint, MoeLayer
from appliance.errors import UnsupportedError, UsageError
from appliance.plan.kv import text_config
from appliance.plan.routing import Heat

# EXL3 rotates inputs and outputs in blocks of 128: a shard that cuts one decodes to noise.
HADAMARD = 128


def refuse_unservable(checkpoint: Checkpoint) -> None:
    quantisation = checkpoint.config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if method != "exl3":
        raise UnsupportedError(
            f"{checkpoint.path} is quantised with {method or 'nothing'}: this engine keeps only "
            "EXL3 experts on the host",
            fix="use an EXL3 package of the model",
        )
    if not checkpoint.expert_count:
        raise UnsupportedError(
            f"{checkpoint.path} has no routed experts: there is nothing to place",
            fix="serve a dense model with vLLM itself",
        )


def refuse_foreign_heat(heat: Heat, checkpoint: Checkpoint) -> None:
    experts = {layer.index: len(layer.experts) for layer in checkpoint.target_layers}
    for layer, row in heat.counts.items():
        if experts.get(layer) != len(row):
            has = f"{experts[layer]} experts" if layer in experts else "no routed experts"
            raise UsageError(
                f"the routing counts give layer {layer} {len(row)} experts and the model's has "
                f"{has}",
                fix="use counts of this model",
            )


def refuse_impossible_split(checkpoint: Checkpoint, ranks: int, expert_parallel: bool) -> None:
    """Raises UnsupportedError where this split, or the checkpoint under any, would be wrong."""
    sliced = checkpoint.rank_sliced
    if sliced is not None and sliced != ranks:
        raise UnsupportedError(
            f"the files are already cut for {sliced} ranks and cannot serve {ranks}",
            fix=f"use {sliced} GPUs, or the package that is not cut",
        )
    heads = text_config(checkpoint).get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        raise UnsupportedError(
            f"{heads} attention heads cannot be shared by {ranks} ranks",
            fix="use a number of GPUs that divides the heads",
        )
    for layer in checkpoint.layers:
        _refuse_mixed(layer)
        if expert_parallel:
            _refuse_uneven(layer, ranks)
        else:
            _refuse_unaligned(layer, ranks)


def _refuse_mixed(layer: MoeLayer) -> None:
    """One kernel call serves a layer: its experts must agree on K and codebook per projection."""
    first = layer.experts[0]
    for number, expert in enumerate(layer.experts):
        if expert is first:
            continue
        for name, a, b in zip(
            layer.projection_names, first.projections, expert.projections, strict=True
        ):
            if a != b:
                raise UnsupportedError(
                    f"layer {layer.index} mixes {name} of {a.k} x {a.n} at {a.bits:g} bits "
                    f"{a.codebook} (expert 0) with {b.k} x {b.n} at {b.bits:g} bits {b.codebook} "
                    f"(expert {number}): the kernels take one shape, K and codebook a layer and "
                    "projection",
                    fix="use a package quantised with one K for all experts of a layer",
                )


def _refuse_uneven(layer: MoeLayer, ranks: int) -> None:
    if len(layer.experts) % ranks:
        raise UnsupportedError(
            f"layer {layer.index} has {len(layer.experts)} experts, which {ranks} ranks cannot "
            "share evenly",
            fix="use a number of ranks that divides the experts",
        )


def _refuse_unaligned(layer: MoeLayer, ranks: int) -> None:
    shape = layer.experts[0]
    cuts = ((layer.projection_names[0], shape.gate.n), (layer.projection_names[1], shape.up.n),
            (layer.projection_names[2], shape.down.k))  # fmt: skip
    for name, size in cuts:
        if size % (ranks * HADAMARD):
            raise UnsupportedError(
                f"tensor parallelism over {ranks} ranks cuts {name} of layer {layer.index} into "
                f"{size}/{ranks} = {size / ranks:g}, which is not a multiple of {HADAMARD}: the "
                "result would be wrong without a message",
                fix="use --expert-parallel, which gives each rank whole experts",
            )
