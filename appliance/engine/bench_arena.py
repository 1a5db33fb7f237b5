"""Seconds to place and to pin host memory: `python -m appliance.engine.bench_arena --gib 24`.

Place is mmap, bind, touch (HostMapping); pin is the driver's registration in chunks. Then the rate
at which the GPU copies from it, and its page kind. One JSON line. No torch: the driver alone.

With `--file PATH` the same for blocks of a file, mapped (stored.FileMapping) and registered
read-only: cold, then from the page cache. A file that is not there is made, --gib GiB of random
bytes, and stays.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from appliance.engine.hostmem import HostMapping, Touch
from appliance.engine.pinning import Driver, Pinned, chunks
from appliance.engine.resident import huge_and_resident
from appliance.engine.stored import FileMapping


def _context(library: ctypes.CDLL) -> None:
    """The first GPU's primary context, current on this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for code in (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(device), 0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        library.cuCtxSetCurrent(context),
    ):
        if code:
            raise RuntimeError(f"no GPU to pin for: driver error {code}")


def _copy_rate(library: ctypes.CDLL, address: int, size_bytes: int) -> float:
    """Bytes a second of one copy to the device, best of five."""
    target = ctypes.c_uint64()
    if code := library.cuMemAlloc_v2(ctypes.byref(target), ctypes.c_size_t(size_bytes)):
        raise RuntimeError(f"no device memory for the copy: driver error {code}")
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        code = library.cuMemcpyHtoD_v2(
            target, ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)
        )
        if code:
            raise RuntimeError(f"copy failed: driver error {code}")
        best = max(best, size_bytes / (time.perf_counter() - start))
    library.cuMemFree_v2(target)
    return best


def _measured(
    library: ctypes.CDLL, size: int, block: int, threads: int, touch: Touch
) -> dict[str, Any]:
    step = -(-block // 4096) * 4096
    start = time.perf_counter()
    mapping = HostMapping(size, threads=threads, touch=touch)
    placed = time.perf_counter()
    pieces = chunks(range(0, size, step), size)
    pinned = Pinned(mapping.address, pieces, Driver())
    done = time.perf_counter()
    huge = huge_and_resident(mapping.address, size)
    rate = _copy_rate(library, mapping.address, min(256 << 20, len(pieces[0])))
    held = pinned.registrations
    released = time.perf_counter()
    pinned.close()
    mapping.close()
    gib = size / 2**30
    return {
        "section": "arena",
        "gib": gib,
        "threads": threads or "one a CPU, up to 16",
        "touch": touch,
        "huge_share": None if huge is None else round(huge[0] / max(1, huge[1]), 4),
        "page_kind": mapping.page_kind,
        "registrations": held,
        "place_s_per_gib": round((placed - start) / gib, 4),
        "pin_s_per_gib": round((done - placed) / gib, 4),
        "place_and_pin_s_per_gib": round((done - start) / gib, 4),
        "release_s": round(time.perf_counter() - released, 3),
        "copy_gb_s": round(rate / 1e9, 2),
    }


def _measured_file(library: ctypes.CDLL, path: Path, block: int) -> dict[str, Any]:
    size = path.stat().st_size // 4096 * 4096
    step = -(-block // 4096) * 4096
    starts = list(range(0, size, step))
    start = time.perf_counter()
    mapping = FileMapping(path, [range(size)])
    placed = time.perf_counter()
    pieces = chunks(starts, size)
    pinned = Pinned(mapping.address, pieces, Driver(), read_only=True)
    done = time.perf_counter()
    rate = _copy_rate(library, mapping.address, min(256 << 20, len(pieces[0])))
    held = pinned.registrations
    pinned.close()
    mapping.close()
    gib = size / 2**30
    return {
        "section": "arena file",
        "gib": round(gib, 2),
        "registrations": held,
        "map_s_per_gib": round((placed - start) / gib, 4),
        "pin_s_per_gib": round((done - placed) / gib, 4),
        "copy_gb_s": round(rate / 1e9, 2),
    }


def _bench_file(library: ctypes.CDLL, path: Path, gib: int, block: int) -> None:
    if not path.exists():
        with path.open("wb") as stream:
            for _ in range(gib << 4):
                stream.write(os.urandom(64 << 20))
            os.fsync(stream.fileno())
    for state in ("cold", "in the page cache"):
        if state == "cold":
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        facts = _measured_file(library, path, block)
        sys.stdout.write(json.dumps({**facts, "file": state}) + "\n")
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m appliance.engine.bench_arena")
    parser.add_argument("--gib", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help="0: one a CPU")
    parser.add_argument("--touch", nargs="+", choices=("write", "populate"), default=["write"])
    parser.add_argument("--block", type=int, default=13_271_040, help="bytes of an expert")
    parser.add_argument("--file", type=Path, help="measure a mapped file instead")
    a = parser.parse_args(argv)
    library = ctypes.CDLL("libcuda.so.1")
    _context(library)
    if a.file is not None:
        _bench_file(library, a.file, a.gib, a.block)
        return 0
    for number, (touch, threads) in enumerate(
        (touch, threads) for touch in a.touch for threads in a.threads
    ):
        # A virtual machine gets its memory at the first touch: trust the second pass.
        for again in (1, 2) if number == 0 else (2,):
            facts = _measured(library, a.gib << 30, a.block, threads, touch)
            sys.stdout.write(json.dumps({**facts, "pass": again}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
