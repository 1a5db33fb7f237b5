"""What `size` may be asked about: a folder, a manifest, a listing of headers, or a known name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from appliance import durable
from appliance.errors import UsageError

if TYPE_CHECKING:
    from appliance.checkpoint.model import Checkpoint

LARGEST_BYTES = 256 << 20


def checkpoint_of(model: str) -> Checkpoint:
    """Raises UsageError for what is none of these, CheckpointError for what would load wrong."""
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.checkpoint.synth.headers import MODELS, headers_only

    path = Path(model)
    if path.is_dir():
        return read_checkpoint(path.absolute())
    if path.is_file():
        return _from_file(path)
    if model not in MODELS:
        raise UsageError(
            f"{model} is no folder, no file and no known model: headers are needed to plan it",
            fix="a folder, a manifest of weights, a listing of headers (size MODEL --listing FILE "
            f"writes one), or one of {', '.join(MODELS)}",
        )
    with TemporaryDirectory() as aside:
        headers_only(Path(aside) / model, model)
        return read_checkpoint(Path(aside) / model)


def write_listing(checkpoint: Checkpoint, file: Path) -> None:
    """The outline of a checkpoint as a file that `size` takes in its place."""
    from appliance.plan.outline import Outline

    text = Outline.of(checkpoint).model_dump_json(indent=1) + "\n"
    with durable.naming(file):
        file.write_text(text, encoding="utf-8")


def _from_file(path: Path) -> Checkpoint:
    """By what the file holds: an outline, a manifest, or names with dtypes and shapes."""
    from appliance.checkpoint.strictjson import read_object

    if path.stat().st_size > LARGEST_BYTES:
        raise UsageError(f"{path} has {path.stat().st_size:,} bytes: a listing has at most "
                         f"{LARGEST_BYTES:,}", fix="give the model's folder")  # fmt: skip
    held = read_object(path)
    if "dense" in held:
        return _outlined(held, path)
    if "files" in held:
        return _of_manifest(held, path)
    if {"config", "tensors"} <= held.keys():
        return _of_headers(held["config"], held["tensors"], path)
    raise UsageError(
        f"{path} is neither a manifest nor a listing of headers",
        fix='a listing has the keys "config" (config.json) and "tensors" (name: dtype and shape)',
    )


def _of_manifest(held: Mapping[str, object], path: Path) -> Checkpoint:
    said = held.get("checkpoint")
    outline = said.get("outline") if isinstance(said, Mapping) else None
    if not isinstance(outline, Mapping):
        raise UsageError(
            f"the manifest {path} does not say enough of the model to plan it: it has no outline "
            "of its headers",
            fix="give the folder it describes, or make the manifest again with this release",
        )
    return _outlined(outline, path)


def _outlined(held: Mapping[str, object], path: Path) -> Checkpoint:
    from pydantic import ValidationError

    from appliance.plan.outline import Outline

    try:
        # JSON mode, so that lists become tuples and nothing else is converted.
        return Outline.model_validate_json(json.dumps(held)).checkpoint(path.absolute())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}: {where}: {first['msg']}", fix="write it again") from error


def _of_headers(config: object, tensors: object, path: Path) -> Checkpoint:
    """Written out as one hollow shard, so that one reader reads everything."""
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.checkpoint.safetensors import DTYPE_BITS

    if not isinstance(tensors, dict) or not tensors:
        raise UsageError(f'{path}: "tensors" names no tensor', fix="list name: dtype and shape")
    header: dict[str, object] = {}
    stop = 0
    for name, entry in tensors.items():
        dtype, shape = _dtype_and_shape(entry)
        if dtype not in DTYPE_BITS or shape is None:
            raise UsageError(
                f"{path}: {name} needs a dtype of safetensors and a shape, and has {entry!r}",
                fix='write it like {"dtype": "I16", "shape": [8, 8]}',
            )
        size = DTYPE_BITS[dtype]
        for length in shape:
            size *= length
        start, stop = stop, stop + size // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    with TemporaryDirectory() as aside:
        folder = Path(aside)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with (folder / "model.safetensors").open("wb") as shard:
            shard.write(len(text).to_bytes(8, "little") + text)
            shard.truncate(8 + len(text) + stop)
        return read_checkpoint(folder)


def _dtype_and_shape(entry: object) -> tuple[str, list[int] | None]:
    if not isinstance(entry, dict):
        return "", None
    dtype, shape = entry.get("dtype"), entry.get("shape")
    right = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    return str(dtype), shape if right else None
