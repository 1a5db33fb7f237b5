"""What must hold before an engine is started: each a sentence where it does not."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
from pathlib import Path

from appliance.errors import ServeError
from appliance.serve.spec import ServeSpec

# Logs, state, keys and the engine's caches; the weights are elsewhere.
STATE_BYTES = 256 << 20


def require(spec: ServeSpec) -> None:
    """All of the below. Raises ServeError with the first that does not hold."""
    require_program(spec.argv[0])
    if "--numa-bind" in spec.argv and shutil.which("numactl") is None:
        raise ServeError(
            "the engine binds its workers to memory nodes with numactl, which is not installed",
            fix="sudo apt install numactl",
        )
    require_disk(spec.files.folder)
    require_free_port(spec.host, spec.port)


def require_free_port(host: str, port: int) -> None:
    """Raises ServeError naming who holds the port, where that can be seen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a server that has just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ServeError(
                    f"{host} is no address of this machine that can be bound: {error.strerror}",
                    fix="--host or APPLIANCE_HOST: 127.0.0.1 (this host only), 0.0.0.0 (every"
                    " network), or one that `ip address` shows",
                ) from error
            holder = port_holder(port)
            if holder is not None:
                reason = f"is held by {holder}"
            else:
                reason = f"cannot be bound: {error.strerror}"
            raise ServeError(
                f"port {port} on {host} {reason}",
                fix="stop it, or choose another port with --port or APPLIANCE_PORT",
            ) from error


def port_holder(port: int) -> str | None:
    """`name (process N)` of who listens on a TCP port; None where that cannot be seen.

    Source: /proc/net/tcp and tcp6 (socket inodes), /proc/PID/fd. Other users' need root.
    """
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return None
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                if str(descriptor.readlink()) in inodes:
                    name = (folder / "comm").read_text().strip()
                    return f"{name} (process {folder.name})"
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                    inodes.add(fields[9])
    return inodes


def require_disk(folder: Path, needed_bytes: int = STATE_BYTES) -> None:
    """Raises ServeError where the file system of `folder` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ServeError(
            f"{folder} has {free_bytes / (1 << 20):.0f} MiB free and"
            f" {needed_bytes / (1 << 20):.0f} MiB are needed for logs and state",
            fix="free some space, or set APPLIANCE_STATE_DIR to another disk",
        )


def require_program(python: str) -> None:
    """Raises ServeError where the engine's Python is not there."""
    if shutil.which(python) is None:
        raise ServeError(
            f"the engine's Python {python} is not there or not executable",
            fix="set APPLIANCE_ENGINE_PYTHON to the Python that has vLLM",
        )
