"""20 GiB of sparse shards through the whole cycle, in a process whose memory is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

from weights_models import write_model

GIB = 20
SHARDS = 8
LIMIT_KIB = 200_000
CYCLE = """
import json, sys, time
from pathlib import Path
from appliance.weights.activate import activate, rollback
from appliance.weights.fetch import Transfer
from appliance.weights.network import Network
from appliance.weights.pull import pull
from appliance.weights.source import open_source
from appliance.weights.store import make_store
from appliance.weights.sweep import gc, rm
from appliance.weights.verify import Reading, verify

store, seconds = make_store(Path(sys.argv[3])), {}

def timed(name, work):
    started = time.monotonic()
    found = work()
    seconds[name] = round(time.monotonic() - started, 1)
    return found

def fetch(folder):
    return pull(store, open_source(folder, Network()), Transfer(), lambda moment: None)

first = timed("pull", lambda: fetch(sys.argv[1]))
verdict = timed("verify", lambda: verify(
    store, [first.release], Reading(full=True), lambda done, total: None))
assert verdict.is_right and verdict.read_bytes == first.manifest.size_bytes, verdict
timed("activate", lambda: activate(store, first.release))
again = timed("pull again", lambda: fetch(str(store.release_folder(first.release))))
assert (again.release, again.fetched_bytes) == (first.release, 0)
second = timed("pull another", lambda: fetch(sys.argv[2]))
activate(store, second.release)
timed("rollback", lambda: rollback(store))
rm(store, second.release)
timed("gc", lambda: gc(store))
assert store.releases() == [first.release] and store.current() == first.release
# Not ru_maxrss: it still counts the process that started this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0])
print(json.dumps({"bytes": first.manifest.size_bytes, "peak_kib": peak, "seconds": seconds}))
"""


def test_20_gib_run_through_the_whole_cycle_in_under_200_mb(folder: Path):
    rows = (GIB << 30) // 512 // SHARDS
    big = write_model(folder / "big", None, rows, shards=SHARDS, extra=SHARDS - 1)
    small = write_model(folder / "small", None, 64)
    repository = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", CYCLE, str(big), str(small), str(folder / "store")],
        env={**os.environ, "PYTHONPATH": f"{repository}:{repository / 'kernels'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["bytes"] >= GIB << 30
    assert found["peak_kib"] < LIMIT_KIB
