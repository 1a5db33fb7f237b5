"""Recorded machines for any test: `machine("two-rtx-pro-6000")` is a Host."""

from functools import cache
from pathlib import Path

from preflight.host import Host
from preflight.inspect import inspect
from preflight.source import Recorded

FOLDER = Path(__file__).resolve().parent / "machines"
NAMES = tuple(sorted(p.name for p in FOLDER.iterdir() if (p / "recording.json").is_file()))


def recorded(name: str) -> Recorded:
    """The source of one recorded machine."""
    return Recorded(FOLDER / name)


@cache
def machine(name: str) -> Host:
    """The facts of one recorded machine, by the name of its folder under tests/machines."""
    return inspect(recorded(name))
