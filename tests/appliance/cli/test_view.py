"""What people read about the experts' homes."""

import time

from appliance.cli.view import health_rows, home_rows
from appliance.serve.load import cold_share


def rank(number: int, device: int, host: int, read: int) -> dict:
    homes = {"device": {"experts": 24, "bytes": 3 << 30}, "host": {"experts": 8, "bytes": 1 << 30}}
    return {"rank": number, "homes": homes, "picks": {"device": device, "host": host},
            "host_bytes_read": read}  # fmt: skip


def test_each_rank_has_its_homes_and_what_it_read():
    rows = home_rows({"ranks": [rank(0, 750, 250, 5 << 20), rank(1, 0, 0, 0)]})
    assert rows == [
        ("rank 0, device", "24 experts, 3.0 GiB"),
        ("rank 0, host", "8 experts, 1.0 GiB"),
        ("rank 0, read from host", "5.0 MiB; 25.0% of 1,000 picks were there"),
        ("rank 1, device", "24 experts, 3.0 GiB"),
        ("rank 1, host", "8 experts, 1.0 GiB"),
        ("rank 1, read from host", "0 B; no picks"),
    ]


def test_slots_are_a_row_where_the_plan_has_some_even_before_one_is_taken():
    one = rank(0, 1, 0, 0)
    one["homes"]["slot"] = {"experts": 0, "bytes": 1 << 20}
    assert ("rank 0, slot", "0 experts, 1.0 MiB") in home_rows({"ranks": [one]})
    one["homes"]["slot"]["bytes"] = 0
    assert not [name for name, _ in home_rows({"ranks": [one]}) if "slot" in name]


def test_an_engine_that_gives_no_answer_gives_no_rows():
    assert home_rows(None) == []


def test_the_cold_share_is_of_all_picks_of_all_ranks_and_unknown_before_the_first():
    assert cold_share({"ranks": [rank(0, 60, 20, 0), rank(1, 20, 0, 0)]}) == 0.2
    assert cold_share({"ranks": [rank(0, 0, 0, 0)]}) is None and cold_share(None) is None


def test_health_shows_a_moment_and_counts_as_people_write_them():
    rows = health_rows(True, {"since": 1796031597.55336, "steps": 79.0, "queued": 0.5, "held": 0})
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1796031597))
    assert rows == [
        ("ready", "yes"), ("since", when), ("steps", 79), ("queued", 0.5), ("held", 0),
    ]  # fmt: skip
    assert str(dict(rows)["steps"]) == "79"
    assert health_rows(False, {"since": None}) == [("ready", "no"), ("since", None)]
