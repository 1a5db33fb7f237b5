"""The CUDA library: one that was built before, else compiled once on this machine into a cache.

The library is plain C (csrc/experts.h), so one file serves every torch and every Python. It knows
the digest of its sources: a library from other sources is never loaded in silence.

    python -m expert_kernels.build [--out DIR] [--arch sm_90 ...]    compiles and prints the path
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE.parent / "csrc"
LIBRARY = "libexpert_kernels.so"
PREBUILT = (PACKAGE / LIBRARY, PACKAGE.parent / "build" / LIBRARY)
CACHE = Path.home() / ".cache" / "moe-appliance" / "kernels"
ARCHITECTURES = ("sm_90", "sm_120")
# What is compiled for each: the matrix products of a warpgroup are sm_90a's alone, and every card
# of compute capability 9.0 runs that code.
_CODE = {"sm_90": "sm_90a"}
_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-cudart", "static")


class BuildError(RuntimeError):
    """No library for this machine. The message has the way out."""


def source_files() -> list[Path]:
    return sorted(p for p in SOURCES.glob("*") if p.suffix in (".cu", ".cuh", ".h"))


def digest(architectures: Sequence[str] = ()) -> str:
    """Of every source, the flags and the architectures: the key of the cache."""
    sha = hashlib.sha256(" ".join((*_FLAGS, *architectures)).encode())
    for path in source_files():
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:16]


def compiler() -> Path | None:
    """nvcc, from PATH or from CUDA's usual folder; None if there is none."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found) if found else None


def commands(nvcc: Path, folder: Path, architectures: Sequence[str]) -> list[list[str]]:
    """One compilation a source, then the link: what `compile_to` runs."""
    targets = [
        word
        for code in (_CODE.get(name, name) for name in architectures)
        for word in ("-gencode", f"arch=compute_{code[3:]},code={code}")
    ]
    mark = f'-DEXPERTS_SOURCE="{digest()}"'
    units = [path for path in source_files() if path.suffix == ".cu"]
    objects = [str(folder / f"{path.stem}.o") for path in units]
    compile_one = [str(nvcc), *_FLAGS, *targets, mark, "-c"]
    link = [str(nvcc), "-shared", "-cudart", "static", *targets, *objects]
    return [
        *([*compile_one, str(u), "-o", o] for u, o in zip(units, objects, strict=True)),
        [*link, "-o", str(folder / LIBRARY)],
    ]


def compile_to(target: Path, architectures: Sequence[str], jobs: int = 0) -> Path:
    """The library at `target`, compiled aside and renamed. BuildError with nvcc's own words."""
    nvcc = compiler()
    if nvcc is None:
        raise BuildError(
            f"no nvcc on PATH to compile {SOURCES}. Try: install the CUDA 13.0 toolkit, or put a "
            f"built {LIBRARY} at {PREBUILT[0]}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        *compilations, link = commands(nvcc, folder, architectures)
        step = jobs or os.cpu_count() or 1
        for start in range(0, len(compilations), step):
            _run(compilations[start : start + step])
        _run([link])
        (folder / LIBRARY).replace(target)
    return target


def _run(all_commands: list[list[str]]) -> None:
    """All at once; BuildError on the first that fails, after all have ended."""
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in all_commands
    ]
    said = [process.communicate()[0] for process in running]
    for command, process, words in zip(all_commands, running, said, strict=True):
        if process.returncode:
            raise BuildError(f"{' '.join(command)} failed with {process.returncode}:\n{words}")


def source_of(path: Path) -> str | None:
    """Digest of the sources that the library at `path` was built from; None if it cannot say."""
    try:
        library = ctypes.CDLL(str(path))
        library.experts_source.restype = ctypes.c_char_p
        return bytes(library.experts_source()).decode()
    except (OSError, AttributeError):
        return None


def library_path(architecture: str) -> Path:
    """A library with code for `architecture` ("sm_90"): prebuilt, cached, or compiled now.

    A prebuilt one is taken if it comes from these very sources, or if there are no sources here.
    """
    have_sources = bool(source_files())
    for path in PREBUILT:
        if path.is_file() and (not have_sources or source_of(path) == digest()):
            return path
    if not have_sources:
        raise BuildError(f"this installation has neither {PREBUILT[0]} nor sources to build it")
    cached = CACHE / digest([architecture]) / LIBRARY
    return cached if cached.is_file() else compile_to(cached, [architecture])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m expert_kernels.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=PREBUILT[1].parent)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once (default: cores)")
    a = parser.parse_args(argv)
    sys.stdout.write(f"{compile_to(a.out / LIBRARY, a.arch, a.jobs)}\n")


if __name__ == "__main__":
    main()
