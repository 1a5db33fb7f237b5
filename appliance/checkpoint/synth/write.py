"""Write a checkpoint's folder: safetensors shards and their index, all or nothing.

A safetensors file is an 8-byte little-endian header length, a JSON header, then the tensors
without gaps. Source: the format's description in huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from appliance import durable
from appliance.checkpoint.synth.parts import Part
from appliance.errors import ApplianceError, UsageError

Progress = Callable[[str, int, int], None]
Sized = tuple[Part, int]  # with its bytes


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and vanishes otherwise.

    A killed run leaves at most a hidden `.NAME.*.partial`, never a half-made `out`.
    Raises UsageError if `out` exists and is not an empty folder, ApplianceError if it cannot be
    written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty", fix="another folder, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        try:
            aside.chmod(0o755)
            yield aside
            aside.rename(out)
            durable.sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except OSError as error:
        raise ApplianceError(f"cannot write {out}: {error}") from error


def write_text(path: Path, text: str) -> None:
    durable.write_file(path, text.encode())


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_shards(
    folder: Path,
    parts: Sequence[Part],
    *,
    shards: int,
    seed: int = 0,
    hollow: bool = False,
    note: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `parts` in order over `shards` files of about equal size, and the index of several.

    One shard is `model.safetensors` without an index, as transformers writes it. With `hollow` the
    tensors are holes: files have their true size and take no disk. So are parts without values in
    any case. `note` joins the metadata of
    every header. `progress` gets ("weights", bytes done, bytes in all).
    """
    sized = [(part, part.size_bytes) for part in parts]
    total = sum(size for _, size in sized)
    metadata = {"format": "pt", **(note or {})}
    places: dict[str, str] = {}
    done = 0
    for number, group in enumerate(_groups(sized, shards), start=1):
        name = (
            "model.safetensors"
            if shards == 1
            else f"model-{number:05d}-of-{shards:05d}.safetensors"
        )
        with durable.writing(folder / name) as file:
            file.write(_header(group, metadata))
            for part, size in group:
                if hollow or part.draw is None:
                    file.seek(size, os.SEEK_CUR)
                else:
                    file.write(_drawn(part, size, seed))
                done += size
                if progress is not None:
                    progress("weights", done, total)
            file.truncate()
        places.update((part.name, name) for part, _ in group)
    if len(places) != len(parts):
        raise UsageError(f"{len(parts)} tensors share {len(places)} names")
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        # Unindented: 190,000 entries take json 0.1 s this way and 2 s the other.
        write_text(folder / "model.safetensors.index.json", json.dumps(index) + "\n")


def _groups(sized: Sequence[Sized], shards: int) -> Iterator[Sequence[Sized]]:
    """`sized` in order, cut so that each group takes its share of what is still left."""
    if shards > len(sized):
        raise UsageError(f"{shards} shards for {len(sized)} tensors", fix=f"at most {len(sized)}")
    left = sum(size for _, size in sized)
    start = 0
    for waiting in range(shards - 1, -1, -1):
        stop, taken = start, 0
        while stop < len(sized) - waiting and (not waiting or taken < left / (waiting + 1)):
            taken += sized[stop][1]
            stop += 1
        yield sized[start:stop]
        left -= taken
        start = stop


def _header(group: Sequence[Sized], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for part, size in group:
        place = {
            "dtype": part.dtype,
            "shape": part.shape,
            "data_offsets": (offset, offset + size),
        }
        header[part.name] = place
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start on a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _drawn(part: Part, size: int, seed: int) -> bytes:
    assert part.draw is not None
    data = part.draw(Random(f"{seed}/{part.name}"))
    if len(data) != size:
        raise AssertionError(f"{part.name}: drew {len(data)} of {size} bytes")
    return data
