"""A machine that changes while it is measured is called out; one that does not is not."""

import numpy as np

from appliance.bench.level import Level
from appliance.bench.steady import unsteadiness


def level(seed: int, shifts: list[float], turns: int = 120) -> Level:
    """Blocks whose speeds are 50 tok/s times each shift, 10 % apart."""
    chance = np.random.default_rng(seed)
    found = Level(4, 44.0)
    for shift in shifts:
        found.add((50.0 * shift * np.exp(chance.normal(0, 0.1, turns))).tolist())
    return found


def test_a_steady_machine_is_called_unsteady_less_than_once_in_a_hundred() -> None:
    flagged = sum(bool(list(unsteadiness([level(s, [1.0] * 5)]))) for s in range(500))
    assert flagged <= 5


def test_a_drift_of_ten_per_cent_is_named_with_its_size() -> None:
    found = [list(unsteadiness([level(s, [1.0, 0.97, 0.93, 0.90])])) for s in range(50)]
    assert sum(bool(f) and f[0].kind == "drift" for f in found) >= 48
    assert abs(sum(f[0].change for f in found if f) / 50 + 0.10) < 0.02
    assert "ended" in str(found[0][0]) and "slower" in str(found[0][0])


def test_runs_that_scatter_without_a_trend_are_called_noise() -> None:
    shifts = [1.0, 1.12, 0.9, 1.1, 0.88, 1.0]
    found = [list(unsteadiness([level(s, shifts)])) for s in range(50)]
    assert sum(bool(f) and f[0].kind == "noise" for f in found) >= 45


def test_a_single_run_says_nothing_about_steadiness() -> None:
    assert not list(unsteadiness([level(1, [1.0])]))
