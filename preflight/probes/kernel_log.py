"""NVIDIA's errors in the kernel log: Xids, and cards that left the bus without one."""

from __future__ import annotations

import re

from preflight.host import Xid

XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
GONE = re.compile(r"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]+).*")


def xids(text: str) -> tuple[Xid, ...]:
    """Every driver error of a kernel log, in order.

    A card that "has fallen off the bus" without an Xid line of its own comes with code None; the
    message may be wrapped over several NVRM lines.
    """
    lines = [line for line in text.replace("\r", "").splitlines() if "NVRM" in line]
    found = [
        Xid(pci_address=_address(match.group(1)), code=int(match.group(2)), text=_message(match))
        for match in map(XID.search, lines)
        if match
    ]
    told = {_slot(xid.pci_address) for xid in found}
    for address in _gone(lines):
        if _slot(address) not in told:
            told.add(_slot(address))
            found.append(Xid(pci_address=address, text="has fallen off the bus"))
    return tuple(found)


def _message(match: re.Match[str]) -> str:
    return match.group(3).strip() or "no text"


def _gone(lines: list[str]) -> list[str | None]:
    found, about = [], None
    for line in lines:
        if XID.search(line):
            continue
        named = GONE.search(line)
        if named:
            about = _address(named.group(1))
        if "fallen off the bus" in line:
            found.append(about)
            about = None
    return found


def _address(text: str) -> str:
    return text.lower().rstrip(":.")


def _slot(address: str | None) -> str | None:
    """Xids name a slot (0000:01:00), other lines a function (0000:01:00.0)."""
    return address.split(".")[0] if address else None


KILLED = re.compile(r"(Memory cgroup out|Out) of memory: Killed process (?:\d+ )?\(([^)]*)\)(.*)")


def memory_kills(text: str) -> tuple[str, ...]:
    """What the kernel killed: the process, whether its group or the machine was full, its sizes."""
    found = []
    lines = text.replace("\r", "").splitlines()
    for n, line in enumerate(lines):
        match = KILLED.search(line)
        if match:
            near = " ".join([match.group(3), *lines[n + 1 : n + 2]])
            sizes = dict(re.findall(r"(anon-rss|shmem-rss):\s*(\d+)\s*kB", near))
            told = ", ".join(
                f"{name} {int(kib) / (1 << 20):.1f} GiB" for name, kib in sizes.items()
            )
            where = (
                "its control group was full" if "cgroup" in match.group(1) else "memory was full"
            )
            found.append(f"{match.group(2)} ({where}{': ' + told if told else ''})")
    return tuple(found)
