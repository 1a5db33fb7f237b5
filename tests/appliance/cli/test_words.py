"""Exit codes, what goes where, and one sentence for everything that goes wrong."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from appliance import render
from appliance.cli import app
from appliance.errors import CheckFailed
from appliance.plan.model import load_plan
from appliance.upgrade.book import Book, Deployment, Upgrade, write_book
from appliance.upgrade.run import BOOK


def test_wrong_usage_is_two_and_says_where_help_is(appliance):
    for words in (["plna"], ["up", "--bogus"], ["plan", "diff"], ["up", "--port", "x"]):
        said = appliance(*words)
        assert said.code == 2 and said.out == ""
        assert said.err.startswith("error: ") and "--help" in said.err
        assert "Traceback" not in said.err


def test_history_says_that_there_is_none_and_what_was_cut_off(appliance, own_state):
    assert "nothing was upgraded here yet" in appliance("upgrade", "history").err
    one, two = (Deployment(release=name, model=Path("/m")) for name in ("1", "2"))
    cut = Upgrade(previous=one, target=two, step="drain", started=0.0)
    own_state.mkdir()
    write_book(own_state / BOOK, Book(current=one, running=cut))
    said = appliance("upgrade", "history").err
    assert "cut off at drain: 1 -> 2; appliance upgrade resume finishes it" in said
    assert "serving: 1 (/m)" in said


def test_commands_where_nothing_ever_ran_say_what_comes_first(appliance):
    for words in (["upgrade", "resume"], ["canary"]):
        said = appliance(*words)
        assert said.code in (1, 2) and "appliance up" in said.err and "Errno" not in said.err


def test_an_unknown_variable_is_refused_with_the_nearest_one(appliance, monkeypatch):
    monkeypatch.setenv("APPLIANCE_DRAIN_SECOND", "3")
    said = appliance("status")
    assert said.code == 2
    assert "APPLIANCE_DRAIN_SECOND is not a setting" in said.err
    assert "did you mean APPLIANCE_DRAIN_SECONDS?" in said.err


@pytest.mark.parametrize("value", ["0", "65536", "http", " "])
def test_an_impossible_value_names_its_variable(appliance, monkeypatch, value):
    monkeypatch.setenv("APPLIANCE_PORT", value)
    said = appliance("status")
    assert said.code == 2 and f"APPLIANCE_PORT={value}: " in said.err


def test_an_empty_variable_is_one_that_nobody_set_as_compose_passes_it(appliance, monkeypatch):
    monkeypatch.setenv("APPLIANCE_PORT", "")
    assert appliance("status").code == 3, "nothing runs, and nothing is wrong with the settings"


def test_an_error_is_a_sentence_and_a_fix_and_a_traceback_only_with_debug(appliance, tmp_path):
    said = appliance("plan", "show", tmp_path / "none.json")
    assert said.code == 1
    assert said.err == (
        f"error: cannot read the plan {tmp_path / 'none.json'}: No such file or directory\n"
        "  fix: appliance plan make --model DIR writes one\n"
    )
    with pytest.raises(Exception, match="cannot read the plan"):
        appliance("--debug", "plan", "show", tmp_path / "none.json")


def test_a_fault_of_ours_is_one_line_that_asks_for_debug(appliance, monkeypatch):
    monkeypatch.setattr("appliance.cli.running.files_of", lambda settings: 1 / 0)
    said = appliance("status")
    assert said.code == 1
    assert said.err.startswith("error: ZeroDivisionError: division by zero\n")
    assert "rerun with --debug" in said.err and "Traceback" not in said.err


def test_a_check_that_failed_is_three_and_ctrl_c_is_130(appliance, monkeypatch):
    def raise_it(error):
        def raising(settings):
            raise error

        return raising

    monkeypatch.setattr("appliance.cli.running.files_of", raise_it(CheckFailed("no")))
    assert appliance("status").code == 3
    monkeypatch.setattr("appliance.cli.running.files_of", raise_it(KeyboardInterrupt()))
    assert appliance("status").code == 130


def test_a_reader_that_leaves_early_is_met_with_silence(own_state):
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    show = [sys.executable, "-c", "from appliance import render\n"
            "from appliance.cli import app, run\nimport sys\n"
            "app.command('many')(lambda: render.lines('x' for _ in range(100000)))\n"
            "sys.exit(run(['many']))"]  # fmt: skip
    with subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env=environment) as started:  # fmt: skip
        started.stdout.readline()
        started.stdout.close()
        assert started.stderr.read() == b""


def test_a_file_that_cannot_be_written_is_a_sentence(own_process, model):
    said = own_process("plan", "make", "--model", model, "-o", "/proc/none/plan.json")
    assert said.code == 1
    assert "error: /proc/none/" in said.err and "No such file or directory" in said.err


def test_a_full_disk_is_a_sentence(model, tmp_path, own_state):
    # No file may grow: what the kernel says to a write is as real as a full disk's answer.
    limited = f"ulimit -f 0; exec {sys.executable} -m appliance.cli up --dry-run --model {model}"
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    for words, code in ((limited, 0), (limited.replace("--dry-run ", ""), 1)):
        done = subprocess.run(["sh", "-c", words], env=environment, capture_output=True, text=True,
                              timeout=180, check=False)  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr


def test_data_is_on_stdout_and_talk_on_stderr(appliance, model, tmp_path):
    out = tmp_path / "made.json"
    said = appliance("plan", "make", "--model", model, "-o", out)
    assert (said.code, said.out) == (0, f"{out}\n")
    assert "experts" in said.err
    shown = appliance("plan", "show", out, "--json")
    assert json.loads(shown.out) == load_plan(out).model_dump(mode="json")
    assert shown.err == ""


def test_a_plan_made_twice_is_the_same_file(appliance, model, tmp_path):
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path in paths:
        appliance("plan", "make", "--model", model, "-o", path, "--host-share", 0.25)
    first, second = (load_plan(path) for path in paths)
    # The host's free memory moves from one look to the next; the homes do not.
    assert first.ranks[0].layers == second.ranks[0].layers
    explained = appliance("plan", "explain", 1, 7, "--plan", paths[0]).out
    assert "Layer 1 expert 7 is on the host of rank 0" in explained


def test_weights_synth_makes_what_weights_show_reads(appliance, tmp_path):
    made = tmp_path / "new"
    words = ["--experts", 8, "--top-k", 2, "--bits", 2, 3, 4, "--codebook", "mul1"]
    assert appliance("weights", "synth", made, *words).out == f"{made}\n"
    shown = appliance("weights", "show", made, "--json")
    facts = json.loads(shown.out)
    assert (facts["experts"], facts["bits"], facts["codebooks"]) == (24, "2, 3, 4", "mul1")
    assert facts["all bytes"] == sum(
        value for name, value in facts.items() if name.endswith("bytes") and value
        and name != "all bytes"
    )  # fmt: skip
    assert appliance("weights", "synth", made).code == 2, "a folder that is not empty"


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (int(102.1 * 2**30), "102.1 GiB"),
     (1 << 40, "1,024.0 GiB"), (-(5 << 20), "-5.0 MiB")],
)  # fmt: skip
def test_bytes_are_shown_in_binary_units(size_bytes, words):
    assert render.size(size_bytes) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (38.2, "38 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"),
     (3600 * 3 + 720, "3 h 12 min")],
)  # fmt: skip
def test_durations_are_shown_as_people_say_them(seconds, words):
    assert render.duration(seconds) == words


def test_headers_only_takes_no_other_option_and_names_what_it_knows(appliance, tmp_path):
    mixed = appliance("weights", "synth", tmp_path / "x", "--headers-only", "m", "--layers", 3)
    assert mixed.code == 2 and "no other option goes with it" in mixed.err
    unknown = appliance("weights", "synth", tmp_path / "x", "--headers-only", "m")
    assert unknown.code == 2 and "glm-5.3-flash" in unknown.err


def test_no_flag_depends_on_how_a_release_of_typer_reads_a_metavar():
    """typer 0.27 calls an option of the metavar URL --URL where it has no name, others --url."""

    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if hasattr(command, "commands") else [command]

    asked = 0
    for command in commands(get_command(app)):
        parameters = inspect.signature(command.callback, eval_str=True).parameters.values()
        for parameter in parameters:
            for info in getattr(parameter.annotation, "__metadata__", ()):
                asked += isinstance(info, typer.models.OptionInfo)
                metavar = (info.metavar or "").lower().replace("-", "_")
                if isinstance(info, typer.models.OptionInfo) and metavar == parameter.name:
                    assert isinstance(info.default, str), parameter.name  # its first own name
    assert asked > 200


def commands(group, before=()):
    """(words, command) of every command."""
    for name, command in group.commands.items():
        words = (*before, name)
        yield from commands(command, words) if hasattr(command, "commands") else [(words, command)]


def test_every_port_is_refused_beyond_the_ports_that_there_are(appliance):
    found = [
        w for w, c in commands(get_command(app)) if "--port" in str([p.opts for p in c.params])
    ]
    assert len(found) == 4
    for words in found:
        for port in (65536, -1):
            said = appliance(*words, "--port", port)
            assert said.code == 2 and "Invalid value for '--port'" in said.err, words


def test_every_option_says_what_it_is_and_synth_its_defaults():
    from appliance.checkpoint.synth import SynthSpec

    silent = [
        (words, option.name)
        for words, command in commands(get_command(app))
        for option in command.params
        if isinstance(option, typer.core.TyperOption) and not (option.help or option.hidden)
    ]
    assert silent == []
    synth = next(c for words, c in commands(get_command(app)) if words == ("weights", "synth"))
    spec, told = SynthSpec(), 0
    for option in synth.params:
        if option.name in SynthSpec.__slots__:
            value = getattr(spec, option.name)
            words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert f"(default {words})" in option.help, option.name
            told += 1
    assert told == 10


def test_the_version_is_said(appliance, monkeypatch):
    from appliance.cli import loads

    monkeypatch.setattr(loads, "version", lambda name: {"moe-appliance": "1.2.3"}[name])
    said = appliance("--version")
    assert (said.code, said.out) == (0, "appliance 1.2.3\n")


@pytest.mark.parametrize("words", [("accuracy", "compare"), ("bench", "compare")])
def test_a_comparison_says_which_run_is_which(appliance, words):
    said = appliance(*words, "--help").out
    assert re.search(r"\bA +<path> +\w+ before", said) and re.search(
        r"\bB +<path> +\w+ after", said
    )
