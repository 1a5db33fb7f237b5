"""Kill or fail the store's operations at chosen calls, and say what must hold after each."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.weights.manifest import CHUNK_BYTES
from appliance.weights.marks import clean_mark
from appliance.weights.release import check_release
from appliance.weights.store import Store, open_store

HERE = Path(__file__).resolve().parent
CONNECTIONS = 2  # as in crash_driver
LOOK_BYTES = 2 << 20  # headers, which every run asks for first
KILL_BEFORE, KILL_AFTER = 0, -1
OUTPUT = {"bundle": "bundle", "repack": "arena"}  # the folder that each writes into
NEVER = 0


@dataclass(frozen=True)
class End:
    signal: int
    code: int | None
    calls: int | None
    text: str


class Crasher:
    """A process with everything imported; each operation is a forked child of it."""

    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "crash_driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'kernels'}",
            },
        )

    def run(
        self, operation: str, store: Path, argument: str = "", *, n: int = NEVER, failure: int = 0
    ) -> End:
        asked = {"operation": operation, "store": str(store), "argument": argument}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({**asked, "n": n, "failure": failure}) + "\n")
        self._process.stdin.flush()
        end = End(**json.loads(self._process.stdout.readline()))
        assert end.code != 2, end.text
        return end

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@contextmanager
def crasher(build: Path) -> Iterator[Crasher]:
    library = build / "crash_faults.so"
    source = HERE / "crash_faults.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    started = Crasher(library)
    try:
        yield started
    finally:
        started.close()


def what_is_wrong(folder: Path) -> list[str]:
    """Whatever must never be seen in a store, at any moment."""
    if not (folder / "FORMAT").exists():
        return []  # killed before it was one; the next run makes it
    store = open_store(folder)
    wrong = [
        f"blob {name} has other bytes"
        for name, _ in store.blob_names()
        if hashlib.sha256(store.blob(name).read_bytes()).hexdigest() != name
    ]
    for release in store.releases():
        wrong += [f"{release}: {problem}" for problem in check_release(store, release)]
    store.current()  # raises where it leads nowhere
    return wrong


def kill_pulls(crash: Crasher, folder: Path, url: str, kills: int, seed: int) -> tuple[int, int]:
    """Kill pulls at `kills` random calls, stores one after another; gives completed and kills.

    A run is killed at a call drawn from those that a whole pull makes, then goes on, and so on
    until the pull completes; then the next store begins.
    """
    draw = random.Random(seed)
    whole = crash.run("pull", folder / "count", url).calls
    shutil.rmtree(folder / "count")
    assert whole
    done = completed = 0
    while done < kills:
        store = folder / f"store-{completed}"
        while True:
            # Half of the kills come early in a run: there the bookkeeping is.
            n = draw.randint(1, whole if draw.random() < 0.5 else 40)
            end = crash.run("pull", store, url, n=n, failure=draw.choice((KILL_BEFORE, KILL_AFTER)))
            assert (end.signal, end.code) in ((9, None), (0, 0)), end
            assert what_is_wrong(store) == []
            if end.code == 0:
                break
            done += 1
        assert open_store(store).releases()
        completed += 1
        shutil.rmtree(store)
    return completed, done


def kill_first_pull_at(
    crash: Crasher, work: Path, source: str, points: list[int], failure: int
) -> None:
    """Kill a pull into an empty store at each call of `points`; then it completes."""
    for n in points:
        shutil.rmtree(work, ignore_errors=True)
        end = crash.run("pull", work, source, n=n, failure=failure)
        assert (end.signal, end.code) in ((9, None), (0, 0)), end
        assert what_is_wrong(work) == [], n
        assert crash.run("pull", work, source).code == 0
        assert what_is_wrong(work) == []
        assert len(open_store(work).releases()) == 1


def kill_at(
    crash: Crasher, prepared: Path, work: Path, operation: str, argument: str, points: list[int]
) -> None:
    """Kill one operation at each call of `points`, each time on a fresh copy; then it completes."""
    for n in points:
        for failure in (KILL_BEFORE, KILL_AFTER):
            copy(prepared, work)
            before = open_store(work).current()
            end = crash.run(operation, work, argument, n=n, failure=failure)
            assert (end.signal, end.code) in ((9, None), (0, 0)), end
            assert what_is_wrong(work) == [], (operation, n, failure)
            after = open_store(work).current()
            asked = open_store(work).find(argument) if operation == "activate" else before
            assert after in (before, asked)
            assert crash.run(operation, work, argument).code == 0
            assert what_is_wrong(work) == []
            assert open_store(work).current() == asked


def kill_writers_at(
    crash: Crasher, prepared: Path, work: Path, operation: str, points: list[int]
) -> None:
    """Kill bundle or repack at each call of `points`: a file that has its name is whole.

    What is there is held against the files of a run that nobody killed.
    """
    copy(prepared, work)
    assert crash.run(operation, work).code == 0
    whole = written(work / OUTPUT[operation])
    for n in points:
        for failure in (KILL_BEFORE, KILL_AFTER):
            copy(prepared, work)
            end = crash.run(operation, work, n=n, failure=failure)
            assert (end.signal, end.code) in ((9, None), (0, 0)), end
            left = written(work / OUTPUT[operation])
            assert left.items() <= whole.items(), (operation, n, failure, left.keys())
            assert what_is_wrong(work) == []
            assert crash.run(operation, work).code == 0
            assert written(work / OUTPUT[operation]) == whole
            asides = [p.name for p in (work / OUTPUT[operation]).iterdir() if ".aside" in p.name]
            assert len(asides) <= 1, asides  # of a small file; a large one's is taken over


def kill_repairs_at(
    crash: Crasher, prepared: Path, work: Path, source: str, points: list[int]
) -> None:
    """Kill a repair at each call: the damaged blob is right, or known to be wrong; then right."""
    for n in points:
        for failure in (KILL_BEFORE, KILL_AFTER):
            copy(prepared, work)
            damaged = damage(open_store(work))
            end = crash.run("repair", work, source, n=n, failure=failure)
            assert (end.signal, end.code) in ((9, None), (0, 0)), end
            wrong = what_is_wrong(work)
            assert wrong in ([], [f"blob {damaged} has other bytes"]), wrong
            # Half-written bytes never pass for proved ones: verify looks at them again.
            assert not wrong or clean_mark(open_store(work), damaged) is None
            assert crash.run("repair", work, source).code == 0
            assert what_is_wrong(work) == []


def damage(store: Store) -> str:
    """Flip a bit in the middle of the largest blob; gives its name."""
    name, found = max(store.blob_names(), key=lambda blob: blob[1].st_size)
    path = store.blob(name)
    path.chmod(0o644)
    with path.open("r+b") as stream:
        stream.seek(found.st_size // 2)
        byte = stream.read(1)
        stream.seek(found.st_size // 2)
        stream.write(bytes([byte[0] ^ 1]))
    path.chmod(0o444)
    return name


def written(folder: Path) -> dict[str, str]:
    """sha256 of every file that has its name."""
    if not folder.is_dir():
        return {}
    files = [p for p in folder.iterdir() if p.is_file() and ".aside" not in p.name]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def copy(prepared: Path, work: Path) -> None:
    """The store again as it was, marks and all (they hold inode and times of the copies)."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(prepared, work, symlinks=True)
    remark(open_store(work))


def remark(store: Store) -> None:
    from appliance.weights.marks import prove

    for name, _ in list(store.blob_names()):
        assert prove(store, name) is not None


def refetch_limit(size_bytes: int, kills: int) -> int:
    """Bytes that may be asked for in all: one chunk a connection again for every kill."""
    return size_bytes + kills * (CONNECTIONS * CHUNK_BYTES + LOOK_BYTES)
