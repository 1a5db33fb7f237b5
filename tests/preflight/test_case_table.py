"""Which real input is tested where: every id that preflight owns, and who owns the others."""

from pathlib import Path

import pytest
from cases import FOLDERS

HERE = Path(__file__).resolve().parent
TESTED_IN = {"T": "test_topo.py", "S": "test_smi.py", "M": "test_host_cases.py"}
OURS = [
    "B004",
    "B007",
    "B008",
    "B011",
    "B012",
    "B013",
    "B014",
    "B015",
    "B016",
    "B017",
    "B018",
    "B020",
    "B022",
    "B023",
    "B024",
    "B025",
    "B041",
    "B042",
    "B043",
    "B044",
    "B049",
    "B050",
    "B052",
    "B054",
]
# The part whose tests own each other report.
OTHERS = {
    "accuracy": ["B002"],
    "engine": ["B006", "B038", "B039"],
    "weights": ["B028", "B029", "B031", "B032"],
    "checkpoint": ["B035", "B036"],
    "serve": ["B045", "B046", "B056"],
    "chart": ["B047"],
    "upgrade": ["B051"],
}


def ids(shared: Path, letter: str) -> list[str]:
    return sorted(p.name.split("_")[0] for p in (shared / "cases" / FOLDERS[letter]).iterdir())


@pytest.mark.parametrize("letter", TESTED_IN)
def test_every_real_output_is_named_in_its_test(shared: Path, letter: str) -> None:
    text = (HERE / TESTED_IN[letter]).read_text()
    found = ids(shared, letter)
    assert len(found) > 20
    assert [name for name in found if name not in text] == []


def test_every_bug_report_has_an_owner_and_ours_are_tested(shared: Path) -> None:
    text = (HERE / "test_issues.py").read_text()
    assert [name for name in OURS if name not in text] == []
    owned = {*OURS, *(name for names in OTHERS.values() for name in names)}
    assert set(ids(shared, "B")) == owned
