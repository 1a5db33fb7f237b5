"""Compiling the library: what nvcc is asked, what its failure says, and when nothing is compiled.

A shell script stands for nvcc: it notes its arguments and makes the file it is asked for.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest

from expert_kernels import build

NVCC = """#!/bin/sh
echo "$@" >> {notes}
case "$*" in *{broken}*) echo "error: no such thing"; exit 3 ;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && cp {library} "$2"; shift; done
"""
NOTHING = "never-in-a-command"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A real library that says it came from these sources."""
    source = tmp_path / "experts.c"
    source.write_text("const char* experts_source(void) { return SOURCE; }\n")
    out = tmp_path / "some.so"
    mark = f'-DSOURCE="{build.digest()}"'
    command = ["cc", "-shared", "-fPIC", mark, str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> Path:
    """nvcc's arguments, a line a call; nothing is prebuilt, the cache is empty."""
    monkeypatch.setattr(build, "PREBUILT", (tmp_path / "prebuilt" / build.LIBRARY,))
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    install(tmp_path, monkeypatch, library)
    return tmp_path / "notes"


def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path, broken: str = NOTHING
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    script = NVCC.format(notes=tmp_path / "notes", broken=broken, library=library)
    (folder / "nvcc").write_text(script)
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_every_source_is_compiled_once_for_the_architecture_and_linked(notes: Path) -> None:
    path = build.library_path("sm_90")
    assert path.is_file() and path.name == build.LIBRARY
    *compilations, link = sorted(notes.read_text().splitlines(), key=lambda s: " -c " not in s)
    units = [p for p in build.source_files() if p.suffix == ".cu"]
    assert sorted(line.split(" -c ")[1].split()[0] for line in compilations) == [
        str(unit) for unit in units
    ]
    assert all("arch=compute_90a,code=sm_90a" in line for line in (*compilations, link))
    assert "-shared" in link and all(f"{unit.stem}.o" in link for unit in units)


def test_a_second_call_compiles_nothing(notes: Path) -> None:
    first = build.library_path("sm_90")
    calls = notes.read_text()
    assert build.library_path("sm_90") == first and notes.read_text() == calls


def test_another_architecture_has_another_library(notes: Path) -> None:
    assert build.library_path("sm_90") != build.library_path("sm_120")


def test_a_compiler_that_fails_is_an_error_with_its_words_and_leaves_nothing(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path
) -> None:
    install(tmp_path, monkeypatch, library, broken="prefill.cu")
    with pytest.raises(build.BuildError, match=r"prefill.cu.* failed with 3:\n.*no such thing"):
        build.library_path("sm_90")
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_no_compiler_is_an_error_with_the_way_out(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match="install the CUDA"):
        build.library_path("sm_90")


def test_a_prebuilt_library_of_these_sources_is_taken_as_it_is(notes: Path, library: Path) -> None:
    build.PREBUILT[0].parent.mkdir()
    library.rename(build.PREBUILT[0])
    assert build.library_path("sm_90") == build.PREBUILT[0]
    assert not notes.exists()


def test_a_prebuilt_library_of_other_sources_is_never_taken(notes: Path) -> None:
    build.PREBUILT[0].parent.mkdir()
    build.PREBUILT[0].write_bytes(b"not a library")
    assert build.library_path("sm_90") != build.PREBUILT[0]
    assert notes.exists()


def test_a_compiled_library_can_be_loaded(notes: Path) -> None:
    assert ctypes.CDLL(str(build.library_path("sm_90"))) is not None
