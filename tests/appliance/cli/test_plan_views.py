"""plan show, explain, simulate, picture: a plan for people."""

import json
import re

import pytest


@pytest.fixture
def plan(appliance, model, tmp_path):
    path = tmp_path / "plan.json"
    made = appliance("plan", "make", "--model", model, "-o", path, "--host-share", 0.5)
    assert made.code == 0, made.err
    return path


@pytest.fixture
def counts(tmp_path, plan):
    layers = json.loads(plan.read_text())["ranks"][0]["layers"]
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"layer": layers[0]["layer"],
                                "counts": [90, 80, 70, 60, 5, 4, 3, 2]}))  # fmt: skip
    return path


def test_small_sizes_keep_their_digits_and_lines_fit_the_screen(appliance, plan):
    shown = appliance("plan", "show", plan).out
    assert "0.00 GiB" not in shown and "0.0 GiB" not in shown
    assert re.search(r"4 on the host \(\d+\.\d KiB\)", shown)
    assert max(map(len, shown.splitlines())) <= 100


def test_simulated_traffic_gives_a_row_for_each_rule(appliance, plan, counts):
    said = appliance("plan", "simulate", plan, "--heat", counts, "--batch", 2)
    assert said.code == 0, said.err
    assert "2 a step" in said.out and "static" in said.out and "clairvoyant" in said.out
    again = appliance("plan", "simulate", plan, "--heat", counts, "--batch", 2)
    assert again.out == said.out


def test_a_trace_is_replayed_in_its_order(appliance, plan, tmp_path):
    layer = json.loads(plan.read_text())["ranks"][0]["layers"][0]["layer"]
    trace = tmp_path / "trace.jsonl"
    rows = [{"layer": layer, "topk_ids": [n % 8, (n + 3) % 8]} for n in range(64)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = appliance("plan", "simulate", plan, "--trace", trace)
    # Every expert is picked equally often, and half of them are on the host.
    assert said.code == 0 and "50.00%" in said.out, said.err


def test_topics_are_left_out_and_served_over_several_draws(appliance, plan, tmp_path):
    layer = json.loads(plan.read_text())["ranks"][0]["layers"][0]["layer"]
    topics = {"a": [9, 8, 7, 6, 1, 1, 1, 1], "b": [1, 1, 1, 1, 9, 8, 7, 6]}
    both = [a + b for a, b in zip(*topics.values(), strict=True)]
    counts = tmp_path / "topics.json"
    parts = {topic: {layer: row} for topic, row in topics.items()}
    counts.write_text(json.dumps({"schema_version": 1, "layers": {layer: both}, "topics": parts}))
    asked = ("plan", "simulate", plan, "--heat", counts, "--seed", 1, "--seed", 2)
    said = appliance(*asked, "--held-out")
    assert said.code == 0, said.err
    assert "| planned topic, 4 rows | 2000-2500 | static |" in said.out
    assert (
        "--held-out takes several"
        in appliance("plan", "simulate", plan, "--heat", counts, "--seed", 1, "--seed", 2).err
    )
    assert "topics of counts" in appliance("plan", "simulate", plan, "--held-out").err


def test_nothing_to_replay_and_two_kinds_of_it_are_wrong_usage(appliance, plan, counts):
    assert "no traffic to replay" in appliance("plan", "simulate", plan).err
    said = appliance("plan", "simulate", plan, "--heat", counts, "--trace", counts)
    assert said.code == 2 and "one of them" in said.err


def test_the_picture_is_one_page_that_needs_nothing_else(appliance, plan, tmp_path, counts):
    page = tmp_path / "plan.html"
    said = appliance("plan", "picture", page, "--plan", plan, "--heat", counts)
    assert (said.code, said.out) == (0, f"{page}\n")
    text = page.read_text()
    assert "Where the experts live" in text and "http" not in text and "<script" not in text


PLANNED = [
    ("show", ()), ("ledger", ()), ("explain", (1, 2)), ("simulate", ()), ("values", ()),
    ("picture", ("page.html",)),
]  # fmt: skip


@pytest.mark.parametrize(("command", "words"), PLANNED)
def test_without_a_plan_here_the_error_names_the_folder_and_the_plan_that_up_made(
    appliance, plan, tmp_path, own_state, monkeypatch, command, words
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    said = appliance("plan", command, *words)
    assert said.code == 1
    assert said.err.splitlines() == [
        f"error: there is no plan.json in {elsewhere}",
        "  fix: appliance plan make --model DIR writes one",
    ]
    own_state.mkdir()
    (own_state / "plan.json").write_bytes(plan.read_bytes())
    said = appliance("plan", command, *words)
    assert said.code == 1  # it is named, and not taken in silence
    assert f"served last is {own_state / 'plan.json'}" in said.err.splitlines()[1]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nope/plan.json", ("No such file or directory", "make that folder first")),
        (".", ("Is a directory", "name a file in that folder")),
        ("plan.json/x.json", ("Not a directory", "one on the way to it is a file")),
    ],
)
def test_a_place_that_takes_no_plan_is_named_with_a_way_out(
    appliance, model, plan, tmp_path, target, said
):
    path = tmp_path / target
    made = appliance("plan", "make", "--model", model, "-o", path)
    problem, fix = made.err.splitlines()[-2:]
    assert made.code == 1 and problem == f"error: {path}: {said[0]}" and said[1] in fix


def test_a_full_disk_is_told_with_the_file_that_it_could_not_take(appliance, plan, tmp_path):
    page = tmp_path / "page.html"
    page.symlink_to("/dev/full")
    said = appliance("plan", "picture", page, "--plan", plan)
    assert said.code == 1
    assert said.err.splitlines() == [
        f"error: {page}: No space left on device",
        "  fix: free space there, or name a place on another disk",
    ]


def test_every_view_of_a_plan_takes_it_as_an_argument_and_the_old_option_still_works(
    appliance, plan, tmp_path
):
    page = tmp_path / "page.html"
    for command, words in (("explain", (1, 2)), ("picture", (page,))):
        new = appliance("plan", command, *words, plan)
        old = appliance("plan", command, *words, "--plan", plan)
        assert new.code == old.code == 0 and new.out == old.out, new.err
        assert "[PLAN]" in appliance("plan", command, "--help").out
