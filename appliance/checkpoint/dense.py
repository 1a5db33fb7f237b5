"""Everything that is no routed EXL3 expert and no table: bytes by role, and its EXL3 linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from appliance.checkpoint.config import Architecture
from appliance.checkpoint.experts import Bank
from appliance.checkpoint.linears import PARTS, Linears
from appliance.checkpoint.model import DensePart, MoeLayer, ProjectionShape, Tensor
from appliance.checkpoint.names import layer_of, place

_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8", "F4": "fp4"}


def dense_parts(
    rest: Mapping[str, Tensor], plain: Mapping[str, Bank], hidden_layers: int
) -> tuple[DensePart, ...]:
    """Bytes by (role, sharded or not), sorted. `plain` are the experts that are not EXL3."""
    sizes: Counter[tuple[str, bool]] = Counter()
    for name, tensor in rest.items():
        spot = place(name, hidden_layers)
        sizes[spot.role, spot.sharded] += tensor.size_bytes
    for prefix, bank in plain.items():
        _, draft = layer_of(prefix + ".", hidden_layers)
        for tensor in bank.tensors():
            sizes["draft" if draft else "routed_experts", True] += tensor.size_bytes
    return tuple(
        DensePart(role, size, sharded) for (role, sharded), size in sorted(sizes.items()) if size
    )


def read_linears(rest: Mapping[str, Tensor], linears: Linears) -> dict[str, ProjectionShape]:
    """The EXL3 linears outside the routed experts (attention, shared experts, head), by name."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in rest.items():
        key, _, part = name.rpartition(".")
        if part in PARTS:
            groups.setdefault(key, {})[part] = tensor
    for key, parts in groups.items():
        for part in ("bias", "weight"):
            if f"{key}.{part}" in rest:
                parts[part] = rest[f"{key}.{part}"]
    return {key: linears.read(key, parts) for key, parts in groups.items()}


def quantisation(
    architecture: Architecture, layers: tuple[MoeLayer, ...], plain: Mapping[str, Bank]
) -> str:
    """How the target's routed experts are stored: see Checkpoint.quantisation."""
    exl3 = any(not layer.draft for layer in layers)
    others = [
        bank
        for prefix, bank in plain.items()
        if not layer_of(prefix + ".", architecture.hidden_layers)[1]
    ]
    if not others:
        return "exl3" if exl3 else "none"
    return "mixed" if exl3 else _format(architecture.quantization, others[0])


def _format(quantization: Mapping[str, object], bank: Bank) -> str:
    """The config's word for it where it has one: packed 4-bit types look alike in a header."""
    if any(tensor.name.rpartition(".")[2] in PARTS for tensor in bank.fused):
        return "exl3-fused"
    for key in ("expert_dtype", "quant_method"):
        word = quantization.get(key)
        if isinstance(word, str) and word != "exl3":
            return word
    largest = max(bank.tensors(), key=lambda tensor: tensor.size_bytes)
    return _FORMATS.get(largest.dtype, largest.dtype.lower())
