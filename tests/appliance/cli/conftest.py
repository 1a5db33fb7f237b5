"""The command line, in this process or as its own, over a state directory of its own."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.cli import run

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch) -> Path:
    for name in [name for name in os.environ if name.startswith("APPLIANCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("APPLIANCE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@dataclasses.dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def appliance(capfd):
    """appliance("plan", "show", path) -> exit code, stdout, stderr; run in this process."""

    def command(*words: object) -> Said:
        code = run([str(word) for word in words])
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return command


@pytest.fixture
def own_process(own_state):
    """own_process("up", ..., STANDIN=...) -> the finished command, as a process of its own."""

    def command(*words: object, **environment: str) -> Said:
        done = subprocess.run(
            [sys.executable, "-m", "appliance.cli", *map(str, words)],
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}",
                 **environment},
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        return Said(done.returncode, done.stdout, done.stderr)

    return command


@pytest.fixture(scope="session")
def made_model(tmp_path_factory) -> Path:
    from appliance.checkpoint.synth import SynthSpec, synthesize

    folder = tmp_path_factory.mktemp("models") / "tiny"
    synthesize(folder, SynthSpec(layers=2, experts=8))
    return folder


@pytest.fixture
def model(made_model, tmp_path) -> Path:
    return Path(shutil.copytree(made_model, tmp_path / "tiny"))
