"""The file systems under our folders: what kind, how much is free, whether O_DIRECT works."""

from __future__ import annotations

from collections.abc import Mapping

from preflight.answers import Unreadable
from preflight.host import Disk
from preflight.looking import Looking


def disks(look: Looking, folders: Mapping[str, str]) -> tuple[Disk, ...]:
    """One Disk for each role -> absolute folder, in the order given."""
    mounts = _mounts(look)
    return tuple(_disk(look, role, path, mounts) for role, path in folders.items())


def _mounts(look: Looking) -> list[tuple[str, str, str, str]]:
    """(device, mount point, file system, options), later mounts last."""
    found = []
    for line in (look.text("/proc/self/mounts") or "").splitlines():
        words = line.split(" ")
        if len(words) >= 4:
            point = words[1].replace("\\040", " ")
            found.append((words[0], point, words[2], words[3]))
    return found


def _disk(look: Looking, role: str, path: str, mounts: list[tuple[str, str, str, str]]) -> Disk:
    under = [m for m in mounts if path == m[1] or path.startswith(m[1].rstrip("/") + "/")]
    device, mount, kind, options = max(
        enumerate(under), key=lambda m: (len(m[1][1]), m[0]), default=(0, ("", "", "", ""))
    )[1]
    try:
        space = look.source.space(path)
    except Unreadable:
        space = None
    direct = look.trial("direct-io", path)
    return Disk(
        role=role,
        path=path,
        mount=mount or None,
        filesystem=kind or None,
        total_bytes=space.total_bytes if space else None,
        free_bytes=space.free_bytes if space else None,
        rotational=_rotational(look, device),
        read_only="ro" in options.split(",") if options else None,
        direct_io=None if direct is None else direct == "yes",
    )


def _rotational(look: Looking, device: str) -> bool | None:
    """A partition has no queue of its own: ask the disk it is on.

    None for a virtual disk, too: virtio says that it spins, whatever is beneath it.
    """
    if not device.startswith("/dev/"):
        return None
    path = look.target(f"/sys/class/block/{device.rsplit('/', 1)[-1]}")
    if path and "/virtio" in path:
        return None
    for folder in (path, path.rsplit("/", 1)[0]) if path else ():
        value = look.number(f"{folder}/queue/rotational")
        if value is not None:
            return bool(value)
    return None
