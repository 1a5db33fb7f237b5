"""Another package registers the method exl3, too: exactly one owns it, and no plan is ignored."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.errors import UsageError
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.serve.spec import Wishes, spec
from appliance.serve.state import Files
from preflight import inspect
from preflight.source import Live

OURS = "appliance.engine.config"
PACKAGE = """
def register():
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Theirs(QuantizationConfig):
        def get_name(self): return "exl3"
        def get_supported_act_dtypes(self): return []
        @classmethod
        def get_min_capability(cls): return 0
        @staticmethod
        def get_config_filenames(): return []
        @classmethod
        def from_config(cls, config): return cls()
        def get_quant_method(self, layer, prefix): return None

    register_quantization_config("exl3")(Theirs)
"""
# What every process of the engine does first, then what the worker does before it proves itself.
START = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from appliance.engine import compat
from appliance.engine.config import METHOD, Exl3Config
print("owner", compat.owner_of(METHOD))
compat.require_owner(METHOD, Exl3Config)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for vllm-exl3, as installed. It is found after our own distribution."""
    site = tmp_path_factory.mktemp("site")
    (site / "their_exl3.py").write_text(PACKAGE)
    for name, entry in (("their_exl3", "their_exl3 = their_exl3:register"),
                        ("moe_appliance", "appliance = appliance.engine:register")):  # fmt: skip
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return site


def started(theirs: Path, plugins: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    path = [str(theirs), str(Path.cwd()), str(Path.cwd() / "kernels")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    return subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True,
                          text=True, timeout=240, check=False)  # fmt: skip


def served_environment(tmp_path: Path, **wishes: str) -> dict[str, str]:
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.checkpoint.synth import SynthSpec, synthesize

    synthesize(tmp_path / "model", SynthSpec())
    made = plan(
        inspect(Live()), read_checkpoint(tmp_path / "model"), None,
        Policy(device="cpu", host_share=0.5, context_tokens=128),
    )  # fmt: skip
    ours = dataclasses.replace(Wishes("python", "127.0.0.1", 8000), **wishes)
    files = Files.of(tmp_path / "state")
    return dict(spec(made, tmp_path / "model", tmp_path / "p.json", ours, files).environment)


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_launchers_setting_makes_it_ours_with_both_installed(tmp_path, theirs):
    plugins = served_environment(tmp_path)["VLLM_PLUGINS"]
    done = started(theirs, plugins)
    assert (done.returncode, done.stdout.split()) == (0, ["owner", OURS]), done.stderr[-2000:]


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_with_both_loaded_the_engine_refuses_instead_of_ignoring_the_plan(theirs):
    done = started(theirs, None)
    assert done.returncode != 0
    assert "exl3" in done.stderr and "VLLM_PLUGINS" in done.stderr.splitlines()[-1]


def test_a_setting_for_another_owner_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UsageError, match=r"their_exl3, a plugin that reads no plan") as caught:
        served_environment(tmp_path, exl3_owner="their_exl3")
    assert "APPLIANCE_EXL3_OWNER=appliance" in caught.value.fix
