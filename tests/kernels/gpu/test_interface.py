"""The ctypes mirror of the C interface has the layout that a C compiler gives the header."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from expert_kernels import build, interface, launch, prefill

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    program = tmp_path_factory.mktemp("layout") / "layout"
    source = Path(__file__).with_name("layout_on_host.cpp")
    command = ["g++", "-std=c++17", f"-I{build.SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    text = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, text.splitlines())}


def test_structs_have_the_sizes_and_offsets_of_the_header(header: dict[str, int]) -> None:
    mirrors: dict[str, type[ctypes.Structure]] = {
        "ExpertsDecode": interface.Decode,
        "ExpertsPrefill": interface.Prefill,
        "ExpertsMatrix": interface.Matrix,
        "ExpertsLinear": interface.Linear,
    }
    checked = 0
    for name, value in header.items():
        struct, _, field = name.partition(".")
        if struct in mirrors:
            mirror = mirrors[struct]
            assert value == (getattr(mirror, field).offset if field else ctypes.sizeof(mirror)), (
                name
            )
            checked += 1
    assert checked >= 36


def test_limits_and_version_are_those_of_the_header(header: dict[str, int]) -> None:
    assert header["EXPERTS_ABI"] == interface.ABI
    assert header["kMaxTokens"] == launch.MAX_TOKENS
    assert header["kMaxPicks"] == launch.MAX_PICKS
    assert header["kMaxExperts"] == launch.MAX_EXPERTS
    assert header["EXPERTS_MATRICES"] == interface.MATRICES
    assert header["EXPERTS_PIECE_ROWS"] == launch.PIECE_ROWS


def test_a_piece_is_five_words_as_prefill_packs_them(header: dict[str, int]) -> None:
    assert header["ExpertsPiece"] == 8 * prefill._PIECE_WORDS
    offsets = [header[f"ExpertsPiece.{name}"] for name in ("expert", "at", "rows")]
    assert offsets == [24, 32, 36]  # at | rows << 32
