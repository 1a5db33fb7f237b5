"""A checkpoint from its headers: layers, experts, bits, tables, dense parts, exact bytes.

No tensor's bytes are ever read, so 309 GiB cost what their 185,000 names cost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from appliance.checkpoint.collector import collector_paused
from appliance.checkpoint.config import Architecture, read_architecture
from appliance.checkpoint.contract import check_contract
from appliance.checkpoint.coverage import check_layers
from appliance.checkpoint.dense import dense_parts, quantisation, read_linears
from appliance.checkpoint.experts import LayerReader, take_experts
from appliance.checkpoint.folder import read_config, read_shards
from appliance.checkpoint.linears import Linears
from appliance.checkpoint.model import Checkpoint, Tensor
from appliance.checkpoint.names import place
from appliance.checkpoint.tables import take_tables
from appliance.errors import CheckpointError


def read_checkpoint(path: Path) -> Checkpoint:
    """The model in folder `path`, sharded or in one file, with an index or without.

    Raises CheckpointError, which names the file or tensor, for anything that would load wrong.
    A model whose routed experts are not EXL3 is read too: see Checkpoint.quantisation.
    """
    with collector_paused():
        config = read_config(path)
        architecture = read_architecture(config)
        tensors, warnings = read_shards(path, lambda name: _is_needed(name, architecture))
        return _build(path, config, architecture, tensors, warnings)


def checkpoint_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the sorted (name, dtype, shape, size): the same model however it is sharded."""
    kinds: dict[tuple[str, tuple[int, ...]], str] = {}
    lines = []
    for name in sorted(tensors):
        tensor = tensors[name]
        kind = (tensor.dtype, tensor.shape)
        text = kinds.get(kind)
        if text is None:
            text = kinds[kind] = f" {tensor.dtype} {tensor.shape} {tensor.size_bytes}\n"
        lines.append(name + text)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _build(
    path: Path,
    config: Mapping[str, object],
    architecture: Architecture,
    tensors: dict[str, Tensor],
    warnings: list[str],
) -> Checkpoint:
    banks, others = take_experts(tensors)
    tables, rest = take_tables(others, architecture)
    warnings = warnings + check_layers(architecture, banks, rest)
    linears = Linears()
    reader = LayerReader(architecture, linears)
    read = (reader.read(prefix, bank) for prefix, bank in banks.items() if bank.is_exl3)
    layers = tuple(sorted(read, key=lambda layer: layer.index))
    plain = {prefix: bank for prefix, bank in banks.items() if not bank.is_exl3}
    stored_as = quantisation(architecture, layers, plain)
    dense_linears = read_linears(rest, linears)
    warnings += check_contract(architecture, stored_as, layers, dense_linears)
    return Checkpoint(
        path=path,
        family=architecture.family,
        model_type=architecture.model_type,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        layers=layers,
        tables=tables,
        dense=dense_parts(rest, plain, architecture.hidden_layers),
        size_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
        digest=checkpoint_digest(tensors),
        config=config,
        tensors=tensors,
        rank_sliced=_rank_sliced(reader.ranks),
        warnings=tuple(warnings),
        quantisation=stored_as,
    )


def _is_needed(name: str, architecture: Architecture) -> bool:
    """Whether the target model is wrong without this tensor; it runs without draft layers."""
    spot = place(name, architecture.hidden_layers)
    return not spot.draft and (spot.layer is not None or spot.role != "other")


def _rank_sliced(degrees: set[int]) -> int | None:
    if len(degrees) > 1:
        raise CheckpointError(
            "experts are sliced for different tensor-parallel degrees (1 is whole): "
            + ", ".join(map(str, sorted(degrees)))
        )
    degree = next(iter(degrees), 1)
    return degree if degree > 1 else None
