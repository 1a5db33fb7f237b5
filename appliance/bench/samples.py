"""One turn as it was felt, kept as a line of JSON that AIPerf's readers know.

Times are seconds inside, nanoseconds and milliseconds in the file, as there.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from appliance.errors import UsageError

LEAST_TOKENS = 16  # fewer say nothing about the speed of a stream
STALL_FACTOR, STALL_SECONDS = 10.0, 0.2
Role = Literal["warm", "counted", "extra"]


@dataclass(frozen=True)
class Sample:
    """`role`: only `counted` turns are judged; `warm` came before them, `extra` kept up the load.

    `gaps`: seconds between pieces of the answer as they arrived (one piece may hold several
    tokens). Token counts are the server's; None: it did not say. `error`: a short name, or None.
    """

    session: str
    turn: int
    stream: int
    streams: int
    block: int
    start: int
    role: Role
    began: float
    asked_tokens: int
    error: str | None = None
    detail: str | None = None
    first_token: float | None = None
    latency: float | None = None
    gaps: tuple[float, ...] = ()
    empty_chunks: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first token; 0 for a failed turn; None: cannot be said."""
        if self.error is not None:
            return 0.0
        seconds = sum(self.gaps)
        if self.output_tokens is None or self.output_tokens < LEAST_TOKENS or seconds <= 0:
            return None
        return (self.output_tokens - 1) / seconds

    @property
    def stalls(self) -> int:
        """Gaps above 0.2 s that are also ten times the turn's median gap."""
        if not self.gaps:
            return 0
        limit = max(STALL_SECONDS, STALL_FACTOR * statistics.median(self.gaps))
        return sum(gap > limit for gap in self.gaps)

    def to_json(self) -> str:
        metrics: dict[str, Any] = {}

        def put(name: str, value: object, unit: str) -> None:
            if value is not None:
                metrics[name] = {"value": value, "unit": unit}

        put("input_sequence_length", self.input_tokens, "tokens")
        put("output_sequence_length", self.output_tokens, "tokens")
        put("cached_tokens", self.cached_tokens, "tokens")
        put("time_to_first_token", _ms(self.first_token), "ms")
        put("request_latency", _ms(self.latency), "ms")
        put("inter_chunk_latency", [_ms(gap) for gap in self.gaps] or None, "ms")
        about = {
            "conversation_id": self.session,
            "turn_index": self.turn,
            "request_start_ns": round(self.began * 1e9),
            "request_end_ns": round((self.began + (self.latency or 0.0)) * 1e9),
            "benchmark_phase": "warmup" if self.role == "warm" else "profiling",
            "was_cancelled": self.role == "extra" and self.latency is None,
            **{name: getattr(self, name) for name in OURS},
        }
        error = None if self.error is None else {"type": self.error, "message": self.detail}
        return json.dumps({"metadata": about, "metrics": metrics, "error": error})


MEANINGS = {
    "too-short": f": fewer than {LEAST_TOKENS} tokens of answer say no speed",
    "no-usage": ": the server did not count the tokens of the answer",
    "one-piece": ": the answer came all at once",
}
OURS = ("stream", "streams", "block", "start", "role", "asked_tokens", "empty_chunks")


def from_json(line: str) -> Sample:
    """The inverse of to_json. Raises UsageError on another tool's file: it lacks our fields."""
    try:
        found = json.loads(line)
        about, metrics, error = found["metadata"], found["metrics"], found["error"] or {}

        def get(name: str) -> Any:
            return metrics.get(name, {}).get("value")

        first, latency = get("time_to_first_token"), get("request_latency")
        return Sample(
            session=about["conversation_id"],
            turn=about["turn_index"],
            began=about["request_start_ns"] / 1e9,
            error=error.get("type"),
            detail=error.get("message"),
            first_token=_seconds(first),
            latency=_seconds(latency),
            gaps=tuple(round(gap / 1e3, 9) for gap in get("inter_chunk_latency") or ()),
            input_tokens=get("input_sequence_length"),
            cached_tokens=get("cached_tokens"),
            output_tokens=get("output_sequence_length"),
            **{name: about[name] for name in OURS},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UsageError(
            f"not a sample of ours: {type(problem).__name__} {problem}: {line[:120]}"
        ) from problem


def problems(samples: Iterable[Sample]) -> dict[str, int]:
    """How often each thing went wrong, by name; nothing is dropped without being in here."""
    found: Counter[str] = Counter()
    for sample in samples:
        if sample.error is not None:
            found[sample.error] += 1
        elif sample.role == "counted":
            found["no-usage"] += sample.output_tokens is None
            found["too-short"] += (sample.output_tokens or LEAST_TOKENS) < LEAST_TOKENS
            found["one-piece"] += (sample.output_tokens or 0) >= LEAST_TOKENS and not sum(
                sample.gaps
            )
        found["empty-chunk"] += sample.empty_chunks
        found["stall"] += sample.stalls
    return {name: count for name, count in sorted(found.items()) if count}


def problem_lines(samples: Sequence[Sample]) -> Iterator[str]:
    """`problems` for people: with what the server said the first time, where it said something."""
    said = {s.error: s.detail for s in reversed(samples) if s.error is not None and s.detail}
    for name, count in problems(samples).items():
        reason = f", such as: {' '.join((said[name] or '').split())}" if name in said else ""
        yield f"counted: {count:,} {name}{MEANINGS.get(name, '')}{reason}"


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else round(ms / 1e3, 9)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)
