"""Spare slots that follow the traffic: carries out plan/policy.py, between steps.

A step's counts are looked at LAG steps later, when they have arrived by themselves. An expert that
is to leave a slot is read from its home again at once. The newcomer costs the link nothing: the
next step that reads it from the host stores what it reads in the slot, too, and says so; seen by
the host, the tables then name the slot. All of it is counted in steps, so ranks that hold slices of
the same experts do the same at the same step and never ask one another.
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
from appliance.plan.following import LayerSlots, Promotion
from appliance.plan.model import CacheRules
from appliance.plan.policy import Cache
from appliance.plan.routing import heat_from_json

LAG_STEPS = 2
MOST_CHANGES = 32  # swaps a step: what was put off by a burst waits its turn


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step that has been enqueued: its rows, its counts, and who was on the host then."""

    step: int
    rows: int
    counts: Snapshot
    on_host: torch.Tensor  # bool, flat


@dataclass(frozen=True, slots=True)
class _Coming:
    """A newcomer that the next step which reads it stores in a slot; asked for at `step`."""

    step: int
    slot: int


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
    _coming: dict[tuple[int, int], _Coming] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys, arena = self.book.experts, self.arena
        host = [arena.blocks[key].home == "host" for key in keys]
        there = [h and k not in arena.held for h, k in zip(host, keys, strict=True)]
        order = {layer: i for i, layer in enumerate(self.book.rows)}
        # The device is named: vLLM makes the GPU the default one while a model is built.
        self._has_slot_or_host = torch.tensor(host, device="cpu")
        self._on_host = torch.tensor(there, device="cpu")
        self._layer_of = torch.tensor([order[layer] for layer, _ in keys], device="cpu")
        self._before = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
        self.tally = self._nothing()

    def _nothing(self) -> Tally:
        zeros = [0] * len(self.book.rows)
        return Tally(list(zeros), list(zeros), list(zeros))

    @property
    def mode(self) -> str:
        """What the slots do: nothing; or hold what following the traffic would, or the plan's."""
        if self.policy.rules.promotions_per_row == 0:
            return "frozen"
        return "following" if self.policy.follows else "as planned"

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
        tables: dict[int, int] = {}  # places in the book's numbers, and in its fills
        fills: dict[int, int] = {}
        self._look(self.step - LAG_STEPS, tables, fills)
        self._begin(tables, fills)
        self._write(tables, fills)

    def after_step(self, rows: int) -> None:
        """A step of `rows` rows has been enqueued."""
        if self.started:
            counts = self.moves.snapshot(self.counters.flat_and_fill)
            self._seen.append(_Seen(self.step, rows, counts, self._on_host.clone()))

    def settle(self) -> None:
        """Look at every step up to now, and wait for it: for whoever asks what was counted."""
        tables: dict[int, int] = {}
        fills: dict[int, int] = {}
        self._look(self.step, tables, fills)
        self._write(tables, fills)

    def _write(self, tables: dict[int, int], fills: dict[int, int]) -> None:
        for numbers, changes in ((self.book.numbers, tables), (self.counters.fill, fills)):
            if changes:
                self.moves.point(numbers, changes)

    def _look(self, last: int, tables: dict[int, int], fills: dict[int, int]) -> None:
        while self._seen and self._seen[0].step <= last:
            seen = self._seen.popleft()
            counts, fill = seen.counts.read().split(len(self.book.experts))
            delta = counts - self._before
            self._before = counts
            self._count(delta, seen.on_host)
            self._arrive(seen.step, fill, tables, fills)
            self._waiting += self._decide(delta, seen.rows)

    def _count(self, delta: torch.Tensor, on_host: torch.Tensor) -> None:
        layers = len(self.book.rows)
        for total, weights in (
            (self.tally.picks, delta),
            (self.tally.cold, delta * on_host),
            (self.tally.slots, delta * (self._has_slot_or_host & ~on_host)),
        ):
            by_layer = torch.zeros(layers, dtype=torch.int64, device="cpu")
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

    def _arrive(
        self, step: int, fill: torch.Tensor, tables: dict[int, int], fills: dict[int, int]
    ) -> None:
        """Newcomers that a step up to `step` has stored are read from their slots from now on."""
        for place in (fill < 0).nonzero().flatten().tolist():
            key = self.book.experts[place]
            coming = self._coming.get(key)
            if coming is None or coming.step > step:
                continue  # called back since
            del self._coming[key]
            self.arena.held[key] = coming.slot
            self._point(key, tables)
            fills[place] = 0
            self.tally.promotions += 1

    def _begin(self, tables: dict[int, int], fills: dict[int, int]) -> None:
        """Take experts out of their slots, or call back newcomers, in the policy's order."""
        for _ in range(min(MOST_CHANGES, len(self._waiting))):
            swap = self._waiting.popleft()
            leaves, enters = (swap.evict_layer, swap.evict), (swap.layer, swap.expert)
            coming = self._coming.pop(leaves, None)
            if coming is None:
                slot = self.arena.held.pop(leaves)
                self._point(leaves, tables)
            else:  # no step has read it yet, or none whose counts have been seen
                slot = coming.slot
                fills[self.book.place[leaves]] = 0
            self._coming[enters] = _Coming(self.step, slot)
            fills[self.book.place[enters]] = slot

    def _point(self, key: tuple[int, int], tables: dict[int, int]) -> None:
        """The kernels are to read an expert where the arena now says."""
        tables |= zip(self.book.trellises(*key), self.arena.trellis_addresses(*key), strict=True)
        self._on_host[self.book.place[key]] = key not in self.arena.held


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
    planned = {place.layer: place.slot_experts for place in arena.plan.layers}
    policy = Cache(layers, rules, planned)
    policy.recall(learned)
    device = book.numbers.device
    moves: Moves = (
        CpuMoves()
        if device.type == "cpu"
        # At most the three addresses of every expert change in one step.
        else CudaMoves(device, 2 * len(book.experts), 3 * len(book.experts))
    )
    return SlotCache(arena, book, counters, policy, moves)
