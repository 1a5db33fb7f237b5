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
from typing import BinaryIO

from appliance.checkpoint.synth.parts import Part
from appliance.errors import UsageError

Progress = Callable[[str, int, int], None]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and vanishes otherwise.

    A killed run leaves at most a hidden `.NAME.*.partial`, never a half-made `out`.
    Raises UsageError if `out` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty", fix="another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        aside.chmod(0o755)
        yield aside
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_shards(
    folder: Path,
    parts: Sequence[Part],
    *,
    shards: int,
    seed: int = 0,
    note: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `parts` in order over `shards` files of about equal size, and the index of several.

    One shard is `model.safetensors` without an index, as transformers writes it. A part without
    `draw` becomes a hole: the file has its true size and takes no disk. `note` joins the metadata
    of every header. `progress` gets ("weights", bytes done, bytes in all).
    """
    total = sum(part.size_bytes for part in parts)
    metadata = {"format": "pt", **(note or {})}
    places: dict[str, str] = {}
    done = 0
    for number, group in enumerate(_groups(parts, shards, total), start=1):
        name = (
            "model.safetensors"
            if shards == 1
            else f"model-{number:05d}-of-{shards:05d}.safetensors"
        )
        with (folder / name).open("wb") as file:
            _write_header(file, group, metadata)
            for part in group:
                _write_part(file, part, seed)
                done += part.size_bytes
                if progress is not None:
                    progress("weights", done, total)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        places |= {part.name: name for part in group}
    if len(places) != len(parts):
        raise UsageError(f"{len(parts)} tensors share {len(places)} names")
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def _groups(parts: Sequence[Part], shards: int, total: int) -> Iterator[list[Part]]:
    if shards > len(parts):
        raise UsageError(f"{shards} shards for {len(parts)} tensors", fix=f"at most {len(parts)}")
    group: list[Part] = []
    done = written = 0
    for place, part in enumerate(parts):
        group.append(part)
        done += part.size_bytes
        left_parts, left_shards = len(parts) - place - 1, shards - written - 1
        full = done * shards >= total * (written + 1) or left_parts == left_shards
        if left_shards and full:
            yield group
            group, written = [], written + 1
    yield group


def _write_header(file: BinaryIO, parts: Sequence[Part], metadata: Mapping[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for part in parts:
        stop = offset + part.size_bytes
        header[part.name] = {
            "dtype": part.dtype,
            "shape": part.shape,
            "data_offsets": (offset, stop),
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start on a multiple of 8
    file.write(struct.pack("<Q", len(text)) + text)


def _write_part(file: BinaryIO, part: Part, seed: int) -> None:
    if part.draw is None:
        file.seek(part.size_bytes, os.SEEK_CUR)
        return
    data = part.draw(Random(f"{seed}/{part.name}"))
    if len(data) != part.size_bytes:
        raise AssertionError(f"{part.name}: drew {len(data)} of {part.size_bytes} bytes")
    file.write(data)
