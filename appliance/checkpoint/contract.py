"""What quantization_config declares, held against what the shapes say. Shapes win.

`bits` is a declared average: packages say 2.51 for a mix of 2 and 3, but also 2.9 or 3.02 for K = 3
throughout. A value between the widths stored is true; one up to half a bit outside them is worth a
warning; one farther away cannot come from these tensors, and says that the files do not belong
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from appliance.checkpoint.config import Architecture
from appliance.checkpoint.model import ExpertShape, MoeLayer, ProjectionShape
from appliance.checkpoint.names import place
from appliance.errors import CheckpointError

_DEFAULT_CODEBOOK = ("3inst", "default", "")
_SLACK_BITS = 0.5


def check_contract(
    architecture: Architecture,
    stored_as: str,
    layers: tuple[MoeLayer, ...],
    linears: Mapping[str, ProjectionShape],
) -> list[str]:
    """Warnings; raises CheckpointError where config and tensors cannot both be right.

    `linears` are the EXL3 tensors that are no routed experts, by name, the head among them.
    """
    quantization = architecture.quantization
    method = quantization.get("quant_method")
    if not layers and not linears:
        if method == "exl3" and not stored_as.startswith("exl3"):
            raise CheckpointError(
                "config.json says quant_method exl3, but no tensor is EXL3 (none ends in .trellis)"
            )
        return []
    warnings = []
    if method is None:
        warnings.append(
            "config.json has no quantization_config.quant_method; the tensors are EXL3, and the "
            "engine must be told so"
        )
    elif method != "exl3":
        raise CheckpointError(
            f"config.json says quant_method {method!a}, but the tensors are EXL3",
            fix="take config.json from the repository that the shards came from",
        )
    _check_codebook(quantization, layers, linears)
    warnings += _check_bits(quantization, _averaged(architecture, layers, linears))
    warnings += _mixed_widths(layers)
    return warnings


def _distinct(layer: MoeLayer) -> Iterator[tuple[int, ExpertShape]]:
    """Each shape among the layer's experts once, with the first expert that has it."""
    seen: set[int] = set()
    for number, expert in enumerate(layer.experts):
        if id(expert) not in seen:
            seen.add(id(expert))
            yield number, expert


def _check_codebook(
    quantization: Mapping[str, object],
    layers: tuple[MoeLayer, ...],
    linears: Mapping[str, ProjectionShape],
) -> None:
    """A declared codebook must be the one that the markers choose: without one it decodes wrong."""
    declared = quantization.get("codebook")
    if declared is None:
        return
    if not isinstance(declared, str) or declared.lower() not in (*_DEFAULT_CODEBOOK, "mcg", "mul1"):
        raise CheckpointError(
            f"config.json has the codebook {declared!a}; 3inst, mcg and mul1 are known"
        )
    wanted = "3inst" if declared.lower() in _DEFAULT_CODEBOOK else declared.lower()
    named = [
        (f"{layer.prefix}.{number}.{word}", shape)
        for layer in layers
        for number, expert in _distinct(layer)
        for word, shape in zip(layer.projection_names, expert.projections, strict=True)
    ]
    for name, shape in (*named, *linears.items()):
        if shape.codebook != wanted:
            has = "no marker" if shape.codebook == "3inst" else f"the marker {shape.codebook}"
            raise CheckpointError(
                f"config.json declares the codebook {declared}; {name} has {has}: its weights "
                "would decode to noise"
            )


def _averaged(
    architecture: Architecture,
    layers: tuple[MoeLayer, ...],
    linears: Mapping[str, ProjectionShape],
) -> set[float]:
    """The widths that `bits` averages: head and draft layers have head_bits and mtp_bits."""
    widths = {
        shape.bits
        for layer in layers
        if not layer.draft
        for _, expert in _distinct(layer)
        for shape in expert.projections
    }
    for name, shape in linears.items():
        spot = place(name + ".", architecture.hidden_layers)
        if spot.role not in ("head", "draft"):
            widths.add(shape.bits)
    return widths


def _check_bits(quantization: Mapping[str, object], widths: set[float]) -> list[str]:
    declared = quantization.get("bits")
    if declared is None:
        return []
    if isinstance(declared, bool) or not isinstance(declared, int | float):
        raise CheckpointError(f"config.json has bits = {declared!a}; a number is needed")
    if not widths:
        return []
    low, high = min(widths), max(widths)
    if low <= declared <= high:
        return []
    text = " and ".join(f"{width:g}" for width in sorted(widths))
    if not low - _SLACK_BITS < declared < high + _SLACK_BITS:
        raise CheckpointError(
            f"config.json declares {declared} bits; the shapes say K = {text}, which does not "
            f"average to {declared}",
            fix="take config.json and shards from one repository and revision",
        )
    return [f"config.json declares {declared} bits; the shapes say K = {text}, and they count"]


def _mixed_widths(layers: tuple[MoeLayer, ...]) -> list[str]:
    """One sentence for all layers whose experts mix the same widths in the same projection."""
    mixes: dict[tuple[str, tuple[float, ...]], list[int]] = {}
    for layer in layers:
        distinct = [expert for _, expert in _distinct(layer)]
        for i, word in enumerate(layer.projection_names):
            widths = tuple(sorted({expert.projections[i].bits for expert in distinct}))
            if len(widths) > 1:
                mixes.setdefault((word, widths), []).append(layer.index)
    return [
        f"experts of layer{'s' * (len(indexes) > 1)} {', '.join(map(str, indexes))} mix "
        f"{' and '.join(f'{width:g}' for width in widths)} bits in {word}"
        for (word, widths), indexes in mixes.items()
    ]
