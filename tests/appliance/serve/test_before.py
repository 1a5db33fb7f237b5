"""Refusals before anything is started."""

import os
import socket

import pytest

from appliance.errors import ServeError
from appliance.serve.before import require_disk, require_free_port, require_program
from appliance.serve.keys import first_key, make_keys
from appliance.serve.state import Files, make_folder, only_supervisor, read_state, write_aside

from .conftest import free_port


def test_a_used_port_is_refused_with_the_name_of_who_holds_it():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServeError) as caught:
            require_free_port("127.0.0.1", port)
    assert f"port {port} on 127.0.0.1 is held by" in caught.value.message
    assert f"(process {os.getpid()})" in caught.value.message
    assert "--port" in caught.value.fix


def test_a_free_port_passes_and_stays_free():
    port = free_port()
    require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_an_address_that_is_not_ours_is_refused_with_the_reason():
    with pytest.raises(ServeError, match="can be bound: Cannot assign requested address") as caught:
        require_free_port("192.0.2.1", free_port())
    assert "--host" in caught.value.fix and "--port" not in caught.value.fix
    with pytest.raises(ServeError, match=r"300\.1\.1\.1 is no address of this machine") as caught:
        require_free_port("300.1.1.1", free_port())
    assert "--host" in caught.value.fix


def test_a_disk_with_too_little_room_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ServeError, match=r"has \d+ MiB free and 1099511627776 MiB are needed"):
        require_disk(tmp_path, 1 << 60)
    require_disk(tmp_path, 1)


def test_an_engine_python_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ServeError, match="is not there or not executable"):
        require_program(str(tmp_path / "python"))


def test_the_api_key_is_made_once_and_the_control_key_on_every_start(tmp_path):
    files = Files.of(tmp_path / "state")
    make_folder(files)
    assert make_keys(files)
    key, control = first_key(files.keys), first_key(files.control_key)
    assert key.startswith("sk-") and len(key) > 40
    assert not make_keys(files)
    assert first_key(files.keys) == key and first_key(files.control_key) != control
    modes = {path.stat().st_mode & 0o777 for path in (files.keys, files.control_key)}
    assert modes == {0o600} and files.folder.stat().st_mode & 0o077 == 0


def test_a_key_file_without_a_key_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# none yet\n\n")
    with pytest.raises(ServeError, match="holds no key"):
        first_key(path)


def test_a_state_file_that_is_no_state_is_an_error_that_names_it(tmp_path):
    files = Files.of(tmp_path)
    assert read_state(files) is None
    files.state.write_text('{"phase": "dreaming"}')
    with pytest.raises(ServeError, match=str(files.state)) as caught:
        read_state(files)
    assert "no appliance runs from here" in caught.value.fix
    with only_supervisor(files), pytest.raises(ServeError) as caught:
        read_state(files)
    assert f"an appliance runs from here: `kill {os.getpid()}` stops it" in caught.value.fix


def test_a_folder_that_cannot_be_written_is_an_error_with_the_systems_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServeError, match=r"cannot make the state directory .*: Not a directory"):
        make_folder(Files.of(tmp_path / "file" / "state"))
    with pytest.raises(ServeError, match=r"cannot write .*: No such file"):
        write_aside(tmp_path / "none" / "state.json", "x")
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
