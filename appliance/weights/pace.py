"""How fast and how often: a byte rate shared by threads, and when to try again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from appliance.weights.source import Again

MAX_WAIT_SECONDS = 60.0


class Throttle:
    """At most so many bytes a second over all threads; None is no limit."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, size_bytes: int, stop: threading.Event) -> None:
        """Wait until `size_bytes` more fit the rate, or until `stop`."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            # Time that passed unused is not saved up: no burst after a pause.
            self._free_at = max(self._free_at, now) + size_bytes / self._rate
            wait = self._free_at - now
        stop.wait(wait)


class Patience:
    """How one piece of work is tried again; progress makes it patient anew.

    `told`: a sentence before each pause, with why and how often.
    """

    def __init__(
        self, tries: int, first_seconds: float, told: Callable[[str], None] = lambda text: None
    ) -> None:
        self._told = told
        self._tries = tries
        self._first = first_seconds
        self._failed = 0

    def progressed(self) -> None:
        self._failed = 0

    def wait(self, problem: Again, stop: threading.Event) -> None:
        """Sleep as the source asked or twice as long as last time; raises `problem` at the end."""
        self._failed += 1
        if self._failed >= self._tries:
            raise problem
        seconds = min(MAX_WAIT_SECONDS, self._first * 2.0 ** (self._failed - 1))
        # Spread out, or all connections come back in the same moment.
        seconds *= random.uniform(0.5, 1.0)
        seconds = max(seconds, problem.after_seconds or 0.0)
        self._told(
            f"{problem.message}; trying again in {seconds:.1f} s, "
            f"{self._failed + 1} of {self._tries}"
        )
        stop.wait(seconds)
