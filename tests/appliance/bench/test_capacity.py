"""The search on machines with known truth. A reduced sample: study.py runs the whole."""

import itertools
import statistics

import pytest
from bench_simulator import NOISES, Machine, drive, machine
from bench_study import coverage_of_bound, coverage_of_ratio, study_capacity

from appliance.bench.capacity import Ask, Goal, linear_sweep, search
from appliance.bench.level import LOOK_CONFIDENCE, LOOKS
from appliance.bench.table import Row, answer, read_table
from appliance.errors import UsageError

SEED_TABLE = [Row(1, 186, 134), Row(4, 59, 52), Row(6, 40, 34)]


@pytest.mark.timeout(120)
def test_the_right_number_of_streams_is_found_and_cheaply() -> None:
    study = study_capacity(200)
    assert len(study.wrong) <= 3, study.wrong
    assert len(study.large.early) > 40
    # Every single run, against a linear sweep that stops each number of streams when it is sure.
    assert max(study.large.early) <= 0.40
    assert max(study.small.early) <= 2.0
    assert statistics.fmean(study.large.fixed) <= 0.05


def test_the_bound_on_p5_covers_the_truth() -> None:
    assert coverage_of_bound(2000, 120) >= 0.94
    assert coverage_of_bound(2000, 60) >= 0.94


def test_the_bootstrap_of_a_ratio_covers_as_often_as_it_says() -> None:
    assert 0.92 <= coverage_of_ratio(300, 400) <= 0.98


def test_the_table_of_the_reference_deployment_answers_four_streams() -> None:
    found = answer(SEED_TABLE, Goal(target=40.0, headroom=1.1))
    assert (found.streams, found.unmeasured, found.at_limit) == (4, (5,), False)


def test_a_table_in_which_everything_holds_says_that_more_was_not_tried() -> None:
    assert answer(SEED_TABLE[:2], Goal()).at_limit


def test_a_table_with_a_wrong_key_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("table") / "t.json"
    file.write_text('[{"streams": 1, "median": 10}]')
    with pytest.raises(UsageError, match="'p5'"):
        read_table(file)


def test_a_machine_too_slow_for_one_stream_has_capacity_zero() -> None:
    slow = machine(3)
    slow.truth = 0
    assert drive(search(slow.goal), slow.run).streams == 0


def test_at_the_limit_the_answer_says_so() -> None:
    fast = Machine(30, Goal(most_streams=8), NOISES[0], 0.1, 0.1, seed=1)
    found = drive(search(fast.goal), fast.run)
    assert (found.streams, found.at_limit, found.sure) == (8, True, True)


def test_a_machine_on_the_threshold_is_decided_but_not_called_sure() -> None:
    found = []
    for seed in range(10):
        even = Machine(4, Goal(), NOISES[0], 0.0, 0.3, seed)
        found.append(drive(search(even.goal), even.run))
    unsure = [f for f in found if not f.sure]
    assert len(unsure) >= 8
    assert {f.streams for f in found} <= {3, 4}
    assert all(len(f.levels[4].speeds) == LOOKS[-1] for f in unsure)


def test_with_many_streams_a_search_ends_unsure_rather_than_cost_a_large_part_of_a_sweep() -> None:
    for seed in range(5):
        ours, plain = (Machine(36, Goal(), NOISES[4], 0.0, 0.3, seed) for _ in range(2))
        found = drive(search(ours.goal), ours.run)
        drive(linear_sweep(plain.goal), plain.run)
        # p5 lies within 5 % of the threshold from 34 streams on.
        assert not found.sure and 33 <= found.streams <= 36
        assert ours.requests <= 0.40 * plain.requests


def test_the_deciding_levels_run_in_turns() -> None:
    order: list[int] = []
    even = Machine(20, Goal(), NOISES[2], 0.03, 0.03, seed=12)

    def run(ask: Ask) -> list[float]:
        order.append(ask.streams)
        return even.run(ask)

    n = drive(search(even.goal), run).streams
    pairs = list(itertools.pairwise(order))
    assert pairs.count((n, n + 1)) >= 2 and pairs.count((n + 1, n)) >= 2


def test_a_decided_level_keeps_its_bound_on_the_right_side() -> None:
    found = drive(search(machine(5).goal), machine(5).run)
    level = found.levels[found.streams]
    assert level.sure and level.p5_at_least is not None
    assert level.p5_at_least >= level.threshold
    assert LOOK_CONFIDENCE > 0.99


@pytest.mark.parametrize(
    "goal", [Goal(target=0), Goal(headroom=0.9), Goal(most_streams=0)], ids=str
)
def test_an_impossible_goal_is_refused(goal: Goal) -> None:
    with pytest.raises(UsageError, match="target above 0"):
        next(search(goal))


def test_a_level_where_nothing_could_be_measured_is_an_error() -> None:
    with pytest.raises(UsageError, match="none of 40 turns at 1 stream could"):
        drive(search(Goal()), lambda ask: [])
