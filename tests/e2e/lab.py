"""One checkpoint, and engines that generate from it, each in its own process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.plan.model import Plan

# Python of the vLLM that the image ships, over the CPU build's libraries (constraints/install.py).
OVERLAY = {"PYTHONPATH": str(Path(sys.prefix) / "vllm-0.33.0"), "VLLM_TARGET_DEVICE": "cpu"}
GENERATE = Path(__file__).parent / "generate.py"
Outputs = dict[str, Any]
MakeLab = Callable[[str], "Lab"]


def run(arguments: list[str], log: Path, **environment: str) -> None:
    """Run in the engine's Python; on failure show the end of what it said."""
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            # One thread an engine: the models are tiny, and threads only wait for each other.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                **environment,
            },
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

    def generate(
        self,
        name: str,
        plan: Plan,
        prompts: dict[str, Any],
        environment: dict[str, str] | None = None,
        arena: Path | None = None,
        **options: Any,
    ) -> Outputs:
        """Serve the checkpoint on `plan`, host experts in `arena` if given, generate greedily."""
        plan_file = self.folder / f"{name}.plan.json"
        plan.write(plan_file)
        ours = {"appliance": {"plan": str(plan_file), "checkpoint": str(self.path)}}
        if arena is not None:
            ours["appliance"]["arena"] = str(arena)
        options["additional_config"] = ours
        return self._run(name, self.path, prompts, options, environment or {})

    def generate_stock(self, name: str, model: Path, prompts: dict[str, Any]) -> Outputs:
        """vLLM's own unquantised path on dense weights."""
        return self._run(name, model, prompts, {}, {})

    def _run(
        self,
        name: str,
        model: Path,
        prompts: dict[str, Any],
        options: dict[str, Any],
        environment: dict[str, str],
    ) -> Outputs:
        asked, out = self.folder / f"{name}.prompts.json", self.folder / f"{name}.json"
        asked.write_text(json.dumps(prompts))
        arguments = [str(GENERATE), str(model), str(asked), str(out), json.dumps(options)]
        run(arguments, self.folder / f"{name}.log", **environment)
        found: Outputs = json.loads(out.read_text())
        return found
