"""The part of plan.json that predicts: every number with its range."""

from __future__ import annotations

from appliance.plan.strict import Bytes, Strict


class Range(Strict):
    """What to expect, and between what bounds: the plan's assumptions say what moves it."""

    low: float
    likely: float
    high: float


class StreamPrediction(Strict):
    """One decode step with `streams` rows: the slowest rank's link and the bytes it moves.

    compute_ms   the step with every expert on the device
    waiting_ms   what host reads add to it: device work hides under them
    topology_ms  what cards on different memory nodes add; never charged to the experts
    tokens_per_second  of each stream, without draft tokens
    All None where the card or its link is unknown.
    """

    streams: int
    link_bytes_per_step: Bytes
    link_ms_per_step: float | None
    cold_share: float
    compute_ms: Range | None = None
    waiting_ms: Range | None = None
    topology_ms: Range | None = None
    tokens_per_second: Range | None = None


class PrefillPrediction(Strict):
    """Reading `tokens` for the first time, alone; and how fast others decode meanwhile."""

    tokens: int
    seconds: Range
    others_tokens_per_second: Range


class ColdShares(Strict):
    """Share of picks on the host: of the counts the plan was made from, and of a topic left out.

    `held_out_settled`: with slots, once they hold what that topic wants.
    """

    in_sample: float
    held_out: float | None = None
    held_out_worst: float | None = None
    held_out_settled: float | None = None


class Forecast(Strict):
    """What the planner expects beside single steps, and the assumptions that move it most."""

    prefill: tuple[PrefillPrediction, ...] = ()
    # From this chunk on arithmetic takes as long as every host expert takes to cross.
    break_even_chunk_tokens: int | None = None
    load_seconds: Range | None = None
    cold: ColdShares | None = None
    assumptions: tuple[str, ...] = ()
