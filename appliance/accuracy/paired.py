"""Two systems on the same items: what changed, how sure that is, and what could have been seen.

Pure statistics. A score is a number per item, 0 to 1; items may be grouped (several questions about
one text), and then groups, not items, are the independent things.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.accuracy.intervals import RESAMPLES, Group, bootstrap, paired_interval
from appliance.errors import UsageError
from preflight.counted import counted


@dataclass(frozen=True)
class Paired:
    """B minus A. `interval`: 95 %; of single right-or-wrong items Tango's score interval, else a
    paired bootstrap over groups; never narrower than what so few could have missed (`unseen`).

    `standard_error`: over groups. `only_a`, `only_b`: items that one got wholly right and the other
    not. `p_value`: McNemar's exact test on them; None where scores are not all 0 or 1, or where
    items are grouped.
    """

    items: int
    groups: int
    a: float
    b: float
    difference: float
    interval: tuple[float, float]
    standard_error: float
    only_a: int
    only_b: int
    p_value: float | None

    def not_inferior(self, margin: float) -> bool:
        """B is not worse than A by `margin` or more: the whole interval lies above -margin.

        The interval is two-sided at 95 %, so this errs in at most 2.5 % of the cases.
        """
        return self.interval[0] > -margin


def compare(
    a: Mapping[str, float],
    b: Mapping[str, float],
    groups: Mapping[str, str] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 5,
) -> Paired:
    """Scores by item id of both; the ids must be the same. Raises UsageError where they differ."""
    if set(a) != set(b):
        missing = sorted(set(a) ^ set(b))
        raise UsageError(
            f"{counted(len(missing), 'item')} answered by one of the two only, such as "
            f"{missing[0]!r}",
            fix="finish both runs (accuracy run continues where it stopped)",
        )
    if len(a) < 2:
        raise UsageError(
            f"no difference can be seen in {counted(len(a), 'item')}", fix="two or more items"
        )
    ids = sorted(a)
    of = {i: groups[i] if groups is not None else i for i in ids}
    sums = _by_group(ids, of, {i: b[i] - a[i] for i in ids})
    only_a = sum(a[i] == 1.0 > b[i] for i in ids)
    only_b = sum(b[i] == 1.0 > a[i] for i in ids)
    right_or_wrong = all(score in (0.0, 1.0) for i in ids for score in (a[i], b[i]))
    exact = right_or_wrong and len(sums) == len(ids)
    return Paired(
        items=len(ids),
        groups=len(sums),
        a=statistics.fmean(a.values()),
        b=statistics.fmean(b.values()),
        difference=statistics.fmean(b[i] - a[i] for i in ids),
        interval=paired_interval(only_a, only_b, len(ids))
        if exact
        else bootstrap(sums, resamples, seed, limits=(-1.0, 1.0)),
        standard_error=_cluster_error(sums),
        only_a=only_a,
        only_b=only_b,
        p_value=mcnemar(only_a, only_b) if exact else None,
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value: of n discordant items, is the split still that of a fair coin?"""
    n, k = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / (1 << n))


def _by_group(ids: Sequence[str], of: Mapping[str, str], delta: Mapping[str, float]) -> list[Group]:
    found: dict[str, Group] = {}
    for i in ids:
        total, count = found.get(of[i], (0.0, 0))
        found[of[i]] = (total + delta[i], count + 1)
    return list(found.values())


def _cluster_error(sums: Sequence[Group]) -> float:
    """Standard error of the mean difference when groups are independent (CR1)."""
    count, items = len(sums), sum(n for _, n in sums)
    mean = sum(total for total, _ in sums) / items
    spread = math.fsum((total - n * mean) ** 2 for total, n in sums)
    return math.sqrt(spread * count / (count - 1)) / items
