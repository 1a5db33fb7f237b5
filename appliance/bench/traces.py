"""Public trace formats -> sessions: only lengths, order and sharing; never the text.

Mooncake (github.com/kvcache-ai/Mooncake, FAST25 traces): one request a line, {"timestamp": ms,
"input_length", "output_length", "hash_ids"}: equal ids are equal blocks of 512 input tokens.
AIPerf, `profile_export.jsonl` (also what we write): {"metadata": {"conversation_id",
"turn_index"}, "metrics": {"input_sequence_length": {"value"}, "output_sequence_length": ...}}.
AgentX exports the same; its corpus (SemiAnalysis' agentx-harness, weka_trace_models.py) has one
conversation a line: {"id", "block_size", "requests": [{"t", "type": "n" | "s", "in", "out",
"hash_ids", "api_time", "think_time"} or {"type": "subagent", "agent_id", "requests"}]}.
Recordings of `bench record` are AIPerf's layout with "messages": [[number, characters], ...].
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from appliance.bench.agentx import agentx
from appliance.bench.grown import Line, Row, count, grown
from appliance.bench.turns import Piece, Session, Shape, Turn, unthinking
from appliance.bench.turns import sessions as made
from appliance.errors import UsageError

MOONCAKE_BLOCK_TOKENS = 512


def read_trace(file: Path) -> list[Session]:
    """Sessions of a trace in any known format. Raises UsageError with the line at fault."""
    lines = list(_lines(file))
    if not lines:
        raise UsageError(f"{file} holds no requests")
    for is_it, read in FORMATS:
        if is_it(lines[0]):
            return read(file, lines)
    raise UsageError(
        f"{file}: line 1 has the keys {', '.join(sorted(lines[0]))}: no known format",
        fix="a Mooncake trace, AIPerf's profile_export.jsonl, an AgentX corpus, or our recordings",
    )


def endless(sessions: Sequence[Session], tag: str) -> Iterator[Session]:
    """The sessions over and over. Text is shared within a round, never between rounds or tags."""
    for number in itertools.count():
        for session in sessions:
            mark = f"{tag}.{number}/"
            yield Session(
                mark + session.name,
                tuple(
                    replace(t, pieces=tuple(replace(p, key=mark + p.key) for p in t.pieces))
                    for t in session.turns
                ),
            )


def source(
    shape: Shape, seed: int, *, think: bool, trace: Sequence[Session] | None = None
) -> Callable[[str], Iterator[Session]]:
    """What a block is sent, by the block's tag: sessions of the shape, or of the trace if any."""

    def of(tag: str) -> Iterator[Session]:
        tag = f"{seed}.{tag}"
        found = made(shape, tag) if trace is None else endless(trace, tag)
        return found if think else map(unthinking, found)

    return of


def mooncake(file: Path, lines: list[Line]) -> list[Session]:
    """One session of one turn a request; the blocks that requests share are equal pieces."""
    found = []
    for number, line in enumerate(lines, 1):
        length = count(file, number, line, "input_length")
        blocks = [str(block) for block in line.get("hash_ids", [])]
        if not blocks:
            pieces = [Piece(f"{file.name}/{number}", length)]
        else:
            rest = length - MOONCAKE_BLOCK_TOKENS * (len(blocks) - 1)
            if not 0 < rest <= MOONCAKE_BLOCK_TOKENS:
                raise UsageError(
                    f"{file} line {number}: {len(blocks)} blocks of {MOONCAKE_BLOCK_TOKENS} "
                    f"tokens do not make {length} tokens of input"
                )
            sizes = [MOONCAKE_BLOCK_TOKENS] * (len(blocks) - 1) + [rest]
            pieces = [Piece(f"block {b}", n) for b, n in zip(blocks, sizes, strict=True)]
        turn = Turn(tuple(pieces), count(file, number, line, "output_length"))
        found.append(Session(f"{file.name}-{number}", (turn,)))
    return found


def aiperf(file: Path, lines: list[Line]) -> list[Session]:
    """Requests of a conversation become its turns; a turn adds what the one before did not have.

    AgentX replays a conversation several times: `x_correlation_id` tells one replay from another.
    Where a history gets shorter (it was cut or compacted) another session begins.
    """
    turns: dict[str, list[Row]] = {}
    for number, line in enumerate(lines, 1):
        if line.get("error"):
            continue
        about, metrics = line["metadata"], line["metrics"]
        known = (about.get(key) for key in ("x_correlation_id", "conversation_id", "x_request_id"))
        length, output = (
            count(file, number, metrics.get(key) or {}, "value", key)
            for key in ("input_sequence_length", "output_sequence_length")
        )
        row = Row(
            index=int(about.get("turn_index") or 0),
            input=length,
            output=output,
            began=about.get("request_start_ns", 0) / 1e9,
            ended=about.get("request_end_ns", 0) / 1e9,
            messages=tuple((int(name), int(size)) for name, size in about.get("messages", ())),
        )
        turns.setdefault(next((str(n) for n in known if n), str(number)), []).append(row)
    by_start = {
        name: sorted(rows, key=lambda r: (r.index, r.began)) for name, rows in turns.items()
    }
    return [found for name, rows in by_start.items() for found in grown(name, rows)]


FORMATS: tuple[tuple[Callable[[Line], bool], Callable[[Path, list[Line]], list[Session]]], ...] = (
    (lambda line: "input_length" in line, mooncake),
    (lambda line: "metadata" in line and "metrics" in line, aiperf),
    (lambda line: "requests" in line and "block_size" in line, agentx),
)


def _lines(file: Path) -> Iterator[Line]:
    with file.open(encoding="utf-8") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                continue
            try:
                found = json.loads(raw)
            except json.JSONDecodeError as problem:
                raise UsageError(f"{file} line {number} is not JSON: {problem.msg}") from problem
            if not isinstance(found, dict):
                raise UsageError(f"{file} line {number} is no JSON object")
            yield found
