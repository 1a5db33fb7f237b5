"""The CUDA driver through NVIDIA's cuda-bindings, imported at the first use: copies and reads."""

from __future__ import annotations

import ctypes
from typing import Any

from preflight.answers import Unreadable
from preflight.measuring.read_kernel import BLOCKS, NAME, PTX, THREADS, whole_reads

PORTABLE_AND_MAPPED = 0x01 | 0x02


class Cuda:
    """One GPU's primary context. Every refusal is Unreadable with the driver's own words."""

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise Unreadable(f"cuda-bindings is not installed ({error})") from error
        self.driver: Any = driver
        self.index = index
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:
            raise Unreadable(f"libcuda cannot be loaded: {error}") from error
        self.device = self._call("cuDeviceGet", index)
        self.context = self._call("cuDevicePrimaryCtxRetain", self.device)
        self.current()
        self.stream = self._call("cuStreamCreate", 1)
        self._kernel: Any = None

    def current(self) -> None:
        """Make this GPU's context the calling thread's."""
        self._call("cuCtxSetCurrent", self.context)

    def _call(self, name: str, *words: Any) -> Any:
        """Call the driver; its first word back is the error, the rest the answer."""
        code, *found = getattr(self.driver, name)(*words)
        if int(code) != 0:
            _, text = self.driver.cuGetErrorString(code)
            said = text.decode() if isinstance(text, bytes) else f"error {int(code)}"
            raise Unreadable(f"{name}: {said}", int(code))
        return found[0] if found else None

    def register(self, address: int, size_bytes: int) -> None:
        """Pin and map a range of host memory for every GPU."""
        self.current()
        self._call("cuMemHostRegister", address, size_bytes, PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        self.current()
        self._call("cuMemHostUnregister", address)

    def allocate(self, size_bytes: int) -> Any:
        self.current()
        return self._call("cuMemAlloc", size_bytes)

    def free(self, pointer: Any) -> None:
        self.current()
        self._call("cuMemFree", pointer)

    def queue_copy(self, to: Any, address: int, size_bytes: int) -> None:
        self._call("cuMemcpyHtoDAsync", to, address, size_bytes, self.stream)

    def queue_read(self, address: int, size_bytes: int, sink: Any) -> int:
        """Queue one in-place read of pinned host memory; returns the bytes it reads."""
        if self._kernel is None:
            module = self._call("cuModuleLoadData", PTX)
            self._kernel = self._call("cuModuleGetFunction", module, NAME)
        mapped = self._call("cuMemHostGetDevicePointer", address, 0)
        pieces = whole_reads(size_bytes)
        values = (int(mapped), pieces, int(sink))
        kinds = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)
        self._call(
            "cuLaunchKernel", self._kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, self.stream,
            (values, kinds), 0,
        )  # fmt: skip
        return pieces * 16

    def mark(self) -> Any:
        """An event now in this stream."""
        event = self._call("cuEventCreate", 0)
        self._call("cuEventRecord", event, self.stream)
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two events, once the last has happened."""
        self._call("cuEventSynchronize", last)
        milliseconds = self._call("cuEventElapsedTime", first, last)
        return float(milliseconds) / 1000

    def close(self) -> None:
        self.current()
        self._call("cuStreamDestroy", self.stream)
        self._call("cuDevicePrimaryCtxRelease", self.device)
