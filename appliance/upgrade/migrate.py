"""The files of the state directory, from one schema version to another, both ways.

A migration may be cut off anywhere: it is run again from its start, so it must not mind what an
earlier attempt left. The version is written when it is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ServeError
from appliance.serve.state import write_aside

VERSION_FILE = "schema.json"


@dataclass(frozen=True)
class Migration:
    """`up` leads to the version it is listed under, `down` back from it."""

    up: Callable[[Path], None]
    down: Callable[[Path], None]


# version -> how to get there from the one before. Version 1 is where everything starts.
MIGRATIONS: Mapping[int, Migration] = {}
SCHEMA_VERSION = max({1, *MIGRATIONS})  # what this release reads and writes


def version_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / VERSION_FILE).read_text())["version"])
    except FileNotFoundError:
        return 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServeError(f"cannot read the schema version in {folder / VERSION_FILE}") from error


def migrate(folder: Path, wanted: int, table: Mapping[int, Migration] = MIGRATIONS) -> None:
    """Up or down, one version at a time. Raises ServeError where there is no way there."""
    while (version := version_of(folder)) != wanted:
        up = wanted > version
        step = version + 1 if up else version
        if step not in table:
            raise ServeError(
                f"no way from schema version {version} to {wanted}: this release knows"
                f" {sorted({1, *table})}",
                fix="use a release that knows both",
            )
        (table[step].up if up else table[step].down)(folder)
        reached = step if up else step - 1
        write_aside(folder / VERSION_FILE, json.dumps({"version": reached}) + "\n")
