"""What a long context costs: speed against length, first reads, cached prefixes. Into a record.

Each experiment is one or more blocks of the record, told apart by `part`:

    prefix          one prompt sent twice: the engine's counters must move the second time
    context N       fresh prompts of N tokens, one at a time: first token, time per token
    beside N        three streams decode short prompts while a fourth reads prompts of N tokens
    prime N U       a prefix of N tokens is read once, so that the next part finds it
    cached N U      U users at once ask about that prefix
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from appliance.bench.capacity import Ask
from appliance.bench.client import Answer
from appliance.bench.load import calibrate, feel
from appliance.bench.measure import Target, grown
from appliance.bench.record import Block, Lengths, Record
from appliance.bench.samples import Sample
from appliance.bench.text import CHARACTERS_PER_TOKEN, text

STREAMS_BESIDE = 3
ALONE_TURNS = 8  # of each of the three, before the first read
TWICE_TOKENS = 2048  # of the prompt that is sent twice
SHORT_TOKENS = 512  # of the prompts that the three decode
ROOM = 0.94  # of a length: the text's tokens are known to a few per cent only


def lengths_to(
    least: int, most: int, *, repeats: int = 3, output: int = 64, beside: int = 131072
) -> Lengths:
    """Twice as long each time, from `least` to `most`, both included. Tokens."""
    contexts = [least]
    while contexts[-1] * 2 < most:
        contexts.append(contexts[-1] * 2)
    if contexts[-1] < most:
        contexts.append(most)
    return Lengths(
        contexts=tuple(contexts),
        repeats=repeats,
        output=output,
        beside=min(beside, most),
        prefix=most,
        users=(1, 2, 4),
    )


def measure_context(record: Record, target: Target) -> None:
    """Run every part that the record does not have yet. Raises ServeError without usage."""
    lengths = record.stamp.lengths
    assert lengths is not None
    asyncio.run(_Run(record, target, lengths).all())


@dataclass
class _Run:
    record: Record
    target: Target
    lengths: Lengths
    per_token: float = CHARACTERS_PER_TOKEN
    samples: list[Sample] = field(default_factory=list)

    async def all(self) -> None:
        self.per_token = await calibrate(self.target.endpoint, self._least())
        for number in (1, 2):
            await self._block(f"prefix {number}", 1, partial(self._ask, "twice", self._twice()))
        for tokens in self.lengths.contexts:
            await self._block(f"context {tokens}", 1, partial(self._one_by_one, tokens))
        beside = self.lengths.beside
        await self._block(f"beside {beside}", STREAMS_BESIDE + 1, partial(self._beside, beside))
        for users in self.lengths.users:
            mark = f"{self.lengths.prefix} {users}"
            await self._block(f"prime {mark}", 1, partial(self._ask, mark, self._prefix()))
            await self._block(f"cached {mark}", users, partial(self._cached, users, mark))

    async def _block(self, part: str, streams: int, run: Callable[[], Awaitable[Any]]) -> None:
        if any(block.part == part for block in self.record.blocks):
            return
        number = len(self.record.blocks)
        self.samples = []
        before, began, clock = self.target.counters(), time.time(), time.monotonic()
        self.target.told(Ask(streams, 1, 0), number)
        await run()
        turns = sum(sample.role == "counted" for sample in self.samples)
        block = Block(
            start=0,
            number=number,
            ask=Ask(streams, turns, 0),
            began=began,
            seconds=time.monotonic() - clock,
            samples=len(self.samples),
            engine=self.target.engine(),
            counters=grown(before, self.target.counters()),
            part=part,
        )
        self.record.add(block, self.samples)

    async def _one_by_one(self, tokens: int) -> None:
        for turn in range(self.lengths.repeats):
            await self._ask(f"context {tokens} {turn}", round(tokens * ROOM), turn=turn)

    async def _beside(self, tokens: int) -> None:
        """The three go on until the last read has ended; every read is of a fresh prompt."""
        over = asyncio.Event()
        ready = [0] * STREAMS_BESIDE

        async def decode(stream: int) -> None:
            turn = 0
            while not over.is_set():
                short = min(SHORT_TOKENS, self._least())
                await self._ask(f"short {stream} {turn}", short, turn=turn, stream=stream)
                turn += 1
                ready[stream] = turn

        async def read() -> None:
            while min(ready) < ALONE_TURNS:
                await asyncio.sleep(0.01)
            for turn in range(self.lengths.repeats):
                name, size = f"read {tokens} {turn}", round(tokens * ROOM)
                await self._ask(name, size, turn=turn, stream=STREAMS_BESIDE)
            over.set()

        await asyncio.gather(*map(decode, range(STREAMS_BESIDE)), read())

    async def _cached(self, users: int, mark: str) -> None:
        for turn in range(self.lengths.repeats):
            asked = (
                self._ask(mark, self._prefix(), turn=turn, stream=user, more=f"\n{user} {turn}?")
                for user in range(users)
            )
            await asyncio.gather(*asked)

    async def _ask(
        self, key: str, tokens: int, *, turn: int = 0, stream: int = 0, more: str = ""
    ) -> Answer:
        room = max(8, tokens - self.lengths.output)
        content = self._text(key, room) + more
        answer, sample = await feel(
            self.target.endpoint,
            [{"role": "user", "content": content}],
            self.lengths.output,
            session=key,
            turn=turn,
            stream=stream,
            streams=1,
            block=len(self.record.blocks),
            start=0,
            role="counted",
        )
        self.samples.append(sample)
        return answer

    def _text(self, key: str, tokens: int) -> str:
        return text(f"{self.record.stamp.seed}/{key}", tokens, self.per_token)

    def _twice(self) -> int:
        """Engines cache whole blocks of KV, of 128 tokens and more: a short prompt has none."""
        return round(min(TWICE_TOKENS, self.lengths.contexts[-1]) * ROOM)

    def _least(self) -> int:
        return round(self.lengths.contexts[0] * ROOM)

    def _prefix(self) -> int:
        # Room for the question that follows.
        return round(self.lengths.prefix * ROOM) - 16
