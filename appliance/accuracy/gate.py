"""Does a new release answer as well as the old one? For `upgrade run --prove`: raises if not."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from appliance.accuracy.paired import compare
from appliance.accuracy.power import require_items
from appliance.accuracy.run import Pinned, Server, read_run, run_task, same_items
from appliance.accuracy.tasks import read_task
from appliance.errors import CheckFailed
from preflight.counted import counted


def require_accuracy(
    before: Path,
    after: Path,
    task: Path,
    url: str,
    model: str,
    key: str | None,
    *,
    margin: float,
    streams: int = 4,
    tls: ssl.SSLContext | None = None,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> str:
    """A sentence with the difference; the answers are kept in the folder `after`.

    `before`: the folder of an `accuracy run` on the old release; `task`: the file it was made with.
    The same items are asked of what serves at `url` (up to /v1). Raises CheckFailed unless the
    whole 95 % interval of the difference lies above -`margin`, UsageError where `before` has too
    few items to show that of equal answers; a run that stopped continues.
    """
    old, scores = read_run(before)
    require_items(len(old.items), margin)
    frozen = read_task(task, count=len(old.items), seed=old.seed, expected_sha256=old.task_sha256)
    pinned = Pinned.of(frozen, model, old.sampling)
    groups = same_items(old, pinned)
    now = run_task(after, frozen, pinned, Server(url, key, tls=tls), sys.executable, streams, told)
    found = compare(scores, now, groups)
    low, high = found.interval
    sentence = (
        f"{frozen.name}: {found.a:.3f} -> {found.b:.3f}, {found.difference:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] over {counted(found.items, 'item')}"
    )
    if not found.not_inferior(margin):
        raise CheckFailed(
            f"{sentence}: not shown to be less than {margin:g} worse",
            fix=f"accuracy compare {before} {after}, or more items",
        )
    return sentence
