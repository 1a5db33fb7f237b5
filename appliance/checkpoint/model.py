"""What a checkpoint holds, read from its headers alone. Bytes are exact; K comes from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: where its bytes are. `start`, `stop` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """One EXL3 projection: `k` inputs, `n` outputs, `bits` a weight (K), one codebook.

    Bytes on disk: trellis k*n*bits/8; scales 2*(k+n) (suh, svh, fp16); marker 4 or 0; bias 2*n.
    `stored_bytes` is set only where the disk differs from that: older files pack the scales' signs,
    rank-sliced ones repeat scales and markers. Source: FACTS section 2.
    """

    k: int
    n: int
    bits: float
    codebook: str  # "3inst" | "mcg" | "mul1"
    bias: bool = False
    stored_bytes: int | None = None

    @property
    def trellis_bytes(self) -> int:
        return int(self.k * self.n * self.bits) // 8

    @property
    def scale_bytes(self) -> int:
        return 2 * (self.k + self.n)

    @property
    def marker_bytes(self) -> int:
        return 0 if self.codebook == "3inst" else 4

    @property
    def bias_bytes(self) -> int:
        return 2 * self.n if self.bias else 0

    @property
    def size_bytes(self) -> int:
        """Everything stored for this projection."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return self.trellis_bytes + self.scale_bytes + self.marker_bytes + self.bias_bytes


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The three projections of one routed expert: gate (w1), up (w3), down (w2)."""

    gate: ProjectionShape
    up: ProjectionShape
    down: ProjectionShape

    @property
    def projections(self) -> tuple[ProjectionShape, ProjectionShape, ProjectionShape]:
        return (self.gate, self.up, self.down)

    @property
    def trellis_bytes(self) -> int:
        return sum(p.trellis_bytes for p in self.projections)

    @property
    def size_bytes(self) -> int:
        """Everything stored for this expert."""
        return sum(p.size_bytes for p in self.projections)


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One layer with routed experts. `experts[e]` is the shape of expert e (shared objects).

    `prefix` is the name before `.{expert}.{projection}.trellis`, e.g. `model.layers.3.mlp.experts`;
    `projection_names` are the checkpoint's own words for gate, up and down.
    A draft (MTP, DSpark) layer has draft=True: never counted or ranked with the target's.
    """

    index: int
    prefix: str
    projection_names: tuple[str, str, str]
    experts: tuple[ExpertShape, ...]
    top_k: int
    draft: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(e.size_bytes for e in self.experts)


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A table read by rows (Engram, n-gram embedding): candidates for host memory.

    `row_bytes` is one row with its own scales; `size_bytes` all that is stored, shards and global
    scales included.
    """

    name: str
    layer: int | None
    rows: int
    row_bytes: int
    size_bytes: int
    format: str  # "fp8" | "int4" | "bf16" ...


@dataclass(frozen=True, slots=True)
class DensePart:
    """A sum of everything that is not a routed EXL3 expert or a table, by role.

    role: attention | mlp (dense layers) | shared_experts | router | norm | embedding | head |
    lookup (what an Engram or n-gram module has beside its table) | draft | vision | other |
    routed_experts (only where those of the target are not EXL3: see Checkpoint.quantisation).
    Draft experts that are EXL3 are MoeLayers, others count as draft.
    `tensor_parallel` says whether vLLM shards it over ranks (else each rank holds all of it), so
    one role may come in two parts.
    """

    role: str
    size_bytes: int
    tensor_parallel: bool


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. `digest` is sha256 over sorted (name, dtype, shape, size), not over weights.

    hidden_size and intermediate_size are the experts'; `config` is config.json as parsed;
    `tensors` maps every stored name that loads to its place; `warnings` are sentences to show.
    `size_bytes` = layers + tables + dense, to the byte. `quantisation` is how the target's routed
    experts are stored: "exl3"; else another format's name, "mixed", or "none" without experts.
    """

    path: Path
    family: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: tuple[MoeLayer, ...]
    tables: tuple[LookupTable, ...]
    dense: tuple[DensePart, ...]
    size_bytes: int
    digest: str
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor] = field(repr=False)
    rank_sliced: int | None = None  # tensor-parallel degree baked into the names, if any
    warnings: tuple[str, ...] = ()
    quantisation: str = "exl3"

    @property
    def target_layers(self) -> tuple[MoeLayer, ...]:
        """MoE layers of the model proper, draft layers left out."""
        return tuple(layer for layer in self.layers if not layer.draft)

    @property
    def expert_count(self) -> int:
        """Routed experts of the target layers."""
        return sum(len(layer.experts) for layer in self.target_layers)
