"""The support bundle: nothing secret or personal leaves, and what leaves can be replayed."""

import tarfile

import pytest
from machines import FOLDER

from appliance.cli import run
from appliance.serve.state import Files
from appliance.support import Redactor, collect, write
from preflight import Recorded, check, inspect

KEY, CONTROL = "sk-" + "k" * 43, "control-key-of-32-characters-abc"


@pytest.fixture
def files(tmp_path) -> Files:
    files = Files.of(tmp_path / "state")
    files.folder.mkdir()
    files.keys.write_text(f"# alice\n{KEY}\nshort\n")
    files.control_key.write_text(CONTROL + "\n")
    files.engine_log.write_text(
        f"GET /v1/models Authorization: Bearer {KEY}\n"
        f"connect to https://alice:hunter2secret@hub.example/x as alice@example.org from 10.1.2.3\n"
        f"control {CONTROL} token hf_ABCDEFGHIJKLMNOPQRST in /home/alice/models on box17\n"
    )
    return files


def test_no_key_token_password_mail_user_address_or_host_name_is_in_any_file(files):
    items = collect(files, {"settings.json": f'{{"x": "{CONTROL}"}}'}, None, hostname="box17")
    everything = "".join(item.text for item in items)
    for secret in (KEY, CONTROL, "hunter2", "hf_ABC", "alice", "10.1.2.3", "box17"):
        assert secret not in everything, secret
    log = next(item for item in items if item.name == "logs/engine.log")
    assert log.redacted >= 5 and "GET /v1/models" in log.text


def test_the_key_files_themselves_are_never_in_it(files):
    names = {item.name for item in collect(files, {}, None)}
    assert not {"keys", "control-key"} & names


@pytest.mark.parametrize("text", ["step 4096 took 0.5 s", "sk-short", "layer 7: 12.5 GiB"])
def test_ordinary_words_and_numbers_stay(text):
    item = Redactor([KEY])("x", text)
    assert item.text == text and item.redacted == 0


def test_a_bundle_replays_as_the_machine_it_was_made_on(files, tmp_path):
    source = FOLDER / "two-rtx-pro-6000"
    out = tmp_path / "bundle.tar.gz"
    size = write(collect(files, {}, source), out)
    assert out.stat().st_size == size and out.stat().st_mode & 0o077 == 0
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path, filter="data")
    replayed = inspect(Recorded(tmp_path / "bundle" / "machine"))
    original = inspect(Recorded(source))
    assert check(replayed).findings == check(original).findings


def test_a_bundle_is_its_owners_alone_also_where_a_file_of_that_name_was_everybodys(
    files, tmp_path
):
    out = tmp_path / "bundle.tar.gz"
    out.write_text("an older one")
    out.chmod(0o644)
    write(collect(files, {}, None), out)
    assert out.stat().st_mode & 0o077 == 0


def test_a_bundle_can_be_made_of_an_appliance_whose_state_cannot_be_read(tmp_path, monkeypatch):
    state = tmp_path / "state"
    state.mkdir()
    (state / "state.json").write_text('{"phase": "re')
    monkeypatch.setenv("APPLIANCE_STATE_DIR", str(state))
    out = tmp_path / "bundle.tar.gz"
    assert run(["support-bundle", "--out", str(out)]) == 0
    with tarfile.open(out) as archive:
        said = archive.extractfile("bundle/status.txt").read().decode()
    assert "cannot make sense of the state file" in said
