"""What is known about one number of streams: its samples, and whether p5 holds the threshold.

A sample is the speed of one agent turn on one stream, in tokens per second. The samples are looked
at a fixed number of times, each at a confidence that shares the 5 % of error between the looks
(Bonferroni), so stopping early does not spoil the bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from appliance.bench.bounds import P5, lower_bound, quantile, upper_bound

Verdict = Literal["holds", "fails"]
LOOKS = (120, 180, 270, 405, 608, 912, 1368, 2052)  # turns, each half as many again
CONFIDENCE = 0.95
ROUGH_CONFIDENCE = 0.85
LOOK_CONFIDENCE = 1.0 - (1.0 - CONFIDENCE) / len(LOOKS)


@dataclass
class Level:
    """One number of streams. `blocks`: the speeds of each uninterrupted run, in the order run."""

    streams: int
    threshold: float
    blocks: list[list[float]] = field(default_factory=list)
    verdict: Verdict | None = None
    sure: bool = False

    @property
    def speeds(self) -> list[float]:
        return [speed for block in self.blocks for speed in block]

    @property
    def p5(self) -> float:
        return quantile(self.speeds)

    @property
    def median(self) -> float:
        return statistics.median(self.speeds)

    @property
    def p5_at_least(self) -> float | None:
        """A lower bound on p5 at 95 % that allows for having looked several times."""
        return lower_bound(self.speeds, P5, LOOK_CONFIDENCE)

    def add(self, speeds: Sequence[float]) -> None:
        self.blocks.append(list(speeds))

    def wants(self) -> int:
        """Turns still needed before the next look; 0: it is decided."""
        if self.verdict is not None:
            return 0
        have = sum(map(len, self.blocks))
        return next((look - have for look in LOOKS if look > have), 0)

    def look(self) -> None:
        """Decide if the samples suffice. At the last look the estimate decides: not sure."""
        speeds = self.speeds
        if self.verdict is not None or len(speeds) < LOOKS[0]:
            return
        low = lower_bound(speeds, P5, LOOK_CONFIDENCE)
        high = upper_bound(speeds, P5, LOOK_CONFIDENCE)
        if low is not None and low >= self.threshold:
            self.verdict, self.sure = "holds", True
        elif high is not None and high < self.threshold:
            self.verdict, self.sure = "fails", True
        elif len(speeds) >= LOOKS[-1]:
            self.decide()

    def decide(self) -> None:
        """By the estimate alone, where more turns are not to be spent: not sure."""
        if self.verdict is None:
            self.verdict = "holds" if self.p5 >= self.threshold else "fails"

    def is_clear(self) -> bool:
        """Whether a short run can be believed: its threshold lies outside loose bounds."""
        low, high = (
            bound(self.speeds, P5, ROUGH_CONFIDENCE) for bound in (lower_bound, upper_bound)
        )
        return (low is not None and low >= self.threshold) or (
            high is not None and high < self.threshold
        )

    def seems_to_hold(self) -> bool:
        """The rough answer of a short run; the verdict where there is one."""
        return self.verdict == "holds" if self.verdict else self.p5 >= self.threshold
