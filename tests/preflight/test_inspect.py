"""Facts of the recorded machines."""

import pytest
from machines import NAMES, machine

from preflight.host import Host
from preflight.inspect import inspect
from preflight.source import Live

GIB = 1 << 30


def test_two_cards_have_what_the_planner_needs() -> None:
    one, two = machine("two-rtx-pro-6000").gpus or ()
    assert (one.numa_node, two.numa_node) == (0, 1)
    assert (one.cpus, two.cpus) == ("0-15", "16-31")
    assert (two.pcie_generation, two.pcie_width) == (4, 8)
    assert (two.pcie_generation_max, two.pcie_width_max) == (5, 16)
    assert one.memory_total_bytes == 102641958912
    assert one.compute_capability == "12.0"
    assert one.uuid != two.uuid


def test_the_nodes_have_cpus_and_free_memory() -> None:
    host = machine("two-rtx-pro-6000")
    assert [n.cpus for n in host.numa_nodes] == ["0-15", "16-31"]
    assert [n.distances for n in host.numa_nodes] == [(10, 21), (21, 10)]
    assert sum(n.memory_free_bytes or 0 for n in host.numa_nodes) == host.memory_free_bytes


def test_limits_are_read_and_unlimited_is_minus_one() -> None:
    limits = machine("two-rtx-pro-6000").limits
    assert limits.memlock_soft_bytes == limits.memlock_hard_bytes == -1
    assert limits.cgroup_memory_max_bytes == -1
    assert limits.max_map_count == 1048576
    assert limits.shm_bytes == 64 * GIB


def test_a_composed_machine_says_so() -> None:
    assert (machine("two-rtx-pro-6000").label or "").startswith("composed")


def test_the_only_node_of_a_machine_is_the_node_of_its_cards() -> None:
    # The firmware of this virtual machine says -1.
    (card,) = machine("h200-1gpu").gpus or ()
    assert card.numa_node == 0
    assert card.name == "NVIDIA H200"
    assert card.memory_total_bytes == 143771 << 20
    assert card.bridges == ()


def test_a_machine_without_a_card_has_none_rather_than_unknown() -> None:
    host = inspect(Live())
    if host.pci_gpus:
        pytest.skip("this machine has NVIDIA cards")
    assert host.gpus == ()
    assert host.memory_total_bytes


@pytest.mark.parametrize("name", NAMES)
def test_facts_survive_json(name: str) -> None:
    host = machine(name)
    assert Host.model_validate_json(host.model_dump_json()) == host
