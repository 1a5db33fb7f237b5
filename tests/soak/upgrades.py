"""Upgrades with the real CPU engine and real faults: python tests/soak/upgrades.py [HOW_MANY]

Two small models take turns. Every other upgrade process is killed with SIGKILL at a moment drawn
by lot, then taken up with `appliance upgrade resume`; every fifth has broken weights. After each,
one recorded deployment must serve, and answer. Prints a line for each and a verdict at the end.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 900


def appliance(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "appliance.cli", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ran(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    process = appliance(environment, *arguments)
    text = process.communicate(timeout=LONGEST_SECONDS)[0]
    return process.returncode, text


def served(environment: dict[str, str]) -> tuple[bool, str]:
    """Whether one recorded deployment serves and answers, and what there is instead."""
    code, text = ran(environment, "upgrade", "history", "--json")
    book = json.loads(text[text.index("{") : text.rindex("}") + 1])
    if code or book["running"] is not None:
        return False, f"unfinished: {book['running']}"
    _, text = ran(environment, "status", "--json")
    status = json.loads(text[text.index("{") : text.rindex("}") + 1])
    recorded, here = book["current"]["plan_digest"], status["plan_digest"]
    if not status["serving"] or recorded != here:
        return False, f"{status['phase']}: plan {here[:12]}, recorded {recorded[:12]}"
    code, text = ran(environment, "canary", "127.0.0.1", environment["APPLIANCE_PORT"])
    return code == 0, text.strip()


def main(count: int, folder: Path) -> int:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("APPLIANCE_")},
        "APPLIANCE_STATE_DIR": str(folder / "state"), "APPLIANCE_PORT": "18400",
        "APPLIANCE_DRAIN_SECONDS": "20",
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}",
    }  # fmt: skip
    dice = random.Random(20261129)
    for seed, name in ((1, "a"), (2, "b")):
        _, text = ran(environment, "weights", "synth", str(folder / name), "--seed", str(seed))
        print(text.strip(), flush=True)
    shutil.copytree(folder / "b", folder / "broken")
    shard = max((folder / "broken").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4096])
    code, text = ran(environment, "up", "--detach", "--model", str(folder / "a"), "--context",
                     "2048", "--streams", "2")  # fmt: skip
    assert code == 0, text
    good = 0
    try:
        for number in range(count):
            started = time.monotonic()
            name = "broken" if number % 5 == 4 else "ba"[number % 2]
            process = appliance(environment, "upgrade", "run", "--model", str(folder / name),
                                "--release", f"{number}-{name}")  # fmt: skip
            killed = ""
            if number % 2:
                wait = dice.uniform(0.5, 60.0)
                try:
                    process.wait(wait)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    killed = f", killed after {wait:.0f} s"
            process.communicate(timeout=LONGEST_SECONDS)
            if killed:
                ran(environment, "upgrade", "resume")
            fine, words = served(environment)
            good += fine
            took = time.monotonic() - started
            verdict = "serving" if fine else "NOT serving"
            print(f"{number} to {name}{killed}: exit {process.returncode}, {verdict} after"
                  f" {took:.0f} s ({words})", flush=True)  # fmt: skip
    finally:
        ran(environment, "down")
    print(f"{good} of {count} ended serving and recorded")
    return 0 if good == count else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, Path(scratch)))
