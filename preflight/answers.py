"""What a question to the machine is. Every probe asks a Source; source.py has the three there are.

A question is a kind (read, names, target, binary, space, run, nvml, trial) and its words. An answer
is plain JSON; a refusal is Unreadable with the reason, and is recorded too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

MISSING = "no such file"
NOT_RECORDED = "not in the recording"


class Unreadable(Exception):
    """Why a question has no answer. `code` is errno or NVML's number."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Ran(NamedTuple):
    """What a command printed (stdout, then stderr) and its exit code."""

    code: int
    out: str


class Space(NamedTuple):
    """Bytes of a file system; free is what an ordinary user may take."""

    total_bytes: int
    free_bytes: int


class Source(ABC):
    """Asks one machine. Every method raises Unreadable where there is no answer."""

    label: str | None = None
    # The folders whose disks were looked at: a replay looks at the same ones.
    folders: Mapping[str, str] | None = None
    # What was measured there (a Measured as plain JSON), if anything was.
    measured: Mapping[str, Any] | None = None

    @abstractmethod
    def answer(self, kind: str, *words: str) -> Any:
        """The raw answer, plain JSON."""

    def read(self, path: str) -> str:
        """The text of a file of /proc, /sys, /etc or /dev."""
        return str(self.answer("read", path))

    def names(self, path: str) -> tuple[str, ...]:
        """What a folder holds, sorted."""
        return tuple(self.answer("names", path))

    def target(self, path: str) -> str:
        """Where a symbolic link ends."""
        return str(self.answer("target", path))

    def binary(self, path: str) -> bytes:
        """The first 4 KiB of a binary file, such as PCI configuration space."""
        return bytes.fromhex(self.answer("binary", path))

    def space(self, path: str) -> Space:
        """Size of the file system that holds a path."""
        return Space(*self.answer("space", path))

    def run(self, *argv: str) -> Ran:
        """Run a command that only looks, for at most a few seconds."""
        return Ran(*self.answer("run", *argv))

    def nvml(self, call: str, devices: tuple[int, ...] = (), *args: int) -> Any:
        """Call NVML's `call` on the handles of these device indices. Structs come back as dicts."""
        return self.answer("nvml", call, *(f"gpu{i}" for i in devices), *(str(a) for a in args))

    def trial(self, what: str, *words: str) -> str:
        """Try something harmless that no file tells: memory-policy, direct-io FOLDER."""
        return str(self.answer("trial", what, *words))
