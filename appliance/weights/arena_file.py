"""A load-optimised copy of the routed experts: one file a rank, read from start to end, or mapped.

    0     magic, header length (8 bytes, little-endian), header (JSON), zeros to the next 4 KiB
    then  one block [gate | up | down] of trellises per expert, layer by layer, expert by expert,
          each padded to 4 KiB: the bytes of a block are those of the engine's arena

Trellises only: scales, markers and everything dense stay in the shards.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError

from appliance.checkpoint.model import Checkpoint
from appliance.errors import UnsupportedError, WeightsError
from appliance.plan.model import BLOCK_ALIGNMENT_BYTES, expert_block_bytes
from appliance.weights.manifest import Sha256, Strict

MAGIC = b"MOEARENA"
MAX_HEADER_BYTES = 64 << 20


class LayerBlocks(Strict):
    """`block_bytes[e]` is the padded size of expert e's block."""

    layer: int
    block_bytes: tuple[Annotated[int, Field(gt=0)], ...]


class ArenaHeader(Strict):
    """`checkpoint` is Checkpoint.digest; `rank` of `parts` is the share of every expert."""

    schema_version: Literal[1] = 1
    checkpoint: Sha256
    parts: Annotated[int, Field(ge=1)]
    rank: Annotated[int, Field(ge=0)]
    layers: tuple[LayerBlocks, ...]

    @property
    def data_bytes(self) -> int:
        return sum(sum(layer.block_bytes) for layer in self.layers)

    def to_bytes(self) -> bytes:
        """The header as it is stored, padded."""
        text = json.dumps(self.model_dump(mode="json"), separators=(",", ":")).encode()
        head = MAGIC + len(text).to_bytes(8, "little") + text
        return head + bytes(-len(head) % BLOCK_ALIGNMENT_BYTES)


def header_for(checkpoint: Checkpoint, rank: int, parts: int) -> ArenaHeader:
    """Raises UnsupportedError where the experts cannot be cut into `parts`."""
    if checkpoint.rank_sliced is not None:
        raise UnsupportedError(
            f"this checkpoint is cut for tensor parallel {checkpoint.rank_sliced} in its files"
        )
    for layer in checkpoint.target_layers:
        for expert in set(layer.experts):
            for side in (expert.gate.n, expert.up.n, expert.down.k):
                if parts > 1 and side % (128 * parts):
                    raise UnsupportedError(
                        f"layer {layer.index}: {side} does not cut into {parts} multiples of 128",
                        fix="repack for fewer parts, or for one with expert parallelism",
                    )
    return ArenaHeader(
        checkpoint=checkpoint.digest,
        parts=parts,
        rank=rank,
        layers=tuple(
            LayerBlocks(
                layer=layer.index,
                block_bytes=tuple(expert_block_bytes(expert, parts) for expert in layer.experts),
            )
            for layer in checkpoint.target_layers
        ),
    )


def arena_path(folder: Path, rank: int, parts: int) -> Path:
    """Where `weights repack` puts the file of one rank."""
    return folder / f"arena-{rank}-of-{parts}.bin"


def open_arena(folder: Path, checkpoint: Checkpoint, rank: int, parts: int) -> ArenaFile:
    """This rank's file. Raises WeightsError unless it was made of this very checkpoint."""
    found = ArenaFile.open(arena_path(folder, rank, parts))
    if found.header != header_for(checkpoint, rank, parts):
        raise WeightsError(
            f"{found.path} was made of another checkpoint ({found.header.checkpoint[:12]}, this is "
            f"{checkpoint.digest[:12]}) or for another rank",
            fix=f"appliance weights repack {folder} --parts {parts}",
        )
    return found


@dataclass(frozen=True)
class ArenaFile:
    """One arena file: `data_start` is where its first block begins."""

    path: Path
    header: ArenaHeader
    data_start: int

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises WeightsError for a file that is none of ours, or cut short."""
        try:
            with path.open("rb") as stream:
                start = stream.read(16)
                length = int.from_bytes(start[8:], "little")
                if start[:8] != MAGIC or length > MAX_HEADER_BYTES:
                    raise WeightsError(f"{path} is no arena file")
                header = ArenaHeader.model_validate_json(stream.read(length))
                size = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            raise WeightsError(f"{path} has a header that is not understood") from error
        data_start = -(-(16 + length) // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
        if size != data_start + header.data_bytes:
            raise WeightsError(
                f"{path} has {size:,} bytes, {data_start + header.data_bytes:,} are needed",
                fix="appliance weights repack again",
            )
        return cls(path, header, data_start)

    def block(self, layer: int, expert: int) -> tuple[int, int]:
        """Offset in the file and padded size of one expert's block."""
        return self._places[layer, expert]

    def map(self) -> mmap.mmap:
        """All of the file, read-only; its blocks are 4 KiB-aligned in memory too."""
        with self.path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)

    @cached_property
    def _places(self) -> dict[tuple[int, int], tuple[int, int]]:
        keys = [(la.layer, e) for la in self.header.layers for e in range(len(la.block_bytes))]
        sizes = [size for layer in self.header.layers for size in layer.block_bytes]
        offsets = itertools.accumulate(sizes, initial=self.data_start)
        return dict(zip(keys, zip(offsets, sizes, strict=False), strict=True))
