"""`nvidia-smi -q -x`: by the level of a tag, since MIG devices repeat a card's. Never raises."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from preflight.host import Gpu
from preflight.witness import fields
from preflight.witness.words import fault, known, size


def parse_xml(text: str) -> tuple[Gpu, ...]:
    """Cards of `nvidia-smi -q -x`; of a text cut short, the elements that were closed."""
    start = max(text.find("<nvidia_smi_log"), 0) or max(text.find("<gpu"), 0)
    parser: Any = ET.XMLPullParser(["start", "end"])
    found: list[ET.Element] = []
    path: list[ET.Element] = []
    try:
        parser.feed(text[start:])
        for event, element in parser.read_events():
            if event == "end":
                path.pop()
                continue
            if element.tag == "gpu" and len(path) <= 1:
                found.append(element)
            path.append(element)
    except ET.ParseError:
        pass  # what was read before the damage is kept, less the element it is in
    if len(path) > 1:
        path[-2].remove(path[-1])
    return tuple(_xml_card(index, card) for index, card in enumerate(found))


def _xml_card(index: int, card: ET.Element) -> Gpu:
    paths = {str(row[fields.XML]) for row in fields.FIELDS.values()} - {""}
    told: dict[str, str | None] = {path: card.findtext(path) for path in paths}
    told["pci/pci_bus_id"] = told["pci/pci_bus_id"] or card.get("id")
    # A broken card says so in any tag.
    told |= {f"?{n}": e.text for n, e in enumerate(card.iter()) if fault(e.text)}
    found = fields.gpu(index, told, fields.XML)
    sizes = [size(e.findtext("fb_memory_usage/total")) for e in card.iter("mig_device")]
    capability = fields.capability(
        card.findtext("product_architecture"), card.findtext("pci/pci_device_id")
    )
    return found.model_copy(
        update={"mig_slices_bytes": known(sizes), "compute_capability": capability}
    )
