"""One shard: whatever can be wrong with a file, in a sentence that names it."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny

from appliance.checkpoint.safetensors import read_bytes, read_headers
from appliance.errors import CheckpointError

F16 = {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}


def refused(file: Path, words: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_headers(file)
    assert str(file) in caught.value.message
    return caught.value


def test_offsets_count_from_the_files_first_byte(tmp_path: Path) -> None:
    header, size = tiny.header_of({"a": ("F16", (2, 3)), "b": ("I32", ())})
    file = tiny.write_raw(tmp_path / "m.safetensors", header, size)
    data = 8 + len(json.dumps(header))
    tensors = read_headers(file)
    assert (tensors["a"].start, tensors["a"].stop) == (data, data + 12)
    assert (tensors["b"].start, tensors["b"].stop) == (data + 12, data + 16)
    assert tensors["b"].shape == ()
    assert tensors["a"].file == "m.safetensors"


def test_read_bytes_gives_the_bytes_of_one_tensor(tmp_path: Path) -> None:
    header, _ = tiny.header_of({"a": ("U8", (3,)), "b": ("U8", (4,))})
    file = tiny.write_raw(tmp_path / "m.safetensors", header, 0)
    with file.open("ab") as stream:
        stream.write(b"abcdefg")
    assert read_bytes(tmp_path, read_headers(file)["b"]) == b"defg"


def test_read_bytes_of_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    file = tiny.write_shard(tmp_path / "m.safetensors", {"a": ("U8", (4,))})
    tensor = read_headers(file)["a"]
    with file.open("r+b") as stream:
        stream.truncate(tensor.start + 1)
    with pytest.raises(CheckpointError, match="gave 1 of the 4 bytes of a"):
        read_bytes(tmp_path, tensor)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot read a from"):
        read_bytes(tmp_path, tensor)


def test_padding_after_the_json_is_fine(tmp_path: Path) -> None:
    text = json.dumps({"a": F16}).encode() + b"    "
    assert read_headers(tiny.write_raw(tmp_path / "m.safetensors", text, 12)).keys() == {"a"}


def test_an_empty_tensor_takes_no_bytes(tmp_path: Path) -> None:
    file = tiny.write_shard(tmp_path / "m.safetensors", {"e": ("F16", (0, 4)), "a": ("F16", (2,))})
    assert read_headers(file)["e"].size_bytes == 0


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0", b"\0" * 8, b"\0" * 64])
def test_a_file_without_a_header_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    refused(file, f"{len(content)} bytes and no safetensors header")


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes((5000).to_bytes(8, "little") + b"{}" * 10)
    refused(file, "header has 5000 bytes, but the file ends after 28")


def test_a_header_over_the_limit_is_not_even_read(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    with file.open("wb") as stream:
        stream.write((100_000_001).to_bytes(8, "little"))
        stream.truncate(200_000_000)
    refused(file, "100000001 bytes; the format allows 100000000")


def test_a_truncated_shard_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    header, size = tiny.header_of({"a": ("F16", (2, 3)), "b": ("F16", (100,))})
    refused(tiny.write_raw(tmp_path / "m.safetensors", header, size - 7), "7 bytes are missing")


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    refused(tiny.write_raw(tmp_path / "m.safetensors", {"a": F16}, 15), "3 bytes after its last")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F16", "shape": [2, 3]}, "must have dtype, shape and data_offsets"),
        (F16 | {"extra": 1}, "and nothing else"),
        ([], "must have dtype"),
        (F16 | {"dtype": "I15"}, "unknown dtype 'I15'"),
        (F16 | {"dtype": 16}, "unknown dtype 16"),
        (F16 | {"shape": [2, 3.0]}, "has the shape"),
        (F16 | {"shape": [True, 6]}, "has the shape"),
        (F16 | {"shape": [-2, -3]}, "has the shape"),
        (F16 | {"shape": "23"}, "has the shape"),
        (F16 | {"shape": [1 << 63]}, "has the shape"),
        (F16 | {"shape": [10**4000]}, "has the shape"),
        (F16 | {"data_offsets": [0]}, "has the data_offsets"),
        (F16 | {"data_offsets": [-12, 0]}, "has the data_offsets"),
        (F16 | {"data_offsets": [12, 0]}, "has the data_offsets"),
        (F16 | {"data_offsets": [10**4000, 10**4000 + 12]}, "has the data_offsets"),
        (F16 | {"data_offsets": [0, 11]}, r"holds 11 bytes, but F16 \[2, 3\] needs 12"),
        (F16 | {"dtype": "F4", "shape": [3]}, "12 bits, not bytes"),
    ],
)
def test_a_tensor_entry_that_makes_no_sense(tmp_path: Path, entry: Any, words: str) -> None:
    refused(tiny.write_raw(tmp_path / "m.safetensors", {"a": entry}, 12), words)


def test_overlap_and_hole_name_the_tensor(tmp_path: Path) -> None:
    a, b = (F16 | {"data_offsets": [at, at + 12]} for at in (0, 8))
    refused(
        tiny.write_raw(tmp_path / "m.safetensors", {"a": a, "b": b}, 20), "b starts .* overlaps"
    )
    b = F16 | {"data_offsets": [16, 28]}
    refused(tiny.write_raw(tmp_path / "m.safetensors", {"a": a, "b": b}, 28), "b starts .* a hole")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": {"dtype"', "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[1, 2]  ", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
        (b'{"a": {"dtype": "F16", "dtype": "F16"}}', "has the key 'dtype' twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "no size"),
        (b'{"__metadata__": {"format": 1}}', "not text to text"),
        (b'{"__metadata__": []}', "not text to text"),
        (b'{"\\ud800": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', "no name"),
        (b'{"": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', "no name"),
    ],
)
def test_a_header_that_is_no_header(tmp_path: Path, text: bytes, words: str) -> None:
    refused(tiny.write_raw(tmp_path / "m.safetensors", text, 0), words)


def test_a_missing_shard_and_a_folder_are_errors_too(tmp_path: Path) -> None:
    refused(tmp_path / "none.safetensors", "No such file")
    (tmp_path / "d.safetensors").mkdir()
    refused(tmp_path / "d.safetensors", "directory")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"data_offsets": [0, 13]}, "needs 12"),
        ({"data_offsets": [1, 13]}, "a starts"),
        ({"dtype": "X"}, "unknown dtype"),
    ],
)
def test_our_reading_agrees_with_the_reference_implementation(
    tmp_path: Path, broken: dict[str, Any], words: str
) -> None:
    import safetensors

    stored = {"a": ("F16", (2, 3)), "b": ("F8_E4M3", (4, 4)), "c": ("I32", ())}
    header, size = tiny.header_of(stored)
    file = tiny.write_raw(tmp_path / "m.safetensors", header, size)
    ours = read_headers(file)
    with safetensors.safe_open(str(file), "np") as theirs:
        assert set(theirs.keys()) == set(ours)
        for name, tensor in ours.items():
            part = theirs.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (tensor.dtype, tensor.shape)
    tiny.write_raw(file, header | {"a": header["a"] | broken}, size)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(str(file), "np")
    refused(file, words)
