"""understand(text) -> Host: what any text that an operator sends us says about a machine.

A text may hold several outputs in a row, prompts and log lines among them. What it does not say
stays None, so the checks answer "could not read" instead of "fine".
"""

from __future__ import annotations

import re
from typing import Any

from preflight.host import Gpu, Host, Limits, Link, Software
from preflight.probes.kernel_log import memory_kills, xids
from preflight.witness.numactl import parse_lscpu, parse_numactl
from preflight.witness.smi import parse_csv, parse_list, parse_q, parse_table
from preflight.witness.smi_xml import parse_xml
from preflight.witness.topo import Topo, parse_topo

DRIVER = re.compile(r"(?:Driver Version|KMD Version|driver_version>)\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
CUDA = re.compile(r"(?:CUDA Version|CUDA UMD Version|cuda_version>)\s*:?\s*(\d+\.\d+)")
KERNEL = re.compile(r"^Linux \S+ (\d+\.\d+\.\d+\S*) ", re.M)
NVML_FAILED = re.compile(r"Failed to initialize NVML: ([^\"\n]+)")
NVML_LIBRARY = re.compile(r"NVML library version: (\d+\.\d+(?:\.\d+)?)")
FIRST = {"driver": DRIVER, "cuda": CUDA, "kernel": KERNEL, "nvml": NVML_LIBRARY}
NVML_CODES = {"Driver/library version mismatch": 18, "Unknown Error": 999, "Driver Not Loaded": 9,
              "GPU is lost": 15, "Insufficient Permissions": 4}  # fmt: skip
POLICY_REFUSED = re.compile(r"(?:set|get)_mempolicy: (Operation not permitted)")
TOPO_FAILED = re.compile(r"ERROR: Option -m|topo.*not supported", re.I)
NO_TOOLKIT = "could not select device driver"


def understand(text: str) -> Host:
    """Facts of one machine from one text. Never raises; unknown is None."""
    text = text.replace("\r\n", "\n").replace("\xa0", " ")
    topo = parse_topo(text)
    cards = _with_topo(_cards(text), topo)
    nodes = parse_numactl(text)
    cpus = parse_lscpu(text)
    soft = _software(text)
    asked = bool(topo.columns or TOPO_FAILED.search(text))
    policy = POLICY_REFUSED.search(text)
    return Host(
        gpus=cards or None,
        links=_links(topo),
        numa_nodes=nodes or cpus.nodes,
        cpu_model=cpus.model,
        cpus_online=cpus.online,
        limits=Limits(memory_policy=policy.group(1).lower() if policy else None),
        software=soft.model_copy(update={"topo_error": topo.error if asked else None}),
    )


def _cards(text: str) -> tuple[Gpu, ...]:
    """Cards of every form in the text; one seen in two forms has the facts of both."""
    merged: dict[int, dict[str, Any]] = {}
    for parse in (parse_xml, parse_q, parse_csv, parse_table, parse_list):
        for card in parse(text):
            known = merged.setdefault(card.index, {})
            for fact, told in card.model_dump().items():
                if told is not None and known.get(fact) is None:
                    known[fact] = told
    return tuple(Gpu.model_validate(known) for _, known in sorted(merged.items()))


def _with_topo(cards: tuple[Gpu, ...], topo: Topo) -> tuple[Gpu, ...]:
    """Cards as topo -m places them: rows that are missing leave a card without a node."""
    known = {card.index: card for card in cards}
    for index in range(topo.gpu_count):
        row = topo.gpus.get(index)
        card = known.get(index, Gpu(index=index))
        if row:
            card = card.model_copy(update={
                "cpus": row.cpus, "numa_node": row.numa_node, "memory_numa_node": row.gpu_numa_id,
            })  # fmt: skip
        known[index] = card
    return tuple(known[index] for index in sorted(known))


def _links(topo: Topo) -> tuple[Link, ...]:
    count = topo.gpu_count
    found = []
    for a in range(count):
        for b in range(a + 1, count):
            cell = topo.cell(a, b)
            nvlinks = int(cell[2:]) if cell and cell.startswith("NV") else None
            # Drivers before 375 call SYS "SOC".
            path = None if nvlinks is not None else "SYS" if cell == "SOC" else cell
            found.append(Link(a=a, b=b, path=path, path_in_topo=cell, nvlinks=nvlinks))
    return tuple(found)


def _software(text: str) -> Software:
    failed = NVML_FAILED.search(text)
    reason = failed.group(1).strip() if failed else None
    told = {}
    for name, pattern in FIRST.items():
        match = pattern.search(text)
        told[name] = match.group(1) if match else None
    log = "NVRM" in text or "Killed process" in text
    return Software(
        kernel=told["kernel"],
        wsl="microsoft" in told["kernel"].lower() if told["kernel"] else _wsl(text),
        driver=told["driver"],
        cuda_driver=told["cuda"],
        nvml=told["nvml"],
        nvml_error=reason,
        nvml_error_code=NVML_CODES.get(reason) if reason else None,
        docker="not known" if NO_TOOLKIT in text else None,
        xids=xids(text) if log else None,
        memory_kills=memory_kills(text) if log else None,
    )


def _wsl(text: str) -> bool | None:
    return True if "WSL is detected" in text else None
