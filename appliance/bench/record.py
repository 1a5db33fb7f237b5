"""A measurement on disk: what was measured on what, every block run, every sample. It replays.

    DIR/record.json     the stamp: goal, shape, seed, and digests of host, plan, image and release
    DIR/blocks.jsonl    each uninterrupted run at one number of streams, with the engine's counters
    DIR/samples.jsonl   every turn (samples.py)

A report is computed from these files and nothing else, so replaying gives the same report. An
interrupted measurement continues where it stopped: what it has is replayed, the rest is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance import durable
from appliance.bench.capacity import Ask, Goal
from appliance.bench.samples import Sample, from_json
from appliance.bench.turns import Shape
from appliance.errors import ApplianceError, UsageError

FEWEST_STARTS = 3  # the engine may choose kernels and graphs anew each time it starts
RECORD, BLOCKS, SAMPLES = "record.json", "blocks.jsonl", "samples.jsonl"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Lengths(_Strict):
    """What `bench context` sends. Tokens; `beside`: of the read beside three streams."""

    contexts: tuple[int, ...]
    repeats: int
    output: int
    beside: int
    prefix: int
    users: tuple[int, ...]


class Stamp(_Strict):
    """What was measured on what. None: nobody could say."""

    schema_version: Literal[1] = 1
    made: str
    release: str | None
    kind: Literal["capacity", "turns", "context"]
    goal: Goal
    model: str
    seed: int
    think: bool = False
    shape: Shape
    trace_sha256: str | None = None
    lengths: Lengths | None = None  # of a record of contexts
    context_tokens: int | None = None  # what the server held: sessions ended before more
    text_sha256: str
    request: Mapping[str, Any]  # what every request body carried besides the messages
    host_digest: str | None = None
    plan_digest: str | None = None
    image_digest: str | None = None


class Block(_Strict):
    """One uninterrupted run. `counters`: by how much the engine's grew; None: it did not say.

    `engine`: identity of the engine's process, where known, to tell one start from another. `part`:
    which experiment of `bench context` this is.
    """

    start: int
    number: int
    ask: Ask
    began: float
    seconds: float
    samples: int
    engine: str | None = None
    counters: Mapping[str, float] | None = None
    part: str | None = None


class Record:
    """A folder being written or read. Raises UsageError where it is not one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.stamp = Stamp.model_validate_json((folder / RECORD).read_bytes())
            lines = _lines(folder / BLOCKS)
            self.blocks = [Block.model_validate_json(line) for line in lines]
        except FileNotFoundError as problem:
            raise UsageError(
                f"{folder} holds no record: {problem.filename} is missing"
            ) from problem
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{folder}: {where}: {first['msg']}") from problem
        self.samples = self._samples()

    @classmethod
    def create(cls, folder: Path, stamp: Stamp) -> Record:
        """A new record; an old one of the same stamp is continued, any other is refused."""
        if (folder / RECORD).exists():
            for name in (BLOCKS, SAMPLES):
                _drop_torn_line(folder / name)
            found = cls(folder)
            changed = [
                name
                for name in Stamp.model_fields
                if name != "made" and getattr(found.stamp, name) != getattr(stamp, name)
            ]
            if changed:
                raise UsageError(
                    f"{folder} holds a measurement with another {', '.join(changed)}",
                    fix="another --out, or the same options as before"
                    + (", with `appliance up --plan FILE`" if "plan_digest" in changed else ""),
                )
            return found
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_file(folder / RECORD, (stamp.model_dump_json(indent=1) + "\n").encode())
        return cls(folder)

    @property
    def starts(self) -> list[int]:
        return sorted({block.start for block in self.blocks})

    def add(self, block: Block, samples: Sequence[Sample]) -> None:
        """Keep a finished block. Its samples go first: samples without a block are not read."""
        _append(self.folder / SAMPLES, [sample.to_json() for sample in samples])
        _append(self.folder / BLOCKS, [block.model_dump_json()])
        self.blocks.append(block)
        self.samples[block.start, block.number] = list(samples)

    def speeds(self, block: Block) -> list[float]:
        found = self.samples[block.start, block.number]
        return [s.speed for s in found if s.role == "counted" and s.speed is not None]

    def _samples(self) -> dict[tuple[int, int], list[Sample]]:
        every: dict[tuple[int, int], list[Sample]] = {}
        file = self.folder / SAMPLES
        for sample in map(from_json, _lines(file)):
            every.setdefault((sample.start, sample.block), []).append(sample)
        found = {}
        for block in self.blocks:
            # A crash between the two writes leaves samples of a block that was run again.
            kept = every.get((block.start, block.number), [])
            if len(kept) < block.samples:
                raise ApplianceError(
                    f"{file} has {len(kept)} of the {block.samples} samples of block {block.number}"
                )
            found[block.start, block.number] = kept[len(kept) - block.samples :]
        return found


def _append(file: Path, lines: Sequence[str]) -> None:
    with file.open("a", encoding="utf-8") as handle:
        handle.writelines(line + "\n" for line in lines)
        handle.flush()
        os.fsync(handle.fileno())


def _drop_torn_line(file: Path) -> None:
    """A crash in the middle of a write leaves a line without an end."""
    if file.exists():
        content = file.read_bytes()
        with file.open("r+b") as handle:
            handle.truncate(content.rfind(b"\n") + 1)


def _lines(file: Path) -> list[str]:
    if not file.exists():
        return []
    *whole, _torn = file.read_text(encoding="utf-8").split("\n")
    return [line for line in whole if line.strip()]
