"""One fault gives one finding, with the right id; what cannot be read is never fine."""

import pytest
from broken_machines import FAULTS, H200, TWO, host_with, needs_for

from preflight.checks import CHECKS
from preflight.host import Host
from preflight.report import check

CASES = [(name, machine) for name, fault in FAULTS.items() for machine in fault.machines]


@pytest.mark.parametrize("machine", [TWO, H200])
def test_a_healthy_machine_has_no_finding_and_nothing_unseen(machine: str) -> None:
    assert check(host_with(machine, {}), needs_for(machine)).findings == ()


@pytest.mark.parametrize(("name", "machine"), CASES)
def test_one_fault_gives_exactly_its_finding(name: str, machine: str) -> None:
    fault = FAULTS[name]
    report = check(host_with(machine, fault.edits), needs_for(machine, **fault.needs))
    assert [f.check for f in report.failures + report.warnings] == [name], report.text()


@pytest.mark.parametrize("name", [name for name, f in FAULTS.items() if f.blind or f.dark])
def test_what_cannot_be_read_is_neither_wrong_nor_fine(name: str) -> None:
    fault = FAULTS[name]
    machine = fault.machines[0]
    host, needs = host_with(machine, fault.blind), needs_for(machine, **fault.needs)
    for key, value in fault.dark.items():
        if key in Host.model_fields:
            host = host.model_copy(update={key: value})
        else:
            needs = needs.model_copy(update={key: value})
    report = check(host, needs)
    mine = [f for f in report.findings if f.check == name]
    row = next(row for row in CHECKS if row.id == name)
    assert mine and all(f.saw.startswith("could not read") for f in mine), report.text()
    assert {f.severity for f in mine} == {"warn" if row.must_see else "unknown"}


def test_every_check_of_a_quick_look_has_a_fault_and_an_unreadable_fixture() -> None:
    quick = {row.id for row in CHECKS if row.area != "measured"}
    assert quick == {name for name, fault in FAULTS.items() if fault.machines}
    assert not [name for name, fault in FAULTS.items() if not (fault.blind or fault.dark)]
    assert len(quick) >= 60
