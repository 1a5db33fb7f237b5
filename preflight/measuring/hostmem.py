"""Host memory of one page kind on one node, for measuring: mmap, mbind, madvise, touch."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

MPOL_BIND = 2
MBIND = {"x86_64": 237, "aarch64": 235}
MAP_HUGETLB, HUGE_SHIFT = 0x40000, 26
MADV_POPULATE_WRITE = 23
SMALL, HUGE = 4096, 2 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


class Area:
    """`size_bytes` of private memory; `page_bytes` 4096, 2 MiB (transparent) or reserved pages.

    `node`: strict binding before the first touch. Raises OSError where the kernel refuses. Reserved
    pages that a node does not have are a SIGBUS at the touch: check its counters first.
    """

    def __init__(
        self, size_bytes: int, *, node: int | None = None, page_bytes: int = HUGE,
        reserved: bool = False,
    ) -> None:  # fmt: skip
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if reserved:
            flags |= MAP_HUGETLB | (page_bytes.bit_length() - 1) << HUGE_SHIFT
        # One page more, so that the part used can begin on a huge page.
        extra = 0 if reserved else HUGE
        self._map = mmap.mmap(-1, size_bytes + extra, flags=flags)
        self._view = ctypes.c_char.from_buffer(self._map)
        start = ctypes.addressof(self._view)
        self.address = start if reserved else -(-start // HUGE) * HUGE
        self.size_bytes = size_bytes
        if not reserved:
            advice = mmap.MADV_HUGEPAGE if page_bytes >= HUGE else mmap.MADV_NOHUGEPAGE
            self._map.madvise(advice)
        if node is not None:
            bind(self.address, size_bytes, node)

    def touch(self) -> float:
        """Have every page made, by a few threads; returns the seconds it took.

        The kernel populates the range itself (Linux 5.14); an older one is made to by writing.
        """
        threads = min(8, os.cpu_count() or 1)
        part = -(-self.size_bytes // threads // HUGE) * HUGE
        starts = range(0, self.size_bytes, max(part, HUGE))
        before = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda at: self._populate(at, min(part, self.size_bytes - at)), starts))
        return time.perf_counter() - before

    def _populate(self, offset: int, size_bytes: int) -> None:
        at = ctypes.c_void_p(self.address + offset)
        if LIBC.madvise(at, ctypes.c_size_t(size_bytes), MADV_POPULATE_WRITE) != 0:
            ctypes.memset(self.address + offset, 0, size_bytes)

    def close(self) -> None:
        del self._view
        self._map.close()

    def __enter__(self) -> Area:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def bind(address: int, size_bytes: int, node: int) -> None:
    """Strictly bind a page-aligned range to one node. Raises OSError where it is refused."""
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(0, f"mbind is not known for {platform.machine()}")
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << node % 64
    done = LIBC.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(size_bytes),
        ctypes.c_int(MPOL_BIND), mask, ctypes.c_ulong(words * 64 + 1), ctypes.c_uint(0),
    )  # fmt: skip
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind to node {node}: {os.strerror(code).lower()}")
