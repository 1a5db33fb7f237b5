"""Each phase of a start or a stop, shown as it comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from appliance import render

if TYPE_CHECKING:
    from appliance.serve.state import State


@contextmanager
def watched() -> Iterator[Watch]:
    """Ctrl-C says what goes on all the same, where anything does."""
    watch = Watch()
    try:
        yield watch
    except KeyboardInterrupt as stop:
        watch.close()
        if str(stop):
            render.say(str(stop))
        raise
    finally:
        watch.close()


class Watch:
    """Shows each phase of a start or a stop as it comes; called with the state again and again."""

    WORDS = {  # noqa: RUF012 (never changed)
        "starting": "starting the engine and loading the weights",
        "proving": "proving the engine",
        "draining": "waiting for accepted requests to finish",
        "stopping": "ending the engine",
    }

    def __init__(self) -> None:
        self._phase: str | None = None
        self._progress: render.Progress | None = None

    def __call__(self, state: State) -> None:
        if state.phase == self._phase:
            if self._progress is not None:
                self._progress.detail = state.message
            return
        self.close()
        self._phase = state.phase
        if state.phase in self.WORDS:
            expected = state.expected_load_seconds if state.phase == "starting" else None
            self._progress = render.Progress(self.WORDS[state.phase], expected)
            self._progress.__enter__()
        elif state.phase in ("ready", "unproved"):
            self._serving(state)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None

    def _serving(self, state: State) -> None:
        render.say(f"{state.words}: {state.message}")
        render.say(f"{state.served_name} on {state.url}/v1, API key in {state.keys}")
