"""plan simulate: topics and traces replayed on a plan as it is."""

from pathlib import Path

import pytest
from plan_builders import checkpoint, gpu, host, layer

from appliance.errors import UsageError
from appliance.plan.contenders import NAMES
from appliance.plan.heat_files import read_rows
from appliance.plan.model import Plan
from appliance.plan.planner import Policy, plan
from appliance.plan.routing import Heat
from appliance.plan.simulate_plan import simulate_lines, trace_lines

MODEL = checkpoint((layer(0, 32, 2), layer(1, 32, 2)))
NEW = Heat({0: tuple(1.0 if e < 16 else (e - 15.0) ** 2 for e in range(32))})


@pytest.fixture(scope="module")
def made() -> Plan:
    old = Heat({i: tuple(40.0 - e for e in range(32)) for i in (0, 1)})
    return plan(host((gpu(0),)), MODEL, old, Policy(host_share=0.5, cache_slots=4))


def shares(lines: list[str]) -> dict[str, float]:
    found = {}
    for line in lines[1:]:
        words = line.rsplit("%", 1)[0].split()
        found[words[-2]] = float(words[-1])
    return found


def test_traffic_the_plan_never_saw_is_colder_than_the_slots_leave_it(made: Plan) -> None:
    cold = shares(simulate_lines(made, NEW, batch=4))
    assert set(cold) == set(NAMES)
    assert cold["clairvoyant"] <= cold["decayed"] <= cold["static"]


def test_a_trace_is_replayed_in_its_own_order(made: Plan, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    picks = [f"0,{20 + i % 3} {24 + i % 2}" for i in range(600)]
    file.write_text("layer,experts\n" + "\n".join(picks))
    cold = shares(trace_lines(made, read_rows(file), batch=2))
    assert cold["static"] > 50 and cold["lru"] < 50
    assert cold["decayed"] < cold["static"]


def test_what_cannot_be_replayed_is_refused(made: Plan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no step of 4 rows"):
        trace_lines(made, {0: [(1, 2)]}, batch=4)
    with pytest.raises(UsageError, match="picks expert 99 in layer 0"):
        trace_lines(made, {0: [(1, 99)] * 4}, batch=4)
    with pytest.raises(UsageError, match="know no layer of this plan"):
        simulate_lines(made, Heat({7: (1.0, 1.0)}), batch=1)
    counts = tmp_path / "counts.json"
    counts.write_text("{}")
    with pytest.raises(UsageError, match="holds counts, not rows"):
        read_rows(counts)
