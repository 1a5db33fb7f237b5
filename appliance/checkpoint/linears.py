"""One EXL3 linear layer from its stored tensors: sizes, bits and codebook, read from shapes.

Source: FACTS section 2. `key.trellis` int16 [k/16, n/16, 16*K]; `suh`, `svh` fp16 [k], [n] (older
files: int16 sign words `su` [k/16], `sv` [n/16]); `mcg` or `mul1` int32 [], whose presence names
the codebook; `bias` fp16 [n], optional. K is 1..8, or 1.5, 2.5, 3.5 with mul1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from appliance.checkpoint.model import Checkpoint, ProjectionShape, Tensor
from appliance.errors import CheckpointError

PARTS = frozenset(("trellis", "suh", "svh", "su", "sv", "mcg", "mul1"))
HADAMARD = 128
HEAD = "head.trellis"
_READ_DENSE = re.compile(r"(?!mtp)(?:\w+\.)*layers\.(\d+)\.[\w.]*\.(wo_a|kv_b_proj)\.trellis")
_WIDTHS: dict[int, float] = {16 * k: k for k in range(1, 9)} | {24: 1.5, 40: 2.5, 56: 3.5}


def made_dense(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of EXL3 trellises of which vLLM's classes take a dense copy as they load.

    DeepSeek-V4 reads the weight of wo_a itself, V4.1's head gets no quantisation method, and
    latent attention absorbs kv_b_proj.
    """
    drafts = {layer.index for layer in checkpoint.layers if layer.draft}
    v4 = checkpoint.model_type.startswith("deepseek_v4")
    names = {
        match[0]
        for name in checkpoint.tensors
        if (match := _READ_DENSE.fullmatch(name))
        and int(match[1]) not in drafts
        and (v4 or match[2] == "kv_b_proj")
    }
    head = checkpoint.model_type == "deepseek_v41" and HEAD in checkpoint.tensors
    return frozenset(names | ({HEAD} if head else set()))


class Linears:
    """Reads linears; equal ones share one ProjectionShape, so 46,080 cost a handful."""

    def __init__(self) -> None:
        self._by_signature: dict[tuple[object, ...], ProjectionShape] = {}
        self._shapes: dict[ProjectionShape, ProjectionShape] = {}

    def read(self, key: str, parts: Mapping[str, Tensor]) -> ProjectionShape:
        """The shape of linear `key`. Raises CheckpointError with its name and file."""
        signature = tuple((part, t.dtype, t.shape) for part, t in parts.items())
        shape = self._by_signature.get(signature)
        if shape is None:
            shape = self._by_signature[signature] = self.shared(_read(key, parts))
        return shape

    def shared(self, shape: ProjectionShape) -> ProjectionShape:
        return self._shapes.setdefault(shape, shape)


def _read(key: str, parts: Mapping[str, Tensor]) -> ProjectionShape:
    trellis = parts.get("trellis")
    where = f"{key} in {next(iter(parts.values())).file}"
    if trellis is None:
        raise CheckpointError(f"{where} has {_words(parts)} but no trellis")
    strangers = parts.keys() - PARTS - {"bias"}
    if strangers:
        raise CheckpointError(f"{where} has a trellis and {_words(strangers)}: two weights for one")
    if trellis.dtype != "I16" or len(trellis.shape) != 3:
        raise CheckpointError(
            f"{where}: a trellis is I16 [k/16, n/16, 16*K], not {_describe(trellis)}"
        )
    k, n, bits = 16 * trellis.shape[0], 16 * trellis.shape[1], _WIDTHS.get(trellis.shape[2])
    if bits is None:
        raise CheckpointError(
            f"{where}: the trellis is {trellis.shape[2]} wide; 16*K with K = 1 to 8, 1.5, 2.5 or "
            "3.5 are the widths of EXL3"
        )
    if k % HADAMARD or n % HADAMARD or not k or not n:
        raise CheckpointError(f"{where} is {k} x {n}; EXL3 needs multiples of {HADAMARD}")
    codebook = _codebook(where, parts)
    if bits % 1 and codebook != "mul1":
        raise CheckpointError(f"{where} has K = {bits}, which only the codebook mul1 has")
    _check_scales(where, parts, ("suh", "su"), k)
    _check_scales(where, parts, ("svh", "sv"), n)
    bias = parts.get("bias")
    if bias is not None and (bias.dtype, bias.shape) != ("F16", (n,)):
        raise CheckpointError(f"{where}: the bias must be F16 [{n}], not {_describe(bias)}")
    shape = ProjectionShape(k, n, bits, codebook, bias is not None)
    stored = sum(t.size_bytes for t in parts.values())
    return shape if shape.size_bytes == stored else replace(shape, stored_bytes=stored)


def _codebook(where: str, parts: Mapping[str, Tensor]) -> str:
    markers = [name for name in ("mcg", "mul1") if name in parts]
    if len(markers) == 2:
        raise CheckpointError(f"{where} has both codebook markers, mcg and mul1")
    for name in markers:
        if (parts[name].dtype, parts[name].shape) != ("I32", ()):
            raise CheckpointError(
                f"{where}: the marker {name} must be I32 [], not {_describe(parts[name])}"
            )
    return markers[0] if markers else "3inst"


def _check_scales(
    where: str, parts: Mapping[str, Tensor], names: tuple[str, str], count: int
) -> None:
    present = [name for name in names if name in parts]
    if not present:
        raise CheckpointError(f"{where} has no {names[0]}: the scales of {count} values")
    if len(present) == 2:
        raise CheckpointError(f"{where} has both {names[0]} and the older {names[1]}")
    wanted = ("F16", (count,)) if present[0] == names[0] else ("I16", (count // 16,))
    tensor = parts[present[0]]
    if (tensor.dtype, tensor.shape) != wanted:
        raise CheckpointError(
            f"{where}: {present[0]} must be {wanted[0]} {list(wanted[1])}, not {_describe(tensor)}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _words(names: Mapping[str, Tensor] | frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))
