"""nvidia-smi of real machines, in all its forms, broken ones too: right or unknown."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from cases import text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from preflight.host import Gpu
from preflight.needs import Needs
from preflight.probes.kernel_log import xids
from preflight.report import check
from preflight.witness.understand import understand

MIB = 1 << 20
ERROR, RESET = "nvidia-smi shows ERR!", "GPU requires reset"
# id -> for each card: facts that must be exactly so (None: must be unknown)
RIGHT: dict[str, list[dict[str, Any]]] = {
    "S001": [{"index": 0, "mig_enabled": True, "memory_total_bytes": 81559 * MIB, "processes": (),
              "mig_slices_bytes": (40448 * MIB, 20096 * MIB, 9984 * MIB, 9984 * MIB)}],
    "S002": [{"mig_enabled": True, "memory_total_bytes": 81559 * MIB,
              "bar1_total_bytes": 131072 * MIB, "pcie_generation_max": 5, "pcie_width": 16,
              "mig_slices_bytes": (40448 * MIB, 20096 * MIB, 9984 * MIB, 9984 * MIB)}],
    "S003": [{"mig_enabled": True, "memory_total_bytes": 81559 * MIB, "compute_capability": "9.0",
              "recovery_action": "none", "ecc_uncorrected_errors": 0, "pcie_generation": 5}],
    "S004": [{"name": "NVIDIA L40S", "pcie_generation": 4, "pcie_generation_max": 4,
              "ecc_enabled": True, "persistence": False, "mig_enabled": None}],
    "S007": [{"pcie_generation": 3, "pcie_generation_max": 3, "pcie_width": 16,
              "compute_capability": "7.5"}],
    "S010": [{"pcie_generation": 3, "pcie_generation_max": 3, "pcie_width": 8,
              "pcie_width_max": 16, "bar1_total_bytes": 256 * MIB, "persistence": None}],
    "S011": [{"pcie_generation": 1, "pcie_generation_max": 3, "pcie_generation_device_max": 4,
              "bar1_total_bytes": 256 * MIB, "compute_capability": "8.9"}],
    "S012": [{"mig_enabled": True, "bar1_total_bytes": 65536 * MIB,
              "memory_total_bytes": 40960 * MIB, "mig_slices_bytes": (19968 * MIB,) * 2}],
    "S013": [{"compute_capability": "6.x", "name": "Tesla P100-PCIE-16GB"}],
    "S014": [{"name": "NVIDIA RTX PRO 6000 Blackwell", "power_limit_milliwatts": None,
              "memory_total_bytes": None, "temperature_celsius": 37}],
    "S015": [{"mig_enabled": True, "bar1_total_bytes": 131072 * MIB, "ecc_enabled": True,
              "memory_total_bytes": 81920 * MIB, "mig_slices_bytes": (19968 * MIB,) * 4}],
    "S016": [{"bar1_total_bytes": 16384 * MIB, "pcie_generation": 4, "pcie_width": 16}],
    "S017": [{"bar1_total_bytes": None, "pcie_generation": 1, "pcie_generation_max": None,
              "compute_capability": None}],
    "S018": [{"compute_capability": "6.x", "bar1_total_bytes": 256 * MIB, "pcie_generation": 1}],
    "S023": [{"index": 3, "fault": None, "name": "NVIDIA A40"},
             {"index": 4, "fault": ERROR, "name": None, "memory_total_bytes": 46068 * MIB}],
    "S024": [{"index": 1, "fault": None}, {"index": 2, "fault": ERROR, "mig_enabled": None},
             {"index": 3, "fault": ERROR}],
    "S025": [{"index": 5, "fault": ERROR}],
    "S026": [{"fault": ERROR, "memory_used_bytes": 58222 * MIB, "processes": ()}],
    "S027": [{"index": 0, "fault": RESET, "temperature_celsius": None}],
    "S029": [{"index": 0, "temperature_celsius": None, "power_limit_milliwatts": None},
             {"index": 1, "memory_total_bytes": None}],
    "S030": [{"index": 0, "fault": None}, {"index": 1, "fault": ERROR}],
    "S032": [{"pcie_generation": g, "pcie_generation_max": 3, "pcie_width": 16} for g in (2, 1, 1)],
}  # fmt: skip
# id -> (checks that must speak, checks that must not)
FOUND: dict[str, tuple[set[str], set[str]]] = {
    "S001": ({"mig-enabled"}, set()),
    "S002": ({"mig-enabled"}, {"bar1-small"}),
    "S003": ({"mig-enabled"}, {"compute-capability-too-old"}),
    "S004": (set(), {"pcie-width-reduced", "pcie-generation-limited", "driver-too-old"}),
    "S010": ({"pcie-width-reduced", "bar1-small"}, {"pcie-generation-limited"}),
    "S011": ({"pcie-generation-limited", "bar1-small"}, {"pcie-width-reduced"}),
    "S012": ({"mig-enabled"}, {"bar1-small"}),
    "S013": ({"compute-capability-too-old"}, set()),
    "S014": (set(), {"gpu-fault", "power-limit-lowered"}),
    "S015": ({"mig-enabled"}, {"bar1-small", "ecc-errors"}),
    "S016": (set(), {"bar1-small", "pcie-width-reduced", "pcie-generation-limited",
                     "driver-too-old"}),
    "S017": (set(), {"compute-capability-too-old", "bar1-small", "pcie-generation-limited",
                     "driver-too-old"}),
    "S018": ({"driver-too-old", "compute-capability-too-old"}, {"pcie-generation-limited"}),
    "S023": ({"gpu-fault"}, set()),
    "S024": ({"gpu-fault"}, set()),
    "S025": ({"gpu-fault", "xid-fatal"}, set()),
    "S026": ({"gpu-fault", "gpu-memory-held-by-nobody"}, set()),
    "S027": ({"gpu-fault"}, set()),
    "S029": (set(), {"gpu-memory-held"}),
    "S030": ({"gpu-fault"}, set()),
    "S031": ({"nvml-starts"}, {"gpus-too-few"}),
    "S032": (set(), {"pcie-generation-limited", "pcie-width-reduced"}),
    "S037": ({"driver-library-mismatch"}, {"gpus-too-few", "nvml-starts"}),
    "S038": ({"driver-library-mismatch"}, {"gpus-too-few", "nvml-starts"}),
    "S040": (set(), {"gpu-memory-held", "gpu-memory-too-small"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_real_output_is_read_right(shared: Path, name: str) -> None:
    cards = understand(text_of(shared, name)).gpus or ()
    assert len(cards) == len(RIGHT[name])
    for card, facts in zip(cards, RIGHT[name], strict=True):
        assert {fact: getattr(card, fact) for fact in facts} == facts


@pytest.mark.parametrize("name", FOUND)
def test_a_real_output_leads_to_the_right_findings(shared: Path, name: str) -> None:
    must, must_not = FOUND[name]
    report = check(understand(text_of(shared, name)), Needs())
    said = {f.check for f in report.failures + report.warnings if "could not" not in f.saw}
    assert must <= said, report.text()
    assert not must_not & said, report.text()


def test_without_units_the_header_says_them() -> None:
    text = "index, memory.total [MiB], power.limit [W]\n1, 97887, 600.00\n"
    (card,) = understand(text).gpus or ()
    assert (card.index, card.memory_total_bytes) == (1, 97887 * MIB)


def test_a_number_without_any_unit_is_not_a_size() -> None:
    (card,) = understand("index, memory.total\n0, 97887\n").gpus or ()
    assert card.memory_total_bytes is None


def test_a_windows_card_has_a_driver_model_in_place_of_persistence() -> None:
    text = (
        "|   0  NVIDIA GeForce RTX 2080     WDDM  | 00000000:0A:00.0  On |                  N/A |\n"
        "| 27%   30C    P8    19W / 215W |   862MiB /  8192MiB |     12%      Default |\n"
    )
    (card,) = understand(text).gpus or ()
    assert (card.persistence, card.memory_total_bytes) == (None, 8192 * MIB)


def test_a_lost_container_is_told_to_restart(shared: Path) -> None:
    report = check(understand(text_of(shared, "S031")), Needs())
    (finding,) = [f for f in report.failures if f.check == "nvml-starts"]
    assert "restart this container" in (finding.fix or "")


def test_a_mismatch_names_the_library_and_asks_for_a_reboot(shared: Path) -> None:
    report = check(understand(text_of(shared, "S037")), Needs())
    (finding,) = [f for f in report.failures if f.check == "driver-library-mismatch"]
    assert "535.288" in finding.saw and "reboot" in (finding.fix or "")


def test_an_xid_79_is_a_card_off_the_bus_and_its_recovery_line_no_second_fault(
    shared: Path,
) -> None:
    errors = xids(text_of(shared, "S033"))
    assert [(x.pci_address, x.code) for x in errors] == [("0000:01:00", 79), ("0000:01:00", 154)]
    host = understand(text_of(shared, "S033")).model_copy(update={"gpus": (Gpu(index=0),)})
    said = {f.check for f in check(host, Needs()).failures}
    assert "gpu-off-the-bus" in said and "xid-fatal" not in said


def test_a_card_off_the_bus_without_an_xid_is_found(shared: Path) -> None:
    (gone,) = xids(text_of(shared, "B044"))
    assert (gone.pci_address, gone.code) == ("0000:b3:00.0", None)


def same_or_unknown(damaged: str, whole: str) -> bool:
    right = {card.index: card for card in understand(whole).gpus or ()}
    for card in understand(damaged).gpus or ():
        if card.index not in right:
            return False
        want = right[card.index].model_dump()
        for fact, told in card.model_dump().items():
            if fact in ("index", "fault", "processes", "mig_slices_bytes"):
                continue
            if told is not None and want[fact] is not None and told != want[fact]:
                return False
    return True


# One form each: in a text of several forms a cut changes which card comes first.
FORMS = ["S002", "S003", "S004", "S007", "S010", "S011", "S012", "S015", "S016", "S023", "S024"]


@pytest.mark.parametrize("name", FORMS)
def test_a_text_cut_anywhere_is_right_or_unknown(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    chance = random.Random(name)
    for cut in chance.sample(range(len(text)), 15):
        assert same_or_unknown(text[:cut], text), (cut, text[max(0, cut - 80) : cut])


@pytest.mark.parametrize("name", ["S002", "S003", "S004", "S007", "S010", "S012", "S015"])
def test_shuffled_and_respaced_lines_are_right_or_unknown(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    chance = random.Random(name)
    for _ in range(10):
        lines = text.splitlines(keepends=True)
        chance.shuffle(lines)
        assert same_or_unknown("".join(lines), text)
    for changed in (re.sub(r"[ \t]+", " ", text), re.sub("^", "    ", text, flags=re.M)):
        assert same_or_unknown(changed, text)


@pytest.mark.parametrize("name", [*RIGHT, "S031", "S033", "S037", "S038", "S040"])
def test_line_ends_change_nothing_and_damage_never_raises(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    assert understand(text.replace("\n", "\r\n")) == understand(text)
    chance = random.Random(name)
    for _ in range(2):
        lines = text.splitlines(keepends=True)
        chance.shuffle(lines)
        understand("".join(lines))
        understand(re.sub(r"[ \t]+", " ", text))
        understand(text.replace("\n", "", chance.randrange(20)))


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='<>/="gpu idx|MiB0123456789.:%\nERR!GPUXD,[]', max_size=300))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    understand("<nvidia_smi_log>" + text)
    understand("index, name, uuid\n" + text)
    understand("GPU 0000:01:00.0\n" + text)
