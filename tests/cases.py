"""Finds a real input by its id: `case(shared, "T048")` is the path of that file."""

from pathlib import Path

FOLDERS = {"T": "topo", "S": "smi", "M": "host", "B": "issues"}


def case(shared: Path, name: str) -> Path:
    """The one file of this id."""
    (path,) = (shared / "cases" / FOLDERS[name[0]]).glob(f"{name}_*")
    return path


def text_of(shared: Path, name: str) -> str:
    return case(shared, name).read_bytes().decode("utf-8", "replace")
