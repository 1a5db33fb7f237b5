"""The files of a model's folder: config.json, the shards, and the index that must list them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from appliance.checkpoint.model import Tensor
from appliance.checkpoint.safetensors import AGAIN, read_headers
from appliance.checkpoint.strictjson import read_object
from appliance.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[ !-.0-~]+\.safetensors")  # printable, and in this folder
_NUMBERED = re.compile(r".*-(\d{1,6})-of-(\d{1,6})\.safetensors")


def read_config(folder: Path) -> dict[str, object]:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is {'a file' if folder.exists() else 'not there'}; a model is a folder with "
            "config.json and *.safetensors"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json", fix="download it beside the shards")
    return read_object(folder / "config.json")


def read_shards(
    folder: Path, is_needed: Callable[[str], bool]
) -> tuple[dict[str, Tensor], list[str]]:
    """Every tensor that vLLM would load, by name, and warnings about the rest.

    With an index vLLM opens only the files that it lists and loads all they hold; without one,
    every *.safetensors. `is_needed` says whether the model is wrong without a tensor of that name.
    """
    present = sorted(file.name for file in folder.glob("*.safetensors"))
    if not present:
        raise CheckpointError(f"{folder} has no *.safetensors file", fix="download the shards")
    mistral = [name for name in present if name.startswith("consolidated")]
    if mistral:
        raise CheckpointError(
            f"{folder} has {mistral[0]}: vLLM takes that for Mistral's own format and would load "
            "nothing else",
            fix="move it out of the folder",
        )
    if not (folder / INDEX).is_file():
        _check_numbering(folder, present)
        return _merge(folder, present), []
    index = _read_index(folder / INDEX)
    listed = sorted(set(index.values()))
    missing = [name for name in listed if name not in present]
    if missing:
        raise CheckpointError(
            f"{folder / INDEX} lists {missing[0]}, which is not in the folder"
            f"{_and_more(len(missing))}",
            fix="download it",
        )
    tensors = _merge(folder, listed)
    warnings = _compare(folder / INDEX, index, tensors)
    for name in present:
        if name not in listed:
            warnings.append(_unlisted(folder / name, tensors, is_needed))
    return tensors, warnings


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map", fix=AGAIN)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise CheckpointError(f"{file} puts {tensor!a} in {shard!a}, which is no shard's name")
    return weight_map


def _merge(folder: Path, names: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in names:
        shard = read_headers(folder / name)
        twice = tensors.keys() & shard.keys()
        if twice:
            example = min(twice)
            raise CheckpointError(
                f"{folder}: {example} is in {tensors[example].file} and in {name}"
                f"{_and_more(len(twice))}; which one loads would be chance",
                fix="remove the shard that does not belong",
            )
        tensors.update(shard)
    return tensors


def _compare(index_file: Path, index: dict[str, str], tensors: dict[str, Tensor]) -> list[str]:
    """The index against the headers, in both directions."""
    lost = sorted(index.keys() - tensors.keys())
    if lost:
        raise CheckpointError(
            f"{index_file} lists {lost[0]!a} in {index[lost[0]]}, whose header does not have it"
            f"{_and_more(len(lost))}",
            fix="download the index and the shards again, from one revision",
        )
    warnings = []
    moved = sorted(name for name, shard in index.items() if tensors[name].file != shard)
    if moved:
        warnings.append(
            f"{INDEX} is stale: it puts {moved[0]} in {index[moved[0]]}, it is in "
            f"{tensors[moved[0]].file}{_and_more(len(moved))}"
        )
    unlisted = sorted(tensors.keys() - index.keys())
    if unlisted:
        warnings.append(
            f"{INDEX} is stale: it does not list {unlisted[0]} of {tensors[unlisted[0]].file}"
            f"{_and_more(len(unlisted))}; other readers will not find it"
        )
    return warnings


def _unlisted(file: Path, tensors: dict[str, Tensor], is_needed: Callable[[str], bool]) -> str:
    """A warning about a shard that will not load, or an error where the model needs it."""
    try:
        shard = read_headers(file)
    except CheckpointError as error:
        return f"{file.name} is not in {INDEX} and will not load; it is broken too: {error.message}"
    needed = sorted(name for name in shard.keys() - tensors.keys() if is_needed(name))
    if needed:
        raise CheckpointError(
            f"{INDEX} does not list {file.name}, so vLLM would silently skip {needed[0]}"
            f"{_and_more(len(needed))}",
            fix=f"download the index again, or add the tensors of {file.name} to it",
        )
    return f"{file.name} is not in {INDEX} and will not load; nothing of the model is only there"


def _check_numbering(folder: Path, present: list[str]) -> None:
    """Without an index the names are all that says how many shards there should be."""
    numbered = [match for name in present if (match := _NUMBERED.fullmatch(name))]
    # Some packages count from 0 and so hold one file more than they say.
    promised = max((int(match[2]) for match in numbered), default=0)
    if len(numbered) < promised:
        raise CheckpointError(
            f"{folder} has {len(numbered)} of {promised} shards and no {INDEX}",
            fix="download the missing shards",
        )


def _and_more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
