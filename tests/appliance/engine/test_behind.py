"""While experts are pinned, the page cache does not keep the shards they came from."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from appliance.engine.behind import Behind

MIB = 1 << 20


LIBC = ctypes.CDLL(None, use_errno=True)


def in_cache(file: Path) -> bool:
    """Whether any page of a file is in the page cache. Source: mincore(2), which reads nothing."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        first = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        assert LIBC.mincore(ctypes.c_void_p(first), ctypes.c_size_t(len(mapped)), pages) == 0
        return any(page & 1 for page in pages)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for file in files:
        with file.open("wb") as stream:
            stream.write(os.urandom(2 * MIB))
            os.fsync(stream.fileno())
        file.read_bytes()
    assert all(map(in_cache, files))
    return files


def test_shards_two_behind_the_reader_leave_the_cache_and_at_the_end_all_do(shards: list[Path]):
    behind = Behind({f"{file.stem}.{n}": file for file in shards for n in range(3)})
    cached = []
    for file in shards:
        for n in range(3):
            behind.reached(f"{file.stem}.{n}")
        cached.append([in_cache(each) for each in shards])
    assert cached == [
        [True, True, True, True],
        [True, True, True, True],
        [False, True, True, True],
        [False, False, True, True],
    ]
    behind.finished()
    assert not any(map(in_cache, shards))


def test_a_tensor_of_no_shard_and_a_file_that_is_gone_are_no_errors(tmp_path: Path):
    behind = Behind({"a": tmp_path / "gone"})
    behind.reached("b")
    behind.reached("a")
    behind.finished()
