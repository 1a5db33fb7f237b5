"""Is a new release as fast as the old one? For `upgrade run --prove`: raises where it is not.

The old release's record says what load to run; the same load is run on what serves now, in blocks,
until the interval of the ratio of p5 lies on one side of the margin. The interval allows for having
been looked at several times. What cannot be shown to be fast enough does not pass.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from appliance.bench.capacity import Ask
from appliance.bench.client import Endpoint
from appliance.bench.load import room_of
from appliance.bench.measure import Target, measure_turns
from appliance.bench.ratio import Ratio, p5_ratio
from appliance.bench.record import Record
from appliance.bench.report import report
from appliance.bench.traces import read_trace, source
from appliance.errors import CheckFailed, UsageError
from preflight.counted import counted

MARGIN = 0.05
LOOKS = 4
CONFIDENCE = 1.0 - 0.05 / LOOKS
LEAST_TURNS = 60  # a look at fewer says nothing about p5


def require_speed(
    before: Path,
    after: Path,
    url: str,
    model: str,
    key: str | None,
    *,
    margin: float = MARGIN,
    tls: ssl.SSLContext | None = None,
    trace: Path | None = None,
    told: Callable[[Ask, int], None] = lambda ask, number: None,
) -> list[str]:
    """One sentence for each number of streams; the new samples are kept in the folder `after`.

    `before`: a record of `bench turns` or `bench capacity` (of which the answer is taken). `url` up
    to /v1. `margin`: p5 may fall by less than this share. Raises CheckFailed where it fell by more,
    or where that could not be shown in `LOOKS` times the turns of `before`.
    """
    old = Record(before)
    if old.stamp.trace_sha256 is not None and trace is None:
        raise UsageError(f"{before} was measured with a trace", fix="give the same trace file")
    endpoint = Endpoint(url, model, key, extra=dict(old.stamp.request), tls=tls)
    stamp = old.stamp.model_copy(
        update={
            "kind": "turns",
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": model,
            **dict.fromkeys(("release", "plan_digest", "image_digest")),
        }
    )
    new = Record.create(after, stamp)
    sessions = source(
        old.stamp.shape,
        old.stamp.seed,
        think=old.stamp.think,
        trace=None if trace is None else read_trace(trace),
    )
    held = old.stamp.context_tokens
    room = None if held is None else room_of(endpoint, held)
    target = Target(endpoint, sessions, lambda: None, lambda: None, told, room)
    return [_one(old, new, target, streams, margin) for streams in _levels(old)]


def _levels(old: Record) -> list[int]:
    if old.stamp.kind == "turns":
        found = sorted({block.ask.streams for block in old.blocks})
    else:
        streams = report(old).streams
        found = [streams] if streams else []
    if not found:
        raise UsageError(
            f"{old.folder} holds no speed to compare with",
            fix="bench turns --streams N on the release that serves now",
        )
    return found


def _one(old: Record, new: Record, target: Target, streams: int, margin: float) -> str:
    was = _speeds(old, streams)
    turns = max(LEAST_TURNS, len(was))
    for _ in range(LOOKS):
        measure_turns(new, target, Ask(streams, turns, streams))
        ratio = p5_ratio(was, _speeds(new, streams), CONFIDENCE)
        if ratio.interval[0] > 1 - margin:
            return _sentence(streams, ratio)
        if ratio.interval[1] < 1 - margin:
            break
    shown = (
        "fell by more than" if ratio.interval[1] < 1 - margin else "may have fallen by more than"
    )
    raise CheckFailed(
        f"{_sentence(streams, ratio)}: it {shown} {margin:.0%}",
        fix=f"compare {old.folder} and {new.folder} with bench compare, or measure both longer",
    )


def _sentence(streams: int, ratio: Ratio) -> str:
    low, high = (f"{100 * (edge - 1):+.1f}" for edge in ratio.interval)
    change = f"{100 * (ratio.value - 1):+.1f} % [{low}, {high}]"
    return f"p5 of {counted(streams, 'stream')} changed by {change}"


def _speeds(record: Record, streams: int) -> list[float]:
    blocks = [block for block in record.blocks if block.ask.streams == streams]
    return [speed for block in blocks for speed in record.speeds(block)]
