"""Bytes of KV cache for so many tokens on one rank, by the attention the config describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from appliance.checkpoint import config
from appliance.checkpoint.model import Checkpoint
from appliance.errors import UnsupportedError

DEFAULT_CONTEXT_LIMIT = 262_144
# FACTS section 1: 1.95 to 2.24 KB a token and card over 40 layers; the upper end is planned.
V4_BYTES_PER_TOKEN_AND_LAYER = 2240 // 40
# A sparse-attention indexer keeps one byte a value and a scale beside the latent.
INDEX_SCALE_BYTES = 4
FP8_GROUP = 128
# vLLM rounds a request up to blocks and keeps one empty block; 128 is the largest it uses here.
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes one token takes on one rank, how that is known, and in words."""

    bytes_per_token: int
    source: Literal["formula", "measured"]
    note: str


def text_config(checkpoint: Checkpoint) -> Mapping[str, object]:
    """The language model's settings, wherever a multimodal config nests them."""
    return config.text_config(checkpoint.config)


def context_limit(checkpoint: Checkpoint) -> int | None:
    """Longest context the model was made for, None where its config does not say."""
    return _whole(text_config(checkpoint), "max_position_embeddings")


def vocabulary(checkpoint: Checkpoint) -> int:
    """Tokens that logits are worked out for; 0 where the config does not say."""
    return _whole(text_config(checkpoint), "vocab_size") or 0


def kv_cost(
    checkpoint: Checkpoint, tensor_parallel: int, float32: bool = False, fp8: bool = False
) -> KvCost:
    """KV bytes per token and rank. Raises UnsupportedError where the config does not say.

    float32: the engine computes in float32, as it does without a GPU. fp8: vLLM's --kv-cache-dtype
    fp8, one byte a value; with an indexer its layout fp8_ds_mla (vLLM's flashmla_sparse.py): one
    scale of 4 B for 128 latent values, and the rope part in 2 B.

    Grouped-query heads are shared by ranks and repeated when there are more ranks than heads;
    a latent (MLA) cache is held whole by every rank.
    """
    settings = text_config(checkpoint)
    layers = _whole(settings, "num_hidden_layers")
    if layers is None:
        raise UnsupportedError(
            "config.json does not say num_hidden_layers: its KV cache is unknown"
        )
    if checkpoint.model_type.startswith("deepseek_v4"):
        return KvCost(
            V4_BYTES_PER_TOKEN_AND_LAYER * layers,
            "measured",
            "2.24 KB a token over 40 layers, measured on DeepSeek-V4.1-Flash; fp8 in any case",
        )
    item = 4 if float32 else 1 if fp8 else _item_bytes(settings)
    attending, which = _attending_layers(settings, layers)
    latent, rope = _whole(settings, "kv_lora_rank"), _whole(settings, "qk_rope_head_dim")
    if latent is not None and rope is not None:
        index = _whole(settings, "index_head_dim")
        size, values = (latent + rope) * item, f"({latent} latent + {rope} rope) x {item} B"
        if index is not None and item == 1:
            scales = latent // FP8_GROUP * INDEX_SCALE_BYTES
            size = latent + scales + 2 * rope
            values = f"({latent} latent + {scales} B of scales + {rope} rope x 2 B)"
        note = f"{attending} {which}layers x {values}"
        if index is not None:
            note += f" and {index} + {INDEX_SCALE_BYTES} B of index"
            size += index + INDEX_SCALE_BYTES
        return KvCost(attending * size, "formula", f"{note}, whole on every rank")
    heads = _whole(settings, "num_key_value_heads") or _whole(settings, "num_attention_heads")
    width = _whole(settings, "head_dim") or _head_width(settings)
    if heads is None or width is None:
        raise UnsupportedError(
            f"the attention of model type {checkpoint.model_type!r} is not one this release can "
            "size: config.json has neither kv_lora_rank nor num_key_value_heads with head_dim"
        )
    mine = max(1, heads // tensor_parallel)
    return KvCost(
        2 * attending * mine * width * item,
        "formula",
        f"2 x {attending} {which}layers x {mine} heads x {width} x {item} B",
    )


def kv_cache_bytes(cost: KvCost, tokens: int) -> int:
    """Room for so many tokens in whole blocks, and vLLM's one empty block."""
    return (-(-tokens // BLOCK_TOKENS) + 1) * BLOCK_TOKENS * cost.bytes_per_token


def kv_tokens(cost: KvCost, size_bytes: int) -> int:
    """Tokens that a cache of this size holds: the inverse of kv_cache_bytes, in whole blocks."""
    blocks = size_bytes // (BLOCK_TOKENS * cost.bytes_per_token)
    return max(0, blocks - 1) * BLOCK_TOKENS


def _attending_layers(config: Mapping[str, object], layers: int) -> tuple[int, str]:
    """Hybrid models keep keys only in some layers; sliding windows are counted whole."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers and "linear_attention" in kinds:
        return layers - kinds.count("linear_attention"), "attention "
    return layers, ""


def _item_bytes(config: Mapping[str, object]) -> int:
    return 4 if (config.get("dtype") or config.get("torch_dtype")) == "float32" else 2


def _head_width(config: Mapping[str, object]) -> int | None:
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    return None if hidden is None or not heads else hidden // heads or None


def _whole(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
