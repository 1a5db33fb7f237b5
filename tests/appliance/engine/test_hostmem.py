"""Host memory: exact, bound, and honest about what the kernel refused."""

import ctypes

import pytest

from appliance.engine import resident
from appliance.engine.hostmem import (
    HostMapping,
    HostMemoryError,
    Node,
    Touch,
)
from appliance.engine.resident import huge_and_resident, pages_by_node

MIB = 1 << 20


def test_a_mapping_holds_what_was_asked_rounded_to_whole_pages() -> None:
    with HostMapping(5 * MIB + 1) as mapping:
        page = 4096 if mapping.page_kind == "4k" else 2 * MIB
        assert mapping.size_bytes == 5 * MIB + 1
        assert mapping.mapped_bytes % page == 0
        assert mapping.mapped_bytes - mapping.size_bytes < 2 * MIB
        assert mapping.address % page == 0


def test_it_is_zeroed_and_what_is_written_is_read_at_its_address() -> None:
    with HostMapping(MIB) as mapping:
        assert ctypes.string_at(mapping.address, MIB) == bytes(MIB)
        mapping.view(4096, 4)[:] = b"seat"
        assert ctypes.string_at(mapping.address + 4096, 4) == b"seat"


@pytest.mark.parametrize("touch", ["write", "populate"])
def test_every_page_is_resident_and_called_what_the_kernel_gave(touch: Touch) -> None:
    with HostMapping(64 * MIB, touch=touch, threads=2) as mapping:
        if mapping.page_kind == "hugetlb":
            pytest.skip("pages of the reserve are not in these counters")
        found = huge_and_resident(mapping.address, mapping.mapped_bytes)
        if found is None:
            assert mapping.page_kind == "4k", "what nobody proved is not called huge"
            return
        huge, resident = found
        assert resident >= mapping.mapped_bytes
        assert (mapping.page_kind == "thp") == (huge >= 0.9 * resident)


def test_two_mappings_do_not_overlap() -> None:
    with HostMapping(4 * MIB) as one, HostMapping(4 * MIB) as two:
        assert not one.contains(two.address, 1) and not two.contains(one.address, 1)
        assert one.contains(one.address + 4 * MIB - 1, 1)
        assert not one.contains(one.address + 4 * MIB - 1, 2)


def test_bound_pages_are_all_on_the_node() -> None:
    with HostMapping(8 * MIB, node=Node(0)) as mapping:
        pages = pages_by_node(mapping.address, mapping.mapped_bytes)
        assert set(pages) == {0}
        assert pages[0] > 0


def test_a_kernel_without_numa_says_nothing_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_numa_ranges", lambda: iter(()))  # it has no numa_maps
    with HostMapping(MIB) as mapping:
        assert pages_by_node(mapping.address, mapping.mapped_bytes) == {}


def test_a_node_that_is_not_here_is_an_error_with_the_way_out() -> None:
    with pytest.raises(HostMemoryError, match=r"NUMA node 63.*Try: make the plan again"):
        HostMapping(MIB, node=Node(63))


def test_more_memory_than_there_is_is_refused_not_promised() -> None:
    # Asked before the kernel is: with vm.overcommit_memory = 1 it promises, and kills later.
    with pytest.raises(HostMemoryError, match=r"70,368,744,177,664 bytes .* are available"):
        HostMapping(1 << 46)


@pytest.mark.parametrize("size", [0, -1])
def test_a_mapping_of_nothing_is_an_error(size: int) -> None:
    with pytest.raises(HostMemoryError, match="holds nothing"):
        HostMapping(size)


def test_a_view_outside_the_mapping_is_an_error() -> None:
    with HostMapping(4096) as mapping, pytest.raises(HostMemoryError, match="outside"):
        mapping.view(4000, 100)
