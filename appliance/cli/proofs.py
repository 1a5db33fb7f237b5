"""What an upgrade may be asked to prove besides the canary: speed of the slowest turns, answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import render
from appliance.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from appliance.upgrade.steps import Proof

SLOWER = 0.95  # p5 of the new deployment over p5 of the old: below this it is slower
SURE = 0.05


@dataclass(frozen=True)
class Speed:
    """The same turns before and after: p5 within 5 %."""

    folder: Path
    streams: int
    turns: int
    shape: Path | None

    def before(self) -> None:
        self._measure("before")

    def after(self) -> None:
        from appliance.bench.compare import compare
        from appliance.bench.record import Record

        self._measure("after")
        before, after = (Record(self.folder / name) for name in ("before", "after"))
        (change,) = compare(before, after)
        low, high = change.p5.interval
        words = (
            f"p5 of {self.streams} streams is {change.p5.value:.3f} of what it was"
            f" [{low:.3f}, {high:.3f}] over {change.turns[0]} and {change.turns[1]} turns"
        )
        if change.p5.value < SLOWER:
            raise CheckFailed(f"{words}: at least {SLOWER} is asked for",
                              fix="repeat it on a quiet machine, or with more turns")  # fmt: skip
        render.say(f"upgrade: {words}")

    def _measure(self, name: str) -> None:
        from appliance.cli.bench import turns

        turns(streams=str(self.streams), count=self.turns, out=self.folder / name, shape=self.shape)


@dataclass(frozen=True)
class Accuracy:
    """The same questions before and after: not shown to be worse."""

    folder: Path
    task: Path
    items: int

    def before(self) -> None:
        self._ask("before")

    def after(self) -> None:
        from appliance.accuracy.paired import compare
        from appliance.accuracy.run import read_run

        self._ask("after")
        (_, before), (_, after) = (read_run(self.folder / name) for name in ("before", "after"))
        found = compare(before, after)
        words = (
            f"{found.a:.3f} -> {found.b:.3f} of {found.items} answers are right;"
            f" {found.only_a} only before, {found.only_b} only after"
        )
        worse = found.difference < 0 and found.p_value is not None and found.p_value < SURE
        if worse:
            raise CheckFailed(f"{words}, McNemar p = {found.p_value:.3f}")
        render.say(f"upgrade: {words}")

    def _ask(self, name: str) -> None:
        from appliance.cli.accuracy import run

        run(self.task, self.folder / name, count=self.items)


def proof_of(text: str, folder: Path) -> Proof:
    """`speed:STREAMS:TURNS[:SHAPE]` or `accuracy:ITEMS:FILE`; what is measured goes to `folder`."""
    kind, *parts = text.split(":", 3 if text.startswith("speed") else 2)
    try:
        if kind == "speed":
            shape = Path(parts[2]) if len(parts) > 2 else None
            return Speed(folder / "speed", int(parts[0]), int(parts[1]), shape)
        if kind == "accuracy":
            return Accuracy(folder / "accuracy", Path(parts[1]), int(parts[0]))
    except (IndexError, ValueError) as error:
        raise UsageError(
            f"--prove {text}: {error}", fix="speed:4:120 or accuracy:50:FILE"
        ) from error
    raise UsageError(f"--prove {text} is nothing known", fix="speed:4:120 or accuracy:50:FILE")
