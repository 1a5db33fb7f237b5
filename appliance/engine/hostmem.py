"""Host memory for experts: one mapping, bound to a NUMA node before it is touched, on huge pages
when the node has them. No torch here, so that a bare guest can test it.

What the kernel refuses is an error with the way out, never memory somewhere else. Constants are
Linux's (include/uapi: mman.h, mempolicy.h, unistd.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from appliance.engine.resident import available_bytes, is_mostly_huge

PageKind = Literal["hugetlb", "thp", "4k", "file"]
Touch = Literal["write", "populate"]
HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
_MAP_HUGETLB_2MB = 0x40000 | (21 << 26)
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MOST_THREADS = 16  # that make pages resident: the fastest of 4, 8 and 16 on 32 cores
MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long


class HostMemoryError(RuntimeError):
    """The kernel did not give the memory that the plan needs. The message has the way out."""


@dataclass(frozen=True)
class Node:
    """A NUMA node to bind to, and the CPUs near it. `cpus` may be empty: then nobody is moved."""

    index: int
    cpus: frozenset[int] = frozenset()


class HostMapping:
    """`size_bytes` of zeroed memory at `address`, on `page_kind` pages, resident when it returns.

    Bytes are rounded up to whole pages of its kind and no further (a power-of-two allocator turns
    51 GiB into 64). Close it after the last reader; a closed mapping must not be read.

    Raises HostMemoryError: no memory, no right to bind, or no free huge page where one was asked
    for (a page touched on a node that has none is SIGBUS, so the counter is read first).
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        node: Node | None = None,
        threads: int = 0,
        touch: Touch | None = None,
    ) -> None:
        """`threads` make the pages resident; 0: one for each near CPU, up to 16.

        `touch` is for measurements. None: huge pages of the kernel's reserve are populated, because
        a write to one that is not there is SIGBUS; others are written: side by side on one host
        24 GiB took 0.028 s/GiB with 16 threads, populating 0.193
        (docs/measurements/2026-11-29-two-h200.md).
        """
        if size_bytes <= 0:
            raise HostMemoryError(f"a mapping of {size_bytes} bytes holds nothing")
        self.size_bytes = size_bytes
        self.node = node
        self.page_kind: PageKind = _page_kind(size_bytes, node)
        available = None if self.page_kind == "hugetlb" else available_bytes()
        if available is not None and size_bytes > available:
            # With vm.overcommit_memory = 1 the kernel promises anything, and kills later.
            raise HostMemoryError(
                f"{size_bytes:,} bytes of host memory are needed and {available:,} are available. "
                "Try: free memory, or lower the plan's host bytes"
            )
        page = PAGE_BYTES if self.page_kind == "4k" else HUGE_PAGE_BYTES
        self.mapped_bytes = -(-size_bytes // page) * page
        # Transparent huge pages need a 2 MiB boundary: map one page more and start at the first.
        slack = HUGE_PAGE_BYTES if self.page_kind == "thp" else 0
        flags = _MAP_PRIVATE_ANONYMOUS | (_MAP_HUGETLB_2MB if self.page_kind == "hugetlb" else 0)
        self._length = self.mapped_bytes + slack
        base = libc.mmap(None, self._length, _PROT_READ_WRITE, flags, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise _refused(f"map {self._length:,} bytes on {self.page_kind} pages")
        self._base: int | None = base
        self.address: int = -(-base // page) * page if slack else base
        try:
            if self.page_kind == "thp":
                libc.madvise(self.address, self.mapped_bytes, _MADV_HUGEPAGE)
            if node is not None:
                _bind(self.address, self.mapped_bytes, node.index)
            threads = threads or min(_MOST_THREADS, near_cpus(node))
            touch = touch or ("populate" if self.page_kind == "hugetlb" else "write")
            _touch(self.address, self.mapped_bytes, page, node, threads, touch)
            if self.page_kind == "thp" and not is_mostly_huge(self.address, self.mapped_bytes):
                self.page_kind = "4k"  # asked for, and not given
        except BaseException:
            self.close()
            raise

    def contains(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of this mapping; keep the mapping open while the view is used."""
        return view_of(self.address, self.size_bytes, offset, size_bytes)

    def close(self) -> None:
        if self._base is not None:
            libc.munmap(self._base, self._length)
            self._base = None

    def __enter__(self) -> HostMapping:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def view_of(address: int, mapped_bytes: int, offset: int, size_bytes: int) -> memoryview:
    """Bytes at `address` + `offset` of a mapping of `mapped_bytes`."""
    if offset < 0 or offset + size_bytes > mapped_bytes:
        raise HostMemoryError(
            f"bytes {offset}..{offset + size_bytes} are outside a mapping of {mapped_bytes}"
        )
    array = (ctypes.c_ubyte * size_bytes).from_address(address + offset)
    return memoryview(array).cast("B")


def _page_kind(size_bytes: int, node: Node | None) -> PageKind:
    """hugetlb when enough pages are free where they will be bound, else THP, else 4 KiB."""
    where = (
        Path("/sys/kernel/mm/hugepages")
        if node is None
        else Path(f"/sys/devices/system/node/node{node.index}/hugepages")
    )
    free = _read_int(where / "hugepages-2048kB/free_hugepages")
    if free is not None and free * HUGE_PAGE_BYTES >= size_bytes >= HUGE_PAGE_BYTES:
        return "hugetlb"
    try:
        thp = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        thp = "[never]"
    return "4k" if "[never]" in thp or size_bytes < HUGE_PAGE_BYTES else "thp"


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def node_mask(node: int) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """One node as the kernel takes it: the mask, and how many bits it may read of it."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    return mask, ctypes.c_ulong(len(mask) * 64 + 1)  # it reads one bit less than it is told


def _bind(address: int, size_bytes: int, node: int) -> None:
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise HostMemoryError(f"no known mbind on {platform.machine()}: cannot bind to a node")
    mask, bits = node_mask(node)
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(MPOL_BIND),
        mask,
        bits,
        ctypes.c_uint(0),
    )
    if done != 0:
        raise _refused(f"bind {size_bytes:,} bytes to NUMA node {node}")


def _touch(
    address: int, size_bytes: int, page: int, node: Node | None, threads: int, touch: Touch
) -> None:
    """Make every page resident, from threads near the node: the pages are zeroed by near CPUs.

    MADV_POPULATE_WRITE (Linux 5.14) writes nothing twice, and says so where a page cannot be had.
    Without it every byte is written, and a reserved huge page that is not there is SIGBUS.
    """
    step = -(-size_bytes // threads // page) * page
    refusals: list[int] = []

    def work(start: int) -> None:
        if node is not None and node.cpus:
            allowed = node.cpus & os.sched_getaffinity(0)
            if allowed:
                os.sched_setaffinity(0, allowed)
        length = min(step, size_bytes - start)
        if touch == "write":
            ctypes.memset(address + start, 0, length)
            return
        while libc.madvise(address + start, length, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:
                ctypes.memset(address + start, 0, length)
            elif number not in (errno.EINTR, errno.EAGAIN):
                refusals.append(number)
            else:
                continue
            return

    workers = [threading.Thread(target=work, args=(s,)) for s in range(0, size_bytes, step)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if refusals:
        ctypes.set_errno(refusals[0])
        raise _refused(f"give {size_bytes:,} bytes of pages")


def near_cpus(node: Node | None) -> int:
    """CPUs that this process may use and that are near the node; all it may use if none is."""
    mine = os.sched_getaffinity(0)
    return len(mine if node is None else (node.cpus & mine) or mine)


def _refused(what: str) -> HostMemoryError:
    number = ctypes.get_errno()
    way_out = {
        errno.EPERM: "give the container the capability SYS_NICE",
        errno.EFAULT: "reserve more huge pages on that node, or none at all",
        errno.ENOMEM: "free memory, lower the plan's host bytes, or raise the memory limit",
        errno.EINVAL: "make the plan again on this machine: it may name a node that is not here",
        errno.ENOSYS: "this kernel has no NUMA: make the plan again on this machine",
    }.get(number, "see the kernel log")
    return HostMemoryError(f"the kernel refused to {what}: {os.strerror(number)}. Try: {way_out}")
