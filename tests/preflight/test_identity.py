"""One machine has one digest, whatever runs on it."""

import pytest
from machines import NAMES, machine

from preflight import inspect
from preflight.identity import host_digest
from preflight.source import Live

TWO = machine("two-rtx-pro-6000-healthy")


def test_two_looks_at_this_machine_agree_while_memory_and_disk_change(tmp_path) -> None:
    before = host_digest(inspect(Live()))
    held = bytearray(64 << 20)
    (tmp_path / "file").write_bytes(held)
    assert host_digest(inspect(Live())) == before


@pytest.mark.parametrize("field", ["memory_free_bytes", "memory_available_bytes"])
def test_free_memory_is_no_part_of_it(field: str) -> None:
    assert host_digest(TWO.model_copy(update={field: 1})) == host_digest(TWO)


def test_what_a_card_does_now_is_no_part_of_it_and_which_card_it_is_is() -> None:
    assert TWO.gpus is not None

    def first(**facts: object) -> str:
        assert TWO.gpus is not None
        gpus = (TWO.gpus[0].model_copy(update=facts), *TWO.gpus[1:])
        return host_digest(TWO.model_copy(update={"gpus": gpus}))

    busy = {"memory_free_bytes": 1, "memory_used_bytes": 2, "clock_sm_mhz": 3, "processes": (),
            "temperature_celsius": 90, "pcie_generation": 1, "throttle_reasons": ("power",),
            "pcie_replays": 7}  # fmt: skip
    assert first(**busy) == host_digest(TWO)
    for facts in ({"uuid": "GPU-x"}, {"numa_node": 9}, {"memory_total_bytes": 1}):
        assert first(**facts) != host_digest(TWO)


def test_machines_differ() -> None:
    assert len({host_digest(machine(name)) for name in NAMES}) == len(NAMES)


def test_a_machine_that_nobody_could_look_into_has_one_too() -> None:
    assert host_digest(TWO.model_copy(update={"gpus": None})) != host_digest(TWO)
