"""Verdicts on measurements, over the healthy two-card machine."""

from typing import Any

import pytest
from machines import machine

from preflight.checks import CHECKS
from preflight.host import Host, LinkRate, Measured, PinRate
from preflight.needs import Needs
from preflight.report import check

GIB = 1 << 30
TWO = "two-rtx-pro-6000-healthy"


def link(**changed: Any) -> LinkRate:
    usual = {
        "gpu": 0,
        "numa_node": 0,
        "copy_bytes_per_second": 55e9,
        "zero_copy_bytes_per_second": 51e9,
        "pcie_generation": 5,
        "pcie_width": 16,
    }
    return LinkRate(**(usual | changed))


def measured(**changed: Any) -> Host:
    usual: dict[str, Any] = {
        "links": (link(), link(numa_node=1, copy_bytes_per_second=40e9,
                               zero_copy_bytes_per_second=37e9)),
        "links_all_at_once": (link(),),
        "pins": (PinRate(page_bytes=2 << 20, touch_seconds_per_gib=0.025,
                         register_seconds_per_gib=0.025),),
        "trial_asked_bytes": 4 * GIB,
        "trial_registered_bytes": 4 * GIB,
        "disk_read_bytes_per_second": 5e9,
        "all_reduce": "ok",
    }  # fmt: skip
    return machine(TWO).model_copy(update={"measured": Measured(**(usual | changed))})


def findings(host: Host, severities: tuple[str, ...]) -> list[str]:
    return [f.check for f in check(host, Needs(gpus=2)).findings if f.severity in severities]


def test_a_machine_that_measures_well_has_no_finding() -> None:
    assert check(measured(), Needs(gpus=2)).findings == ()


SLOW: dict[str, dict[str, Any]] = {
    "copy-slow": {"links": (link(copy_bytes_per_second=20e9, zero_copy_bytes_per_second=19e9),),
                  "links_all_at_once": ()},
    "zero-copy-slow": {"links": (link(zero_copy_bytes_per_second=20e9),)},
    "link-down-under-load": {
        "links": (link(pcie_generation=3, copy_bytes_per_second=13e9,
                       zero_copy_bytes_per_second=12e9),),
        "links_all_at_once": ()},
    "own-node-not-fastest": {
        "links": (link(copy_bytes_per_second=50e9), link(numa_node=1)), "links_all_at_once": ()},
    "links-share-bandwidth": {"links_all_at_once": (link(copy_bytes_per_second=27e9),)},
    "pin-slow": {"pins": (PinRate(page_bytes=4096, touch_seconds_per_gib=0.2,
                                  register_seconds_per_gib=0.25),)},
    "trial-registration-failed": {"trial_registered_bytes": GIB // 2},
    "disk-slow": {"disk_read_bytes_per_second": 2e8},
    "all-reduce-hangs": {"all_reduce": "no answer within 20 s"},
}  # fmt: skip
BLIND: dict[str, dict[str, Any]] = {
    "copy-slow": {"links": (link(copy_bytes_per_second=None),), "links_all_at_once": ()},
    "zero-copy-slow": {"links": (link(zero_copy_bytes_per_second=None),)},
    "link-down-under-load": {"links": (link(pcie_width=None),)},
    "own-node-not-fastest": {
        "links": (link(), link(numa_node=1, copy_bytes_per_second=None)), "links_all_at_once": ()},
    "links-share-bandwidth": {"links_all_at_once": (link(copy_bytes_per_second=None),)},
    "pin-slow": {"pins": ()},
    "trial-registration-failed": {"trial_registered_bytes": None},
    "disk-slow": {"disk_read_bytes_per_second": None},
    "all-reduce-hangs": {"all_reduce": None},
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_one_bad_measurement_gives_exactly_its_finding(name: str) -> None:
    assert findings(measured(**SLOW[name]), ("fail", "warn")) == [name]


@pytest.mark.parametrize("name", BLIND)
def test_what_was_not_measured_is_not_fine(name: str) -> None:
    host = measured(**BLIND[name])
    assert name in findings(host, ("unknown",))
    assert findings(host, ("fail", "warn")) == []


def test_every_measured_check_is_tried_here() -> None:
    assert set(SLOW) == set(BLIND) == {row.id for row in CHECKS if row.area == "measured"}
