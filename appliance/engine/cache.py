"""Spare slots that follow the traffic: carries out plan/policy.py, between steps.

A step's counts are looked at LAG steps later, when they have arrived by themselves. An expert that
is to leave a slot is read from its home again at once; the copy of the newcomer starts when the
last step that could read the slot has ended; and LAND steps later the newcomer is read from there.
All of it is counted in steps, so ranks that hold slices of the same experts do the same at the same
step and never ask one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from appliance.engine.addresses import AddressBook
from appliance.engine.arena import Arena
from appliance.engine.counters import Counters
from appliance.engine.moves import CpuMoves, CudaMoves, Moves, Snapshot
from appliance.plan.model import CacheRules
from appliance.plan.policy import Cache, LayerSlots, Promotion
from appliance.plan.routing import heat_from_json

LAG_STEPS = 2
LAND_STEPS = 2
MOST_FILLS = 16  # a step: what was put off by a burst waits its turn


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step that has been enqueued: its rows, its counts, and who was on the host then."""

    step: int
    rows: int
    counts: Snapshot
    on_host: torch.Tensor  # bool, flat


@dataclass(frozen=True, slots=True)
class _Flight:
    """A newcomer on its way into a slot."""

    step: int
    key: tuple[int, int]
    slot: int
    ticket: object


@dataclass(slots=True)
class Tally:
    """Picks by where they were read, and swaps, since the counters were reset."""

    picks: list[int]  # by layer, in the book's order
    cold: list[int]
    slots: list[int]
    promotions: int = 0


@dataclass
class SlotCache:
    """One rank's slots. Call `before_step` and `after_step` around each step of real rows.

    It does nothing until `start`: warm-up and proof rows are not traffic.
    """

    arena: Arena
    book: AddressBook
    counters: Counters
    policy: Cache
    moves: Moves
    started: bool = False
    step: int = 0
    _seen: deque[_Seen] = field(default_factory=deque)
    _waiting: deque[Promotion] = field(default_factory=deque)
    _flying: deque[_Flight] = field(default_factory=deque)

    def __post_init__(self) -> None:
        keys, arena = self.book.experts, self.arena
        host = [arena.blocks[key].home == "host" for key in keys]
        self._has_slot_or_host = torch.tensor(host)
        self._on_host = torch.tensor(
            [h and k not in arena.held for h, k in zip(host, keys, strict=True)]
        )
        self._layer_of = torch.tensor([list(self.book.rows).index(layer) for layer, _ in keys])
        self._before = torch.zeros(len(keys), dtype=torch.int64)
        self.tally = self._nothing()

    def _nothing(self) -> Tally:
        zeros = [0] * len(self.book.rows)
        return Tally(list(zeros), list(zeros), list(zeros))

    @property
    def frozen(self) -> bool:
        return self.policy.rules.promotions_per_row == 0

    def start(self) -> None:
        """Traffic begins, from counters that are zero: what was counted before is forgotten."""
        self._seen.clear()
        self._before.zero_()
        self.tally = self._nothing()
        self.started = True

    def before_step(self) -> None:
        """Look at steps that have ended, and move what follows from them."""
        if not self.started:
            return
        self.step += 1
        self._look(self.step - LAG_STEPS)
        changes: dict[int, int] = {}
        self._land(changes)
        leaving = self._begin(changes)
        if changes:
            self.moves.point(self.book.numbers, changes)
        if leaving:
            self._fill(leaving)

    def after_step(self, rows: int) -> None:
        """A step of `rows` rows has been enqueued."""
        if self.started:
            counts = self.moves.snapshot(self.counters.flat)
            self._seen.append(_Seen(self.step, rows, counts, self._on_host.clone()))

    def settle(self) -> None:
        """Look at every step up to now, and wait for it: for whoever asks what was counted."""
        self._look(self.step)

    def _look(self, last: int) -> None:
        while self._seen and self._seen[0].step <= last:
            seen = self._seen.popleft()
            counts = seen.counts.read()
            delta = counts - self._before
            self._before = counts
            self._count(delta, seen.on_host)
            self._waiting += self._decide(delta, seen.rows)

    def _count(self, delta: torch.Tensor, on_host: torch.Tensor) -> None:
        layers = len(self.book.rows)
        for total, weights in (
            (self.tally.picks, delta),
            (self.tally.cold, delta * on_host),
            (self.tally.slots, delta * (self._has_slot_or_host & ~on_host)),
        ):
            by_layer = torch.zeros(layers, dtype=torch.int64)
            by_layer.index_add_(0, self._layer_of, weights)
            for i, value in enumerate(by_layer.tolist()):
                total[i] += value

    def _decide(self, delta: torch.Tensor, rows: int) -> Sequence[Promotion]:
        picked: dict[int, list[tuple[int, int]]] = {}
        places = delta.nonzero().flatten()
        for place, times in zip(places.tolist(), delta[places].tolist(), strict=True):
            layer, expert = self.book.experts[place]
            picked.setdefault(layer, []).append((expert, times))
        for layer, pairs in picked.items():
            self.policy.count(layer, pairs)
        return self.policy.step(rows)

    def _land(self, changes: dict[int, int]) -> None:
        while self._flying and self._flying[0].step + LAND_STEPS <= self.step:
            flight = self._flying.popleft()
            self.moves.land(flight.ticket)
            self.arena.held[flight.key] = flight.slot
            self._point(flight.key, changes)
            self.tally.promotions += 1

    def _begin(self, changes: dict[int, int]) -> list[tuple[Promotion, int]]:
        """Take experts out of their slots, in the policy's order; (promotion, its slot)."""
        out: list[tuple[Promotion, int]] = []
        while self._waiting and len(out) < MOST_FILLS:
            leaves = (self._waiting[0].evict_layer, self._waiting[0].evict)
            slot = self.arena.held.pop(leaves, None)
            if slot is None:
                break  # it is still on its way in
            self._point(leaves, changes)
            out.append((self._waiting.popleft(), slot))
        return out

    def _point(self, key: tuple[int, int], changes: dict[int, int]) -> None:
        """The kernels are to read an expert where the arena now says."""
        changes |= zip(self.book.trellises(*key), self.arena.trellis_addresses(*key), strict=True)
        self._on_host[self.book.place[key]] = key not in self.arena.held

    def _fill(self, leaving: Sequence[tuple[Promotion, int]]) -> None:
        copies = []
        for promotion, slot in leaving:
            home = self.arena.blocks[promotion.layer, promotion.expert]
            copies.append((slot, home.address, home.size_bytes))
        ticket = self.moves.fill(copies)
        self._flying += (
            _Flight(self.step, (promotion.layer, promotion.expert), slot, ticket)
            for promotion, slot in leaving
        )


def read_learned(path: str | None) -> dict[int, list[float]]:
    """What an earlier run of this checkpoint learned; nothing where there is no such file.

    Raises UsageError for a file that holds something else.
    """
    if path is None or not Path(path).exists():
        return {}
    heat = heat_from_json(Path(path).read_text(encoding="utf-8"), path)
    return {layer: list(counts) for layer, counts in heat.counts.items()}


def open_cache(
    arena: Arena,
    book: AddressBook,
    counters: Counters,
    rules: CacheRules,
    learned: Mapping[int, Sequence[float]],
) -> SlotCache:
    """The cache of this rank's slots, as they were filled by loading.

    Rules of no promotions a row freeze it: it counts, and moves nothing.
    """
    layers = []
    for place in arena.plan.layers:
        cold = {e for e in place.host_experts if (place.layer, e) not in arena.held}
        layers.append(
            LayerSlots(
                layer=place.layer,
                experts=len(arena.layers[place.layer].experts),
                slots=set(place.host_experts) - cold,
                cold=cold,
                block_bytes=arena.block_bytes(place.layer),
            )
        )
    policy = Cache(layers, rules)
    policy.recall(learned)
    device = book.numbers.device
    moves: Moves = (
        CpuMoves() if device.type == "cpu" else CudaMoves(device, len(book.experts), 6 * MOST_FILLS)
    )
    return SlotCache(arena, book, counters, policy, moves)
