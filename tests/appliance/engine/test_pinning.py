"""Pinning in chunks: all or none, each refusal with its chunk and the way out."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.engine import pinning
from appliance.engine.hostmem import HostMemoryError
from appliance.engine.pinning import Driver, Pinned, chunks

MIB = 1 << 20
# What libcuda does, as far as pinning asks: it notes every call, refuses the n-th registration,
# and may see an address elsewhere. Numbers and names are cuda.h's.
LIBCUDA = """
#include <stdio.h>
#include <stddef.h>
static int calls;
static void note(const char *what, const void *at) {
    FILE *file = fopen(NOTES, "a");
    fprintf(file, "%s %p\\n", what, at);
    fclose(file);
}
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    if (++calls == REFUSED) return CODE;
    note(flags == 3 ? "register" : "wrong flags", at);
    return 0;
}
int cuMemHostUnregister(void *at) { note("unregister", at); return KEEPS ? 1 : 0; }
int cuMemHostGetDevicePointer_v2(unsigned long long *out, void *at, unsigned flags) {
    *out = (unsigned long long)at + SHIFT;
    return 0;
}
int cuGetErrorString(int code, const char **words) { *words = "its own words"; return 0; }
"""
MakeDriver = Callable[..., Driver]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes"
    path.touch()
    return path


@pytest.fixture
def driver(tmp_path: Path, notes: Path) -> MakeDriver:
    def make(refused: int = -1, code: int = 2, shift: int = 0, keeps: int = 0) -> Driver:
        values = {"REFUSED": refused, "CODE": code, "SHIFT": shift, "KEEPS": keeps}
        defines = [f"-D{name}={value}" for name, value in values.items()]
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
        source.write_text(LIBCUDA)
        mark = f'-DNOTES="{notes}"'
        command = ["cc", "-shared", "-fPIC", *defines, mark, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True)
        return Driver(str(library))

    return make


def said(notes: Path, what: str) -> list[int]:
    lines = [line.split() for line in notes.read_text().splitlines()]
    return [int(at, 16) for word, at in lines if word == what]


PIECES = [range(MIB), range(MIB, 3 * MIB), range(3 * MIB, 4 * MIB)]
BASE = 1 << 40


def test_every_chunk_is_registered_once_and_released_once(driver: MakeDriver, notes: Path) -> None:
    seen: list[tuple[int, int]] = []
    pinned = Pinned(BASE, PIECES, driver(), lambda done, total: seen.append((done, total)))
    starts = [BASE + piece.start for piece in PIECES]
    assert said(notes, "register") == starts and pinned.registrations == 3
    assert seen == [(MIB, 4 * MIB), (3 * MIB, 4 * MIB), (4 * MIB, 4 * MIB)]
    pinned.close()
    pinned.close()
    assert sorted(said(notes, "unregister")) == starts


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refused_chunk_is_named_and_those_before_it_are_released(
    driver: MakeDriver, notes: Path, refused: int
) -> None:
    sentence = rf"pin chunk {refused - 1} of 3 \([\d,]+ bytes\): error 2, its own words.*memlock"
    with pytest.raises(HostMemoryError, match=sentence):
        Pinned(BASE, PIECES, driver(refused))
    assert len(said(notes, "register")) == refused - 1
    assert sorted(said(notes, "unregister")) == said(notes, "register")


def test_a_home_whose_second_chunk_is_refused_is_unmapped(
    driver: MakeDriver, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from appliance.engine.pools import Pool

    monkeypatch.setattr(Driver.__init__, "__defaults__", (driver(2).library,))
    monkeypatch.setattr(pinning.chunks, "__defaults__", (MIB,))
    with pytest.raises(HostMemoryError, match=r"pin chunk 1 of 3 .*memlock"):
        Pool("host", 3 * MIB, torch.device("cuda"), None, [0, MIB, 2 * MIB])
    (at,) = said(notes, "register")
    assert said(notes, "unregister") == [at]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        assert not start <= at < end, f"still mapped: {line}"


def test_an_unknown_refusal_still_has_the_drivers_words(driver: MakeDriver) -> None:
    with pytest.raises(
        HostMemoryError, match=r"error 999, its own words\. Try: see the kernel log"
    ):
        Pinned(BASE, PIECES, driver(1, code=999))


def test_a_watchdog_that_raises_stops_and_releases(driver: MakeDriver, notes: Path) -> None:
    def starved(done: int, total: int) -> None:
        if done > MIB:
            raise HostMemoryError("1 GiB is left")

    with pytest.raises(HostMemoryError, match="1 GiB is left"):
        Pinned(BASE, PIECES, driver(), starved)
    assert sorted(said(notes, "unregister")) == said(notes, "register") != []


def test_memory_that_the_gpu_sees_elsewhere_is_refused_and_released(
    driver: MakeDriver, notes: Path
) -> None:
    with pytest.raises(HostMemoryError, match=r"sees host address 0x10+ at 0x10+1000"):
        Pinned(BASE, PIECES, driver(shift=4096))
    assert said(notes, "unregister") == [BASE]


def test_a_driver_that_keeps_memory_is_an_error(driver: MakeDriver) -> None:
    pinned = Pinned(BASE, PIECES, driver(keeps=1))
    with pytest.raises(HostMemoryError, match="did not let go of 3 chunks"):
        pinned.close()


def test_no_driver_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="--gpus all"):
        Driver(str(tmp_path / "libcuda.so.1"))


def test_chunks_end_between_blocks_and_cover_everything() -> None:
    starts = [0, 12288, 24576, 36864, 49152]
    assert chunks(starts, 61440, limit=30000) == [
        range(24576),
        range(24576, 49152),
        range(49152, 61440),
    ]
    assert chunks(starts, 61440) == [range(61440)]


def test_a_block_larger_than_a_registration_is_refused_with_both_numbers() -> None:
    with pytest.raises(HostMemoryError, match=r"block of 12,288 bytes .* one piece of 8,192"):
        chunks([0, 12288], 24576, limit=8192)


def test_a_block_that_starts_inside_a_page_is_refused() -> None:
    with pytest.raises(HostMemoryError, match="100 bytes into a page"):
        chunks([0, 4196], 8192)
