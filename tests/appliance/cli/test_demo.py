"""What the demo says of its one request, and whether what it tells people to do works."""

import re
from pathlib import Path

from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.cli.demo import say_where, since
from appliance.cli.view import home_rows
from appliance.serve.state import State


def engine(cold: int, warm: int, read: int) -> dict[str, object]:
    homes = {"host": {"experts": 8, "bytes": 1 << 20}}
    picks = {"device": warm, "host": cold}
    return {"ranks": [{"rank": 0, "homes": homes, "picks": picks, "host_bytes_read": read}]}


def test_a_second_request_is_told_alone() -> None:
    """The engine counts since it started: 888 picks of the first request, 2,640 after another."""
    rows = dict(home_rows(since(engine(88, 800, 1 << 20), engine(240, 2400, 3 << 20))))
    assert rows["rank 0, read from host"] == "2.0 MiB; 8.7% of 1,752 picks were there"  # 152


def test_the_command_that_names_an_expert_names_one(appliance, tmp_path, capfd) -> None:
    synthesize(tmp_path / "m", SynthSpec())
    plan = tmp_path / "plan.json"
    said = appliance("plan", "make", "--model", tmp_path / "m", "--device", "cpu", "-o", plan)
    assert plan.exists(), said.err
    state = State.model_construct(
        host="127.0.0.1", port=8000, plan=plan, keys=Path("/keys"), certificate=None
    )
    say_where(state, engine(1, 1, 1))
    words = re.search(r"home and why: \S+ (plan explain .*)", capfd.readouterr().err).group(1)
    said = appliance(*words.split())
    assert said.code == 0 and "expert 0" in said.out, said.err
