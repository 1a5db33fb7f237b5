"""The drawing of a machine: valid SVG, nothing left out, nothing outside its frame."""

import re
import xml.etree.ElementTree as ET

import pytest
from cases import text_of
from machines import NAMES, machine

from preflight.host import Gpu, Host, LinkRate, Measured
from preflight.picture import picture
from preflight.witness.understand import understand

SVG = "{http://www.w3.org/2000/svg}"


def words(host: Host) -> list[str]:
    return [e.text or "" for e in ET.fromstring(picture(host)).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", NAMES)
def test_every_node_and_card_is_drawn_inside_the_frame(name: str) -> None:
    host = machine(name)
    root = ET.fromstring(picture(host))
    told = words(host)
    assert {f"GPU {g.index}" for g in host.gpus or ()} <= set(told)
    assert {f"node {n.index}" for n in host.numa_nodes} <= set(told)
    wide, high = int(root.attrib["width"]), int(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        x, y = int(box.get("x", 0)), int(box.get("y", 0))
        assert x >= 0 and y >= 0
        assert x + int(box.attrib["width"]) <= wide and y + int(box.attrib["height"]) <= high
    for text in root.iter(f"{SVG}text"):
        assert 0 < int(text.attrib["y"]) <= high


def test_links_sockets_and_distances_have_their_words() -> None:
    told = words(machine("two-rtx-pro-6000"))
    assert "GPU 0 - GPU 1: SYS, peer access: not supported" in told
    assert {"socket 0", "socket 1", "21", "PCIe 5 x16", "PCIe 5 x8"} <= set(told)


def test_a_measured_rate_stands_on_its_link() -> None:
    rate = LinkRate(gpu=0, numa_node=0, copy_bytes_per_second=55.04e9)
    host = machine("h200-1gpu").model_copy(update={"measured": Measured(links=(rate,))})
    assert "55.0 GB/s measured" in words(host)


def test_what_is_not_known_is_dashed_and_says_so() -> None:
    host = Host(gpus=(Gpu(index=0),))
    assert {"node unknown", "name unknown", "PCIe unknown"} <= set(words(host))
    assert "stroke-dasharray" in picture(host)


def test_a_name_cannot_break_the_drawing() -> None:
    ET.fromstring(picture(Host(gpus=(Gpu(index=0, name='<b>&"'),), label="<&>")))


@pytest.mark.parametrize("name", ["T029", "T040", "M031", "M034"])
def test_real_machines_can_be_drawn(shared, name: str) -> None:
    told = words(understand(text_of(shared, name)))
    assert len([w for w in told if re.fullmatch(r"GPU \d+", w)]) == {
        "T029": 8, "T040": 5, "M031": 0, "M034": 4}[name]  # fmt: skip
