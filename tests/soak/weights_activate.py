"""Activation by the clock: a release of 309 GiB and a small one, in turn, 50 times each.

    python tests/soak/weights_activate.py [--times 50] [--folder DIR]

The large one has 62 sparse blobs of 5 GiB and a manifest of 19,840 chunks: the time is in names,
marks and the manifest, not in bytes. Run it with priority (chrt -f 50) on a machine that others
use. Prints median and worst, and what a whole `appliance weights activate` takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "tests")]

from weights_models import add_sparse_release, fetch, write_model  # noqa: E402

from appliance.weights.activate import activate  # noqa: E402
from appliance.weights.store import make_store, open_store  # noqa: E402


def timed(work):
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1000


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        store = make_store(Path(name) / "store")
        small = fetch(store, str(write_model(Path(name) / "small", 1, rows=8))).release
        large = add_sparse_release(store, shards=62, shard_bytes=5 << 30)
        activate(store, small)
        times = {large: [], small: []}
        for _ in range(asked.times):
            for release in times:
                times[release].append(timed(lambda r=release: activate(store, r)))
        command = [sys.executable, "-m", "appliance.cli", "weights", "activate"]
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}
        whole = [
            timed(lambda r=release: subprocess.run(
                [*command, r, "--store", str(store.folder)], env=environment, check=True,
                capture_output=True,
            ))
            for release in (large, small) * 5
        ]  # fmt: skip
        assert open_store(store.folder).current() == small
    processes = sum(path.name.isdigit() for path in Path("/proc").iterdir())
    for what, found in (("309 GiB", times[large]), ("small", times[small])):
        print(
            f"activate {what}: median {statistics.median(found):.1f} ms, worst {max(found):.1f} ms "
            f"of {len(found)}"
        )
    print(f"the whole command: median {statistics.median(whole):.0f} ms, worst {max(whole):.0f} ms")
    print(json.dumps({"processes": processes, "load": os.getloadavg()[0], "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
