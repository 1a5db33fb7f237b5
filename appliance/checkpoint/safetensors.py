"""Headers of safetensors files, read strictly: names, dtypes, shapes and places, never weights.

Layout (safetensors' own specification): 8 bytes, little-endian length n of the header; n bytes of
JSON `{name: {dtype, shape, data_offsets: [start, stop]}}`, offsets counted from the header's end;
then the tensors, back to back with no holes, to the end of the file.
"""

from __future__ import annotations

import math
from operator import attrgetter
from pathlib import Path
from typing import Any

from appliance.checkpoint.model import Tensor
from appliance.checkpoint.strictjson import GET_THE_FILE, LFS_POINTER, parse
from appliance.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
AGAIN = "download this file again"
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_KEYS = {"dtype", "shape", "data_offsets"}
_INT = {int}
_MAX_OFFSET = (1 << 63) - 1
_MAX_RANK = 64


def read_headers(file: Path) -> dict[str, Tensor]:
    """Every tensor of one file by name. Raises CheckpointError, which names the file.

    `Tensor.start` and `.stop` count from the file's first byte; the bytes of the tensors cover the
    file exactly, each as many as its dtype and shape ask for.
    """
    text, data_start, file_bytes = _header(file)
    header = parse(text, f"the header of {file}")
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {file} is not a JSON object", fix=AGAIN)
    _check_metadata(file, header.pop("__metadata__", {}))
    tensors = _tensors(file, header, data_start)
    _check_cover(file, tensors, data_start, file_bytes)
    return tensors


def read_bytes(folder: Path, tensor: Tensor) -> bytes:
    """The stored bytes of one tensor, `tensor.size_bytes` of them."""
    file = folder / tensor.file
    try:
        with file.open("rb") as stream:
            stream.seek(tensor.start)
            data = stream.read(tensor.size_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {tensor.name} from {file}: {error.strerror}") from error
    if len(data) != tensor.size_bytes:
        raise CheckpointError(
            f"{file} gave {len(data)} of the {tensor.size_bytes} bytes of {tensor.name}", fix=AGAIN
        )
    return data


def _header(file: Path) -> tuple[bytes, int, int]:
    """The header's text, where the data starts, and the size of the file."""
    try:
        with file.open("rb") as stream:
            file_bytes = stream.seek(0, 2)
            stream.seek(0)
            start = stream.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise CheckpointError(
                    f"{file} is a Git LFS pointer of {file_bytes} bytes, not the weights",
                    fix=GET_THE_FILE,
                )
            length = int.from_bytes(start[:8], "little")
            if file_bytes < 10 or length < 2:
                raise CheckpointError(
                    f"{file} has {file_bytes} bytes and no safetensors header", fix=AGAIN
                )
            if length > file_bytes - 8:
                raise CheckpointError(
                    f"{file} says its header has {length} bytes, but the file ends after "
                    f"{file_bytes}: cut short, or not a safetensors file",
                    fix=AGAIN,
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file} has a header of {length} bytes; the format allows {MAX_HEADER_BYTES}"
                )
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    if len(text) != length:
        raise CheckpointError(f"{file} changed while it was read", fix=AGAIN)
    return text, 8 + length, file_bytes


def _check_metadata(file: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise CheckpointError(f"the header of {file} has a __metadata__ that is not text to text")


def _tensors(file: Path, header: dict[str, Any], data_start: int) -> dict[str, Tensor]:
    """One Tensor an entry. This loop runs 185,000 times for a large model: checks are in C."""
    tensors: dict[str, Tensor] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    place = file.name
    for name, entry in header.items():
        if type(entry) is not dict or entry.keys() != _KEYS:
            raise CheckpointError(
                f"{file}: tensor {name!a} must have dtype, shape and data_offsets and nothing else"
            )
        if not name or not name.isprintable():
            raise CheckpointError(f"{file}: {name!a} is no name for a tensor")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is not str or dtype not in DTYPE_BITS:
            raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype!a}")
        # By exact type: to Python JSON's true equals 1, and 1.0 does too.
        if type(shape) is not list or not _INT.issuperset(map(type, shape)):
            raise CheckpointError(f"{file}: {name} has the shape {shape!a}")
        if type(offsets) is not list or list(map(type, offsets)) != [int, int]:
            raise CheckpointError(f"{file}: {name} has the data_offsets {offsets!a}")
        key = (dtype, tuple(shape))
        size = sizes.get(key)
        if size is None:
            size = sizes[key] = _size_bytes(file, name, *key)
        start, stop = offsets
        if not 0 <= start <= stop <= _MAX_OFFSET:
            raise CheckpointError(f"{file}: {name} has the data_offsets {offsets!a}")
        if stop - start != size:
            raise CheckpointError(
                f"{file}: {name} holds {stop - start} bytes, but {dtype} {shape} needs {size}",
                fix=AGAIN,
            )
        tensors[name] = Tensor(name, dtype, key[1], place, data_start + start, data_start + stop)
    return tensors


def _size_bytes(file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if len(shape) > _MAX_RANK or any(not 0 <= size <= _MAX_OFFSET for size in shape):
        raise CheckpointError(f"{file}: {name} has the shape {list(shape)}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise CheckpointError(f"{file}: {name} is {dtype} {list(shape)}: {bits} bits, not bytes")
    return bits // 8


def _check_cover(file: Path, tensors: dict[str, Tensor], data_start: int, file_bytes: int) -> None:
    """Back to back from the header's end to the file's end: no overlap, no hole, nothing after."""
    end = data_start
    for tensor in sorted(tensors.values(), key=attrgetter("start", "stop")):
        if tensor.start != end:
            what = (
                "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            )
            raise CheckpointError(
                f"{file}: {tensor.name} starts at byte {tensor.start}, not {end}: it {what}",
                fix=AGAIN,
            )
        end = tensor.stop
    if end > file_bytes:
        raise CheckpointError(
            f"{file} is cut short: its tensors end at byte {end}, the file at {file_bytes} "
            f"({end - file_bytes} bytes are missing)",
            fix=AGAIN,
        )
    if end < file_bytes:
        raise CheckpointError(
            f"{file} has {file_bytes - end} bytes after its last tensor", fix=AGAIN
        )
