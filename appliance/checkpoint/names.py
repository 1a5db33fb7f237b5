"""What a tensor's name says: which layer, which part of the model, and how vLLM spreads it.

Two tables, first match wins. Whether a part is sharded over tensor-parallel ranks follows vLLM's
model classes (0.32, 0.33): column- and row-parallel linears and the vocabulary are sharded;
`ReplicatedLinear`, `disable_tp=True`, norms and routers are held whole by every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WRAPPERS = r"(?:(?:model|language_model|text_model)\.)*"
_LAYER = re.compile(_WRAPPERS + r"layers\.(0|[1-9]\d{0,5})\.")
_DRAFT = re.compile(_WRAPPERS + r"mtp\w*\.(?:layers\.)?(?:(0|[1-9]\d{0,5})\.)?")

# (what the name contains, role, sharded by tensor parallelism)
_ROLES = tuple(
    (re.compile(pattern), role, sharded)
    for pattern, role, sharded in (
        # Vision towers: linears of their blocks are sharded, the rest is whole.
        (r"^(?:model\.)?(?:vision|visual|aligner|mm_|multi_modal_|image_).*norm", "vision", False),
        (r"^(?:model\.)?(?:vision|visual).*\.(?:attn|self_attn|mlp|ffn)\.", "vision", True),
        (r"^(?:model\.)?(?:aligner|mm_|multi_modal_).*\.weight", "vision", True),
        (r"^(?:model\.)?(?:vision|visual|aligner|mm_|multi_modal_|image_)", "vision", False),
        # Engram and n-gram modules beside their tables (tables.py).
        (r"\.engram\.wkv\.", "lookup", True),
        (r"\.(?:engram|ple)\.|\bngram_embeddings?\.", "lookup", False),
        # Attention: low-rank inputs, indexers and compressors are replicated.
        (r"\.\w*(?:attn|attention)\..*(?:norm|indexer|compressor)", "attention", False),
        (r"\.\w*(?:attn|attention)\.(?:\w*_a_proj\w*|wq_a|wkv)\.", "attention", False),
        (r"\.\w*(?:attn|attention)\.", "attention", True),
        (r"\.shared_experts?\.", "shared_experts", True),
        (r"\.shared_expert_gate\.", "shared_experts", False),
        (r"\.(?:gate|router)\.|e_score_correction_bias|\.tid2eid", "router", False),
        (r"norm", "norm", False),
        (r"\bembed_tokens\.|^embed\.|\bword_embeddings\.", "embedding", True),
        (r"\blm_head\.|^head\.", "head", True),
        (r"\.(?:mlp|ffn|feed_forward)\.", "mlp", True),
    )
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs. `layer` counts draft layers on from the last target layer."""

    layer: int | None
    draft: bool
    role: str
    sharded: bool


def place(name: str, hidden_layers: int) -> Place:
    """Layer, role and sharding of one stored tensor that is no routed expert and no table."""
    layer, draft = layer_of(name, hidden_layers)
    for pattern, role, sharded in _ROLES:
        if pattern.search(name):
            return Place(layer, draft, "draft" if draft else role, sharded)
    return Place(layer, draft, "draft" if draft else "other", False)


def layer_of(name: str, hidden_layers: int) -> tuple[int | None, bool]:
    """(layer, is it a draft layer). `mtp.1` of a 40-layer model is layer 41, as vLLM numbers it."""
    match = _DRAFT.match(name)
    if match:
        return (hidden_layers + int(match[1]) if match[1] else None), True
    match = _LAYER.match(name)
    if match:
        layer = int(match[1])
        return layer, layer >= hidden_layers
    return None, False
