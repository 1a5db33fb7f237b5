"""The sandbox, by attempts to get out of it. Each attempt succeeds outside, so it means something.

A program here ends well exactly when it could do what it must not.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.accuracy import sandbox
from appliance.accuracy.sandbox import confined, runs
from appliance.errors import UnsupportedError
from appliance.process import run

ATTEMPTS = {
    "talk to itself over the network": (
        "import socket\nwith socket.socket() as s:\n"
        "    s.bind(('127.0.0.1', 0))\n    s.listen()\n"
        "    socket.create_connection(s.getsockname(), 2).close()\n"
    ),
    "send a packet": (
        "import socket\nwith socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "    s.sendto(b'x', ('127.0.0.1', 9))\n"
    ),
    "read the users": "open('/etc/passwd').read()",
    "see the host's processes": "import os\nassert len(os.listdir('/proc')) > 5",
    "see the rest of the machine": "import os\nassert os.listdir('/var') and os.listdir('/etc')",
    "read the environment of its parent": (
        "import os\nopen(f'/proc/{os.getppid()}/environ', 'rb').read()"
    ),
    "hold 2 GiB": "import mmap\nmmap.mmap(-1, 2 << 30).close()",
    "write 4 MiB into one file": "import tempfile\n"
    "with tempfile.TemporaryFile() as f:\n    f.write(bytes(4 << 20))\n    f.flush()",
    "write 64 MiB into many files": "import tempfile, shutil\nd = tempfile.mkdtemp()\ntry:\n"
    "    for i in range(128):\n        open(f'{d}/{i}', 'wb').write(bytes(1 << 19))\n"
    "finally:\n    shutil.rmtree(d)",
    "have 100 processes": (
        "import os, time\nchildren = []\ntry:\n    for _ in range(100):\n        pid = os.fork()\n"
        "        if pid == 0:\n            time.sleep(3)\n            os._exit(0)\n"
        "        children.append(pid)\n"
        "finally:\n    for pid in children:\n        os.kill(pid, 9)\n        os.waitpid(pid, 0)\n"
    ),
}
# These would work for nobody, or do harm outside.
ONLY_INSIDE = {
    "become root": "import os\nos.setuid(0)\nassert os.access('/etc/shadow', os.R_OK) or False",
    "leave through a new user namespace": (
        "import ctypes\nassert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0"
    ),
    "leave the root": "import os\nos.chroot('/tmp')",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0",
    "write beside the interpreter": "import os\nopen(os.__file__ + 'x', 'w')",
    "write to the root": "open('/x', 'w')",
    "leave early": "import sys\nsys.exit(0)",
    "leave at once": "import os\nos._exit(0)",
    "fail": "raise ValueError",
    "not be a program": "def f(:",
}


def outside(program: str) -> None:
    """It works where nothing stops it."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("attempt", [*ATTEMPTS, *ONLY_INSIDE])
def test_code_cannot(tmp_path: Path, attempt: str) -> None:
    program = {**ATTEMPTS, **ONLY_INSIDE}[attempt]
    if attempt in ATTEMPTS:
        outside(program)
    assert not runs(program, sys.executable, tmp_path)


def test_code_that_behaves_ends_well(tmp_path: Path) -> None:
    own = Path(os.path.realpath(sys.executable))  # an interpreter may lie there, too
    there = {"own", *own.parts[2:3]} if own.is_relative_to("/tmp") else {"own"}
    fine = (
        "import json, math, os, re, random, tempfile, collections, itertools, subprocess, sys\n"
        "os.chdir(os.environ['HOME'])\nopen('own', 'w').write('x' * 1000)\n"
        f"open(os.devnull, 'w').write('x')\nassert set(os.listdir('.')) == {there}\n"
        "print('much to say' * 1000)\n"
    )
    assert runs(fine, sys.executable, tmp_path)


def test_code_cannot_read_what_lies_beside_its_own_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    secret.chmod(0o644)
    program = f"assert open({str(secret)!r}).read() == 'key'"
    outside(program)
    assert not runs(program, sys.executable, tmp_path / "box")
    os.environ["SOME_SECRET"] = "key"
    try:
        program = "import os\nassert os.environ['SOME_SECRET'] == 'key'"
        assert not runs(program, sys.executable, tmp_path / "box")
    finally:
        del os.environ["SOME_SECRET"]


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    mark = f"sandbox-{os.getpid()}-{time.monotonic_ns()}"
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n"
        f"    os.execv(sys.executable, ['python', '-c', 'import time; time.sleep(60)', '{mark}'])\n"
        "time.sleep(0.3)\n"
    )
    assert runs(program, sys.executable, tmp_path)
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)]
    assert not alive


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_code_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    for program in ("while True: pass", "import time\ntime.sleep(100)"):
        began = time.monotonic()
        assert not runs(program, sys.executable, tmp_path)
        assert time.monotonic() - began < 20
    assert not list(tmp_path.iterdir())


def test_without_root_a_user_namespace_does_the_same(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "answer.py").write_text(ATTEMPTS["talk to itself over the network"])
    inside = confined(tmp_path, sys.executable, is_root=False)
    assert run(inside, environment={}, log=tmp_path / "log") != 0
    (tmp_path / "answer.py").write_text("print('fine')")
    assert run(inside, environment={}, log=tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "fine\n"


def test_a_system_without_the_tools_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="unshare"):
        runs("print()", sys.executable, tmp_path)
