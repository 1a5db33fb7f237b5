"""Run code that a model wrote: no network, no files but Python's, few resources, a time limit.

The program gets a root of its own in memory: the libraries and the interpreter, read-only, a small
/tmp and /dev/null; no /proc, no home, nobody's secrets. It runs in mount, network, process and IPC
namespaces of its own (util-linux' unshare), without privileges (setpriv) and within limits on
memory, CPU, files and processes (prlimit). It is refused, not run without them, where the system
cannot do that. Started by root it becomes `nobody`, for whom alone the kernel counts processes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from appliance import process
from appliance.errors import UnsupportedError

SECONDS = 10
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
DISK_BYTES = 16 << 20
PROCESSES = 64
NOBODY = 65534
TOOLS = ("unshare", "setpriv", "prlimit", "timeout", "mount", "chroot", "sh")
NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
# Of the folder $1: a root with what a Python needs ($3: its prefix) and the program $2; go there.
BUILD = f"""
mount --make-rprivate /
mount -t tmpfs -o size={DISK_BYTES},mode=755 none "$1"
cp "$2" "$1/answer.py"
chmod 644 "$1/answer.py"
mkdir "$1/tmp" "$1/dev"
mount -t tmpfs -o size={DISK_BYTES},mode=1777 none "$1/tmp"
for folder in /usr /bin /lib /lib32 /lib64 "$3"; do
    if [ -L "$folder" ]; then cp -P "$folder" "$1$folder"; continue; fi
    [ -d "$folder" ] && [ ! -d "$1$folder" ] || continue
    mkdir -p "$1$folder"
    mount --rbind "$folder" "$1$folder"
    mount -o remount,bind,ro "$1$folder"
done
touch "$1/dev/null"
mount --bind /dev/null "$1/dev/null"
mount -o remount,ro "$1"
cd "$1"
shift 3
exec chroot . "$@"
"""


def runs(program: str, python: str, folder: Path) -> bool:
    """Whether the program comes to its own end. Raises UnsupportedError without a sandbox.

    One that leaves early (sys.exit, os._exit) does not: what follows in it, a test, was not run.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise UnsupportedError(
            f"code cannot be sandboxed: {', '.join(missing)} is missing",
            fix="apt-get install util-linux coreutils mount",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        file, log = Path(own) / "answer.py", Path(own) / "log"
        (Path(own) / "root").mkdir()
        confined = _way(Path(own), python)
        reached = secrets.token_hex(16)
        end = f"import os as _os\n_os.write(1, b'{reached}')\n"
        file.write_text(f"{program}\n\n{end}", encoding="utf-8")
        ended = process.run(confined, environment={"HOME": "/tmp", "TMPDIR": "/tmp"}, log=log)
        return ended == 0 and reached.encode() in log.read_bytes()


def _way(own: Path, python: str) -> list[str]:
    """The command that runs answer.py of `own`, in the first way that this system allows."""
    (own / "answer.py").touch()
    for is_root in (True, False) if os.geteuid() == 0 else (False,):
        found = confined(own, python, is_root=is_root)
        if process.run(found, environment={}, log=own / "log") == 0:
            return found
    raise UnsupportedError(
        f"code cannot be sandboxed: {(own / 'log').read_text(errors='replace').strip()[-200:]}",
        fix="run as root or allow user namespaces",
    )


def confined(own: Path, python: str, *, is_root: bool) -> list[str]:
    """`own` holds answer.py and an empty folder root. `is_root`: without a user namespace."""
    real = os.path.realpath(python)
    prefix = str(Path(real).parent.parent)
    user: Sequence[str] = () if is_root else ("--user", "--map-root-user")
    become: Sequence[str] = ()
    if is_root:
        become = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    limits = [f"--as={MEMORY_BYTES}", f"--cpu={SECONDS}", f"--fsize={FILE_BYTES}", "--core=0"]
    return [
        *("unshare", *user, *NAMESPACES),
        *("timeout", "--kill-after=1", str(SECONDS)),
        *("sh", "-ec", BUILD, "sh", str(own / "root"), str(own / "answer.py"), prefix),
        *("setpriv", *become, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
        *("prlimit", *limits, f"--nproc={PROCESSES}", "--"),
        *(real, "-I", "-B", "/answer.py"),
    ]
