"""Which runs said the same tokens, and whether those that parted were allowed to.

Runs on the same ranks add up in the same order: they agree to the token. One card and two add in
another order, so logits differ by rounding. With a drawn router that also swaps experts, and where
texts part is only said. With a decided one it cannot: texts may part only at a step of which one
card is not sure, CLEAR logits or less between its two best tokens. So what it says before its
first such step is said by two, too, and texts without one are equal to the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from environment import say
from served import TEXTS, Case

# Logits deviate by 6, and fp16 holds those of 16 and more to steps of 0.016. TP 2 and EP 2 had the
# same leads within 0.047 in 99 of 100 steps, and within 0.094 in all of 6,000.
CLEAR = 0.1
ENOUGH = 500  # tokens before one card's first step that it is not sure of
Found = Mapping[str, Mapping[str, Any]]


def parting(one: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """Where texts part: equal tokens before the first other one. What follows says nothing more."""
    firsts = [
        next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(one, other, strict=True)
    ]
    return {"equal": sum(firsts), "of": sum(map(len, one)), "first_other": firsts}


def verdict(cases: Mapping[str, Case], found: Found, asked: int) -> bool:
    """Says every comparison and the outcome; `found`: what each case that ended has to say."""
    alike = [_same_on_the_same_ranks(cases, found, what) for what in TEXTS]
    decided = [c for c in found if cases[c].model == "decided" and found[c]["runs"]]
    as_one_card = [_as_one_card(found, decided, what) for what in TEXTS if decided]
    runs = [(cases[c], run) for c in found for run in found[c]["runs"]]
    moved = all(
        all(n > 0 for n in run[f"{what}_promotions"]) == (run["slots"] == "moving")
        for _, run in runs
        for what in TEXTS
        if run["slots"] != "still again"  # the last swaps that were decided still arrive
    )
    agree = all(r["ranks_hold_the_same"] for c, r in runs if c.slots and not c.expert_parallel)
    here = not any(any(run["picks_not_here"]) for _, run in runs)
    proofs = [f[k] for f in found.values() for k in ("proof", "proof_after") if k in f]
    proved = all(proof["ok"] for proof in proofs)
    ok = all((*alike, *as_one_card, moved, agree, here, proved, len(found) == asked))
    say(verdict=ok, same_tokens=all(alike), as_one_card=as_one_card,
        slots_moved_when_asked_and_only_then=moved, ranks_of_tp_hold_the_same=agree,
        proofs=len(proofs), cases=len(found), asked=asked)  # fmt: skip
    return ok


def _same_on_the_same_ranks(cases: Mapping[str, Case], found: Found, what: str) -> bool:
    same = True
    for group in sorted({cases[c].group for c in found}):
        names = [c for c in found if cases[c].group == group]
        runs = [(c, run) for c in names for run in found[c]["runs"]]
        if not runs:
            continue
        base = runs[0][1]
        other = {f"{c} {run['slots']}": parting(base[what], run[what])
                 for c, run in runs if run[what] != base[what]}  # fmt: skip
        alone = [c for c in found if cases[c].group == (group[0], 1, False)]
        one_card = found[alone[0]]["runs"][0][what] if alone and group[1] > 1 else None
        rows = {json.dumps(run[f"{what}_rows"]) for _, run in runs}
        say(compared=what, model=group[0], ranks=group[1], expert_parallel=group[2],
            cases=names, runs=len(runs), texts=len({json.dumps(r[what]) for _, r in runs}),
            other=other, steps_composed=len(rows), first_steps=base[f"{what}_rows"][:6],
            with_one_card=parting(one_card, base[what]) if one_card else None)  # fmt: skip
        same = same and not other
    return same


def _as_one_card(found: Found, decided: list[str], what: str) -> bool:
    """Whether every run of the decided model said one card's tokens wherever that one was sure, and
    said others where two of its experts were swapped."""
    if "decided" not in decided:
        say(compared=what, problem="the one card to compare with has not run")
        return False
    base = found["decided"]["runs"][0]
    leads: list[list[float]] = base[f"{what}_leads"]
    sure = [row for row, text in enumerate(leads) if min(text) > CLEAR]
    tokens = sum(next((i for i, x in enumerate(t) if x <= CLEAR), len(t)) for t in leads)
    ok = tokens >= ENOUGH
    for case, slots, run in _runs(found, decided):
        at = parting(base[what], run[what])["first_other"]
        apart = [row for row, k in enumerate(at) if k < len(leads[row])]
        theirs = run[f"{what}_leads"]
        moved = [abs(leads[row][i] - theirs[row][i]) for row, k in enumerate(at) for i in range(k)]
        wrong = slots == "two experts swapped"
        good = not any(leads[row][at[row]] > CLEAR for row in apart)
        ok = ok and (len(apart) > len(at) / 4 and not good if wrong else good)
        say(compared_with_one_card=what, case=case, run=slots, equal=sum(at),
            of=sum(map(len, leads)), sure_tokens=tokens,
            texts_equal=len(at) - len(apart), texts=len(at),
            sure_texts_equal=len(set(sure) - set(apart)), sure_texts=len(sure),
            leads_where_parted=[round(leads[row][at[row]], 4) for row in apart],
            leads_moved_by_at_most=round(max(moved), 4) if moved else None)  # fmt: skip
    return ok


def _runs(found: Found, cases: list[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for case in cases:
        for run in [*found[case]["runs"], *found[case].get("wrong", [])]:
            yield case, run["slots"], run
