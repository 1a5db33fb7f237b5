"""Measured rates are kept for the cards they were measured on, and for no other."""

import pytest
from machines import machine

from appliance.errors import ServeError
from appliance.serve.measured import keep_rates, with_kept_rates
from appliance.serve.state import Files
from preflight.host import LinkRate, Measured

TWO = machine("two-rtx-pro-6000-healthy")
RATES = Measured(
    links=(LinkRate(gpu=0, numa_node=0, zero_copy_bytes_per_second=5e10),),
    disk_read_bytes_per_second=3e9,
    trial_asked_bytes=1 << 30,
    trial_registered_bytes=1 << 20,
    all_reduce="hangs",
)


@pytest.fixture
def files(tmp_path):
    return Files.of(tmp_path / "state")


def test_rates_come_back_for_the_same_cards_without_the_trials(files):
    keep_rates(files, TWO.model_copy(update={"measured": RATES}))
    found = with_kept_rates(TWO, files).measured
    assert found == Measured(links=RATES.links, disk_read_bytes_per_second=3e9)


def test_other_cards_and_a_fresh_measurement_are_left_alone(files):
    keep_rates(files, TWO.model_copy(update={"measured": RATES}))
    other = TWO.model_copy(update={"gpus": TWO.gpus[:1]})
    assert with_kept_rates(other, files) == other
    fresh = TWO.model_copy(update={"measured": Measured(all_reduce="ok")})
    assert with_kept_rates(fresh, files) == fresh


def test_a_machine_without_links_keeps_nothing(files):
    keep_rates(files, TWO.model_copy(update={"measured": Measured()}))
    assert not files.rates.exists() and with_kept_rates(TWO, files) == TWO


def test_a_file_that_cannot_be_understood_is_an_error_with_the_way_out(files):
    files.folder.mkdir()
    files.rates.write_text('{"cards": [], "rates": {"speed": 1}}')
    with pytest.raises(ServeError, match="preflight --measure"):
        with_kept_rates(TWO, files)
