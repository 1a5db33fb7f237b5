"""A vLLM that nobody tried is refused in one sentence, whatever has moved in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def registered(site: Path) -> subprocess.CompletedProcess[str]:
    path = [str(site), str(Path.cwd()), str(Path.cwd() / "kernels")]
    return subprocess.run(
        [sys.executable, "-c", "from appliance.engine import register; register()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0+cpu"])
def test_another_vllm_is_named_before_what_moved_in_it_is_missed(
    tmp_path: Path, version: str
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    done = registered(tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"RuntimeError: vLLM {version.partition('+')[0]} is not supported; this release works "
        "with 0.32.0 and 0.33.0"
    )


def test_the_vllm_that_is_installed_is_one_of_them(tmp_path: Path) -> None:
    done = registered(tmp_path)
    assert (done.returncode, done.stderr.rpartition("Error")[1]) == (0, "")
