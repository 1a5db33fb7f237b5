"""What the other card's memory would be worth as a third home of experts, under expert parallel.

PYTHONPATH=.:tests python -m peer_study COUNTS.json...

Of two equal cards each has room for 70 % of the experts. `own`: each keeps the most picked of its
own half. `anywhere`: the most picked of all, also in the card that does not own them, from where
they are read over NVLink. `sliced`: tensor parallel, each card reads half of every cold expert.
For each number of rows: experts read from the host by the card that has more of them, a layer.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import numpy as np

RESIDENT, DRAWS = 0.7, 1500


def study(counts: list[int], top_k: int, rows: int) -> tuple[float, float, float, float]:
    """(own, anywhere, sliced) host experts a layer, and experts read over NVLink if anywhere."""
    random, picks = np.random.default_rng(0), np.array(counts, dtype=float)
    first = np.arange(len(picks)) < len(picks) // 2  # whose owner is the first card
    room = int(RESIDENT * len(picks) / 2)
    own = hottest(np.where(first, picks, -1), room) | hottest(np.where(first, -1, picks), room)
    anywhere = hottest(picks, 2 * room)
    found = []
    log_p = np.log(np.maximum(picks, 1e-9))
    for _ in range(DRAWS):
        drawn = log_p + random.gumbel(size=(rows, len(picks)))
        touched = np.unique(np.argpartition(-drawn, top_k, axis=1)[:, :top_k])
        cold, mine = {name: ~kept[touched] for name, kept in
                      (("own", own), ("anywhere", anywhere))}, first[touched]  # fmt: skip
        slowest = [max((c & mine).sum(), (c & ~mine).sum()) for c in cold.values()]
        over_nvlink = (anywhere[touched] & ~own[touched]).sum()
        found.append((*slowest, cold["anywhere"].sum() / 2, over_nvlink))
    own_side, any_side, sliced, moved = (
        fmean(map(float, column)) for column in zip(*found, strict=True)
    )
    return own_side, any_side, sliced, moved


def hottest(picks: np.ndarray, count: int) -> np.ndarray:
    kept = np.zeros(len(picks), dtype=bool)
    kept[np.argsort(-picks, kind="stable")[:count]] = True
    return kept


if __name__ == "__main__":
    layers = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    for rows in (1, 4, 6):
        each = [study(la["counts"], la["experts_per_token"], rows) for la in layers]
        own, anywhere, sliced, moved = (fmean(column) for column in zip(*each, strict=True))
        print(f"{rows} rows: own {own:.3f}, anywhere {anywhere:.3f} "
              f"({moved:.3f} over NVLink), sliced {sliced:.3f}")  # fmt: skip
