"""Does the engine advance while work is queued? Pure: samples in, a verdict out.

A hang is: no step finished for `hang_seconds` although requests are running or waiting, or no
answer at all for as long. An idle engine makes no steps and is fine; a long prefill makes one
step per chunk and is fine. Source of the counters: vLLM's /metrics (ENGINE notes, "Server").
"""

from __future__ import annotations

from dataclasses import dataclass

from preflight.counted import counted

STEPS = "vllm:iteration_tokens_total_count"
QUEUED = ("vllm:num_requests_running", "vllm:num_requests_waiting")


# A look so long after the one before: we did not look. Longer than a poll whose answers time out.
BLIND_SECONDS = 30.0


@dataclass(frozen=True)
class Sample:
    """One look: when (monotonic seconds), steps so far, requests queued. None: no answer."""

    at: float
    steps: float | None
    queued: float | None


@dataclass(frozen=True)
class Hang:
    """Seconds without progress, and the requests that wait for it (None: it does not answer)."""

    seconds: float
    queued: float | None

    @property
    def words(self) -> str:
        if self.queued is None:
            return f"the engine has not answered for {self.seconds:.0f} s: it hangs"
        return (
            f"the engine has finished no step for {self.seconds:.0f} s"
            f" with {counted(round(self.queued), 'request')} queued: it hangs"
        )


class Watch:
    """Remembers the last progress. `see` returns a Hang once there has been none for too long.

    Where nobody looked for as long, a machine or a container that was paused with all that is in
    it, an engine had no time to advance either: the clock starts again.
    """

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self._looked_at: float | None = None
        self._steps: float | None = None
        self._progress_at: float | None = None

    def see(self, sample: Sample) -> Hang | None:
        blind = max(self._hang_seconds, BLIND_SECONDS)
        if self._looked_at is not None and sample.at - self._looked_at >= blind:
            self.forget()
        self._looked_at = sample.at
        answered = sample.steps is not None and sample.queued is not None
        moved = answered and (sample.steps != self._steps or not sample.queued)
        if moved or self._progress_at is None:
            self._progress_at = sample.at
            self._steps = sample.steps if answered else self._steps
            return None
        seconds = sample.at - self._progress_at
        return Hang(seconds, sample.queued) if seconds >= self._hang_seconds else None

    def forget(self) -> None:
        """The engine is loading, draining or gone: nothing counts until the next sample."""
        self._steps = None
        self._progress_at = None


def read_sample(exposition: str, at: float) -> Sample:
    """Steps and queued requests, summed over engines; what is not there is not 0 but None.

    The step counter appears with the first step, so its absence beside a queue is 0 steps.
    """
    values: dict[str, float] = {}
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name == STEPS or name in QUEUED:
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    if any(name not in values for name in QUEUED):
        return Sample(at, None, None)
    return Sample(at, values.get(STEPS, 0.0), sum(values[name] for name in QUEUED))
