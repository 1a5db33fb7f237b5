"""What people read about the experts' homes."""

from appliance.cli.view import home_rows


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


def test_an_engine_that_gives_no_answer_gives_no_rows():
    assert home_rows(None) == []
