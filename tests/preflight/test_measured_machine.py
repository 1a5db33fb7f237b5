"""Faults of a measurement over a machine that really was measured: two H200s, recorded, replayed.

Each fault changes numbers in the recording's own file; the report of the replay gains exactly the
one finding. Labelled so: the numbers around the fault are the machine's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from machines import FOLDER, machine

from appliance.cli import run
from preflight.checks import CHECKS
from preflight.inspect import inspect
from preflight.needs import Needs
from preflight.report import Report, check
from preflight.source import Recorded

MACHINE = "two-h200"
GIB = 1 << 30
Facts = dict[str, Any]


def slower(link: Facts, share: float, *names: str) -> None:
    for name in names:
        link[f"{name}_bytes_per_second"] *= share


def copies_slowly(seen: Facts) -> None:
    slower(seen["links"][0], 0.4, "copy", "zero_copy")
    slower(seen["links_all_at_once"][0], 0.4, "copy")


def link_trained_down(seen: Facts) -> None:
    """Generation 3 under load, and as fast as generation 3 is."""
    seen["links"][0]["pcie_generation"] = 3
    slower(seen["links"][0], 0.24, "copy", "zero_copy")
    slower(seen["links_all_at_once"][0], 0.24, "copy")


def far_node_is_nearer(seen: Facts) -> None:
    far = {**seen["links"][0], "numa_node": 1}
    slower(seen["links"][0], 0.9, "copy", "zero_copy")
    slower(seen["links_all_at_once"][0], 0.9, "copy")
    seen["links"].append(far)


FAULTS: dict[str, Callable[[Facts], object]] = {
    "copy-slow": copies_slowly,
    "zero-copy-slow": lambda seen: slower(seen["links"][1], 0.4, "zero_copy"),
    "link-down-under-load": link_trained_down,
    "own-node-not-fastest": far_node_is_nearer,
    "links-share-bandwidth": lambda seen: slower(seen["links_all_at_once"][1], 0.5, "copy"),
    "pin-slow": lambda seen: [pin.update(touch_seconds_per_gib=2.0) for pin in seen["pins"]],
    "trial-registration-failed": lambda seen: seen.update(
        trial_asked_bytes=4 * GIB, trial_registered_bytes=GIB
    ),
    "disk-slow": lambda seen: seen.update(disk_read_bytes_per_second=2e8),
    "all-reduce-hangs": lambda seen: seen.update(all_reduce="no answer within 20 s"),
}


def replayed(folder: Path, fault: Callable[[Facts], object] | None) -> Report:
    recording = json.loads((FOLDER / MACHINE / "recording.json").read_text())
    if fault is not None:
        fault(recording["measured"])
    folder.mkdir()
    (folder / "recording.json").write_text(json.dumps(recording))
    return check(inspect(Recorded(folder)), Needs(gpus=2))


def bad(report: Report) -> set[str]:
    return {f.check for f in report.findings if f.severity in ("fail", "warn")}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_of_a_measurement_is_the_one_finding_more(name: str, tmp_path: Path) -> None:
    healthy = bad(replayed(tmp_path / "healthy", None))
    assert bad(replayed(tmp_path / "faulty", FAULTS[name])) - healthy == {name}
    assert not healthy & FAULTS.keys()


def test_every_measured_check_has_a_fault_over_the_measured_machine() -> None:
    assert FAULTS.keys() == {row.id for row in CHECKS if row.area == "measured"}


def test_the_command_line_says_it_and_its_exit_code_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replayed(tmp_path / "faulty", FAULTS["all-reduce-hangs"])
    assert run(["preflight", "--host", str(tmp_path / "faulty"), "--json"]) == 3
    found = json.loads(capfd.readouterr().out)["findings"]
    assert any(f["check"] == "all-reduce-hangs" and "20 s" in f["saw"] for f in found)


def test_what_was_measured_there_is_within_5_percent_of_the_facts_we_plan_with() -> None:
    """FACTS section 3: a pinned copy at about 55 GB/s, reads in place at 50.9 to 51.2."""
    seen = machine(MACHINE).measured
    assert seen is not None and len(seen.links) == 2
    for link in seen.links:
        assert link.copy_bytes_per_second == pytest.approx(55e9, rel=0.05)
        assert link.zero_copy_bytes_per_second == pytest.approx(51e9, rel=0.05)
