"""accuracy on the command line, against a server that answers sums, some of them wrong."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from appliance.accuracy.gate import require_accuracy
from appliance.cli.proofs import proof_of
from appliance.errors import CheckFailed, UsageError


class Sums(BaseHTTPRequestHandler):
    """Adds two numbers; a model named off-by-N is wrong on every Nth sum. Counts its calls."""

    asked: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["model"])
        assert (
            body["temperature"] == 0.0 and body["chat_template_kwargs"]["enable_thinking"] is False
        )
        a, b = map(int, re.search(r"(\d+) \+ (\d+)\?", body["messages"][0]["content"]).groups())
        every = int(body["model"].rpartition("-")[2])
        text = f"Let me see.\n#### {a + b + (1 if every and a % every == 0 else 0)}"
        choice = {"message": {"content": text}, "finish_reason": "stop"}
        if body.get("logprobs"):
            tops = [{"token": t, "logprob": -0.1 - 3 * (t != "#")} for t in ("#", str(a % 2))]
            choice["logprobs"] = {"content": [{"token": "#", "top_logprobs": tops}] * 5}
        answer = json.dumps({"choices": [choice], "usage": {"completion_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sums():
    Sums.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sums)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def task(tmp_path):
    rows = [{"id": f"s{n}", "prompt": f"{n} + 3?", "answer": n + 3} for n in range(1, 121)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "own.jsonl"


def test_two_runs_are_scored_and_compared_with_the_gate(appliance, sums, task, tmp_path):
    for model, right in (("off-by-0", "1.000"), ("off-by-6", "0.833")):
        said = appliance(
            "accuracy", "run", task, "--out", tmp_path / model, "--url", sums, "--model", model
        )
        assert (said.code, said.out) == (0, right + "\n"), said.err
        assert "120 items of own" in said.err
        assert "a difference of 0.070 shows in 4 of 5 cases if 8% of them differ" in said.err
        assert "equal answers leave a loss of 3.1% possible" in said.err
    a, b = tmp_path / "off-by-0", tmp_path / "off-by-6"
    said = appliance("accuracy", "compare", a, b, "--margin", "5%")
    assert said.code == 3
    assert "1.000 -> 0.833: -0.167" in said.out and "only A right 20, only B 0" in said.out
    assert "McNemar p = 0.000" in said.out
    assert appliance("accuracy", "compare", a, a, "--margin", "5%").code == 0
    assert json.loads(appliance("accuracy", "compare", a, b, "--json").out)["only_a"] == 20


def test_two_items_show_nothing_and_are_said_to(appliance, sums, task, tmp_path):
    for name in ("a", "b"):
        said = appliance(
            "accuracy", "run", task, "--count", 2, "--out", tmp_path / name, "--url", sums,
            "--model", "off-by-1",
        )  # fmt: skip
        assert (said.code, said.out) == (0, "0.000\n"), said.err
        assert "too few to show any difference if 8% of the items differ (91 do)" in said.err
        assert "equal answers leave a loss of 84.2% possible" in said.err
    said = appliance("accuracy", "compare", tmp_path / "a", tmp_path / "b", "--margin", "3%")
    assert said.code == 3 and "+0.000 [-0.842, +0.842] over 2 items" in said.out
    assert "not shown to be not inferior by 3%" in said.err
    assert "2 items cannot show that: even equal answers take 125 or more" in said.err
    with pytest.raises(UsageError, match="2 items cannot show a loss below 3") as refused:
        require_accuracy(tmp_path / "a", tmp_path / "c", task, sums, "m", None, margin=0.03)
    assert refused.value.fix == "125 items or more"


def test_an_upgrade_is_not_begun_to_prove_what_its_items_cannot_show(task, tmp_path):
    with pytest.raises(UsageError, match="50 items cannot show a loss below 5") as refused:
        proof_of(f"accuracy:50:{task}", tmp_path).before()
    assert refused.value.fix == "73 items or more"


def test_a_run_continues_and_asks_nothing_twice(appliance, sums, task, tmp_path):
    words = ("accuracy", "run", task, "--out", tmp_path / "r", "--url", sums, "--model", "off-by-0")
    assert appliance(*words).code == 0 and len(Sums.asked) == 120
    answers = tmp_path / "r" / "answers.jsonl"
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:50]) + lines[50][:20])  # as a crash leaves it
    assert appliance(*words).out == "1.000\n" and len(Sums.asked) == 190
    assert appliance(*words).code == 0 and len(Sums.asked) == 190


def test_another_subset_into_the_same_folder_is_refused(appliance, sums, task, tmp_path):
    words = ("accuracy", "run", task, "--out", tmp_path / "r", "--url", sums, "--model", "off-by-0")
    assert appliance(*words).code == 0
    said = appliance(*words, "--count", 30)
    assert said.code == 2 and "another items" in said.err


def test_runs_of_other_subsets_do_not_compare(appliance, sums, task, tmp_path):
    for name, count in (("a", 30), ("b", 40)):
        words = ("--out", tmp_path / name, "--url", sums, "--model", "off-by-0", "--count", count)
        assert appliance("accuracy", "run", task, *words).code == 0
    said = appliance("accuracy", "compare", tmp_path / "a", tmp_path / "b")
    assert said.code == 2 and "differ in items" in said.err


def test_a_server_that_is_gone_is_an_error_and_what_came_is_kept(appliance, task, tmp_path):
    words = ("--out", tmp_path / "r", "--url", "http://127.0.0.1:1/v1", "--model", "off-by-0")
    said = appliance("accuracy", "run", task, *words)
    assert said.code == 1 and "gave no answer" in said.err
    assert (tmp_path / "r" / "run.json").exists()


def test_the_gate_on_accuracy_passes_equal_answers_and_stops_worse_ones(
    appliance, sums, task, tmp_path
):
    before = tmp_path / "before"
    words = ("accuracy", "run", task, "--out", before, "--url", sums, "--model", "off-by-0")
    assert appliance(*words).code == 0
    said = require_accuracy(before, tmp_path / "same", task, sums, "off-by-0", None, margin=0.04)
    assert said.startswith("own: 1.000 -> 1.000, +0.000")
    with pytest.raises(CheckFailed, match=r"1.000 -> 0.900.*not shown to be less than 0.04 worse"):
        require_accuracy(before, tmp_path / "worse", task, sums, "off-by-10", None, margin=0.04)


def test_log_probabilities_are_kept_and_compared_where_the_server_gives_them(
    appliance, sums, task, tmp_path
):
    for name in ("a", "b"):
        words = ("--out", tmp_path / name, "--url", sums, "--model", "off-by-0", "--logprobs")
        assert appliance("accuracy", "run", task, *words, "--effort", "low").code == 0
    said = appliance("accuracy", "compare", tmp_path / "a", tmp_path / "b")
    assert "600 positions of 120 items: divergence at least 0.00000 nats" in said.out
    assert "the same token first at 100.00%" in said.out
    pinned = json.loads((tmp_path / "a" / "run.json").read_text())
    assert pinned["sampling"]["reasoning_effort"] == "low"
    found = json.loads(
        appliance("accuracy", "compare", *(tmp_path / n for n in "ab"), "--json").out
    )
    assert found["tokens"]["positions"] == 600
