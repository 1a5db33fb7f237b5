"""Harmless things to try where no file tells the answer. Nothing is left behind."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable

PAGE_BYTES = 4096
MPOL_DEFAULT = 0
STA_UNSYNC = 0x40
MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}


def memory_policy() -> str:
    """mbind of one page of our own: `allowed`, or what the kernel says.

    Docker's default seccomp profile refuses it without SYS_NICE.
    """
    number = MBIND_NUMBER.get(platform.machine())
    if number is None:
        return f"unknown on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.mmap(-1, PAGE_BYTES)
    view = ctypes.c_char.from_buffer(page)
    done = libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(ctypes.addressof(view)),
        ctypes.c_ulong(PAGE_BYTES), ctypes.c_int(MPOL_DEFAULT), None,
        ctypes.c_ulong(0), ctypes.c_uint(0),
    )  # fmt: skip
    code = ctypes.get_errno()
    del view
    page.close()
    return "allowed" if done == 0 else os.strerror(code).lower()


def direct_io(folder: str) -> str:
    """Whether a file of this folder opens with O_DIRECT: yes, or what the kernel says."""
    flags = os.O_RDWR | os.O_TMPFILE | os.O_DIRECT
    try:
        os.close(os.open(folder, flags, 0o600))
    except OSError as error:
        return (error.strerror or "refused").lower()
    return "yes"


def clock() -> str:
    """Whether the kernel says that something keeps its clock right (adjtimex, read only)."""
    timex = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
        return os.strerror(ctypes.get_errno()).lower()
    # struct timex: int modes and padding, four longs, then int status.
    status = int.from_bytes(timex.raw[40:44], "little")
    return "unsynchronised" if status & STA_UNSYNC else "synchronised"


TRIALS: dict[str, Callable[..., str]] = {
    "memory-policy": memory_policy,
    "direct-io": direct_io,
    "clock": clock,
}
