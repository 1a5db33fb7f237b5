"""bench and capacity on the command line."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).resolve().parents[2] / "timed_server.py"
SHAPE = {
    "system_tokens": 10,
    "turns": {"median": 4, "p95": 5, "least": 2},
    "input_tokens": {"median": 10, "p95": 20, "least": 8},
    "short_output_tokens": {"median": 17, "p95": 18, "least": 17, "most": 18},
    "long_share": 0,
}


@contextlib.contextmanager
def timed(port_file: Path, interval_ms: int) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(SERVER), str(port_file), str(interval_ms), "1"])
    until = time.monotonic() + 30
    while not (port_file.exists() and port_file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port_file.read_text()}/v1"
    process.terminate()
    process.wait(10)


@pytest.fixture
def server(tmp_path):
    with timed(tmp_path / "port", 2) as url:
        yield url


@pytest.fixture
def slow(tmp_path):
    with timed(tmp_path / "slow", 100) as url:
        yield url


@pytest.fixture
def shape(tmp_path) -> Path:
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    return tmp_path / "shape.json"


def test_the_published_seat_model_gives_nineteen(appliance):
    said = appliance("capacity", "seats", "--streams", 4, "--active", "7.1%", "--risk", "1%")
    assert (said.code, said.out) == (0, "19\n")
    assert "0.90% with 19 people, 1.13% with one more" in said.err


def test_the_published_table_gives_four_streams(appliance, tmp_path):
    rows = [(1, 186, 134), (4, 59, 52), (6, 40, 34)]
    keys = ("streams", "median", "p5")
    (tmp_path / "t.json").write_text(json.dumps([dict(zip(keys, r, strict=True)) for r in rows]))
    said = appliance("capacity", "table", tmp_path / "t.json", "--target", 40)
    assert (said.code, said.out) == (0, "4\n")
    assert "not measured: 5 streams" in said.err
    assert appliance("capacity", "table", tmp_path / "t.json", "--target", 200).code == 3


def test_seats_from_a_usage_log_come_with_their_interval(appliance, tmp_path):
    rows = [
        f"p{p},{100 * k + 7 * p},{100 * k + 7 * p + 5 + p}" for p in range(9) for k in range(50)
    ]
    (tmp_path / "u.csv").write_text("\n".join(["person,start,end", *rows]) + "\n")
    said = appliance("capacity", "seats", "--streams", 4, "--usage", tmp_path / "u.csv")
    assert said.code == 0 and int(said.out) >= 4
    assert "9 people over" in said.err and "people over that interval" in said.err


def test_a_log_of_one_person_gives_no_interval(appliance, tmp_path):
    (tmp_path / "u.csv").write_text("person,start,end\na,0,10\na,90,100\n")
    said = appliance("capacity", "seats", "--streams", 4, "--usage", tmp_path / "u.csv")
    assert said.code == 0 and int(said.out) >= 4
    assert "1 person over 1 min 40 s: active 20.00% of the time; how people differ" in said.err
    assert "interval" not in said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--streams", 4), "--active or --usage"),
        (("--streams", 4, "--active", "7x"), "'7x' is no share"),
        (("--streams", 4, "--active", "700%"), "share of time of 7"),
    ],
)
def test_seats_that_make_no_sense_are_refused(appliance, words, expected):
    said = appliance("capacity", "seats", *words)
    assert said.code == 2 and expected in said.err


def test_capacity_of_a_server_is_found_kept_and_reported_again(appliance, server, shape, tmp_path):
    out = tmp_path / "record"
    words = ("--url", server, "--model", "fine", "--shape", shape, "--out", out, "--target", 100)
    said = appliance("bench", "capacity", *words, "--most", 2)
    assert said.code == 0, said.err
    assert "2 streams or more: the limit was reached hold p5 >= 100 x 1.1 = 110" in said.out
    svg = tmp_path / "plot.svg"
    again = appliance("bench", "report", out, "--svg", svg)
    assert again.out.startswith(said.out)
    assert "| = 110 tokens per second" in again.out and svg.read_text().startswith("<svg")


def test_turns_of_two_runs_compare(appliance, server, shape, tmp_path):
    for name in ("a", "b"):
        said = appliance(
            "bench", "turns", "--streams", 4, "--turns", 40, "--url", server, "--model", "fine",
            "--shape", shape, "--out", tmp_path / name,
        )  # fmt: skip
        assert said.code == 0, said.err
    said = appliance("bench", "compare", tmp_path / "a", tmp_path / "b")
    assert said.code == 0 and "4 streams, median:" in said.out and "one start each" in said.out
    assert re.search(r"4 streams, p5: \S+ % and no telling how sure: 40 and 40 turns, 60", said.out)


def test_several_numbers_of_streams_run_in_turns_for_a_time(appliance, server, shape, tmp_path):
    words = ("--url", server, "--model", "fine", "--shape", shape, "--out", tmp_path / "r")
    began = time.monotonic()
    said = appliance("bench", "turns", "--streams", "1,2,4", "--seconds", 3, *words)
    assert said.code == 0, said.err
    assert time.monotonic() - began < 4.5
    written = (tmp_path / "r" / "blocks.jsonl").read_text().splitlines()
    blocks = [json.loads(line) for line in written]
    assert [block["ask"]["streams"] for block in blocks] == [1, 2, 4, 4, 2, 1]
    assert [line.split()[0] for line in said.out.splitlines()[1:4]] == ["1", "2", "4"]
    again = appliance("bench", "report", tmp_path / "r")
    assert again.out.startswith(said.out)
    assert appliance("bench", "turns", "--streams", "1,x", *words).code == 2


def test_seconds_are_kept_where_turns_take_longer_and_what_was_not_reached_is_said(
    appliance, slow, shape, tmp_path
):
    """A turn takes 1.7 s here, and each number needs two: two numbers take 6.4 s."""
    words = ("--url", slow, "--model", "fine", "--shape", shape, "--out", tmp_path / "r")
    began = time.monotonic()
    said = appliance("bench", "turns", "--streams", "1,2,3,4", "--seconds", 8, *words)
    assert time.monotonic() - began < 9.5
    assert said.code == 3 and "nothing was measured at 3, 4 streams" in said.err
    assert re.search(r"fix: more --seconds: others took 1\.\d s a turn", said.err)
    assert [line.split()[0] for line in said.out.splitlines()[1:3]] == ["1", "2"]


def test_turns_beyond_the_servers_context_are_not_sent(appliance, server, tmp_path):
    """It holds 4,096 words; the default shape's sessions are some ten times as long."""
    words = ("--url", server, "--model", "small", "--out", tmp_path / "r", "--shape")
    shape = {"input_tokens": {"median": 2000, "p95": 20000}, "think_seconds": SHAPE["turns"]}
    (tmp_path / "s.json").write_text(json.dumps(SHAPE | shape))
    said = appliance("bench", "turns", "--streams", 2, "--turns", 12, *words, tmp_path / "s.json")
    assert said.code == 0, said.err
    assert "the server holds 4,096 tokens" in said.err and "http-400" not in said.out
    lines = (tmp_path / "r" / "samples.jsonl").read_text().splitlines()
    sent = [json.loads(line)["metrics"]["input_sequence_length"]["value"] for line in lines]
    assert 2000 < max(sent) < 4096 and len(sent) >= 14
    assert json.loads((tmp_path / "r" / "record.json").read_text())["context_tokens"] == 4096


def test_a_shape_of_which_no_turn_fits_is_refused_with_the_numbers(appliance, server, tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(SHAPE | {"system_tokens": 30_000}))
    said = appliance(
        "bench", "turns", "--url", server, "--model", "small", "--out", tmp_path / "r",
        "--shape", tmp_path / "s.json",
    )  # fmt: skip
    assert said.code == 2
    assert "the server holds 4,096 tokens, and the shortest first turn" in said.err
    assert not (tmp_path / "r").exists()  # another shape may go there


def test_what_the_server_refuses_is_reported_with_its_reason(appliance, tmp_path, shape, server):
    words = ("--url", server, "--model", "http-429", "--out", tmp_path / "r", "--shape", shape)
    said = appliance("bench", "turns", "--turns", 2, "--streams", 1, *words)
    assert said.code == 1 and "too many requests" in said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--to", 131072), "--to 131,072: the server holds 4,096 tokens"),
        (("--from", 3000, "--to", 2000), "--from 3,000 is above --to 2,000"),
    ],
)
def test_contexts_that_cannot_be_measured_are_refused(appliance, server, tmp_path, words, expected):
    found = ("--url", server, "--model", "small", "--out", tmp_path / "c")
    said = appliance("bench", "context", *found, *words)
    assert said.code == 2 and expected in said.err and not (tmp_path / "c").exists()


def test_turns_of_which_no_speed_can_be_said_are_exit_code_3(appliance, server, tmp_path):
    trace = tmp_path / "own.jsonl"
    trace.write_text(json.dumps({"input_length": 20, "output_length": 4, "hash_ids": [1]}) + "\n")
    words = ("--url", server, "--model", "fine", "--trace", trace, "--out", tmp_path / "r")
    said = appliance("bench", "turns", "--streams", 2, "--turns", 4, *words)
    assert said.code == 3
    assert "counted: 4 too-short: fewer than 16 tokens of answer say no speed" in said.out
    assert "nothing was measured at 2 streams: 4 too-short" in said.err
    assert appliance("bench", "report", tmp_path / "r").code == 3


def test_without_an_appliance_and_without_a_url_it_says_what_to_do(appliance, tmp_path):
    said = appliance("bench", "turns", "--out", tmp_path / "x")
    assert said.code == 1 and "appliance up" in said.err


def test_contexts_of_a_server_are_measured_and_reported_again(appliance, server, tmp_path):
    words = ("--url", server, "--from", 500, "--repeats", 1, "--out", tmp_path / "c")
    said = appliance("bench", "context", *words, "--model", "cache")
    assert said.code == 0, said.err
    assert "prefix caching works" in said.out and "4,096" in said.out  # the server says its longest
    assert appliance("bench", "report", tmp_path / "c").out == said.out
    words = ("--url", server, "--from", 500, "--to", 600, "--repeats", 1, "--out", tmp_path / "d")
    assert appliance("bench", "context", *words, "--model", "no-cache").code == 3


def test_a_recorded_session_is_replayed_as_a_trace(appliance, server, tmp_path):
    file = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "appliance.cli", "bench", "record", "--to", server]
    command += ["--port", "0", "--out", str(file)]
    proxy = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = re.search(r"http://127\.0\.0\.1:\d+/v1", proxy.stderr.readline()).group()
    body = {"model": "fine", "max_tokens": 20, "stream": True}
    body["messages"] = [{"role": "user", "content": "giraffe one two"}]
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=20) as answer:
        assert b"[DONE]" in answer.read()
    until = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    proxy.send_signal(signal.SIGINT)
    assert "1 request kept" in proxy.communicate(timeout=20)[1]
    assert "giraffe" not in file.read_text()
    words = ("--url", server, "--model", "fine", "--trace", file, "--out", tmp_path / "t")
    said = appliance("bench", "turns", "--streams", 1, "--turns", 3, *words)
    assert said.code == 0, said.err
