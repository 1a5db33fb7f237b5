"""compose.yaml as docker compose would read it, for a set of variables. Only what the file uses."""

import re
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+])([^}]*))?\}")


def variables() -> set[str]:
    return {match[1] for match in _VARIABLE.finditer((REPOSITORY / "compose.yaml").read_text())}


def compose(**given: str) -> dict[str, Any]:
    """`${X:-d}`: X, or d where X is empty; `${X:+d}`: d, or nothing where X is empty."""

    def value(match: re.Match[str]) -> str:
        name, sign, default = match[1], match[2], match[3] or ""
        found = given.get(name, "")
        if sign == "+":
            return default if found else ""
        return found or default

    return yaml.safe_load(_VARIABLE.sub(value, (REPOSITORY / "compose.yaml").read_text()))


def environment(service: str, **given: str) -> dict[str, str]:
    """What the service's process sees."""
    found = compose(**given)["services"][service]["environment"]
    return {name: "" if value is None else str(value) for name, value in found.items()}
