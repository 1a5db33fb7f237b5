"""How many items it takes: what so many can show, before any is spent."""

from __future__ import annotations

import math
from statistics import NormalDist

from appliance.accuracy.intervals import CONFIDENCE, Z, paired_interval
from appliance.errors import UsageError
from preflight.counted import counted


def smallest_effect(
    items: int, discordant: float, *, power: float = 0.8, confidence: float = CONFIDENCE
) -> float | None:
    """The smallest true difference that `items` would show with this power, before any is spent.

    `discordant`: the share of items on which the two are expected to differ, 0 to 1. From the
    variance of a paired difference, (discordant - d^2) / items (Connor 1987). None: too few items
    to show any, as no difference exceeds `discordant`; `items_for_effect` is how many it takes.
    """
    _check_power(items, discordant)
    z2 = _power_z2(power, confidence)
    effect = math.sqrt(z2 * discordant / (items + z2))
    return effect if effect <= discordant else None


def items_for_effect(discordant: float, *, power: float = 0.8) -> int:
    """The fewest items that show any difference at all: that all which differ, differ one way."""
    _check_power(1, discordant)
    return max(1, math.ceil(_power_z2(power, CONFIDENCE) * (1 / discordant - 1) - 1e-9))


def least_items(margin: float) -> int:
    """The fewest items on which even equal answers are shown to lose less than `margin`."""
    if not 0 < margin < 1:
        raise UsageError(f"a margin of {margin:g} is not between 0 and 1", fix="--margin 3%")
    by_score = math.floor(Z**2 * (1 / margin - 1)) + 1
    by_unseen = math.floor(math.log((1 - CONFIDENCE) / 2) / math.log1p(-margin)) + 1
    return max(by_score, by_unseen)


def require_items(items: int, margin: float) -> None:
    """Raises UsageError where so few could never be shown to lose less than `margin`."""
    needed = least_items(margin)
    if items < needed:
        raise UsageError(
            f"{counted(items, 'item')} cannot show a loss below {margin:.1%}: equal answers leave "
            f"{-paired_interval(0, 0, items)[0]:.1%} possible",
            fix=f"{needed} items or more",
        )


def _check_power(items: int, discordant: float) -> None:
    if items < 1 or not 0 < discordant <= 1:
        raise UsageError(f"{items} items of which {discordant:g} differ", fix="1 or more; 0 to 1")


def _power_z2(power: float, confidence: float) -> float:
    normal = NormalDist()
    return (normal.inv_cdf(0.5 + confidence / 2) + normal.inv_cdf(power)) ** 2
