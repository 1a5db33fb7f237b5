"""The commands on the store: exit codes, what is on stdout, what never shows."""

import json
import re
import socket
from pathlib import Path

import hostile_server as hostile
import pytest
from weights_models import fetch, publish, same_bytes, write_model

from appliance.cli import run
from appliance.cli.store import say_switch
from appliance.cli.transfers import bytes_of
from appliance.errors import UsageError
from appliance.weights.activate import Activation
from appliance.weights.names import MANIFEST
from appliance.weights.store import make_store, open_store

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def command(folder, monkeypatch, capfd):
    """Runs `appliance weights ...` on a store of this test; gives code, stdout, stderr."""
    monkeypatch.setenv("APPLIANCE_WEIGHTS_DIR", str(folder / "store"))

    def call(*words: str) -> tuple[int, str, str]:
        code = run(["weights", *words])
        out = capfd.readouterr()
        return code, out.out, out.err

    return call


def synthesized(out: Path) -> Path:
    from appliance.checkpoint.synth import SynthSpec, synthesize

    synthesize(out, SynthSpec())
    return out


@pytest.fixture
def small(folder) -> Path:
    return write_model(folder / "small", seed=1, rows=8)


def test_pull_activate_verify_and_look(command, folder, small):
    code, out, _ = command("pull", str(small), "--activate")
    release = out.strip()
    assert code == 0
    assert same_bytes(folder / "store" / "current", small)
    assert command("ls")[1].startswith(f"* {release}")
    assert command("verify", "--full")[0] == 0
    assert release in command("du")[1]
    assert f"(none) -> {release}" in command("history")[1]
    found = json.loads(command("manifest")[1])
    assert found["checkpoint"]["experts"] == 8


def test_pull_says_where_it_went_and_how_to_serve_it(command, folder, small):
    code, out, err = command("pull", str(small))
    release = folder / "store" / "releases" / out.strip()
    assert code == 0 and release.is_dir()
    assert f"what comes goes to {folder / 'store'}" in err
    assert f"serve it: appliance up --model {release}\n" in err
    served = folder / "store" / "current"
    assert (
        f"serve it: appliance up --model {served}\n" in command("pull", str(small), "--activate")[2]
    )


def test_a_source_that_is_away_is_said_so_while_it_is_tried_again(command, server):
    server.fails(hostile.unavailable, when=lambda request: True, times=2)
    code, _, err = command("pull", f"{server.url}/m")
    assert code == 1  # then it answers that it has no such thing
    assert re.search(r"503.*; trying again in \d\.\d s, 2 of 8\n", err)
    assert re.search(r"503.*; trying again in \d\.\d s, 3 of 8\n", err)
    server.fails(hostile.unavailable, when=lambda request: True, times=1)
    assert "trying again" not in command("pull", f"{server.url}/m", "--quiet")[2]


def test_an_empty_store_says_that_it_is_empty(command, folder):
    make_store(folder / "store")
    code, out, err = command("ls")
    assert (code, out) == (0, "") and err == f"{folder / 'store'} holds no release\n"


def test_processes_that_nobody_may_look_into_are_not_blamed_on_not_being_root(capfd):
    say_switch(Activation(old="a", new="b", unseen=1))
    said = capfd.readouterr().err
    assert "1 process could not be looked into" in said and "root" not in said


def test_known_answers_that_do_not_come_leave_no_folder_behind(command, folder, monkeypatch):
    monkeypatch.setenv("APPLIANCE_ENGINE_PYTHON", "/bin/false")
    words = ("synth", str(folder / "new"), "--layers", "2", "--experts", "8")
    assert command(*words, "--known-answers")[0] == 1
    assert not (folder / "new").exists()
    assert command(*words)[0] == 0


def test_a_damaged_release_is_exit_3_and_repair_mends_it(command, folder, small):
    command("pull", str(small), "--activate")
    store = open_store(folder / "store")
    file = next(f for f in store.manifest(store.current()).files if f.path == "config.json")
    store.blob(file.sha256).write_bytes(b"x" * file.size_bytes)
    code, out, err = command("verify")
    assert code == 3
    assert "config.json: bytes 0 to" in out and "--repair" in err
    code, _, err = command("verify", "--repair")
    assert (code, "fetched 1 chunk again" in err) == (0, True)


def test_rollback_gc_and_rm_say_what_they_did(command, folder, small):
    first = command("pull", str(small), "--activate")[1].strip()
    others = [
        command("pull", str(write_model(folder / f"m{seed}", seed, rows=8)))[1].strip()
        for seed in (2, 3)
    ]
    command("activate", others[0])
    assert command("rollback")[1].strip() == first
    assert f"would remove {others[1]}" in command("gc", "--dry-run")[2]
    assert f"removed {others[1]}" in command("gc")[2]
    assert "freed" in command("rm", others[0])[2]
    code, _, err = command("rm", first)
    assert (code, "current release" in err) == (2, True)


def test_progress_in_json_is_one_object_a_line(command, small):
    code, out, err = command("pull", str(small), "--json")
    assert code == 0
    assert json.loads(out)["release"]
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert lines[-1]["done_bytes"] == lines[-1]["total_bytes"] > 0
    assert {"bytes_per_second", "seconds_left", "files"} <= lines[-1].keys()


def test_quiet_says_only_the_end(command, small):
    assert command("pull", str(small), "--quiet")[2].count("\n") == 1


def test_pull_gives_the_verdict_of_size_before_the_first_byte_of_a_shard(command, folder):
    model = synthesized(folder / "synth")
    said = command("pull", str(model))[2]
    verdict = said.index("answer        it fits; how fast is unknown")  # no GPU here
    assert "1. activation a token uses" in said and "2. memory" in said
    assert verdict < said.index("pulling")


def test_a_model_that_this_release_cannot_serve_is_said_so_and_pulled_all_the_same(command, small):
    code, _, said = command("pull", str(small))
    assert code == 0 and "answer        no: not with this release" in said


def test_a_token_shows_in_no_output_and_is_sent_to_the_mirror(
    command, server, filled, small, tmp_path, monkeypatch
):
    (tmp_path / "token").write_text("very-secret\n")
    monkeypatch.setenv("APPLIANCE_WEIGHTS_TOKEN_FILE", str(tmp_path / "token"))
    server.fails(lambda h, r, b: h.answer(403, b""), when=lambda request: True)
    code, out, err = command("pull", f"{server.url}/m")
    assert code == 1
    assert server.requests[0].headers["Authorization"] == "Bearer very-secret"
    assert "very-secret" not in out + err


def test_a_missing_store_and_an_unknown_source_say_the_way_out(command):
    code, _, err = command("ls")
    assert (code, "appliance weights pull SOURCE makes one" in err) == (1, True)
    code, _, err = command("pull", "org/name")
    assert (code, "hf:ORG/NAME" in err) == (2, True)


def test_a_manifest_made_of_a_folder_makes_it_a_mirror(command, server, small, store):
    code, out, _ = command("manifest", "--of", str(small), "--model", "org/small")
    assert code == 0
    publish(server, small)
    server.files[f"/m/{MANIFEST}"] = out.encode()
    pulled = fetch(store, f"{server.url}/m")
    assert pulled.manifest.model == "org/small"
    assert same_bytes(store.release_folder(pulled.release), small)


def test_the_documented_redirection_into_the_folder_makes_a_mirror_also_a_second_time(
    command, folder, small
):
    told = (REPOSITORY / "docs" / "weights.md").read_text()
    assert "`appliance weights manifest --of DIR > DIR/appliance-manifest.json`" in told
    made = []
    for _ in range(2):
        (small / MANIFEST).write_bytes(b"")  # as the shell leaves it before the command runs
        code, out, err = command("manifest", "--of", str(small), "--model", "org/small")
        assert code == 0, err
        made.append(out)
        (small / MANIFEST).write_text(out)
    assert made[0] == made[1]
    (small / MANIFEST).write_text(made[0].replace("note.txt", "gone.txt"))  # of other files
    assert command("manifest", "--of", str(small), "--model", "org/small")[1] == made[0]
    (small / MANIFEST).write_text(made[0])
    assert command("pull", str(small))[0] == 0


def test_an_empty_manifest_in_a_source_is_said_with_the_command_that_makes_it(command, small):
    (small / MANIFEST).write_bytes(b"")
    code, _, err = command("pull", str(small))
    assert code == 1 and f"{MANIFEST} is empty" in err
    assert "appliance weights manifest --of DIR > DIR/appliance-manifest.json" in err


def test_a_folder_that_holds_no_model_is_said_so_whatever_else_lies_there(command, folder):
    (folder / "other").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "other" / "a.socket"))
        for words in (("pull", str(folder / "other")), ("manifest", "--of", str(folder / "other"))):
            code, _, err = command(*words)
            assert code == 1 and "other has no config.json: it is no model's folder" in err


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("500M", 500 << 20), ("1.5 GiB/s", 3 << 29), ("2k", 2048)]
)
def test_bytes_are_read_as_people_write_them(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "fast", "1X"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(UsageError, match="no number of bytes"):
        bytes_of(text)
