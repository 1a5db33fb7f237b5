"""Records made against a server of known timing replay, continue, compare, and refuse."""

import xml.etree.ElementTree as tree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.bench.capacity import Ask, Capacity, Goal
from appliance.bench.client import Endpoint
from appliance.bench.compare import compare, compare_lines
from appliance.bench.measure import Target, measure_capacity, measure_turns, replay
from appliance.bench.plot import plot_lines, plot_svg
from appliance.bench.record import BLOCKS, SAMPLES, Record, Stamp
from appliance.bench.report import report, report_lines
from appliance.bench.table import Row
from appliance.bench.turns import Session, Shape, Spread, sessions, unthinking
from appliance.errors import ApplianceError, UsageError

Serve = Callable[[float, float], str]
SHAPE = Shape(
    system_tokens=10,
    turns=Spread(median=4, p95=5, least=2),
    input_tokens=Spread(median=10, p95=20, least=8),
    short_output_tokens=Spread(median=17, p95=18, least=17, most=18),
    long_share=0.0,
)
STAMP = Stamp(
    made="2026-11-29T12:00:00Z",
    release="0.1.0",
    kind="capacity",
    goal=Goal(target=100.0, headroom=1.1, most_streams=2),
    model="fine",
    seed=1,
    shape=SHAPE,
    text_sha256="t",
    request={},
)


def target(url: str, engine: str = "first", model: str = "fine") -> Target:
    def some(tag: str) -> Iterator[Session]:
        return map(unthinking, sessions(SHAPE, f"1.{tag}"))

    ticks = iter(range(0, 10**6, 500))
    return Target(
        endpoint=Endpoint(url, model, None, 20.0, {}),
        sessions=some,
        counters=lambda: {"prefix_hits": next(ticks), "prefix_queries": next(ticks) * 4},
        engine=lambda: engine,
        told=lambda ask, number: None,
    )


def measured(folder: Path, url: str) -> tuple[Record, Capacity]:
    record = Record.create(folder, STAMP)
    return record, measure_capacity(record, target(url))


def test_a_measured_capacity_replays_to_the_same_report(tmp_path: Path, timed: Serve) -> None:
    record, live = measured(tmp_path / "r", timed(2.0, 1.0))  # 500 tokens a second and stream
    assert (live.streams, live.at_limit, live.sure) == (2, True, True)
    again = Record(tmp_path / "r")
    assert replay(again, 0) == live
    assert list(report_lines(again)) == list(report_lines(record))
    found = report(again)
    assert found.streams == 2
    assert found.between_starts is None  # one start: unknown, not zero
    line = found.lines[-1]
    assert line.streams == 2 and line.turns >= 120
    assert line.p5_at_least is not None and 110 <= line.p5_at_least <= line.p5 <= line.median < 520
    assert line.cache_hits is not None and line.cold is None
    assert any("1 of 3 fresh starts" in text for text in report_lines(again))


def test_an_interrupted_search_continues_and_a_finished_start_is_not_repeated(
    tmp_path: Path, timed: Serve
) -> None:
    url = timed(2.0, 1.0)
    record, live = measured(tmp_path / "r", url)
    blocks = (tmp_path / "r" / BLOCKS).read_text().splitlines(keepends=True)
    # As a crash leaves it: a torn block line, and samples of a block that is not there.
    (tmp_path / "r" / BLOCKS).write_text("".join(blocks[:2]) + blocks[2][:40])
    torn = Record(tmp_path / "r")
    assert replay(torn, 0) is None
    assert any("not finished" in text for text in report_lines(torn))
    resumed = Record.create(tmp_path / "r", STAMP)
    assert measure_capacity(resumed, target(url)).streams == live.streams
    assert resumed.starts == [0] and resumed.blocks[:2] == record.blocks[:2]
    with pytest.raises(UsageError, match="measured already"):
        measure_capacity(resumed, target(url))
    assert measure_capacity(resumed, target(url, "second")).streams == 2
    assert measure_capacity(resumed, target(url, "third")).streams == 2
    again = Record(tmp_path / "r")
    assert len(report(again).capacities) == 3 and report(again).between_starts is not None
    lines = list(report_lines(again))
    assert any("medians of 3 starts scatter by" in text for text in lines)
    assert not any("fresh starts" in text for text in lines)


def test_runs_on_one_start_of_an_engine_are_one_start(tmp_path: Path, timed: Serve) -> None:
    record = Record.create(tmp_path / "r", STAMP.model_copy(update={"kind": "turns"}))
    url = timed(2.0, 1.0)
    for _ in range(2):
        measure_turns(record, target(url), Ask(1, 3, 1))
    assert record.starts == [0] and report(record).between_starts is None
    measure_turns(record, target(url, "second"), Ask(1, 3, 1))
    assert record.starts == [0, 1] and report(record).between_starts is not None


def test_another_measurement_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    Record.create(tmp_path / "r", STAMP)
    other = STAMP.model_copy(update={"seed": 2, "plan_digest": "p"})
    with pytest.raises(UsageError, match="another seed, plan_digest"):
        Record.create(tmp_path / "r", other)


def test_a_record_that_lost_samples_is_refused(tmp_path: Path, timed: Serve) -> None:
    record = Record.create(tmp_path / "r", STAMP.model_copy(update={"kind": "turns"}))
    measure_turns(record, target(timed(2.0, 1.0)), Ask(2, 6, 2))
    samples = (tmp_path / "r" / SAMPLES).read_text().splitlines(keepends=True)
    (tmp_path / "r" / SAMPLES).write_text("".join(samples[1:]))
    with pytest.raises(ApplianceError, match=f"{len(samples) - 1} of the {len(samples)} samples"):
        Record(tmp_path / "r")


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no record"):
        Record(tmp_path)


def test_a_server_that_is_a_fifth_slower_is_found_slower_and_itself_unchanged(
    tmp_path: Path, timed: Serve
) -> None:
    stamp = STAMP.model_copy(update={"kind": "turns"})
    records = {}
    for name, interval in (("a", 5.0), ("b", 6.25), ("again", 5.0)):
        records[name] = Record.create(tmp_path / name, stamp)
        measure_turns(records[name], target(timed(interval, 1.0)), Ask(8, 160, 8))
    (change,) = compare(records["a"], records["b"])
    assert change.median.changed and change.median.value == pytest.approx(0.8, abs=0.05)
    low, high = change.median.interval
    assert low <= change.median.value <= high
    (same,) = compare(records["a"], records["again"])
    assert same.median.value == pytest.approx(1.0, abs=0.05)
    assert any("slower" in text for text in compare_lines(records["a"], records["b"]))


def test_records_of_another_load_do_not_compare(tmp_path: Path) -> None:
    a = Record.create(tmp_path / "a", STAMP)
    b = Record.create(tmp_path / "b", STAMP.model_copy(update={"seed": 2}))
    with pytest.raises(UsageError, match="another seed"):
        compare(a, b)


def test_a_plot_shows_every_row_and_the_threshold() -> None:
    rows = [Row(1, 186, 134), Row(4, 59, 52), Row(6, 40, 34)]
    lines = list(plot_lines(rows, 44.0))
    assert [text.split()[0] for text in lines[:3]] == ["1", "4", "6"]
    column = lines[0].index("|")
    assert all(text[column] == "|" for text in lines[:3])
    assert lines[1][:column].count("#") > lines[2][:column].count("#")
    picture = tree.fromstring(plot_svg(rows, 44.0))
    circles = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 6
