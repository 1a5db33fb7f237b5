"""What an upgrade may be asked to prove besides the canary: speed of the slowest turns, answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import render
from appliance.errors import UsageError

if TYPE_CHECKING:
    from appliance.bench.client import Endpoint
    from appliance.upgrade.steps import Proof

NOT_INFERIOR = 0.05  # share of right answers that the new deployment may lose


@dataclass(frozen=True)
class Speed:
    """The same turns before and after: p5 not shown to be within 5 % does not pass."""

    folder: Path
    streams: int
    turns: int
    shape: Path | None

    def before(self) -> None:
        from appliance.cli.bench import turns

        turns(streams=str(self.streams), count=self.turns, out=self._before, shape=self.shape)

    def after(self) -> None:
        from appliance.bench.gate import require_speed

        server = _serving()
        for line in require_speed(
            self._before, self.folder / "after", server.url, server.model, server.key,
            tls=server.tls,
        ):  # fmt: skip
            render.say(f"upgrade: {line}")

    @property
    def _before(self) -> Path:
        return self.folder / "before"


@dataclass(frozen=True)
class Accuracy:
    """The same questions before and after: the whole interval of the difference decides."""

    folder: Path
    task: Path
    items: int

    def before(self) -> None:
        from appliance.accuracy.power import require_items
        from appliance.accuracy.tasks import read_task
        from appliance.cli.accuracy import run

        # Fewer could never pass, and would be known only after the switch.
        require_items(len(read_task(self.task, count=self.items).items), NOT_INFERIOR)
        run(self.task, self._before, count=self.items)

    def after(self) -> None:
        from appliance.accuracy.gate import require_accuracy

        server = _serving()
        after = self.folder / "after"
        line = require_accuracy(
            self._before, after, self.task, server.url, server.model, server.key,
            margin=NOT_INFERIOR, tls=server.tls,
        )  # fmt: skip
        render.say(f"upgrade: {line}")

    @property
    def _before(self) -> Path:
        return self.folder / "before"


def _serving() -> Endpoint:
    from appliance.cli.measured import find

    return find(None, None, None, ignore_eos=True).endpoint


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
            f"--prove {text}: {error}", fix="speed:4:120 or accuracy:150:FILE"
        ) from error
    raise UsageError(f"--prove {text} is nothing known", fix="speed:4:120 or accuracy:150:FILE")
