"""Write arena files from a checkpoint's shards, an expert at a time: memory is one expert's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from appliance import durable
from appliance.checkpoint.model import Checkpoint, MoeLayer, ProjectionShape
from appliance.checkpoint.safetensors import read_bytes
from appliance.errors import WeightsError
from appliance.weights import guard
from appliance.weights.arena_file import ArenaFile, arena_path, header_for

DOWN = 2


def repack(
    checkpoint: Checkpoint, folder: Path, parts: int, observe: Callable[[int, int], None]
) -> list[ArenaFile]:
    """One file a rank in `folder`, complete or not there at all; existing ones are replaced.

    Raises UnsupportedError where the experts cannot be cut so, WeightsError for lack of space.
    """
    headers = [header_for(checkpoint, rank, parts) for rank in range(parts)]
    total = sum(header.data_bytes for header in headers)
    made, done = [], 0
    with guard.storing(folder):
        durable.make_folder(folder)
    with guard.alone_in(folder), guard.storing(folder):
        free = guard.free_bytes(folder)
        if total > free:
            raise WeightsError(f"arena files of {total:,} bytes do not fit {free:,} free")
        for rank, header in enumerate(headers):
            path = arena_path(folder, rank, parts)
            with durable.writing(path, alone=True) as out:
                out.write(header.to_bytes())
                for blocks, layer in zip(header.layers, checkpoint.target_layers, strict=True):
                    for expert, size in enumerate(blocks.block_bytes):
                        written = sum(
                            map(out.write, _block(checkpoint, layer, expert, rank, parts))
                        )
                        out.write(bytes(size - written))
                        done += size
                        observe(done, total)
            made.append(ArenaFile.open(path))
    return made


def _block(
    checkpoint: Checkpoint, layer: MoeLayer, expert: int, rank: int, parts: int
) -> Iterator[bytes | memoryview]:
    """This rank's bytes of gate, up and down, in this order."""
    shapes = layer.experts[expert].projections
    for number, (word, shape) in enumerate(zip(layer.projection_names, shapes, strict=True)):
        tensor = checkpoint.tensors[f"{layer.prefix}.{expert}.{word}.trellis"]
        data = memoryview(read_bytes(checkpoint.path, tensor))
        yield from _share(data, shape, number == DOWN, rank, parts)


def _share(
    data: memoryview, shape: ProjectionShape, is_down: bool, rank: int, parts: int
) -> Iterator[memoryview]:
    """Of a trellis [k/16, n/16, 16K]: down is cut along k, whole rows; gate and up along n."""
    if is_down or parts == 1:
        size = len(data) // parts
        yield data[rank * size : (rank + 1) * size]
        return
    row = len(data) // (shape.k // 16)
    size = row // parts
    for start in range(rank * size, len(data), row):
        yield data[start : start + size]
