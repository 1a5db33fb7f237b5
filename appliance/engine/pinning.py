"""Host memory made readable by the GPU: registered with the driver, chunk by chunk.

Through the driver's own library, so nothing of torch or the toolkit is needed. A chunk is at most
1 GiB: kernels 6.11 to 6.13 cap one registration at 2 GB, one of 512 GiB or more fails, and many
small ones hit `vm.max_map_count`. Chunks end between blocks, because a copy by the copy engine
must not cross from one registration into the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.engine.hostmem import PAGE_BYTES, HostMemoryError

CHUNK_BYTES = 1 << 30
_PORTABLE_AND_MAPPED = 0x1 | 0x2  # cuda.h: CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP
_READ_ONLY = 0x8  # _READ_ONLY: what the GPU will not write, such as pages of a file
_OUT_OF_MEMORY, _NO_CONTEXT, _NOT_PERMITTED, _TAKEN = 2, 201, 800, 712
_WAY_OUT = {
    _OUT_OF_MEMORY: "raise the memlock limit (`--ulimit memlock=-1`, `LimitMEMLOCK=infinity`), "
    "free memory, or lower the plan's host bytes",
    _NO_CONTEXT: "use the GPU once before (this is a bug of the caller)",
    _NOT_PERMITTED: "raise the memlock limit or give the container the capability IPC_LOCK",
    _TAKEN: "this memory is registered already (this is a bug of the caller)",
}


class Driver:
    """What pinning needs of libcuda. HostMemoryError if there is none."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self.library = library
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as error:
            raise HostMemoryError(
                f"no NVIDIA driver library to pin host memory with ({error}). Try: in a container, "
                "start it with `--gpus all`"
            ) from error
        self._lib.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._lib.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
        self._lib.cuMemHostGetDevicePointer_v2.argtypes = [
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_void_p,
            ctypes.c_uint,
        ]
        self._lib.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        flags = _PORTABLE_AND_MAPPED | (_READ_ONLY if read_only else 0)
        return int(self._lib.cuMemHostRegister_v2(address, size_bytes, flags))

    def unregister(self, address: int) -> int:
        return int(self._lib.cuMemHostUnregister(address))

    def device_address(self, address: int) -> int | None:
        """Where a kernel sees this host address; None if it does not."""
        found = ctypes.c_uint64()
        code = self._lib.cuMemHostGetDevicePointer_v2(ctypes.byref(found), address, 0)
        return None if code else found.value

    def words(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"no words for it").decode()


def chunks(starts: Sequence[int], size_bytes: int, limit: int = CHUNK_BYTES) -> list[range]:
    """[0, size) cut at some of `starts` (offsets of blocks, ascending, whole pages) into as few
    pieces of at most `limit` bytes as that allows. HostMemoryError if a block is larger."""
    out: list[range] = []
    begin = 0
    ends = [*(s for s in starts if s), size_bytes]
    for end, after in zip(ends, [*ends[1:], None], strict=True):
        if end % PAGE_BYTES and end != size_bytes:
            raise HostMemoryError(f"a block starts {end % PAGE_BYTES} bytes into a page")
        if end - begin > limit:
            raise HostMemoryError(
                f"a block of {end - begin:,} bytes cannot be pinned in one piece of {limit:,}"
            )
        if after is None or after - begin > limit:
            out.append(range(begin, end))
            begin = end
    return out


class Pinned:
    """Registrations of one mapping. All or none: a refusal undoes those made before it.

    `progress(done_bytes, total_bytes)` is called after every chunk; raising from it stops and
    undoes. Raises HostMemoryError with the chunk, the driver's words and the way out.
    """

    def __init__(
        self,
        address: int,
        pieces: Sequence[range],
        driver: Driver | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        read_only: bool = False,
    ) -> None:
        self._read_only = read_only
        self.driver = driver or Driver()
        self._held: list[int] = []
        limit = _max_map_count()
        if limit is not None and len(pieces) > limit // 2:
            raise HostMemoryError(
                f"{len(pieces):,} registrations are too many for vm.max_map_count = {limit:,}. "
                f"Try: sysctl vm.max_map_count={4 * len(pieces)}"
            )
        total = sum(len(piece) for piece in pieces)
        try:
            done = 0
            for number, piece in enumerate(pieces):
                self._pin(address + piece.start, len(piece), f"chunk {number} of {len(pieces)}")
                done += len(piece)
                progress(done, total)
        except BaseException:
            self.close()
            raise

    def _pin(self, at: int, size_bytes: int, which: str) -> None:
        code = self.driver.register(at, size_bytes, read_only=self._read_only)
        if code:
            raise HostMemoryError(
                f"the driver refused to pin {which} ({size_bytes:,} bytes): error {code}, "
                f"{self.driver.words(code)}. Try: {_WAY_OUT.get(code, 'see the kernel log')}"
            )
        self._held.append(at)
        seen = self.driver.device_address(at)
        if seen != at:
            there = "nowhere" if seen is None else f"{seen:#x}"
            raise HostMemoryError(
                f"the GPU sees host address {at:#x} at {there}: this platform has no unified "
                "addresses for registered memory, which the address tables need"
            )

    @property
    def registrations(self) -> int:
        return len(self._held)

    def close(self) -> None:
        """Undo every registration. Raises HostMemoryError if the driver keeps one, after all."""
        kept = []
        while self._held:
            at = self._held.pop()
            code = self.driver.unregister(at)
            if code:
                kept.append(f"{at:#x}: {self.driver.words(code)}")
        if kept:
            raise HostMemoryError(f"the driver did not let go of {len(kept)} chunks: {kept[0]}")


def _max_map_count() -> int | None:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
