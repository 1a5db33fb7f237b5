"""The host changes that preflight advises, as steps that can be shown, made, recorded and undone.

A step writes one kernel file for this boot; `lasting` lines make the same change at each boot.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from preflight.counted import counted
from preflight.host import Facts, Host
from preflight.needs import Needs

SWAPPINESS = 1
MAP_COUNT = 1 << 20
THP = "/sys/kernel/mm/transparent_hugepage"
SYSCTL = "/proc/sys/"
LASTING = {
    "sysctl": "/etc/sysctl.d/90-moe-appliance.conf",
    "tmpfiles": "/etc/tmpfiles.d/moe-appliance.conf",
    "limits": "/etc/security/limits.d/90-moe-appliance.conf",
}


class TuneError(Exception):
    """A step could not be made or undone; the message says which and why."""


class Step(Facts):
    """One change: a kernel file from `before` (None: unknown) to `after`, and why."""

    path: str
    before: str | None
    after: str
    why: str

    @property
    def lasting(self) -> tuple[Literal["sysctl", "tmpfiles"], str]:
        """The file kind and line that make it at each boot."""
        if self.path.startswith(SYSCTL):
            name = self.path.removeprefix(SYSCTL).replace("/", ".")
            return "sysctl", f"{name} = {self.after}"
        return "tmpfiles", f"w {self.path} - - - - {self.after}"


class Record(Facts):
    """What was done, for undo: steps in the order made, and files written for good.

    `replaced`: text of those files that were there before.
    """

    schema_version: Literal[1] = 1
    steps: tuple[Step, ...] = ()
    files: tuple[str, ...] = ()
    replaced: Mapping[str, str] = Field(default_factory=dict)


class Advice(NamedTuple):
    """Steps for the kernel, and lines for people: what no file of the kernel changes."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]


def advise(host: Host, needs: Needs) -> Advice:
    """The changes this machine needs for these needs; nothing that is right already."""
    return Advice(tuple(_steps(host, needs)), tuple(_notes(host, needs)))


def _steps(host: Host, needs: Needs) -> Iterator[Step]:
    memory = host.memory
    if memory.swap_total_bytes and (memory.swappiness or 0) > 10:
        yield Step(path=f"{SYSCTL}vm/swappiness", before=str(memory.swappiness),
                   after=str(SWAPPINESS), why="swap takes the engine's memory last")  # fmt: skip
    if memory.numa_balancing:
        yield Step(path=f"{SYSCTL}kernel/numa_balancing", before=str(memory.numa_balancing),
                   after="0", why="balancing unmaps pages that GPUs read")  # fmt: skip
    if memory.zone_reclaim:
        yield Step(path=f"{SYSCTL}vm/zone_reclaim_mode", before=str(memory.zone_reclaim), after="0",
                   why="filling a node must not reclaim its page cache first")  # fmt: skip
    count = host.limits.max_map_count
    if count is not None and count < needs.registrations + 20_000:
        yield Step(path=f"{SYSCTL}vm/max_map_count", before=str(count), after=str(MAP_COUNT),
                   why="every registration is a mapping")  # fmt: skip
    if host.transparent_huge_pages == "never" and needs.huge_page_bytes is None:
        yield Step(path=f"{THP}/enabled", before="never", after="madvise",
                   why="the arena asks for huge pages, nothing else gets them")  # fmt: skip
    if memory.defrag == "always":
        yield Step(path=f"{THP}/defrag", before="always", after="madvise",
                   why="only the arena waits for compaction")  # fmt: skip
    yield from _pools(host, needs)


def _pools(host: Host, needs: Needs) -> Iterator[Step]:
    size = needs.huge_page_bytes
    if size is None:
        return
    for node in host.numa_nodes:
        wanted = -(-needs.pinned_bytes_by_node.get(node.index, 0) // size)
        pool = next((p for p in node.huge_pages if p.page_bytes == size), None)
        if not wanted or pool is None or (pool.free is not None and pool.free >= wanted):
            continue
        used = (pool.total or 0) - (pool.free or 0)
        yield Step(
            path=f"/sys/devices/system/node/node{node.index}/hugepages/"
            f"hugepages-{size >> 10}kB/nr_hugepages",
            before=None if pool.total is None else str(pool.total),
            after=str(used + wanted),
            why=f"{counted(wanted, 'page')} of {size >> 20} MiB for the arena on node {node.index}",
        )


def _notes(host: Host, needs: Needs) -> Iterator[str]:
    hard = host.limits.memlock_hard_bytes
    if hard is not None and hard != -1 and hard < needs.pinned_bytes and not host.limits.ipc_lock:
        yield (
            f"locked memory is limited to {hard:,} B: `* - memlock unlimited` goes into "
            f"{LASTING['limits']} with --for-good, and takes hold at the next login"
        )


def apply(
    advice: Advice, record: Path, *, root: Path = Path("/"), for_good: bool = False
) -> Record:
    """Make the steps, writing the record before each, so that a broken run can be undone.

    Raises TuneError at the first step that fails or does not take hold.
    """
    done = Record()
    if record.exists():
        raise TuneError(f"{record} records an earlier change: undo it first")
    for step in advice.steps:
        done = done.model_copy(update={"steps": (*done.steps, step)})
        _write(record, done.model_dump_json(indent=1))
        _make(root, step.path, step.after)
    if for_good:
        for path, text in _lasting(advice).items():
            target = root / path.lstrip("/")
            done = done.model_copy(
                update={
                    "files": (*done.files, path),
                    "replaced": {**done.replaced, **_text_of(path, target)},
                }
            )
            _write(record, done.model_dump_json(indent=1))
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(target, text)
    return done


def _text_of(path: str, file: Path) -> dict[str, str]:
    """What undo has to write there again; nothing where there is no such file."""
    try:
        return {path: file.read_text(encoding="utf-8")}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(f"{path} is there and cannot be kept for undo: {error}") from error


def _lasting(advice: Advice) -> dict[str, str]:
    lines: dict[str, list[str]] = {}
    for step in advice.steps:
        kind, line = step.lasting
        lines.setdefault(LASTING[kind], []).append(line)
    if advice.notes:
        lines[LASTING["limits"]] = ["* - memlock unlimited"]
    return {path: "# Written by `appliance tune`.\n" + "\n".join(new) + "\n"
            for path, new in lines.items()}  # fmt: skip


def undo(record: Path, *, root: Path = Path("/")) -> Record:
    """Put back what a record says was changed, last first, and remove the record.

    Raises TuneError where the record cannot be read or a value cannot be put back.
    """
    try:
        done = Record.model_validate(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise TuneError(f"{record} is no record of changes: {error}") from error
    for path in done.files:
        target = root / path.lstrip("/")
        if path in done.replaced:
            _write(target, done.replaced[path])
        else:
            target.unlink(missing_ok=True)
    for step in reversed(done.steps):
        if step.before is None:
            raise TuneError(f"{step.path} had an unknown value before; it is {step.after} now")
        _make(root, step.path, step.before)
    record.unlink()
    return done


def _make(root: Path, path: str, value: str) -> None:
    target = root / path.lstrip("/")
    try:
        target.write_text(value + "\n", encoding="utf-8")
        now = target.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise TuneError(
            f"{path}: {(error.strerror or str(error)).lower()} (run as root)"
        ) from error
    if value not in (now, *(word.strip("[]") for word in now.split() if word.startswith("["))):
        raise TuneError(f"{path} is {now} after writing {value}: the kernel has no more to give")


def _write(path: Path, text: str) -> None:
    """Aside, synced, renamed, folder synced: a record outlives the power cut that it undoes."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
