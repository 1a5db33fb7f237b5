"""One door for every question: live, recording, replay."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflight import source
from preflight.answers import Source, Unreadable
from preflight.blank import Blanker
from preflight.inspect import inspect
from preflight.probes import software
from preflight.report import check
from preflight.source import Live, Recorded, Recording

TAIL = "-0000-1111-2222-333344445555"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/hostname").write_text("gpu-box-17\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemFree: 40 kB\n")
    (tmp_path / "proc/version").write_text("Linux version 6.8 (root@gpu-box-17) on gpu-box-17\n")
    return tmp_path


def test_a_container_reads_the_host_below_its_root(root: Path) -> None:
    assert Live(root).read("/proc/meminfo").startswith("MemTotal: 100 kB")


def test_facts_of_this_process_are_never_read_below_the_root(root: Path) -> None:
    assert "Max locked memory" in Live(root).read("/proc/self/limits")


def test_a_missing_file_is_an_answer_with_a_reason_and_is_recorded_too(tmp_path: Path) -> None:
    recording = Recording(Live(tmp_path), tmp_path / "kept")
    with pytest.raises(Unreadable, match="no such file"):
        recording.read("/proc/meminfo")
    recording.save()
    with pytest.raises(Unreadable, match="no such file") as caught:
        Recorded(tmp_path / "kept").read("/proc/meminfo")
    assert caught.value.code == 2


def test_a_question_never_asked_is_not_in_the_recording(root: Path, tmp_path: Path) -> None:
    Recording(Live(root), tmp_path / "kept").save()
    with pytest.raises(Unreadable, match="not in the recording"):
        Recorded(tmp_path / "kept").read("/proc/meminfo")


def test_this_machine_replays_to_the_same_facts(tmp_path: Path) -> None:
    recording = Recording(Live(), tmp_path)
    seen = inspect(recording)
    recording.save()
    assert inspect(Recorded(tmp_path)).model_dump_json() == seen.model_dump_json()


def test_a_replay_looks_at_the_disks_it_was_recorded_with(tmp_path: Path) -> None:
    recording = Recording(Live(), tmp_path / "kept")
    seen = inspect(recording, {"model": str(tmp_path)})
    recording.save()
    replayed = inspect(Recorded(tmp_path / "kept"))
    assert [disk.role for disk in replayed.disks][:1] == ["model"]
    assert check(replayed).to_json() == check(seen).to_json()


def test_a_recording_names_neither_the_host_nor_its_builder(root: Path, tmp_path: Path) -> None:
    recording = Recording(Live(root), tmp_path / "kept")
    assert recording.read("/proc/version") == "Linux version 6.8 (builder) on host\n"
    assert "gpu-box-17" not in recording.save().read_text()


def test_the_same_card_keeps_the_same_placeholder() -> None:
    blank = Blanker(None)
    one = "GPU-1b3f0a4c-0000-1111-2222-333344445555"
    two = "GPU-99990a4c-0000-1111-2222-333344445555"
    text = blank.text(f"{one} {two} {one}")
    assert text.split()[0] == text.split()[2] != text.split()[1]
    assert "1b3f" not in text and "9999" not in text


@pytest.mark.parametrize(
    ("text", "blanked"),
    [
        ("inet 10.1.2.3/24", "inet 0.0.0.0/24"),
        ("link/ether 3c:ec:ef:11:22:33", "link/ether 00:00:00:00:00:00"),
        ("    Serial Number    : 1654023012345", "    Serial Number    : 0"),
        ("<serial>1654023012345</serial>", "<serial>0</serial>"),
        (f"UUID=1b3f0a4c{TAIL}", "UUID=00000000-0000-0000-0000-000000000000"),
    ],
)
def test_identities_are_blanked(text: str, blanked: str) -> None:
    assert Blanker("h").text(text) == blanked


@pytest.mark.parametrize(
    "text", ["00000000:01:00.0", "580.159.04", "0000:c1:00.0", "13.580.95.05", "96.00.A5.00.1A"]
)
def test_what_names_nobody_stays(text: str) -> None:
    assert Blanker("host").text(text) == text


def test_a_network_share_loses_its_server_and_keeps_its_kind() -> None:
    line = "filer01.example.com:/models /models nfs4 rw 0 0\n"
    blanked = Blanker(None).answer("read", ("/proc/self/mounts",), line)
    assert blanked == "host:/models /models nfs4 rw 0 0\n"


def test_a_newer_recording_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "recording.json").write_text(json.dumps({"format": 9, "answers": {}}))
    with pytest.raises(Unreadable, match="recording format 9; this release reads 1"):
        Recorded(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_damaged_recording_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "recording.json").write_text(text)
    with pytest.raises(Unreadable, match=r"recording"):
        Recorded(tmp_path)


class Says(Source):
    """Answers every question with one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def answer(self, kind: str, *words: str) -> object:
        if kind in ("read", "target", "trial"):
            return self.text
        raise Unreadable("nothing here")


@given(st.text(max_size=200))
def test_no_text_in_any_file_makes_a_probe_raise(text: str) -> None:
    host = inspect(Says(text))
    assert host.gpus in ((), None)


class Slow(Source):
    """Commands that take a while each, and nothing else."""

    def answer(self, kind: str, *words: str) -> object:
        if kind != "run":
            raise Unreadable("nothing here")
        time.sleep(0.4)
        return [1, ""]


def test_slow_commands_are_waited_for_together() -> None:
    before = time.monotonic()
    inspect(Slow(), {})
    together = time.monotonic() - before
    before = time.monotonic()
    for argv in software.COMMANDS:
        Slow().run(*argv)
    assert together < time.monotonic() - before


def test_a_command_that_not_even_a_kill_ends_is_left_behind(monkeypatch) -> None:
    """As nvidia-smi is, waiting in the kernel for a driver that hangs."""
    monkeypatch.setattr(source, "COMMAND_SECONDS", 0.2)
    monkeypatch.setattr(source, "KILLED_SECONDS", 0.2)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    began = time.monotonic()
    with pytest.raises(Unreadable, match=r"sleep did not answer within 0\.2 s"):
        Live().run("sleep", "3")
    assert time.monotonic() - began < 1.5
