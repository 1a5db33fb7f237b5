"""JSON from a model's folder: one value, or one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
GET_THE_FILE = "fetch the real file: `git lfs pull`, or download it again"


def parse(text: bytes, where: str) -> object:
    """The value of a JSON text, `where` being what an error names.

    Python's own parser keeps the last of two equal keys; two readers that keep different ones
    would load different weights, so a repeated key is an error here.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    except _RepeatedKey as error:
        raise CheckpointError(f"{where} has the key {error.key!a} twice") from error
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply to be what it claims") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise CheckpointError(f"{where} holds a number that is no size: {error}") from error


def read_object(file: Path) -> dict[str, object]:
    """A JSON file that must hold one object."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    if text.startswith(LFS_POINTER):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file", fix=GET_THE_FILE)
    value = parse(text, str(file))
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a JSON object")
    return value


class _RepeatedKey(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKey(key)
            seen.add(key)
    return value
