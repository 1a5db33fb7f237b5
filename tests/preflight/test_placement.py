"""The proof of placement from numa_maps."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflight.placement import Home, parse_numa_maps, prometheus, prove

MIB = 1 << 20
MAPS = """7f0000000000 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4
7f0001000000 bind:0 file=/dev/hugepages/a huge dirty=4 N0=3 N1=1 kernelpagesize_kB=2048
7f0002000000 default file=/usr/lib/x.so mapped=3 N0=3 kernelpagesize_kB=4
7f0003000000 default
"""


def test_pages_count_with_their_own_size() -> None:
    found = {m.start: (m.page_bytes, m.bytes_by_node) for m in parse_numa_maps(MAPS)}
    assert found[0x7F0000000000] == (4096, {1: 2 * MIB})
    assert found[0x7F0001000000] == (2 * MIB, {0: 6 * MIB, 1: 2 * MIB})
    assert 0x7F0003000000 not in found


def test_a_home_wholly_on_its_node_is_proved() -> None:
    (placed,) = prove(MAPS, [Home("rank 1", 0x7F0000000000, 2 * MIB, 1)])
    assert placed.proved and placed.sentence == ""


def test_a_page_on_the_wrong_node_is_named_with_its_bytes() -> None:
    (placed,) = prove(MAPS, [Home("rank 0", 0x7F0001000000, 8 * MIB, 0)])
    assert not placed.proved
    assert placed.wrong_bytes_by_node == {1: 2 * MIB}
    assert "2,097,152 B on node 1" in placed.sentence


def test_a_binding_that_was_claimed_and_not_done_is_caught() -> None:
    """The call was refused, so every page lies where the process ran."""
    (placed,) = prove(MAPS, [Home("rank 1", 0x7F0000000000, 2 * MIB, 0)])
    assert placed.right_bytes == 0 and placed.wrong_bytes_by_node == {1: 2 * MIB}


def test_pages_never_touched_are_missing() -> None:
    (placed,) = prove(MAPS, [Home("rank 1", 0x7F0000000000, 3 * MIB, 1)])
    assert placed.missing_bytes == MIB and "never touched" in placed.sentence


def test_the_proof_is_exported() -> None:
    text = prometheus(prove(MAPS, [Home("rank0", 0x7F0001000000, 8 * MIB, 0)]))
    assert 'home="rank0",node="1",planned="0"} 2097152' in text


def test_a_mapping_of_this_process_is_found_where_it_is() -> None:
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel has no numa_maps")
    size = 4 * MIB
    area = mmap.mmap(-1, size)
    area.write(b"x" * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    text = maps.read_text()
    # The kernel may have joined the new mapping to a neighbour: look from that one on.
    starts = [int(m, 16) for m in re.findall(r"^([0-9a-f]+) ", text, re.M)]
    first = max(at for at in starts if at <= start)
    (placed,) = prove(text, [Home("here", first, start + size - first, 0)])
    assert placed.right_bytes >= size


@given(st.text(max_size=200))
def test_no_text_makes_it_raise(text: str) -> None:
    prove(text, [Home("x", 0, 1, 0)])
