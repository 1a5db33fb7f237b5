"""Run code that a model wrote: no network, few resources, an empty folder, a time limit.

util-linux' unshare gives it network and process namespaces of its own; prlimit caps memory, CPU,
files and processes. It is refused, not run without them, where the system cannot do that. The
folder tree of the host stays readable: run it as a user who may read nothing of worth.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from appliance import process
from appliance.errors import UnsupportedError

SECONDS = 10
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
PROCESSES = 64


def runs(program: str, python: str, folder: Path) -> bool:
    """Whether the program ends with exit code 0. Raises UnsupportedError without a sandbox."""
    tools = [tool for tool in ("unshare", "prlimit", "timeout") if shutil.which(tool) is None]
    if tools:
        raise UnsupportedError(
            f"code cannot be sandboxed: {', '.join(tools)} is missing",
            fix="apt-get install util-linux coreutils",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        file, log = Path(own) / "answer.py", Path(own) / "log"
        file.write_text(program, encoding="utf-8")
        if process.run(confined([python, "-c", ""]), environment={}, log=log) != 0:
            raise UnsupportedError(
                f"code cannot be sandboxed: {log.read_text(errors='replace').strip()[-200:]}",
                fix="run as root or allow user namespaces",
            )
        inside = confined([python, "-I", "-B", str(file)])
        return process.run(inside, environment={"HOME": own, "TMPDIR": own}, log=log) == 0


def confined(argv: list[str]) -> list[str]:
    """The same command without a network, as process 1 of its own namespace, and limited."""
    limits = [f"--as={MEMORY_BYTES}", f"--cpu={SECONDS}", f"--fsize={FILE_BYTES}", "--core=0"]
    return [
        *("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"),
        *("timeout", "--kill-after=1", str(SECONDS)),
        *("prlimit", *limits, f"--nproc={PROCESSES}", "--"),
        *argv,
    ]
