"""make soak: kill pull at 500 random calls, activate, gc and verify at 100 each, fill the disk at
every write. Prints the figures. About ten minutes.

    python tests/soak/weights.py [--seed 1] [--pulls 500] [--others 100] [--folder DIR]
"""

import argparse
import errno
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "tests")]

import crash_points  # noqa: E402
from crash_points import crasher, kill_at, kill_pulls, refetch_limit, what_is_wrong  # noqa: E402
from hostile_server import HostileServer  # noqa: E402
from weights_models import fetch, publish, write_model  # noqa: E402

from appliance.weights.activate import activate  # noqa: E402
from appliance.weights.names import MANIFEST  # noqa: E402
from appliance.weights.store import make_store, open_store  # noqa: E402


def soak_pull(crash, folder, seed, kills):
    model = write_model(folder / "model", seed=1, rows=200_000)
    manifest = fetch(make_store(folder / "made"), str(model)).manifest
    server = HostileServer()
    try:
        publish(server, model)
        server.files[f"/m/{MANIFEST}"] = manifest.to_json()
        started = time.monotonic()
        completed, done = kill_pulls(crash, folder, f"{server.url}/m", kills, seed)
        asked = sum(r.stop - r.start for r in server.requests if r.start is not None)
        useful = manifest.size_bytes * (completed + 1)
        limit = refetch_limit(useful, done)
        print(
            f"pull: {done} kills over {completed} stores of {manifest.size_bytes:,} bytes in "
            f"{time.monotonic() - started:.0f} s; never a wrong blob, release or pointer; "
            f"{(asked - useful) / done / 2**20:.1f} MiB asked for again per kill "
            f"(limit {(limit - useful) / done / 2**20:.0f})"
        )
        assert asked <= limit
    finally:
        server.close()


def soak_others(crash, folder, seed, kills):
    first = write_model(folder / "first" / "tiny", seed=1, rows=64)
    second = Path(shutil.copytree(first, folder / "second" / "tiny"))
    (second / "docs" / "note.txt").write_text("second\n")
    store = make_store(folder / "prepared")
    releases = [fetch(store, str(model)).release for model in (first, second)]
    activate(store, releases[0])
    draw = random.Random(seed)
    for operation, argument in (("activate", releases[1]), ("gc", ""), ("verify", "")):
        started = time.monotonic()
        crash_points.copy(store.folder, folder / "work")
        calls = crash.run(operation, folder / "work", argument).calls
        points = [draw.randint(1, calls) for _ in range(-(-kills // 2))]
        kill_at(crash, store.folder, folder / "work", operation, argument, points)
        print(
            f"{operation}: {2 * len(points)} kills at {len(set(points))} of {calls} calls, before "
            f"and after, in {time.monotonic() - started:.0f} s; current old or new, never wrong"
        )


def soak_writers(crash, folder, seed, kills):
    """Repair, repack and bundle, as pull: at random calls, before and after."""
    store, source = folder / "prepared", str(folder / "first" / "tiny")
    draw = random.Random(seed)
    for operation in ("repair", "repack", "bundle"):
        started = time.monotonic()
        crash_points.copy(store, folder / "work")
        if operation == "repair":
            crash_points.damage(open_store(folder / "work"))
        calls = crash.run(operation, folder / "work", source).calls
        points = [draw.randint(1, calls) for _ in range(-(-kills // 2))]
        if operation == "repair":
            crash_points.kill_repairs_at(crash, store, folder / "work", source, points)
        else:
            crash_points.kill_writers_at(crash, store, folder / "work", operation, points)
        print(
            f"{operation}: {2 * len(points)} kills at {len(set(points))} of {calls} calls, before "
            f"and after, in {time.monotonic() - started:.0f} s; what has its name is whole"
        )


def soak_full_disk(crash, folder):
    model = folder / "first" / "tiny"
    started = time.monotonic()
    calls = crash.run("pull", folder / "count", str(model)).calls
    shutil.rmtree(folder / "count")
    failed = 0
    for n in range(1, calls + 1):
        store = folder / "full"
        end = crash.run("pull", store, str(model), n=n, failure=errno.ENOSPC)
        failed += end.code == 1
        assert end.code == 0 or "No space left" in end.text, end
        assert what_is_wrong(store) == []
        assert crash.run("pull", store, str(model)).code == 0
        assert len(open_store(store).releases()) == 1
        shutil.rmtree(store)
    print(
        f"disk full at each of {calls} writes in {time.monotonic() - started:.0f} s: {failed} "
        "ended with a sentence, every next run completed"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pulls", type=int, default=500)
    parser.add_argument("--others", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        (folder / "pull").mkdir()
        (folder / "others").mkdir()
        with crasher(folder) as crash:
            soak_pull(crash, folder / "pull", asked.seed, asked.pulls)
            soak_others(crash, folder / "others", asked.seed, asked.others)
            soak_writers(crash, folder / "others", asked.seed, asked.others)
            soak_full_disk(crash, folder / "others")


if __name__ == "__main__":
    main()
