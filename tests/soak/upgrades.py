"""Upgrades of the real CPU engine, a fault in every one: python tests/soak/upgrades.py [HOW_MANY]

Two small models take turns. CASES are met in order: SIGKILL of the upgrade at a step, a power cut
(the engine and its supervisor die, too), broken weights, answers that are not the known ones, an
engine that dies while it loads, one that never becomes ready, a full disk. What was cut off is
taken up with `appliance upgrade resume`. After each, one recorded deployment must serve, be the
right one where the fault leaves no choice, and answer. Prints a line for each, then a verdict.
Needs root: the state directory is a file system of its own, so that it can be full.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 1200
FILLER = "filler"


@dataclass
class Lab:
    folder: Path
    environment: dict[str, str]

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "appliance.cli", *arguments], env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        text = process.communicate(timeout=LONGEST_SECONDS)[0]
        return process.returncode, text

    def json(self, *arguments: str) -> dict:
        text = self.run(*arguments, "--json")[1]
        return json.loads(text[text.index("{") : text.rindex("}") + 1])

    def pids(self) -> dict:
        return json.loads((self.state / "state.json").read_text())


def nothing(lab: Lab, upgrade: subprocess.Popen) -> None:
    """The weights are the fault."""


def kill(lab: Lab, upgrade: subprocess.Popen) -> None:
    upgrade.kill()


def power_cut(lab: Lab, upgrade: subprocess.Popen) -> None:
    upgrade.kill()
    pids = lab.pids()
    for leader in (pids["supervisor_pid"], pids["engine_pid"]):
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.killpg(leader, signal.SIGKILL)


def new_engine(lab: Lab, previous: int) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = lab.pids()["engine_pid"]
        if found not in (None, previous):
            return found
        time.sleep(0.1)
    raise AssertionError("no new engine was started")


def engine_dies(lab: Lab, upgrade: subprocess.Popen) -> None:
    pid = new_engine(lab, lab.pids()["engine_pid"])
    time.sleep(5)
    os.killpg(pid, signal.SIGKILL)


def engine_freezes(lab: Lab, upgrade: subprocess.Popen) -> None:
    """It never becomes ready: the start limit passes."""
    pid = new_engine(lab, lab.pids()["engine_pid"])
    time.sleep(2)
    os.killpg(pid, signal.SIGSTOP)


def fill_disk(lab: Lab, upgrade: subprocess.Popen) -> None:
    """The state directory is a file system of its own: not a byte is left on it."""
    with (lab.state / FILLER).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))


@dataclass(frozen=True)
class Case:
    """`at`: the step whose beginning is waited for; `outcome`: where there is no choice."""

    name: str
    at: str | None
    fault: Callable[[Lab, subprocess.Popen], None]
    outcome: str | None = None
    delay: float = 0.0
    weights: str | None = None


CASES = (
    Case("killed while it plans", "plan", kill, "committed"),
    Case("killed as it drains", "drain", kill, "committed"),
    Case("killed as it stops the old engine", "stop", kill, "committed"),
    Case("killed while the new engine loads", "switch", kill, "committed", delay=12.0),
    Case("killed as it proves", "prove", kill, "committed"),
    Case("power cut while the old engine drains", "drain", power_cut, "committed"),
    Case("power cut while the new engine loads", "switch", power_cut, "committed", delay=15.0),
    Case("a shard is cut short", None, nothing, "undone", weights="short"),
    Case("the new engine's answers are wrong", None, nothing, "undone", weights="wrong"),
    Case("the new engine dies while it loads", "switch", engine_dies, "undone"),
    Case("the new engine never becomes ready", "switch", engine_freezes, "undone"),
    Case("the disk is full before the plan is written", "plan", fill_disk),
    Case("the disk is full while the engine is switched", "switch", fill_disk),
)


def served(lab: Lab) -> tuple[str | None, str]:
    """The release that is recorded, serves and answers (else None), and what was seen."""
    book = lab.json("upgrade", "history")
    if book["running"] is not None:
        return None, f"unfinished: {book['running']}"
    status = lab.json("status")
    recorded, here = book["current"]["plan_digest"], status["plan_digest"]
    if not status["serving"] or recorded != here:
        return None, f"{status['phase']}: plan {here[:12]}, recorded {recorded[:12]}"
    code, text = lab.run("canary", "127.0.0.1", lab.environment["APPLIANCE_PORT"])
    return (None if code else book["current"]["release"]), text.strip()


def upgrade(lab: Lab, case: Case, model: str, release: str) -> tuple[str, str]:
    """Exit code and last words, of the upgrade or of what took it up."""
    process = lab.start("upgrade", "run", "--model", str(lab.folder / model), "--release", release)
    said = []
    for line in process.stdout:
        said.append(line.strip())
        if case.at is not None and line.strip() == f"upgrade: {case.at}":
            time.sleep(case.delay)
            case.fault(lab, process)
            break
    process.communicate(timeout=LONGEST_SECONDS)
    (lab.state / FILLER).unlink(missing_ok=True)
    ended = f"exit {process.returncode}"
    if process.returncode not in (0, 3):
        code, text = lab.run("upgrade", "resume")
        ended += f", resumed with exit {code}"
        said += text.splitlines()
    return ended, said[-1] if said else ""


def one(lab: Lab, case: Case, number: int) -> bool:
    started = time.monotonic()
    before = lab.json("upgrade", "history")["current"]
    was = before["model"] if before else str(lab.folder / "a")
    model = case.weights or ("b" if was.endswith("/a") else "a")
    release = f"{number}-{model}"
    ended, last = upgrade(lab, case, model, release)
    now, words = served(lab)
    book = lab.json("upgrade", "history")
    outcome = book["past"][-1]["outcome"] if book["past"] else "none"
    right = now == book["current"]["release"] and case.outcome in (None, outcome)
    right = right and (now == release) == (outcome == "committed")
    took = time.monotonic() - started
    verdict = "fine" if right else "WRONG"
    print(f"{number + 1:2} {case.name}: {ended}, {outcome}, {verdict}: {now} serves after"
          f" {took:.0f} s ({words}; {last})", flush=True)  # fmt: skip
    return right


def prepare(lab: Lab) -> None:
    for seed, name in ((1, "a"), (2, "b")):
        code, text = lab.run("weights", "synth", str(lab.folder / name), "--seed", str(seed))
        assert code == 0, text
        done = subprocess.run([sys.executable, "-P", "-m", "appliance.engine.expectations",
                               str(lab.folder / name)], env=lab.environment, check=False,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
    shutil.copytree(lab.folder / "b", lab.folder / "short")
    shard = max((lab.folder / "short").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4096])
    # The answers of one model beside the weights of the other.
    shutil.copytree(lab.folder / "b", lab.folder / "wrong")
    shutil.copyfile(lab.folder / "a" / "expectations.json",
                    lab.folder / "wrong" / "expectations.json")  # fmt: skip
    code, text = lab.run("up", "--detach", "--model", str(lab.folder / "a"), "--context", "2048",
                         "--streams", "2")  # fmt: skip
    assert code == 0, text


def environment_of(folder: Path) -> dict[str, str]:
    """The appliance of this checkout, with a state directory of its own and no other setting."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("APPLIANCE_")}
    path = [str(REPOSITORY), str(REPOSITORY / "kernels"), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "APPLIANCE_STATE_DIR": str(folder / "state"),
        "PYTHONPATH": os.pathsep.join(path),
    }


def main(count: int, folder: Path) -> int:
    lab = Lab(folder, {
        **environment_of(folder), "APPLIANCE_PORT": "18400", "APPLIANCE_DRAIN_SECONDS": "20",
        "APPLIANCE_START_LIMIT_SECONDS": "240",
    })  # fmt: skip
    lab.state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512m,mode=700", "upgrades", str(lab.state)]
    subprocess.run(mount, check=True)
    good = 0
    try:
        prepare(lab)
        for number in range(count):
            good += one(lab, CASES[number % len(CASES)], number)
    finally:
        lab.run("down")
        subprocess.run(["umount", str(lab.state)], check=False)
    print(f"{good} of {count} ended in a serving, recorded state")
    return 0 if good == count else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else len(CASES), Path(scratch)))
