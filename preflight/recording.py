"""A machine kept in a folder: Recording writes it, Recorded answers from it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from preflight.answers import NOT_RECORDED, Source, Unreadable
from preflight.blank import Blanker

RECORDING = "recording.json"
FORMAT = 1


class Recorded(Source):
    """A machine kept in a folder by Recording: the same questions get the same answers."""

    def __init__(self, folder: Path) -> None:
        path = folder / RECORDING
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}", error.errno) from error
        except ValueError as error:
            raise Unreadable(f"{path} is not a recording: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise Unreadable(f"{path} has recording format {found!r}; this release reads {FORMAT}")
        self.label = data.get("label")
        self.folders = data.get("folders")
        self.measured = data.get("measured")
        self.answers: dict[str, dict[str, Any]] = data["answers"]

    def answer(self, kind: str, *words: str) -> Any:
        found = self.answers.get(kind, {}).get(" ".join(words))
        if found is None and kind == "names":
            found = self._names(words[0])
        if found is None:
            raise Unreadable(NOT_RECORDED)
        return _as_answered(kind, found)

    def _names(self, folder: str) -> list[str] | None:
        """A machine composed by hand lists files only; what they share is its folders."""
        start = folder.rstrip("/") + "/"
        kinds = ("read", "target", "binary", "names")
        paths = (p for kind in kinds for p in self.answers.get(kind, {}) if p.startswith(start))
        return sorted({path[len(start) :].split("/")[0] for path in paths}) or None


class Recording(Source):
    """Asks another source, blanks what identifies the machine, and keeps question and answer.

    Probes see the blanked answers, so a replay gives the same report, byte for byte.
    """

    def __init__(self, live: Source, folder: Path) -> None:
        self.live = live
        self.folder = folder
        self.label = live.label
        self.answers: dict[str, dict[str, Any]] = {}
        self.blank = Blanker(_hostname(live))
        self._lock = threading.Lock()

    def answer(self, kind: str, *words: str) -> Any:
        # One question at a time: placeholders are numbered in the order of what they stand for.
        with self._lock:
            return self._ask(kind, *words)

    def _ask(self, kind: str, *words: str) -> Any:
        kept = self.answers.setdefault(kind, {})
        key = " ".join(words)
        if key in kept:
            # Free memory changes between two looks; a report has only one value of it.
            return _as_answered(kind, kept[key])
        try:
            found = self.blank.answer(kind, words, self.live.answer(kind, *words))
        except Unreadable as error:
            kept[key] = {"unreadable": self.blank.text(error.reason)}
            if error.code is not None:
                kept[key]["code"] = error.code
            raise
        kept[key] = _as_kept(kind, found)
        return found

    def save(self) -> Path:
        """Write the recording; the folder is made if it is not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / RECORDING
        data = {
            "format": FORMAT,
            "label": self.label,
            "folders": self.folders,
            "measured": self.measured,
            "answers": self.answers,
        }
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(path)
        return path


def _as_kept(kind: str, found: Any) -> Any:
    """Texts of several lines as lists, so that a recording can be read and its changes reviewed."""
    if kind == "run":
        return {"code": found[0], "out": found[1].split("\n")}
    if isinstance(found, str) and found.count("\n") > 1:
        return {"lines": found.split("\n")}
    return found


def _as_answered(kind: str, kept: Any) -> Any:
    """The inverse of _as_kept; a kept refusal is raised again."""
    if isinstance(kept, dict) and "unreadable" in kept:
        raise Unreadable(kept["unreadable"], kept.get("code"))
    if isinstance(kept, dict) and "lines" in kept:
        return "\n".join(kept["lines"])
    if kind == "run":
        return [kept["code"], "\n".join(kept["out"])]
    return kept


def _hostname(live: Source) -> str | None:
    try:
        return live.read("/proc/sys/kernel/hostname").strip() or None
    except Unreadable:
        return None
