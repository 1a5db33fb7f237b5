"""The corpus of AgentX -> sessions. Its layout: traces.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from appliance.bench.grown import Line, Row, count, grown
from appliance.bench.turns import Session
from appliance.errors import UsageError


def agentx(file: Path, lines: list[Line]) -> list[Session]:
    """A corpus of AgentX: one conversation a line. A subagent's requests are sessions of their own.

    Blocks that both requests name tell whether the history grew; where it did not, another session
    begins. An answer of no tokens asks for one. What ran at the same time there runs in turn here.
    """
    found: list[Session] = []
    for number, line in enumerate(lines, 1):
        name, block = str(line["id"]), int(line["block_size"])
        mine: list[Line] = []
        for request in line["requests"]:
            if request.get("type") == "subagent":
                own = f"{name}/{request['agent_id']}"
                found += _chain(file, number, own, block, request["requests"])
            else:
                mine.append(request)
        found += _chain(file, number, name, block, mine)
    if not found:
        raise UsageError(f"{file} holds no requests")
    return found


def _chain(
    file: Path, number: int, name: str, block: int, requests: Sequence[Line]
) -> Iterator[Session]:
    rows: list[Row] = []
    before: list[int] = []
    part = 0
    for index, request in enumerate(requests):
        began = float(request.get("t") or 0.0)
        if request.get("think_time") is not None and rows:
            began = rows[-1].ended + float(request["think_time"])
        row = Row(
            index,
            count(file, number, request, "in"),
            max(1, int(request.get("out") or 0)),
            began,
            began + float(request.get("api_time") or 0.0),
        )
        blocks = list(request.get("hash_ids") or ())
        pairs = enumerate(zip(before, blocks, strict=False))
        shared = next((at for at, (a, b) in pairs if a != b), min(len(before), len(blocks)))
        whole = rows[-1].input // block if rows else 0  # blocks of the last prompt that are full
        if rows and blocks and before and shared < whole:
            yield from grown(f"{name}:{part}", rows)
            rows, part = [], part + 1
        rows.append(row)
        before = blocks
    if rows:
        yield from grown(f"{name}:{part}" if part else name, rows)
