"""The command line starts light: what a command does not need is not imported."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "vllm", "pynvml", "numpy", "transformers", "tokenizers", "httpx", "rich",
         "starlette", "asyncio", "appliance.engine", "appliance.checkpoint.synth",
         "expert_kernels"}  # fmt: skip
IMPORTED = """
import sys
from appliance.cli import run
code = run(sys.argv[1:])
print(code, *sorted(sys.modules), file=sys.stderr)
"""


def imported_by(*words: str) -> tuple[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True,
                          timeout=180, check=True)  # fmt: skip
    code, *modules = done.stderr.splitlines()[-1].split()
    return code, modules


# Counts rather than seconds, so a busy machine changes nothing: an import costs about 0.5 ms, and
# 0.5 s are promised. --help takes 0.2 s here.
@pytest.mark.parametrize(
    ("words", "code", "most"), [(("--help",), "0", 300), (("status",), "3", 330)]
)
def test_help_and_status_import_few_modules_and_none_that_is_heavy(words, code, most, monkeypatch,
                                                                   tmp_path):  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setenv("APPLIANCE_STATE_DIR", str(tmp_path))
    found, modules = imported_by(*words)
    assert found == code
    assert not HEAVY & set(modules)
    assert len(modules) <= most
