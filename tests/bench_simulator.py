"""A machine whose truth is known: speed falls with load; noise, drift and heavy tails on top."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from appliance.bench.capacity import Ask, Capacity, Goal, Search

Draws = NDArray[np.float64]
SEGMENT = 60  # turns after which streams, and what surrounds the machine, are drawn anew


@dataclass(frozen=True)
class Noise:
    """Relative speed of a turn: log-normal, times a stream's own factor, sometimes a slow turn."""

    sigma: float
    slow_share: float
    stream_sigma: float
    drift: float  # of the logarithm, from the first block to the last, and back
    block_sigma: float


NOISES = (
    Noise(0.05, 0.00, 0.00, 0.00, 0.000),
    Noise(0.08, 0.02, 0.01, 0.01, 0.005),
    Noise(0.10, 0.03, 0.02, -0.02, 0.005),
    Noise(0.15, 0.01, 0.02, 0.02, 0.010),
    Noise(0.18, 0.00, 0.01, -0.01, 0.005),
)


def draw(noise: Noise, streams: int, count: int, random: np.random.Generator) -> Draws:
    own = random.normal(0, noise.stream_sigma, streams)[np.arange(count) % streams]
    speeds = np.exp(random.normal(0, noise.sigma, count) + own)
    slow = random.random(count) < noise.slow_share
    return np.where(slow, speeds * random.uniform(0.2, 0.9, count), speeds)


@lru_cache
def true_p5(noise: Noise) -> float:
    """p5 of the relative speed over fresh streams, from two million turns."""
    return float(np.quantile(draw(noise, 2_000_000, 2_000_000, np.random.default_rng(7)), 0.05))


@dataclass
class Machine:
    """p5 at the true capacity is `above` over the threshold, at the next number `below` under."""

    truth: int
    goal: Goal
    noise: Noise
    above: float
    below: float
    seed: int
    requests: int = 0
    drawn: dict[int, list[float]] = field(default_factory=dict)  # by streams, turn by turn
    used: dict[int, int] = field(default_factory=dict)

    def p5(self, streams: int) -> float:
        falls = (4.0 + self.truth) / (4.0 + streams)
        edge = 1 + self.above if streams <= self.truth else 1 - self.below
        if streams > self.truth:
            falls = (5.0 + self.truth) / (4.0 + streams)
        return self.goal.threshold * edge * falls

    def run(self, ask: Ask) -> list[float]:
        wave = np.exp(np.sin(self.requests / 400.0) * self.noise.drift)
        self.requests += ask.requests
        used = self.used.get(ask.streams, 0)
        self.used[ask.streams] = used + ask.turns
        speeds = self.turns(ask.streams, used + ask.turns)[used:]
        return [speed * float(wave) for speed in speeds]

    def turns(self, streams: int, count: int) -> list[float]:
        """The first turns of a number of streams. The k-th is the same however it was asked for:
        two ways to search meet the same turns, so that their costs can be compared run by run."""
        have = self.drawn.setdefault(streams, [])
        while len(have) < count:
            chance = np.random.default_rng([self.seed, streams, len(have)])
            shift = np.exp(chance.normal(0, self.noise.block_sigma))
            relative = draw(self.noise, streams, SEGMENT, chance)
            have += (relative * shift * self.p5(streams) / true_p5(self.noise)).tolist()
        return have[:count]


def machine(seed: int, least_truth: int = 0, most_truth: int = 48) -> Machine:
    """A machine whose truth is at least 5 % from the threshold on both sides."""
    chance = random.Random(seed)
    return Machine(
        truth=chance.randint(least_truth, most_truth),
        goal=Goal(most_streams=64),
        noise=chance.choice(NOISES),
        above=chance.uniform(0.05, 0.15),
        below=chance.uniform(0.05, 0.15),
        seed=seed,
    )


def drive(search: Search, run: Callable[[Ask], list[float]]) -> Capacity:
    ask = next(search)
    while True:
        try:
            ask = search.send(run(ask))
        except StopIteration as done:
            found: Capacity = done.value
            return found
