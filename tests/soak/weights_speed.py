"""Weights against what people use today, side by side on this machine, alternating.

    python tests/soak/weights_speed.py [--mib 1024] [--rounds 5] [--folder DIR]

Pull against huggingface_hub's snapshot_download from the same local hub, both in processes of
their own, whole and after a kill in mid-file; verify --full against `sha256sum` run in parallel
over the same files, and against OpenSSL run so, which has the processor's SHA instructions where
coreutils' may not. Files in memory. Medians of the rounds, and the best.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "tests")]

from weights_models import write_model  # noqa: E402

SHARDS = 4
VERIFIERS = ["verify --full", "sha256sum in parallel", "openssl in parallel"]
OURS = (
    "import sys; from pathlib import Path\n"
    "from appliance.weights.fetch import Transfer; from appliance.weights.network import Network\n"
    "from appliance.weights.pull import pull; from appliance.weights.source import open_source\n"
    "from appliance.weights.store import make_store\n"
    "store = make_store(Path(sys.argv[2]))\n"
    "print('ready', flush=True)\n"
    "source = open_source('hf:org/tiny', Network(hub_url=sys.argv[1]))\n"
    "pull(store, source, Transfer(connections=8), lambda m: None)\n"
)
THEIRS = (
    "import sys; from huggingface_hub import snapshot_download\n"
    "print('ready', flush=True)\n"
    "snapshot_download('org/tiny', cache_dir=sys.argv[2], max_workers=8)\n"
)
VERIFY = (
    "import sys; from pathlib import Path\n"
    "from appliance.weights.store import open_store\n"
    "from appliance.weights.verify import Reading, verify\n"
    "store = open_store(Path(sys.argv[1]))\n"
    "print('ready', flush=True)\n"
    "verdict = verify(store, store.releases(), Reading(full=True), lambda d, t: None)\n"
    "assert verdict.is_right, verdict\n"
)


def started(code, *arguments, **more):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **more,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def timed(code, *arguments, **more):
    """Seconds from the moment everything is imported."""
    process = started(code, *arguments, **more)
    begin = time.monotonic()
    assert process.wait() == 0
    process.stdout.close()
    return time.monotonic() - begin


class Server:
    def __init__(self, model):
        self.process = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "tests" / "hub_server.py"), str(model)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    @property
    def sent(self):
        with urllib.request.urlopen(f"{self.url}/sent") as answer:
            return int(answer.read())

    def close(self):
        self.process.terminate()
        self.process.wait()


def refetched(server, code, folder, size):
    """Bytes sent over both runs beyond the model's own, when the first was killed half way."""
    before = server.sent
    process = started(code, server.url, str(folder), HF_ENDPOINT=server.url)
    while server.sent - before < size // 2:
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    timed(code, server.url, str(folder), HF_ENDPOINT=server.url)
    return server.sent - before - size


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        rows = asked.mib * 2048 // SHARDS
        model = write_model(folder / "tiny", 1, rows, shards=SHARDS, extra=SHARDS - 1)
        size = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
        server = Server(model)
        try:
            measure(server, folder, size, asked.rounds)
        finally:
            server.close()


def in_parallel(files, *command):
    """Seconds of one process a file, as many at once as there are cores."""
    begin = time.monotonic()
    subprocess.run(
        ["xargs", "-P", str(os.cpu_count()), "-n", "1", *command],
        input="\n".join(files), text=True, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.monotonic() - begin


def measure(server, folder, size, rounds):
    gib = size / 2**30
    times = {name: [] for name in ("pull", "huggingface_hub", *VERIFIERS)}
    for number in range(rounds):
        # In turn, and each first as often as the other: a busy machine is busy for both.
        both = [("pull", OURS), ("huggingface_hub", THEIRS)][:: 1 if number % 2 else -1]
        for name, code in both:
            target = folder / f"{name}-{number}"
            times[name].append(timed(code, server.url, str(target), HF_ENDPOINT=server.url))
            if name == "huggingface_hub" or number < rounds - 1:
                shutil.rmtree(target)
    store = folder / f"pull-{rounds - 1}"
    blobs = [str(path) for path in (store / "blobs").rglob("*") if path.is_file()]
    ways = {
        "verify --full": lambda: timed(VERIFY, str(store)),
        "sha256sum in parallel": lambda: in_parallel(blobs, "sha256sum"),
        "openssl in parallel": lambda: in_parallel(blobs, "openssl", "dgst", "-sha256"),
    }
    for number in range(rounds):
        for name in VERIFIERS[number % 3 :] + VERIFIERS[: number % 3]:
            times[name].append(ways[name]())
    print(f"{gib:.2f} GiB, {rounds} rounds; {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    median = {name: gib / statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        print(f"{name:24} median {median[name]:.2f} GiB/s, best {gib / min(seconds):.2f}")
    for ours, theirs in (
        ("pull", "huggingface_hub"),
        *(("verify --full", v) for v in VERIFIERS[1:]),
    ):
        print(f"{ours} / {theirs}: {median[ours] / median[theirs]:.2f}")
    for name, code in (("pull", OURS), ("huggingface_hub", THEIRS)):
        again = refetched(server, code, folder / f"killed-{name}", size)
        print(f"fetched again after a kill half way, {name}: {again / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
