"""Two records, and what changed from A to B, with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.bench.ratio import Ratio, median_ratio, p5_ratio
from appliance.bench.record import Record, Stamp
from appliance.errors import UsageError
from preflight.counted import counted

SAME = ("seed", "think", "shape", "trace_sha256", "text_sha256", "request")

# Of fewer not even the smallest and the largest enclose the quantile in 19 of 20 cases.
FEWEST_TURNS = {"median": 6, "p5": 60}


@dataclass(frozen=True)
class Change:
    """B over A at one number of streams."""

    streams: int
    turns: tuple[int, int]
    median: Ratio
    p5: Ratio


def compare(a: Record, b: Record) -> list[Change]:
    """Numbers of streams that both have. Raises UsageError where the load was another."""
    differing = [n for n in SAME if getattr(a.stamp, n) != getattr(b.stamp, n)]
    if differing:
        raise UsageError(
            f"the two were measured with another {', '.join(differing)}: speeds do not compare",
            fix="measure both with the same options",
        )
    left, right = _by_level(a), _by_level(b)
    both = sorted(set(left) & set(right))
    if not both:
        raise UsageError(
            f"no number of streams in common: {sorted(left)} against {sorted(right)}",
            fix="bench turns --streams N for both",
        )
    return [
        Change(
            n,
            (len(left[n]), len(right[n])),
            median_ratio(left[n], right[n]),
            p5_ratio(left[n], right[n]),
        )
        for n in both
    ]


def compare_lines(a: Record, b: Record) -> Iterator[str]:
    changes = compare(a, b)
    yield from _stamp_lines(a.stamp, b.stamp)
    for change in changes:
        for name, ratio in (("median", change.median), ("p5", change.p5)):
            least = FEWEST_TURNS[name]
            if min(change.turns) < least:
                here = counted(change.streams, "stream")
                yield (
                    f"{here}, {name}: {100 * (ratio.value - 1):+.1f} % and no telling how sure: "
                    f"{change.turns[0]} and {change.turns[1]} turns, {least} are the fewest"
                )
                continue
            low, high = (100 * (edge - 1) for edge in ratio.interval)
            verdict = ("slower" if ratio.value < 1 else "faster") if ratio.changed else "no change"
            yield (
                f"{counted(change.streams, 'stream')}, {name}: {100 * (ratio.value - 1):+.1f} % "
                f"[{low:+.1f}, {high:+.1f}] {verdict} "
                f"({change.turns[0]} and {change.turns[1]} turns)"
            )
    if min(len(a.starts), len(b.starts)) < 2:
        yield "warning: one start each: what differs between starts of an engine is not seen"


def _stamp_lines(a: Stamp, b: Stamp) -> Iterator[str]:
    for name in ("release", "model", "host_digest", "plan_digest", "image_digest"):
        old, new = getattr(a, name), getattr(b, name)
        if old != new:
            yield f"{name.replace('_', ' ')}: {_short(old)} -> {_short(new)}"
    if a.context_tokens != b.context_tokens:
        held = " and ".join(
            "unknown" if n is None else f"{n:,}" for n in (a.context_tokens, b.context_tokens)
        )
        yield f"warning: contexts of {held} tokens: long sessions may have ended at other turns"


def _short(value: str | None) -> str:
    return "unknown" if value is None else value[:24]


def _by_level(record: Record) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for block in record.blocks:
        speeds = record.speeds(block)
        if speeds:
            found.setdefault(block.ask.streams, []).extend(speeds)
    return found
