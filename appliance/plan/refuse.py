"""Splits and counts that this engine would serve wrongly, refused before planning.

Which checkpoints it can serve at all: appliance/checkpoint/support.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.checkpoint.model import Checkpoint, MoeLayer
from appliance.checkpoint.support import require_tensor_parallel
from appliance.errors import UnsupportedError, UsageError
from appliance.plan.cards import Card
from appliance.plan.kv import text_config
from appliance.plan.request import Policy
from appliance.plan.routing import Heat

FP8_CAPABILITY = (8, 9)
MOST_EXPERTS = 1024  # expert_kernels.launch.MAX_EXPERTS
MOST_PICKED = 32  # of one row: csrc/experts.cu


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


def refuse_impossible_split(
    checkpoint: Checkpoint, ranks: int, expert_parallel: bool, draft: bool = False
) -> None:
    """Raises UnsupportedError where this split, or the checkpoint under any, would be wrong.

    Draft layers are looked at where they are to be loaded (`draft`).
    """
    if checkpoint.family == "unknown":
        raise UnsupportedError(
            f"model type {checkpoint.model_type!r} is of no family this release knows, so nobody "
            "has checked that its experts are read and routed right",
            fix="use a release that names this family",
        )
    require_tensor_parallel(checkpoint, 1 if expert_parallel else ranks)
    if checkpoint.rank_sliced is not None:
        raise UnsupportedError(
            f"{checkpoint.path} has its experts cut for {checkpoint.rank_sliced} ranks in its "
            "files; this engine reads whole experts and cuts them itself",
            fix="use a package with whole experts",
        )
    _refuse_uneven_heads(text_config(checkpoint), ranks)
    for layer in checkpoint.layers if draft else checkpoint.target_layers:
        _refuse_mixed(layer)
        _refuse_biased(layer)
        if expert_parallel:
            _refuse_uneven(layer, ranks)


def _refuse_uneven_heads(config: Mapping[str, object], ranks: int) -> None:
    """vLLM gives each rank as many heads; key-value heads it shares evenly or repeats evenly."""
    heads, keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and heads % ranks:
        raise UnsupportedError(
            f"{heads} attention heads cannot be shared by {ranks} ranks",
            fix="use a number of GPUs that divides the heads",
        )
    if config.get("kv_lora_rank") is not None:
        return  # a latent is whole on every rank
    if isinstance(keys, int) and keys > 0 and keys % ranks and ranks % keys:
        raise UnsupportedError(
            f"{keys} key-value heads can be neither shared nor repeated evenly by {ranks} ranks",
            fix="use a number of GPUs that divides them, or a multiple of them",
        )


def refuse_too_many_experts(checkpoint: Checkpoint, ranks: int, whole: bool) -> None:
    """What a GPU's kernels cannot route, at the first step after minutes of loading. `whole`: each
    rank has whole experts, and so fewer. Raises UnsupportedError."""
    for layer in checkpoint.target_layers:
        here = len(layer.experts) // (ranks if whole else 1)
        if here > MOST_EXPERTS or layer.top_k > MOST_PICKED:
            raise UnsupportedError(
                f"layer {layer.index} has {here:,} experts on each card and picks {layer.top_k} of "
                f"them: the kernels take {MOST_EXPERTS:,} and {MOST_PICKED}",
                fix="use expert parallelism over more cards" if here > MOST_EXPERTS else None,
            )


def refuse_too_many_slots(checkpoint: Checkpoint, policy: Policy, ranks: int) -> None:
    """A slot holds one expert of its layer, so more slots than experts is a slip of the keyboard.
    How many of fewer fit is the plan's to say. Raises UsageError."""
    here = [len(layer.experts) // (ranks if policy.expert_parallel else 1)
            for layer in checkpoint.target_layers]  # fmt: skip
    if policy.cache_slots is not None and policy.cache_slots > max(here):
        raise UsageError(
            f"{policy.cache_slots:,} cache slots a layer are asked for, and a layer has "
            f"{max(here):,} experts on each rank",
            fix="ask for fewer with --cache-slots, or leave it out and the plan chooses",
        )


def refuse_kv_dtype(policy: Policy, cards: Sequence[Card]) -> None:
    """fp8 in the KV cache needs a card that computes in it. Raises UnsupportedError."""
    if policy.kv_dtype == "auto":
        return
    for card in cards:
        capability = card.gpu.compute_capability if card.gpu else None
        if card.device == "cpu":
            raise UnsupportedError(
                "the engine without a GPU keeps its KV cache in float32, and fp8 is asked for",
                fix="leave out --kv-dtype",
            )
        if capability is not None and tuple(map(int, capability.split("."))) < FP8_CAPABILITY:
            raise UnsupportedError(
                f"{card.name} has compute capability {capability}, and a KV cache of fp8 takes 8.9 "
                "(Ada) or newer",
                fix="leave out --kv-dtype, or ask for a shorter --context",
            )


def _refuse_mixed(layer: MoeLayer) -> None:
    """One kernel call serves a layer: its experts must agree on K per projection, and all their
    projections on one codebook."""
    first = layer.experts[0]
    books = [projection.codebook for projection in first.projections]
    if len(set(books)) > 1:
        named = ", ".join(map(" ".join, zip(layer.projection_names, books, strict=True)))
        raise UnsupportedError(
            f"layer {layer.index} has projections of several codebooks ({named}): the kernels take "
            "one a layer",
            fix="use a package quantised with one codebook",
        )
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


def _refuse_biased(layer: MoeLayer) -> None:
    """The engine adds no bias to a routed expert: leaving it out would answer wrongly."""
    for number, expert in enumerate(layer.experts):
        for name, projection in zip(layer.projection_names, expert.projections, strict=True):
            if projection.bias:
                raise UnsupportedError(
                    f"layer {layer.index}: {name} of expert {number} has a bias, which the kernels "
                    "do not add",
                    fix="use a model whose routed experts have no biases",
                )


def _refuse_uneven(layer: MoeLayer, ranks: int) -> None:
    if len(layer.experts) % ranks:
        raise UnsupportedError(
            f"layer {layer.index} has {len(layer.experts)} experts, which {ranks} ranks cannot "
            "share evenly",
            fix="use a number of ranks that divides the experts",
        )
