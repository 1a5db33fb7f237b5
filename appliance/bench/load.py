"""Keep n streams busy with agent turns until each has run its share; every turn is a sample."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from appliance.bench.capacity import Ask
from appliance.bench.client import Answer, Endpoint, Message, ask, usage_count
from appliance.bench.room import Room, next_that_fits
from appliance.bench.samples import Role, Sample
from appliance.bench.text import CHARACTERS_PER_TOKEN, text
from appliance.bench.turns import Session, Turn
from appliance.errors import ServeError
from preflight.counted import counted

AFTER_ERROR_SECONDS = 0.2
CALIBRATION_TOKENS = 1000
CALIBRATION_TEXTS = 4


async def feel(
    endpoint: Endpoint, messages: list[Message], tokens: int, **about: Any
) -> tuple[Answer, Sample]:
    """Ask once; what came, and the sample of it. `about`: the fields that say which turn it is."""
    began = time.time()
    answer = await ask(endpoint, messages, tokens)
    times = answer.token_times
    # Whole nanoseconds: what is written is what is judged, so a replay agrees.
    return answer, Sample(
        began=round(began, 6),
        asked_tokens=tokens,
        error=answer.error,
        detail=answer.detail,
        first_token=round(times[0], 9) if times else None,
        latency=round(answer.latency, 9),
        gaps=tuple(round(b - a, 9) for a, b in itertools.pairwise(times)),
        empty_chunks=answer.empty_chunks,
        input_tokens=usage_count(answer.usage, "prompt_tokens"),
        cached_tokens=usage_count(answer.usage, "prompt_tokens_details", "cached_tokens"),
        output_tokens=usage_count(answer.usage, "completion_tokens"),
        **about,
    )


async def calibrate(endpoint: Endpoint, most: int = CALIBRATION_TOKENS) -> float:
    """Characters per token of our text, by this server's count. Raises ServeError without usage."""
    tokens = min(CALIBRATION_TOKENS, most)
    characters = total = 0
    for turn in range(CALIBRATION_TEXTS):
        content = text(f"calibration {turn}", tokens)
        _, sample = await feel(
            endpoint, [{"role": "user", "content": content}], 1, role="extra",
            session="calibration", turn=turn, stream=0, streams=1, block=0, start=0,
        )  # fmt: skip
        if not sample.input_tokens:
            what = sample.detail or "its usage has no prompt_tokens"
            raise ServeError(
                f"the length of a prompt cannot be known: {sample.error or 'no-usage'}: {what}",
                fix="a server that reports usage, and a context that holds the shortest length",
            )
        characters, total = characters + len(content), total + sample.input_tokens
    return characters / total


def room_of(endpoint: Endpoint, context_tokens: int) -> Room:
    """The context that this server holds, in its tokens. Raises ServeError as `calibrate` does."""
    # Half of the context at one character a token, the most that a text can take.
    most = max(1, round(context_tokens / 2 / CHARACTERS_PER_TOKEN))
    per_token = asyncio.run(calibrate(endpoint, most))
    return Room(context_tokens, CHARACTERS_PER_TOKEN / per_token)


@dataclass
class Load:
    """Drives one endpoint. `keep` is given every sample as it is made.

    A stream is a person who never stops: session after session, turn after turn. Each runs an
    equal share of the turns asked for, so that fast ones do not count more often; a stream that is
    done keeps running turns that do not count, until all are done, so that the load stays the same.
    A session ends before the turn that does not fit in `room`.
    """

    endpoint: Endpoint
    sessions: Iterator[Session]
    keep: Callable[[Sample], None]
    start: int = 0
    characters_per_token: float = CHARACTERS_PER_TOKEN
    blocks: int = 0
    room: Room | None = None

    def run(self, asked: Ask, end: float = math.inf) -> list[float]:
        """Speeds of the turns that count (tokens per second); those that cannot be said are out.

        What is under way at `end` (of time.monotonic) is given up and not counted.
        """
        turns = [s for s in asyncio.run(self._block(asked, end)) if s.role == "counted"]
        if turns and all(s.error is not None for s in turns):
            names = ", ".join(sorted({f"{s.error}: {s.detail}" for s in turns}))
            streams = counted(asked.streams, "stream")
            raise ServeError(f"all of {counted(len(turns), 'turn')} at {streams} failed: {names}")
        return [s.speed for s in turns if s.speed is not None]

    async def _block(self, asked: Ask, end: float) -> list[Sample]:
        samples: list[Sample] = []
        share = math.ceil(asked.turns / asked.streams)
        warm = asked.warm_turns // asked.streams
        until = math.inf if asked.seconds is None else time.monotonic() + asked.seconds
        open_ = set(range(asked.streams))

        async def stream(number: int) -> None:
            done = 0

            def role() -> Role:
                return "warm" if done < warm else "counted" if number in open_ else "extra"

            async for sample in self._turns(number, asked.streams, role):
                samples.append(sample)
                self.keep(sample)
                done += 1
                late = time.monotonic() >= until and done > warm
                if done >= warm + share or late:
                    open_.discard(number)
                    if not open_:
                        over.set()

        over = asyncio.Event()
        tasks = [asyncio.create_task(stream(number)) for number in range(asked.streams)]
        waiting = asyncio.create_task(over.wait())
        left = None if end == math.inf else max(0.0, end - time.monotonic())
        finished, _ = await asyncio.wait(
            [waiting, *tasks], timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (waiting, *tasks):
            task.cancel()
        await asyncio.gather(waiting, *tasks, return_exceptions=True)
        self.blocks += 1
        for task in finished - {waiting}:
            task.result()  # a stream never ends on its own: this raises what stopped it
        return samples

    async def _turns(
        self, stream: int, streams: int, role: Callable[[], Role]
    ) -> AsyncIterator[Sample]:
        while True:
            session = next_that_fits(self.sessions, self.room)
            history: list[Message] = []
            used = 0
            for index, turn in enumerate(session.turns):
                if self.room is not None and not self.room.fits(used, turn):
                    break
                await asyncio.sleep(turn.think_seconds)
                history.append({"role": "user", "content": self._input(turn)})
                about = {"session": session.name, "turn": index, "stream": stream}
                about |= {"streams": streams, "block": self.blocks, "start": self.start}
                felt = await feel(self.endpoint, history, turn.output_tokens, role=role(), **about)
                answer, sample = felt
                yield sample
                if answer.error is not None:
                    await asyncio.sleep(AFTER_ERROR_SECONDS)
                    break  # the history is broken: begin another session
                history.append({"role": "assistant", "content": answer.text})
                if self.room is not None:
                    read = sample.input_tokens or used + self.room.added(turn)
                    used = read + (sample.output_tokens or turn.output_tokens)

    def _input(self, turn: Turn) -> str:
        return "\n".join(text(p.key, p.tokens, self.characters_per_token) for p in turn.pieces)
