"""A synthetic model, plans for it, and engines that generate from it. Made once per session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.plan.model import Plan

GENERATE = Path(__file__).parent / "generate.py"
Outputs = dict[str, Any]


def run(arguments: list[str], log: Path, **environment: str) -> None:
    """Run in the engine's Python; on failure show the end of what it said."""
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, f"{arguments[:3]} failed:\n" + "\n".join(
        log.read_text().splitlines()[-40:]
    )


class Lab:
    """One checkpoint and what engines say about it."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder
        self.path = checkpoint
        self.checkpoint: Checkpoint = read_checkpoint(checkpoint)

    def generate(self, name: str, plan: Plan, prompts: dict[str, Any], **options: Any) -> Outputs:
        """Serve the checkpoint on `plan` and generate greedily."""
        plan_file = self.folder / f"{name}.plan.json"
        plan.write(plan_file)
        ours = {"appliance": {"plan": str(plan_file), "checkpoint": str(self.path)}}
        return self._run(name, self.path, prompts, additional_config=ours, **options)

    def generate_stock(self, name: str, model: Path, prompts: dict[str, Any]) -> Outputs:
        """vLLM's own unquantised path on dense weights."""
        return self._run(name, model, prompts)

    def _run(self, name: str, model: Path, prompts: dict[str, Any], **options: Any) -> Outputs:
        asked, out = self.folder / f"{name}.prompts.json", self.folder / f"{name}.json"
        asked.write_text(json.dumps(prompts))
        arguments = [str(GENERATE), str(model), str(asked), str(out), json.dumps(options)]
        run(arguments, self.folder / f"{name}.log")
        found: Outputs = json.loads(out.read_text())
        return found


@pytest.fixture(scope="session")
def prompts() -> dict[str, Any]:
    """20 prompts of 3 to 41 tokens, 64 tokens asked of each."""
    rows = [[4 + (7 * p + 13 * i) % 900 for i in range(3 + 2 * p)] for p in range(20)]
    return {"prompts": rows, "tokens": 64}


MakeLab = Callable[[str], Lab]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> MakeLab:
    from appliance.checkpoint.synth import SynthSpec, synthesize

    made: dict[str, Lab] = {}

    def make(family: str) -> Lab:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            synthesize(folder / "model", SynthSpec(family=family))
            made[family] = Lab(folder, folder / "model")
        return made[family]

    return make
