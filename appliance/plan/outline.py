"""All that planning needs of a checkpoint, in a few kilobytes of JSON: what its headers said.

A manifest of weights can carry it (as `outline` of its checkpoint), and it can be mailed by itself;
`size` takes either. Bytes stay exact; the names of 185,000 tensors are what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from appliance.checkpoint.linears import made_dense
from appliance.checkpoint.model import (
    Checkpoint,
    DensePart,
    ExpertShape,
    LookupTable,
    MoeLayer,
    ProjectionShape,
    Tensor,
)
from appliance.plan.strict import Bytes, Strict

Count = Annotated[int, Field(ge=1)]


class Projection(Strict):
    k: Count
    n: Count
    bits: float
    codebook: str
    bias: bool = False
    stored_bytes: Bytes | None = None


class Experts(Strict):
    """`count` neighbours of one shape."""

    count: Count
    gate: Projection
    up: Projection
    down: Projection


class Layer(Strict):
    index: int
    prefix: str
    projection_names: tuple[str, str, str]
    top_k: Count
    draft: bool
    experts: tuple[Experts, ...]


class Table(Strict):
    name: str
    layer: int | None
    rows: int
    row_bytes: Bytes
    size_bytes: Bytes
    format: str


class Dense(Strict):
    role: str
    size_bytes: Bytes
    tensor_parallel: bool


class Matrices(Strict):
    """`count` EXL3 matrices beside the routed experts whose trellises have this shape; `dense`: the
    engine makes them dense as it loads."""

    count: Count
    shape: tuple[int, ...]
    dense: bool = False


class Outline(Strict):
    """`shards`: files that hold tensors, and where their last tensor ends."""

    schema_version: Literal[1] = 1
    family: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    tables: tuple[Table, ...]
    dense: tuple[Dense, ...]
    size_bytes: Bytes
    digest: str
    config: dict[str, object]
    shards: dict[str, Bytes]
    matrices: tuple[Matrices, ...] = ()
    rank_sliced: int | None = None
    warnings: tuple[str, ...] = ()
    quantisation: str = "exl3"

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Outline:
        """What a folder's headers said."""
        shards: dict[str, int] = {}
        for tensor in checkpoint.tensors.values():
            shards[tensor.file] = max(shards.get(tensor.file, 0), tensor.stop)
        return cls(
            family=checkpoint.family,
            model_type=checkpoint.model_type,
            hidden_size=checkpoint.hidden_size,
            intermediate_size=checkpoint.intermediate_size,
            layers=tuple(map(_layer, checkpoint.layers)),
            tables=tuple(Table(**asdict(table)) for table in checkpoint.tables),
            dense=tuple(Dense(**asdict(part)) for part in checkpoint.dense),
            size_bytes=checkpoint.size_bytes,
            digest=checkpoint.digest,
            config=dict(checkpoint.config),
            shards=dict(sorted(shards.items())),
            matrices=tuple(_matrices(checkpoint)),
            rank_sliced=checkpoint.rank_sliced,
            warnings=checkpoint.warnings,
            quantisation=checkpoint.quantisation,
        )

    def checkpoint(self, path: Path) -> Checkpoint:
        """The same checkpoint to plan with; of its tensors only the ends of the shards and the
        shapes of EXL3 matrices are known.

        `path`: where the outline came from.
        """
        tensors = [Tensor(file, "U8", (stop,), file, 0, stop) for file, stop in self.shards.items()]
        tensors += [
            Tensor(_matrix_name(f"{kind}.{number}", some.dense), "I16", some.shape, "", 0, 0)
            for kind, some in enumerate(self.matrices)
            for number in range(some.count)
        ]
        return Checkpoint(
            path=path,
            family=self.family,
            model_type=self.model_type,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=tuple(map(_moe_layer, self.layers)),
            tables=tuple(LookupTable(**table.model_dump()) for table in self.tables),
            dense=tuple(DensePart(**part.model_dump()) for part in self.dense),
            size_bytes=self.size_bytes,
            digest=self.digest,
            config=self.config,
            tensors={tensor.name: tensor for tensor in tensors},
            rank_sliced=self.rank_sliced,
            warnings=self.warnings,
            quantisation=self.quantisation,
        )  # fmt: skip


def _matrices(checkpoint: Checkpoint) -> Iterator[Matrices]:
    experts = tuple(f"{layer.prefix}." for layer in checkpoint.layers)
    dense_too = made_dense(checkpoint)
    found = Counter(
        (tensor.shape, name in dense_too)
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".trellis") and not name.startswith(experts)
    )
    return (
        Matrices(count=number, shape=shape, dense=dense)
        for (shape, dense), number in sorted(found.items())
    )


def _matrix_name(number: str, dense: bool) -> str:
    """A name that says of a matrix what its own would."""
    return f"layers.0.matrices.{number}.{'kv_b_proj' if dense else 'matrix'}.trellis"


def _layer(layer: MoeLayer) -> Layer:
    return Layer(
        index=layer.index,
        prefix=layer.prefix,
        projection_names=layer.projection_names,
        top_k=layer.top_k,
        draft=layer.draft,
        experts=tuple(_runs(layer.experts)),
    )


def _runs(experts: tuple[ExpertShape, ...]) -> Iterator[Experts]:
    for shape, run in groupby(experts):
        gate, up, down = (Projection(**asdict(projection)) for projection in shape.projections)
        yield Experts(count=len(list(run)), gate=gate, up=up, down=down)


def _moe_layer(layer: Layer) -> MoeLayer:
    experts: tuple[ExpertShape, ...] = ()
    for run in layer.experts:
        shape = ExpertShape(
            *(ProjectionShape(**p.model_dump()) for p in (run.gate, run.up, run.down))
        )
        experts += (shape,) * run.count
    return MoeLayer(
        layer.index, layer.prefix, layer.projection_names, experts, layer.top_k, layer.draft
    )
