"""What a release is: every file with its sha256, whole and per 16 MiB chunk. Strict JSON."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.strictjson import parse
from appliance.errors import ApplianceError, WeightsError
from appliance.plan.outline import Outline
from appliance.weights.names import check_paths

CHUNK_BYTES = 16 << 20
MAX_MANIFEST_BYTES = 256 << 20
MAX_SIGNATURE_BYTES = 4 << 10
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class File(Strict):
    """One file. `chunks` are sha256 of its 16 MiB pieces, the last one shorter; none if empty."""

    path: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256
    chunks: tuple[Sha256, ...]

    @model_validator(mode="after")
    def _chunks_cover_the_file(self) -> Self:
        if len(self.chunks) != chunk_count(self.size_bytes):
            raise ValueError(
                f"{self.path} has {len(self.chunks)} chunks, {self.size_bytes} bytes need "
                f"{chunk_count(self.size_bytes)}"
            )
        return self


class Summary(Strict):
    """What the headers say, so that nobody needs the shards to know it."""

    family: str
    quantisation: str
    layers: int
    experts: int
    bits: tuple[float, ...]
    size_bytes: int
    digest: Sha256
    outline: Outline | None = None  # all that planning needs; older manifests lack it

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Summary:
        layers = checkpoint.target_layers
        shapes = {p for layer in layers for e in layer.experts for p in e.projections}
        return cls(
            family=checkpoint.family,
            quantisation=checkpoint.quantisation,
            layers=len(layers),
            experts=checkpoint.expert_count,
            bits=tuple(sorted({shape.bits for shape in shapes})),
            size_bytes=checkpoint.size_bytes,
            digest=checkpoint.digest,
            outline=Outline.of(checkpoint),
        )


class Manifest(Strict):
    """`source` is where it was pulled from, without credentials; None where that is unknown.

    `signature` is minisign's text over signature.statement; it travels with the manifest.
    """

    schema_version: Literal[1] = 1
    model: str
    revision: str | None
    licence: str | None
    source: str | None
    files: tuple[File, ...]
    checkpoint: Summary | None = None
    signature: Annotated[str, Field(max_length=MAX_SIGNATURE_BYTES)] | None = None

    @model_validator(mode="after")
    def _names_are_safe(self) -> Self:
        if not self.files:
            raise ValueError("a release without files")
        try:
            check_paths(file.path for file in self.files)
        except ApplianceError as error:
            raise ValueError(error.message) from error
        return self

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def blobs(self) -> frozenset[str]:
        return frozenset(file.sha256 for file in self.files)

    @cached_property
    def release_id(self) -> str:
        """`model@digest`: the same files always have the same id, wherever they came from."""
        lines = (
            f"{file.sha256} {file.size_bytes} {json.dumps(file.path)} {' '.join(file.chunks)}\n"
            for file in sorted(self.files, key=lambda file: file.path)
        )
        digest = hashlib.sha256()
        for line in lines:
            digest.update(line.encode())
        return f"{slug(self.model)}@{digest.hexdigest()[:16]}"

    def to_json(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def chunk_span(size_bytes: int, index: int) -> tuple[int, int]:
    """First byte and the byte after the last of one chunk."""
    start = index * CHUNK_BYTES
    return start, min(start + CHUNK_BYTES, size_bytes)


def slug(model: str) -> str:
    """`org/Name` -> `org--Name`, in letters that every file system and URL takes as they are."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model.replace("/", "--")).strip(".-")[:100] or "model"


def load_manifest(content: bytes, where: str) -> Manifest:
    """Raises WeightsError, which names `where`, for anything that is not a manifest of ours."""
    again = "make it anew: appliance weights manifest --of DIR > DIR/appliance-manifest.json"
    if not content.strip():
        raise WeightsError(f"{where} is empty; it should be a manifest", fix=again)
    try:
        value = parse(content, where)
    except ApplianceError as error:
        raise WeightsError(f"{error.message}; it should be a manifest", fix=again) from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > 1:
        raise WeightsError(
            f"{where} has schema {version}; this version of the appliance reads 1",
            fix="use a newer version",
        )
    try:
        # JSON mode, so that lists become tuples and nothing else is converted.
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise WeightsError(f"{where} is no valid manifest: {place}: {first['msg']}") from error


def read_manifest(path: Path) -> Manifest:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    return load_manifest(content, str(path))
