"""`nvidia-smi topo -m` of real machines: each cell right or unknown, whatever the layout."""

import random
import re
from pathlib import Path

import pytest
from cases import text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from preflight.checks import CHECKS
from preflight.report import check
from preflight.witness.topo import parse_topo
from preflight.witness.understand import understand

NONE = None
# id -> (node of each card, CPUs of the first and of the last card, some links)
RIGHT = {
    "T002": ([0], "0-15", "0-15", {}),
    "T006": ([0], "0-7", "0-7", {}),
    "T007": ([None], None, None, {}),
    "T009": ([0] * 4 + [1] * 4, "0-63,128-191", "64-127,192-238",
             {(0, 1): "PIX", (3, 4): "SYS", (6, 7): "PIX", (0, 2): "NODE"}),
    "T010": ([None] * 4, None, None, {(0, 1): "NODE", (2, 3): "NODE"}),
    "T012": ([None] * 8, None, None, {(0, 3): "PIX", (3, 4): "PHB", (4, 7): "PIX"}),
    "T013": ([None] * 8, None, None, {(0, 3): "PIX", (3, 4): "NODE", (6, 7): "PIX"}),
    "T014": ([None] * 2, "0-23", "0-23", {(0, 1): "NV2"}),
    "T016": ([0] * 4 + [1] * 4, "0-23", "24-47", {(0, 7): "NV12"}),
    "T017": ([0] * 4 + [1] * 4, "0-51", "52-103", {(0, 7): "NV18"}),
    "T018": ([0] * 4 + [1] * 4, "0-51,104-155", "52-103,156-207", {(3, 4): "NV18"}),
    "T019": ([0, 1], "0-13,28-41", "14-27,42-55", {(0, 1): "SYS"}),
    "T020": ([1, 1], "28-55,84-111", "28-55,84-111", {(0, 1): "NODE"}),
    "T021": ([0] * 4 + [1] * 4, "0-23,48-71", "24-47,72-95",
             {(0, 7): "NV2", (0, 4): "SYS", (0, 1): "NV1", (3, 4): "NV1"}),
    "T022": ([3, 3, 1, 1, 7, 7, 5, 5], "48-63,176-191", "80-95,208-223", {(0, 7): "NV12"}),
    "T023": ([1] * 4, "32-63,96-127", "32-63,96-127", {(0, 3): "NV12"}),
    "T024": ([0] * 4, "0-47", "0-47", {(0, 1): "SYS", (2, 3): "SYS"}),
    "T025": ([1, 1], "56-111,168-223", "56-111,168-223", {(0, 1): "NODE"}),
    "T028": ([0] * 4, "0-79", "0-79", {(0, 3): "NV18"}),
    "T029": ([3, 2, 1, 0, 7, 6, 5, 4], "48-63,176-191", "64-79,192-207", {(0, 1): "SYS"}),
    "T030": ([0, 0], "0-31", "0-31", {(0, 1): "PHB"}),
    "T031": ([0], "0-31,64-95", "0-31,64-95", {}),
    "T032": ([1], "32-63,96-127", "32-63,96-127", {}),
    "T033": ([0] * 4 + [1] * 4, "0-15,32-47", "16-31,48-63", {(0, 1): "SYS"}),
    "T035": ([None] * 3, "0-31", "0-31", {(0, 1): "SYS", (1, 2): "PHB"}),
    "T037": ([0, 0, 1, 1], "0-27,56-83", "28-55,84-111",
             {(0, 1): "PXB", (2, 3): "PIX", (1, 2): "SYS"}),
    "T038": ([0, 0], "0-63", "0-63", {(0, 1): "PHB"}),
    "T039": ([0, 0], "0-15", "0-15", {(0, 1): "NODE"}),
    "T040": ([1, 0, 0, 0, 0], "8-15,24-31", "0-7,16-23",
             {(0, 1): "SYS", (1, 2): "PHB", (3, 4): "PHB", (2, 3): "NODE"}),
    "T041": ([0] * 4 + [1] * 4, "0-55,112-167", "56-111,168-223", {(0, 1): "SYS"}),
    "T042": ([0, 0, 0, 1], "0-47", "48-95", {(0, 1): "NODE", (2, 3): "SYS"}),
    "T046": ([0], "0-71", "0-71", {}),
    "T047": ([0, 0, 1, 1], "0-127,256-383", "128-255,384-511", {(0, 1): "NODE", (1, 2): "SYS"}),
    "T048": ([0, 0], None, None, {(0, 1): "NODE"}),
    "T050": ([0] * 4, "0-119", "0-119", {(0, 3): "NODE"}),
    "T052": ([None, None], None, None, {(0, 1): "NV12"}),
    "T056": ([0, 0, 1, 1] + [None] * 4, "0-27,112-139", None, {(0, 1): "NV18"}),
    "T057": ([0, 0, 1, 1, 2, None, None, None], "0-27", None, {(0, 1): "NV18"}),
    "T059": ([0] * 4 + [1] * 4, "0-55,112-167", "56-111,168-223", {(0, 7): "NV18"}),
    "T061": ([None] * 8, "0-9,20-29", None, {(0, 1): "PIX", (1, 2): "PHB", (0, 4): "SYS"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_real_matrix_is_read_right(shared: Path, name: str) -> None:
    nodes, first, last, links = RIGHT[name]
    host = understand(text_of(shared, name))
    cards = host.gpus or ()
    assert [card.numa_node for card in cards] == nodes
    assert (cards[0].cpus, cards[-1].cpus) == (first, last)
    told = {(link.a, link.b): link.path_in_topo for link in host.links}
    assert {pair: told[pair] for pair in links} == links


def test_an_error_text_is_no_matrix(shared: Path) -> None:
    host = understand(text_of(shared, "T008"))
    assert host.gpus is None
    assert host.software.topo_error == "the topology is not available on this driver or system"


def test_a_gpu_node_without_cpus_is_told_apart_from_the_node_it_is_near(shared: Path) -> None:
    (card,) = understand(text_of(shared, "T046")).gpus or ()
    assert (card.numa_node, card.memory_numa_node) == (0, 1)


def test_glued_cells_and_headers_are_split(shared: Path) -> None:
    topo = parse_topo(text_of(shared, "T059"))
    assert topo.columns[15:18] == ("NIC7", "NIC8", "NIC9")
    assert topo.rows["GPU5"].cells["NIC8"] == "NODE"
    assert topo.rows["GPU5"].cells["NIC9"] == "PXB"


@pytest.mark.parametrize("name", ["T056", "T057", "T061"])
def test_missing_rows_are_an_incomplete_matrix(shared: Path, name: str) -> None:
    assert "incomplete" in (parse_topo(text_of(shared, name)).error or "")


def test_a_nic_legend_and_its_rows_are_no_cards(shared: Path) -> None:
    topo = parse_topo(text_of(shared, "T021"))
    assert topo.gpu_count == 8 and "mlx5_0" in topo.rows


FOUND = {
    "T009": "gpus-on-different-nodes",
    "T012": "pcie-uplink-shared",
    "T019": "gpus-on-different-nodes",
    "T024": "sys-link-on-one-node",
    "T037": "pcie-uplink-shared",
    "T040": "gpus-on-different-nodes",
}


@pytest.mark.parametrize("name", FOUND)
def test_a_real_matrix_leads_to_the_right_finding(shared: Path, name: str) -> None:
    host = understand(text_of(shared, name))
    nodes = {card.numa_node for card in host.gpus or ()} - {None}
    report = check(host.model_copy(update={"numa_nodes": _nodes(nodes)}))
    found = {f.check for f in report.failures + report.warnings if "could not" not in f.saw}
    assert FOUND[name] in found and found <= {row.id for row in CHECKS}


def _nodes(indices):
    from preflight.host import NumaNode

    return tuple(NumaNode(index=n, cpus=f"{n}") for n in sorted(indices)) or ()


def same_or_unknown(damaged: str, whole: str) -> bool:
    """Every cell of the damaged text is the whole text's, or None."""
    got, want = parse_topo(damaged), parse_topo(whole + "\n")
    for name, row in got.rows.items():
        right = want.rows.get(name)
        if right is None:
            return False
        if row.cpus not in (None, right.cpus) or row.numa_node not in (None, right.numa_node):
            return False
        if row.gpu_numa_id not in (None, right.gpu_numa_id):
            return False
        if any(cell != right.cells.get(other) for other, cell in row.cells.items()):
            return False
    return True


@pytest.mark.parametrize("name", RIGHT)
def test_other_spaces_and_line_ends_change_nothing(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    whole = parse_topo(text)
    for changed in (
        text.replace("\n", "\r\n"),
        re.sub(r"[ \t]+", "  ", text),
        re.sub(r"[ \t]+", "\t", text),
        re.sub("^", "      ", text, flags=re.M),
        text.replace("\n", "   \n"),
    ):
        assert parse_topo(changed).rows == whole.rows


@pytest.mark.parametrize("name", RIGHT)
def test_a_text_cut_anywhere_is_right_or_unknown(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    chance = random.Random(name)
    for cut in chance.sample(range(len(text)), min(150, len(text))):
        assert same_or_unknown(text[:cut], text), cut


# T019 holds two machines: shuffled lines may come from either.
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "T019"])
def test_shuffled_and_glued_lines_are_right_or_unknown(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    chance = random.Random(name)
    for _ in range(20):
        lines = text.splitlines(keepends=True)
        chance.shuffle(lines)
        assert same_or_unknown("".join(lines), text)
    for gap in re.findall(r"(?<=[A-Z0-9])[ \t]+(?=[A-Z])", text)[:40]:
        glued = text.replace(gap, "", chance.randrange(1, 4))
        assert same_or_unknown(glued, text), repr(gap)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="GPUNICXVSYDEHB0123456789 \t\n-,/A\x1b[m", max_size=300))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    understand(text)
