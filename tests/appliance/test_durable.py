from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from appliance import durable


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_bytes_are_synced_before_they_have_their_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, calls = tmp_path / "plan.json", []
    plan.write_text("old")
    real_sync, real_rename = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        calls.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_sync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        calls.append(("rename", path))
        assert path.read_text() == "new" and target.read_text() == "old"
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    durable.write_file(plan, b"new")
    aside = calls[0][1]
    assert calls == [("sync", aside), ("rename", aside), ("sync", tmp_path)]
    assert aside.parent == tmp_path and plan.read_text() == "new"


def test_what_was_there_stays_when_writing_fails_and_nothing_is_left_beside_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "state.json"
    durable.write_file(file, b"old")
    with pytest.raises(ZeroDivisionError), durable.writing(file) as stream:
        stream.write(b"half")
        raise ZeroDivisionError
    assert file.read_bytes() == b"old" and names(tmp_path) == {"state.json"}


def test_a_secret_is_never_readable_by_others_not_even_aside(tmp_path: Path) -> None:
    with durable.writing(tmp_path / "key", mode=durable.OWNER_ONLY) as stream:
        (aside,) = tmp_path.iterdir()
        assert aside.stat().st_mode & 0o777 == 0o600
        stream.write(b"sk")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_writer_that_is_alone_takes_the_place_of_what_a_killed_one_left(tmp_path: Path) -> None:
    part = tmp_path / "part-00001.tar"
    if os.fork() == 0:
        with durable.writing(part, alone=True) as stream:
            stream.write(b"longer than what comes after")
            stream.flush()
            os._exit(0)  # as a kill: nothing is tidied up
    os.wait()
    assert names(tmp_path) == {".part-00001.tar.aside"}
    with durable.writing(part, alone=True) as stream:
        stream.write(b"whole")
    assert names(tmp_path) == {"part-00001.tar"} and part.read_bytes() == b"whole"


def test_two_that_write_the_same_file_do_not_mix_their_bytes(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with durable.writing(file) as one, durable.writing(file) as two:
        one.write(b"1" * 9)
        two.write(b"2" * 9)
    assert file.read_bytes() == b"1" * 9 and names(tmp_path) == {"plan.json"}


def test_what_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    missing, folder = tmp_path / "nope" / "plan.json", tmp_path / "folder"
    folder.mkdir()
    for path, kind in ((missing, FileNotFoundError), (folder, IsADirectoryError)):
        with pytest.raises(kind) as said:
            durable.write_file(path, b"plan")
        assert str(said.value).endswith(f"{str(path)!r}")
    assert names(tmp_path) == {"folder"} and not names(folder)


def test_a_full_disk_is_told_with_the_name_and_other_errors_are_left_as_they_are(
    tmp_path: Path,
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    other = ConnectionResetError(errno.ECONNRESET, "reset by the source that is read")
    for error, name in ((full, str(tmp_path / "plan.json")), (other, None)):
        with pytest.raises(OSError) as said, durable.writing(tmp_path / "plan.json"):
            raise error
        assert (said.value, said.value.filename) == (error, name)
    with pytest.raises(OSError) as said, durable.naming(tmp_path / "page.html"):
        Path("/dev/full").write_bytes(b"page")
    assert said.value.filename == str(tmp_path / "page.html")


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    stdout, pipe = tmp_path / "stdout", os.pipe()
    stdout.symlink_to(f"/proc/self/fd/{pipe[1]}")
    durable.write_file(stdout, b"{}")
    os.close(pipe[1])
    with open(pipe[0], "rb") as read:
        assert read.read() == b"{}"
    assert stdout.is_symlink() and names(tmp_path) == {"stdout"}
