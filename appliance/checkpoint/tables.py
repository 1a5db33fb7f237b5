"""Lookup tables read by rows: DeepSeek's Engram, Qwen's and LongCat's n-gram embeddings.

A table is a `weight` [rows, columns], whole or in row shards, with scales of as many rows beside
it. DeepSeek-V4.1's FP8 rows are 256 values and 8 E8M0 scales: 264 bytes. Our int4 rows are two
values a byte and 8 fp16 scales, 144 bytes: `weight` U8 [rows, 128], `scale` F16 [rows, 8].
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from appliance.checkpoint.config import Architecture
from appliance.checkpoint.model import LookupTable, Tensor
from appliance.checkpoint.names import layer_of
from appliance.errors import CheckpointError

_TABLE = re.compile(
    r"(.*\bengram\.embed|.*\bngram_embedding|.*\bngram_embeddings\.embedders)"
    r"(?:\.(?:shard_)?(\d{1,6}))?\.(\w+)"
)
_FORMATS = {
    "F8_E4M3": "fp8", "F8_E5M2": "fp8", "BF16": "bf16", "F16": "fp16", "F32": "fp32", "F4": "fp4",
}  # fmt: skip


def take_tables(
    tensors: Mapping[str, Tensor], architecture: Architecture
) -> tuple[tuple[LookupTable, ...], dict[str, Tensor]]:
    """Split into tables and the rest. Raises CheckpointError for rows that do not match."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _TABLE.fullmatch(name)
        if match:
            found.setdefault(match[1], []).append((match[3], tensor))
        else:
            rest[name] = tensor
    tables = tuple(_table(key, parts, architecture) for key, parts in sorted(found.items()))
    layers = {table.layer for table in tables}
    for layer in architecture.engram_layers:
        if layer not in layers:
            raise CheckpointError(
                f"config.json puts an Engram table at layer {layer}; the shards hold no "
                f"layers.{layer}.engram.embed"
            )
    return tables, rest


def _table(key: str, parts: list[tuple[str, Tensor]], architecture: Architecture) -> LookupTable:
    weights = [tensor for part, tensor in parts if part == "weight"]
    others = [tensor for part, tensor in parts if part != "weight"]
    if not weights:
        raise CheckpointError(f"the table {key} has no weight, only {others[0].name}")
    first = weights[0]
    for weight in weights:
        if len(weight.shape) != 2 or 0 in weight.shape:
            raise CheckpointError(
                f"{weight.name} in {weight.file} is a table and must be [rows, columns], not "
                f"{list(weight.shape)}"
            )
        if (weight.dtype, weight.shape[1]) != (first.dtype, first.shape[1]):
            raise CheckpointError(f"{weight.name} and {first.name} are unlike parts of one table")
    rows = sum(weight.shape[0] for weight in weights)
    row_bytes = sum(weight.size_bytes for weight in weights) // rows
    per_row = [tensor for tensor in others if len(tensor.shape) > 1]
    if sum(tensor.shape[0] for tensor in per_row) not in (0, rows):
        raise CheckpointError(
            f"the table {key} has {rows} rows and scales for "
            f"{sum(tensor.shape[0] for tensor in per_row)}"
        )
    scale_bytes = sum(tensor.size_bytes for tensor in per_row) // rows
    return LookupTable(
        name=first.name if len(weights) == 1 else key,
        layer=layer_of(key, architecture.hidden_layers)[0],
        rows=rows,
        row_bytes=row_bytes + scale_bytes,
        size_bytes=sum(tensor.size_bytes for _, tensor in parts),
        format=_format(first.dtype, row_bytes, architecture.table_values),
    )


def _format(dtype: str, row_bytes: int, values: int) -> str:
    """Packed integers say their width only together with the config's number of values a row."""
    if dtype in _FORMATS:
        return _FORMATS[dtype]
    bits = 8 * row_bytes / values if values else None
    return f"int{bits:g}" if bits in (2, 4, 8) else dtype.lower()
