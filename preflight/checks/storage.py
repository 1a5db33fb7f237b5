"""Disks: room for the weights and caches, and able to read them fast."""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, gib
from preflight.host import Disk, Host
from preflight.needs import Needs

SPARE = 1.1
CACHE_BYTES = 10 << 30
IMAGE_BYTES = 40 << 30
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "glusterfs", "fuse.s3fs")
IN_MEMORY = ("tmpfs", "ramfs")


def _disk(host: Host, role: str) -> Disk | None:
    return next((disk for disk in host.disks if disk.role == role), None)


def _room(host: Host, role: str, wanted: float | None) -> Result:
    disk = _disk(host, role)
    if wanted is None or disk is None:
        return
    if disk.free_bytes is None:
        yield Unseen(f"free space of {disk.path}")
    elif disk.free_bytes < wanted:
        yield Saw(f"{disk.path} has {gib(disk.free_bytes)} free and {gib(wanted)} are needed")


def model_fits(host: Host, needs: Needs) -> Result:
    wanted = needs.model_disk_bytes
    yield from _room(host, "model", None if wanted is None else wanted * SPARE)


def cache_fits(host: Host, needs: Needs) -> Result:
    yield from _room(host, "cache", needs.cache_disk_bytes or CACHE_BYTES)


def image_fits(host: Host, needs: Needs) -> Result:
    if needs.deployment == "docker":
        yield from _room(host, "docker", needs.docker_disk_bytes or IMAGE_BYTES)


def model_is_local(host: Host, needs: Needs) -> Result:
    disk = _disk(host, "model")
    if disk and disk.filesystem is None:
        yield Unseen(f"the file system of {disk.path}")
    elif disk and disk.filesystem in NETWORK:
        yield Saw(f"{disk.path} is a network file system ({disk.filesystem}): every start reads "
                  "the whole checkpoint over it")  # fmt: skip


def model_not_in_memory(host: Host, needs: Needs) -> Result:
    disk = _disk(host, "model")
    if disk and disk.filesystem is None:
        yield Unseen(f"the file system of {disk.path}")
    elif disk and disk.filesystem in IN_MEMORY:
        yield Saw(f"{disk.path} is in memory ({disk.filesystem}): it takes what experts need")


def model_disk_spins_not(host: Host, needs: Needs) -> Result:
    disk = _disk(host, "model")
    if disk is None or disk.filesystem in NETWORK or disk.filesystem in IN_MEMORY:
        return
    if disk.rotational is None:
        yield Unseen(f"whether the disk of {disk.path} spins")
    elif disk.rotational:
        yield Saw(f"{disk.path} is on a spinning disk: each GiB takes about 6 s to load")


def reads_past_the_cache(host: Host, needs: Needs) -> Result:
    disk = _disk(host, "model")
    if disk is None or disk.filesystem in IN_MEMORY:
        return
    if disk.direct_io is None:
        yield Unseen(f"whether {disk.path} opens with O_DIRECT")
    elif not disk.direct_io:
        yield Saw(
            f"{disk.path} refuses O_DIRECT: the load fills the page cache that pins compete with"
        )


def model_can_be_written(host: Host, needs: Needs) -> Result:
    disk = _disk(host, "model")
    if disk is None or not needs.model_disk_bytes:
        return
    if disk.read_only is None:
        yield Unseen(f"whether {disk.path} can be written")
    elif disk.read_only:
        yield Saw(f"{disk.path} is mounted read-only and {gib(needs.model_disk_bytes)} are to be "
                  "downloaded there")  # fmt: skip


AREA = "storage"
CHECKS = (
    Check("model-disk-full", AREA, FAIL, model_fits, "bytes still to download + 10 %",
          "the checkpoint's manifest", "free space, or choose another folder with --model"),
    Check("cache-disk-full", AREA, WARN, cache_fits, "10 GiB", "compiled kernels and graphs",
          "free space, or choose another folder for the cache"),
    Check("docker-disk-full", AREA, FAIL, image_fits, "40 GiB", "the image and one to upgrade to",
          "docker system prune, or move docker's data-root"),
    Check("model-on-network-disk", AREA, WARN, model_is_local, "a local file system",
          "/proc/self/mounts", "copy the checkpoint to a local NVMe disk"),
    Check("model-in-memory", AREA, WARN, model_not_in_memory, "not tmpfs", "/proc/self/mounts",
          "put the checkpoint on a disk"),
    Check("model-disk-spins", AREA, WARN, model_disk_spins_not, "not rotational",
          "sysfs, queue/rotational", "put the checkpoint on an NVMe disk"),
    Check("direct-io-refused", AREA, WARN, reads_past_the_cache, "a trial open with O_DIRECT",
          "open(2)", "put the checkpoint on ext4 or xfs"),
    Check("model-disk-read-only", AREA, FAIL, model_can_be_written, "writable while downloading",
          "/proc/self/mounts", "sudo mount -o remount,rw, or choose another folder"),
)  # fmt: skip
