"""The report: worst first, 100 columns, exit codes, JSON, Prometheus, ignoring."""

import json
import os
import re
from pathlib import Path

import pytest
from broken_machines import FAULTS, TWO, host_with, needs_for
from machines import FOLDER, NAMES, machine

from preflight.catalogue import catalogue, markdown, schemas
from preflight.checks import CHECKS
from preflight.host import Host
from preflight.needs import Needs
from preflight.report import Report, UnknownCheck, check, prometheus

DOCS = Path(__file__).resolve().parents[2] / "docs"


def broken(*names: str) -> Host:
    edits = {key: value for name in names for key, value in FAULTS[name].edits.items()}
    return host_with(TWO, edits)


def test_failures_come_before_warnings_and_the_verdict_counts_them() -> None:
    report = check(broken("persistence-off", "mig-enabled", "gpu-hot"), needs_for(TWO))
    assert [f.check for f in report.findings] == ["mig-enabled", "persistence-off", "gpu-hot"]
    assert report.verdict == "Not ready: 1 check failed and 2 warnings."


def test_one_problem_of_many_cards_is_one_finding() -> None:
    report = check(broken("gpu-device-node-missing"), needs_for(TWO))
    (finding,) = report.findings
    assert "GPU 0" in finding.saw and "GPU 1" in finding.saw


def test_exit_codes_are_0_fine_3_failed_4_warned_and_strict_makes_warnings_fail() -> None:
    fine, warned, failed = (
        check(host, needs_for(TWO))
        for host in (broken(), broken("gpu-hot"), broken("mig-enabled", "gpu-hot"))
    )
    assert (fine.exit_code(), warned.exit_code(), failed.exit_code()) == (0, 4, 3)
    assert warned.exit_code(strict=True) == 3


def test_an_ignored_failure_is_a_warning_that_still_shows() -> None:
    report = check(broken("mig-enabled"), needs_for(TWO), ignore={"mig-enabled"})
    assert report.exit_code() == 4
    assert "mig-enabled (ignored)" in report.text()


def test_ignoring_a_check_that_does_not_exist_suggests_the_nearest() -> None:
    with pytest.raises(UnknownCheck, match=r"no check 'mig-enable'; did you mean 'mig-enabled'"):
        check(broken(), ignore={"mig-enable"})


@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_asked(width: int) -> None:
    host = broken(*(name for name, fault in FAULTS.items() if TWO in fault.machines))
    lines = check(host, needs_for(TWO)).text(width).splitlines()
    assert max(map(len, lines)) <= width and len(lines) > 10


def test_what_was_not_seen_is_listed_and_counted() -> None:
    host = host_with(TWO, FAULTS["gpu-hot"].blind)
    report = check(host, needs_for(TWO))
    assert report.exit_code() == 0
    assert report.verdict.endswith("1 fact could not be seen.")
    assert "temperature of GPU 0" in report.text()


def test_json_comes_back_as_the_same_report() -> None:
    report = check(broken("mig-enabled"), needs_for(TWO))
    assert Report.model_validate_json(report.to_json()) == report
    assert json.loads(report.to_json())["schema_version"] == 1


def test_prometheus_has_one_gauge_for_each_check() -> None:
    text = prometheus(check(broken("mig-enabled", "gpu-hot"), needs_for(TWO)))
    values = dict(re.findall(r'check\{check="([\w-]+)",area="\w+"\} (\d)', text))
    assert len(values) == len(CHECKS)
    assert (values["mig-enabled"], values["gpu-hot"], values["wsl"]) == ("3", "2", "0")
    assert text.endswith("moe_appliance_preflight_exit_code 3\n")


def test_ids_are_kebab_case_and_used_once() -> None:
    ids = [row.id for row in CHECKS]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in ids)


def test_every_check_names_its_threshold_its_source_and_a_fix() -> None:
    assert all(row.threshold and row.source and row.fix for row in CHECKS)
    assert [row[1] for row in catalogue()] == [row.id for row in CHECKS]


def is_kept(path: Path, text: str) -> bool:
    """Whether a kept file is this text; `make golden` writes it, then review the difference."""
    if os.environ.get("MOE_APPLIANCE_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


def test_the_pages_in_docs_are_what_the_code_generates() -> None:
    fix = "run: make golden (or python -m preflight.catalogue docs)"
    assert is_kept(DOCS / "checks.md", markdown()), fix
    for name, text in schemas().items():
        assert is_kept(DOCS / "schema" / name, text), fix


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_gives_its_kept_report(name: str) -> None:
    report = check(machine(name), Needs(gpus=1))
    assert is_kept(FOLDER / name / "report.txt", report.text()), "run: make golden"
    assert is_kept(FOLDER / name / "report.json", report.to_json()), "run: make golden"
