"""What config.json says of a mixture-of-experts model, whatever the family calls its fields."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import CheckpointError

# One row per fact: the names that families use, the first that is set wins; null counts as unset.
_LAYERS = ("num_hidden_layers", "n_layers")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
_SHARED = ("n_shared_experts", "num_shared_experts")
_INTERMEDIATE = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_mtp_layers")
_DRAFT_EXPERTS = ("dspark_n_routed_experts",)
_DRAFT_TOP_K = ("dspark_num_experts_per_tok",)
# With none of these the config does not say, in a way known here, which layers have experts.
_LAYER_RULES = ("first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers")
_TEXT_CONFIGS = ("text_config", "language_config", "llm_config")
_FAMILIES = (
    "deepseek_v4", "deepseek", "glm", "gpt_oss", "kimi", "longcat", "mimo", "minimax", "mixtral",
    "qwen",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of the model. `experts` is 0 for a model without routed experts.

    `moe_layers` are the target's layers with experts, None where the config does not say in a way
    known here; draft layers come after `hidden_layers` and have their own expert count and top-k.
    `table_values` is the number of values in a lookup-table row, 0 where it is not said.
    `quantization` is the quantization_config, empty when there is none.
    """

    model_type: str
    family: str
    hidden_layers: int
    hidden_size: int
    intermediate_size: int
    experts: int
    top_k: int
    shared_experts: int
    moe_layers: frozenset[int] | None
    draft_layers: int
    draft_experts: int
    draft_top_k: int
    engram_layers: tuple[int, ...]
    table_values: int
    quantization: Mapping[str, object]


def read_architecture(config: Mapping[str, object]) -> Architecture:
    """Read the text model's fields: a nested text_config wins over the top level."""
    text = text_config(config)
    experts = _number(text, _EXPERTS, 0, most=100_000)
    top_k = _number(text, _TOP_K, 0)
    if experts and not 1 <= top_k <= experts:
        raise CheckpointError(
            f"config.json has {experts} routed experts and picks {top_k} of them for a token"
        )
    layers = _number(text, _LAYERS, None, most=10_000)
    if layers == 0:
        raise CheckpointError("config.json says the model has 0 layers")
    quantization = text.get("quantization_config") or {}
    if not isinstance(quantization, Mapping):
        raise CheckpointError("config.json has a quantization_config that is not an object")
    model_type = str(config.get("model_type") or text.get("model_type") or "unknown")
    return Architecture(
        model_type=model_type,
        family=_family(model_type),
        hidden_layers=layers,
        hidden_size=_number(text, ("hidden_size",), None),
        intermediate_size=_number(text, _INTERMEDIATE, None if experts else 0),
        experts=experts,
        top_k=top_k,
        shared_experts=_number(text, _SHARED, 0),
        moe_layers=moe_layers(text, layers) if experts else frozenset(),
        draft_layers=_number(text, _DRAFT_LAYERS, 0),
        draft_experts=_number(text, _DRAFT_EXPERTS, experts, most=100_000),
        draft_top_k=_number(text, _DRAFT_TOP_K, top_k),
        engram_layers=tuple(_numbers(text, "engram_layer_ids")),
        table_values=_number(text, ("engram_head_dim",), 0),
        quantization=quantization,
    )


def moe_layers(text: Mapping[str, object], layers: int) -> frozenset[int] | None:
    """The layers with routed experts, 0-based; None where the config leaves it to the names.

    The rules are those of vLLM's model classes, by field instead of by class.
    """
    everywhere = range(layers)
    if isinstance(text.get("moe_layer_freq"), list):
        flags = _per_layer(_numbers(text, "moe_layer_freq"), "moe_layer_freq", layers)
        return frozenset(i for i in everywhere if flags[i])
    kinds = text.get("mlp_layer_types")
    if isinstance(kinds, list):
        kinds = _per_layer(kinds, "mlp_layer_types", layers)
        return frozenset(i for i in everywhere if kinds[i] != "dense")
    if all(text.get(rule) is None for rule in _LAYER_RULES):
        return None
    dense_first = _number(text, ("first_k_dense_replace",), 0)
    every = _number(text, ("moe_layer_freq",), 1)
    step = _number(text, ("decoder_sparse_step",), 1)
    if every < 1 or step < 1:
        raise CheckpointError(
            f"config.json has experts every {min(every, step)} layers; it must be 1 or more"
        )
    dense = set(_numbers(text, "mlp_only_layers"))
    return frozenset(
        i
        for i in everywhere
        if i >= dense_first and i % every == 0 and (i + 1) % step == 0 and i not in dense
    )


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The language model's settings, which multimodal configs nest, over those of the whole."""
    for key in _TEXT_CONFIGS:
        text = config.get(key)
        if isinstance(text, dict):
            # Facts of the whole model (its quantisation) stay at the top level.
            return ChainMap(text, dict(config))
    return config


def _family(model_type: str) -> str:
    name = model_type.lower().replace("-", "_")
    return next((family for family in _FAMILIES if name.startswith(family)), "unknown")


def _number(
    config: Mapping[str, object],
    names: tuple[str, ...],
    default: int | None,
    most: int = 1 << 40,
) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise CheckpointError(f"config.json has {name} = {value!a}; a whole number is needed")
        if value > most:
            raise CheckpointError(f"config.json has {name} = {value}; {most} would be a lot")
        return value
    if default is None:
        raise CheckpointError(f"config.json has no {' or '.join(names)}")
    return default


def _numbers(config: Mapping[str, object], name: str) -> list[int]:
    values = config.get(name)
    if values is None:
        return []
    if not isinstance(values, list) or any(type(v) is not int for v in values):
        raise CheckpointError(f"config.json has {name} = {values!a}; a list of numbers is needed")
    return values


def _per_layer(values: list[Any], name: str, layers: int) -> list[Any]:
    """One value a layer; families that list their draft layers too list them last."""
    if len(values) < layers:
        raise CheckpointError(
            f"config.json has {len(values)} entries in {name} for {layers} layers"
        )
    return values[:layers]
