"""How many people share so many streams, at a risk that one of them finds every stream taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from appliance.errors import UsageError

MOST_SEATS = 100_000


@dataclass(frozen=True)
class Seats:
    """`risk`: P(more active than streams) with `seats` people; `next_risk`: with one more."""

    seats: int
    risk: float
    next_risk: float


def seats(streams: int, active: float, risk: float, correlation: float = 0.0) -> Seats:
    """The most people for whom P(more than `streams` active at once) is at most `risk`.

    `active`: the probability that a person is being answered, 0 to 1. `correlation` between two
    people's hours: 0 is the binomial; above it the beta-binomial with this intra-class correlation.
    """
    _check(streams, active, risk, correlation)
    people, here = streams, 0.0
    while True:
        after = more_than(streams, people + 1, active, correlation)
        if after > risk:
            return Seats(people, here, after)
        people, here = people + 1, after
        if people >= MOST_SEATS:
            raise UsageError(
                f"{MOST_SEATS:,} people still stay below the risk of {risk:.3%}",
                fix="give the share of time that a person is really active with --active",
            )


def more_than(streams: int, people: int, active: float, correlation: float = 0.0) -> float:
    """P(more than `streams` of `people` active at once)."""
    if people <= streams:
        return 0.0
    at_most = math.fsum(_mass(k, people, active, correlation) for k in range(streams + 1))
    return max(0.0, 1.0 - at_most)


def _mass(k: int, n: int, p: float, rho: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    if rho == 0.0:
        return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
    # Beta(a, b) has intra-class correlation 1 / (a + b + 1).
    a, b = p * (1 - rho) / rho, (1 - p) * (1 - rho) / rho
    return math.exp(ways + _log_beta(k + a, n - k + b) - _log_beta(a, b))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _check(streams: int, active: float, risk: float, correlation: float) -> None:
    if streams < 1:
        raise UsageError(f"{streams} streams seat nobody", fix="--streams 1 or more")
    if not 0.0 < active < 1.0:
        raise UsageError(f"a share of time of {active:g} is not between 0 and 1", fix="--active 7%")
    if not 0.0 < risk < 1.0:
        raise UsageError(f"a risk of {risk:g} is not between 0 and 1", fix="--risk 1%")
    if not 0.0 <= correlation < 1.0:
        raise UsageError(
            f"a correlation of {correlation:g} is not in 0 to 1", fix="--correlation 0.05"
        )
