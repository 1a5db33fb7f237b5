"""Heat from every format, and arithmetic on it."""

import json
from pathlib import Path

import pytest

from appliance.errors import UsageError
from appliance.plan.heat_files import read_heat
from appliance.plan.routing import Heat, heat_from_json, merge, mix

ROUTE = {"type": "route", "layer": 3, "topk_ids": [1, 2], "topk_weights": [0.6, 0.4]}


def jsonl(folder: Path, rows: list[dict[str, object]]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_topic_files_give_totals_and_topics(shared: Path) -> None:
    heat = read_heat(sorted((shared / "routing").glob("layer_*.json"))).heat
    assert sorted(heat.counts) == [0, 16, 32]
    assert len(heat.topics) == 8
    # `reasoning` is not inside the published total; here every topic is part of the whole.
    assert sum(heat.counts[0]) == 695_388 + 20_940
    assert sum(heat.without("reasoning").counts[0]) == 695_388


def test_a_real_trace_that_is_all_warm_up_is_refused(shared: Path) -> None:
    trace = shared / "cases" / "routing" / "R003_qwen15moe_layer0_trace.jsonl"
    with pytest.raises(UsageError, match="all 1,499 rows are warm-up"):
        read_heat([trace])


def test_warm_up_rows_are_dropped_and_said_so(tmp_path: Path) -> None:
    even = {**ROUTE, "topk_ids": [4, 5], "topk_weights": [0.5, 0.5]}
    other = {**ROUTE, "topk_ids": [0, 6]}
    read = read_heat([jsonl(tmp_path, [ROUTE] * 9 + [even, other, ROUTE, other])])
    assert read.heat.counts == {3: (2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 2.0)}
    assert read.notes == ("trace.jsonl: 10 of 13 rows are warm-up and were dropped",)


def test_csv_logs_are_read_with_and_without_a_header(shared: Path, tmp_path: Path) -> None:
    log = shared / "cases" / "routing" / "R012_skew_llamacpp_log_format.csv"
    with_header = read_heat([log], experts=256).heat
    assert len(with_header.counts[3]) == 256 and sum(with_header.counts[3]) == 16
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(log.read_text().splitlines()[1:]))
    assert read_heat([bare], experts=256).heat == with_header


def test_expert_loads_of_a_balancer_are_read(shared: Path) -> None:
    heat = read_heat([shared / "cases" / "routing" / "R005_eplb_example_12x2.json"]).heat
    assert {layer: len(row) for layer, row in heat.counts.items()} == {0: 12, 1: 12}
    assert heat.counts[0][0] == 90


def test_our_own_file_is_read_back(tmp_path: Path) -> None:
    heat = Heat({0: (1.0, 2.0)}, {"a": {0: (1.0, 0.0)}})
    file = tmp_path / "heat.json"
    file.write_text(heat.to_json())
    assert read_heat([file]).heat == heat == heat_from_json(heat.to_json())


def test_counts_add_up_fade_and_mix_by_topic() -> None:
    one, two = Heat({0: (1, 3)}, {"a": {0: (1, 3)}}), Heat({0: (2, 2)}, {"b": {0: (2, 2)}})
    both = merge([one, two.scaled(0.5)])
    assert both.counts == {0: (2.0, 4.0)} and set(both.topics) == {"a", "b"}
    assert mix(both, {"a": 1, "b": 3}).counts[0] == pytest.approx((1.75, 2.25))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.json", "{", "is not JSON"),
        ("x.json", '{"layer": "3", "counts": [1]}', "does not say which layer"),
        ("x.json", '{"weight": []}', "not a table of loads"),
        ("x.json", '{"weight": [["a"]]}', "not a list of numbers"),
        ("x.jsonl", '{"type": "route", "layer": 1}', "line 1: not a routed row"),
        ("x.jsonl", "[1]", "line 1: not a routed row"),
        ("x.csv", "layer,experts\n3", "line 2: not layer,experts"),
        ("x.jsonl", '{"layer": "3", "topk_ids": [1]}', "line 1: '3' is no number of a layer"),
        ("x.jsonl", '{"layer": [3], "topk_ids": [1]}', r"line 1: \[3\] is no number of a layer"),
        ("x.jsonl", '{"layer": 3, "topk_ids": [1.5]}', "line 1: 1.5 is no number of a layer"),
        ("x.jsonl", '{"layer": 3, "topk_ids": "12"}', "line 1: '1' is no number of a layer"),
        ("x.jsonl", '{"layer": 3, "topk_ids": [true]}', "line 1: True is no number"),
        ("x.jsonl", '{"layer": 3, "topk_ids": [1, -1]}', "line 1: -1 is no number of a layer"),
        ("x.jsonl", '{"layer": 3, "topk_ids": [1], "topk_weights": [[1]]}', "not a routed row"),
        ("x.jsonl", '{"layer": 3, "topk_ids": [99999999999]}', "99,999,999,999: no layer has so"),
        ("x.csv", '-1,"1 2"', "line 1: -1 is no number of a layer"),
        ("x.csv", '3,"1 99999999999"', "99,999,999,999: no layer has so many"),
        ("x.json", "[" * 100_000, "is not JSON: it is nested too deeply"),
        ("x.json", f'{{"layer": 0, "counts": [{"9" * 5000}]}}', "a number of thousands of digits"),
        ("x.json", f'{{"layer": 0, "counts": [1, {"9" * 400}]}}', "say 99999999999999999999 for"),
        ("x.json", '{"layer": 0, "counts": [1e308, 1e308]}', "of layer 0 add up to no number"),
        ("x.json", '{"layer": true, "counts": [1]}', "does not say which layer"),
        (
            "x.json",
            '{"layer": 0, "counts": [1], "topics_outside_counts": ["a"]}',
            r"names topics outside the total, \['a'\], that it does not count",
        ),
        ("x.json", '{"layer": 0, "counts": [1], "topics_outside_counts": [[1]]}', "not count"),
    ],
)
def test_files_that_are_not_counts_are_refused_by_name(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_heat([file])


def test_empty_lines_of_a_trace_are_no_rows(tmp_path: Path) -> None:
    right = {3: (0.0, 1.0, 1.0)}
    (tmp_path / "x.jsonl").write_text('{"layer": 3, "topk_ids": [1, 2]}\n\n')
    (tmp_path / "x.csv").write_text('3,"1 2"\n\n')
    assert [read_heat([tmp_path / f"x.{kind}"]).heat.counts for kind in ("jsonl", "csv")] == [
        right,
        right,
    ]


def test_counts_of_different_widths_do_not_add_up() -> None:
    with pytest.raises(UsageError, match="2 experts in one file of counts and 3 in another"):
        merge([Heat({0: (1, 1)}), Heat({0: (1, 1, 1)})])


def test_an_unknown_topic_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="known topics: a"):
        Heat({0: (1.0,)}, {"a": {0: (1.0,)}}).topic("b")
