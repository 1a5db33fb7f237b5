"""Replay routed rows against rules for the spare slots: what stays cold, what the link carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from appliance.plan.contenders import Contender
from appliance.plan.routing import Heat
from appliance.plan.traffic import Row


@dataclass(frozen=True, slots=True)
class Link:
    """What turns distinct cold experts of one layer into milliseconds of a step on one card."""

    layers: int
    block_bytes: int
    bytes_per_second: float

    def milliseconds(self, distinct_cold: float) -> float:
        return distinct_cold * self.layers * self.block_bytes / self.bytes_per_second * 1e3


@dataclass(frozen=True, slots=True)
class Window:
    """Rows [start, stop) of the replay, by contender: shares, counts a step and layer, swaps."""

    start: int
    stop: int
    cold_share: Mapping[str, float]
    distinct_cold: Mapping[str, float]
    promotions_per_row: Mapping[str, float]


def even_mix(topics: Sequence[Heat]) -> dict[int, tuple[float, ...]]:
    """The counts of streams that take turns: each topic weighs the same."""
    out: dict[int, tuple[float, ...]] = {}
    for layer in topics[0].counts:
        rows = [row for topic in topics if (row := topic.of(layer)) is not None]
        out[layer] = tuple(sum(v / sum(r) for v, r in zip(c, rows, strict=True))
                           for c in zip(*rows, strict=True))  # fmt: skip
    return out


def replay(
    contenders: Mapping[str, Contender],
    traffic: Mapping[int, Iterator[Row]],
    batch: int,
    windows: Sequence[tuple[int, int]],
) -> tuple[Window, ...]:
    """Feed every contender the same rows, `batch` a step, and measure it in each window."""
    tallies = [{name: _Tally() for name in contenders} for _ in windows]
    seen = 0
    while seen < max(stop for _, stop in windows):
        live = [
            t for t, (start, stop) in zip(tallies, windows, strict=True) if start <= seen < stop
        ]
        for layer, rows_of in traffic.items():
            rows = [next(rows_of) for _ in range(batch)]
            for name, contender in contenders.items():
                cold = contender.cold(layer)
                for tally in live:
                    tally[name].count(rows, cold)
                contender.see(layer, rows)
        for name, contender in contenders.items():
            swaps = contender.step(batch)
            for tally in live:
                tally[name].swaps += swaps
                tally[name].rows += batch
        seen += batch
    return tuple(
        Window(start, stop, {n: t.cold / t.picks for n, t in tally.items()},
               {n: t.distinct / t.steps for n, t in tally.items()},
               {n: t.swaps / t.rows for n, t in tally.items()})
        for (start, stop), tally in zip(windows, tallies, strict=True)
    )  # fmt: skip


@dataclass(slots=True)
class _Tally:
    picks: int = 0
    cold: int = 0
    distinct: int = 0
    steps: int = 0  # times layers
    swaps: int = 0
    rows: int = 0

    def count(self, rows: Sequence[Row], cold: AbstractSet[int]) -> None:
        picked = [e for row in rows for e in row]
        missed = [e for e in picked if e in cold]
        self.picks += len(picked)
        self.cold += len(missed)
        self.distinct += len(set(missed))
        self.steps += 1
