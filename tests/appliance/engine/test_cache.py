"""The cache carries out the policy: whatever moves, every table names bytes that are right."""

import ctypes
import random

import pytest

torch = pytest.importorskip("torch")

from appliance.checkpoint.exl3 import read_checkpoint  # noqa: E402
from appliance.checkpoint.model import Checkpoint  # noqa: E402
from appliance.checkpoint.safetensors import read_bytes  # noqa: E402
from appliance.checkpoint.synth import SynthSpec, synthesize  # noqa: E402
from appliance.engine.addresses import AddressBook  # noqa: E402
from appliance.engine.arena import Arena  # noqa: E402
from appliance.engine.cache import LAG_STEPS, SlotCache, open_cache  # noqa: E402
from appliance.engine.counters import Counters  # noqa: E402
from appliance.plan.following import Promotion  # noqa: E402
from appliance.plan.model import CacheRules, Plan  # noqa: E402
from appliance.plan.planner import plan  # noqa: E402
from appliance.plan.request import Policy  # noqa: E402
from preflight import inspect  # noqa: E402
from preflight.source import Live  # noqa: E402

EAGER = CacheRules(hysteresis=1.0, deviations=0.0, promotions_per_row=4.0, half_life_rows=20.0)
SLOTS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("cache") / "model"
    spec = SynthSpec(layers=3, hidden_size=128, intermediate_size=128, experts=16, top_k=2)
    synthesize(folder, spec)
    return read_checkpoint(folder)


@pytest.fixture(scope="module")
def made(checkpoint: Checkpoint) -> Plan:
    policy = Policy(device="cpu", host_share=0.6, cache_slots=SLOTS, streams=4, context_tokens=128)
    return plan(inspect(Live()), checkpoint, None, policy)


class Rank:
    """One rank's experts, loaded as the engine loads them, without an engine."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        made: Plan,
        rules: CacheRules = EAGER,
        learned: dict[int, list[float]] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.arena = Arena(made, 0, checkpoint, torch.device("cpu"), learned)
        rows = {p.layer: sorted(p.device_experts | p.host_experts) for p in self.arena.plan.layers}
        self.book = AddressBook(rows, torch.device("cpu"))
        self.counters = Counters(self.book)
        for layer, expert in self.book.experts:
            for p in range(3):
                self.arena.write(layer, expert, p, self.stored(layer, expert, p))
            for place, address in zip(
                self.book.trellises(layer, expert),
                self.arena.trellis_addresses(layer, expert),
                strict=True,
            ):
                self.book.numbers[place] = address
        with torch.device("meta"):  # a model is built with another default device than the CPU
            self.cache: SlotCache = open_cache(
                self.arena, self.book, self.counters, rules, learned or {}
            )
        self.cache.start()

    def stored(self, layer: int, expert: int, projection: int) -> torch.Tensor:
        moe = self.arena.layer(layer)
        name = f"{moe.prefix}.{expert}.{moe.projection_names[projection]}.trellis"
        tensor = self.checkpoint.tensors[name]
        raw = bytearray(read_bytes(self.checkpoint.path, tensor))
        return torch.frombuffer(raw, dtype=torch.int16).reshape(tensor.shape)

    def step(self, picked: dict[int, list[int]], rows: int = 1) -> None:
        """What a step does: slots change, rows are routed and counted, the step is noted."""
        self.cache.before_step()
        for layer, experts in picked.items():
            at = self.book.table(layer)[:, 0, 0]
            host = self.arena.pools["host"]
            on_host = (at >= host.address) & (at < host.address + host.size_bytes)
            chosen = torch.tensor([self.book.rows[layer].index(e) for e in experts])
            self.counters.record(layer, chosen, on_host.long() * self.arena.block_bytes(layer))
            self.store(layer, set(experts))
        self.cache.after_step(rows)

    def store(self, layer: int, touched: set[int]) -> None:
        """As ops.experts does with `fill`: what is read is kept, once, and said to be kept."""
        fill = self.counters.fill_of(layer)
        for row, expert in enumerate(self.book.rows[layer]):
            to = int(fill[row])
            if expert in touched and to > 0:
                source = int(self.book.table(layer)[row, 0, 0])
                ctypes.memmove(to, source, self.arena.block_bytes(layer))
                fill[row] = -to

    def wrong(self) -> list[tuple[int, int]]:
        """Experts whose table names bytes that are not theirs."""
        out = []
        for layer, expert in self.book.experts:
            at = int(self.book.numbers[self.book.trellises(layer, expert)[0]])
            for p in range(3):
                right = bytes(self.stored(layer, expert, p).contiguous().view(-1).view(torch.uint8))
                if self.arena.read(layer, expert, p, at) != right:
                    out.append((layer, expert))
        return out


def test_a_hot_expert_takes_a_slot_and_is_read_there(checkpoint: Checkpoint, made: Plan) -> None:
    rank = Rank(checkpoint, made)
    layer = rank.arena.plan.layers[0]
    hot = min(layer.host_experts - layer.slot_experts)
    home = rank.arena.blocks[layer.layer, hot].address
    place = rank.book.trellises(layer.layer, hot)[0]
    # Counted in the first step and asked for LAG later, stored then and seen LAG later again.
    for _ in range(1 + 2 * LAG_STEPS):
        assert int(rank.book.numbers[place]) == home
        rank.step({layer.layer: [hot]})
    assert int(rank.book.numbers[place]) in rank.arena.slots[layer.layer]
    assert rank.cache.tally.promotions == 1
    assert not rank.wrong()


def test_a_newcomer_that_is_called_back_before_it_was_read_leaves_its_slot_to_the_next(
    checkpoint: Checkpoint, made: Plan
) -> None:
    rank = Rank(checkpoint, made, EAGER.model_copy(update={"pooled": False}))
    layer = rank.arena.plan.layers[0]
    first, second = sorted(layer.host_experts - layer.slot_experts)[:2]
    rank.step({layer.layer: [first]})
    while not rank.cache._coming:
        rank.step({})
    slot = rank.cache._coming[layer.layer, first].slot
    rank.cache._waiting.append(Promotion(layer.layer, second, layer.layer, first))
    rank.step({})
    assert (layer.layer, first) not in rank.cache._coming
    assert rank.cache._coming[layer.layer, second].slot == slot
    for _ in range(2 + LAG_STEPS):
        rank.step({layer.layer: [first, second]})
    assert rank.arena.held[layer.layer, second] == slot
    assert not rank.wrong()


def test_picks_are_told_apart_by_where_they_were_read(checkpoint: Checkpoint, made: Plan) -> None:
    rank = Rank(checkpoint, made, EAGER.model_copy(update={"promotions_per_row": 0.0}))
    layer = rank.arena.plan.layers[0]
    resident, slot = min(layer.device_experts), min(layer.slot_experts)
    host = min(layer.host_experts - layer.slot_experts)
    for _ in range(5):
        rank.step({layer.layer: [resident, slot, host, host]}, rows=2)
    rank.cache.settle()
    tally = rank.cache.tally
    assert (tally.picks[0], tally.slots[0], tally.cold[0]) == (20, 5, 10)
    assert rank.counters.host_bytes[layer.layer] == 5 * rank.arena.block_bytes(layer.layer)
    assert rank.cache.mode == "frozen"
    assert tally.promotions == 0


@pytest.mark.parametrize(("pooled", "steps"), [(True, 2_000), (False, 500)])
def test_thousands_of_steps_of_changing_traffic_leave_every_byte_right(
    checkpoint: Checkpoint, made: Plan, pooled: bool, steps: int
) -> None:
    """Each step's table is checked in part, all of it every 500 steps."""
    rank = Rank(checkpoint, made, EAGER.model_copy(update={"pooled": pooled}))
    rng = random.Random(5)
    blocks = {
        key: rank.arena.read(*key, 0, rank.arena.blocks[key].address) for key in rank.book.experts
    }
    for step in range(steps):
        if step % 50 == 0:
            hot = {layer: rng.sample(range(16), 4) for layer in rank.book.rows}
        rows = rng.choice([1, 1, 4, 40])
        rank.step(
            {la: [e for _ in range(rows) for e in rng.sample(hot[la], 2)] for la in hot}, rows
        )
        layer, expert = key = rng.choice(rank.book.experts)
        at = int(rank.book.numbers[rank.book.trellises(*key)[0]])
        assert rank.arena.read(layer, expert, 0, at) == blocks[key], f"step {step}"
        if step % 500 == 0:
            assert not rank.wrong(), f"step {step}"
    assert rank.cache.tally.promotions > steps / 20
    held = rank.arena.held
    assert len(set(held.values())) == len(held) <= SLOTS * len(rank.book.rows)


def test_two_ranks_that_see_the_same_rows_hold_the_same_experts(
    checkpoint: Checkpoint, made: Plan
) -> None:
    """And neither asks the other: what each does follows from its own counts and steps alone."""
    one, two = Rank(checkpoint, made), Rank(checkpoint, made)
    rng = random.Random(2)
    for step in range(300):
        picked = {layer: rng.sample(range(6 if step < 150 else 16), 2) for layer in one.book.rows}
        for rank in (one, two):
            rank.step(picked)
        assert set(one.arena.held) == set(two.arena.held), f"step {step}"
    assert one.cache.tally.promotions > 0


def test_what_was_learned_fills_the_slots_of_the_next_start(
    checkpoint: Checkpoint, made: Plan
) -> None:
    rank = Rank(checkpoint, made)
    layer = rank.arena.plan.layers[0]
    hot = sorted(layer.host_experts)[-2:]
    for _ in range(60):
        rank.step({layer.layer: hot})
    again = Rank(checkpoint, made, learned=rank.cache.policy.recent())
    assert {(layer.layer, e) for e in hot} <= set(again.arena.held)
    assert not again.wrong()
    for layer_index, picks in rank.cache.policy.recent().items():
        assert again.cache.policy.recent()[layer_index] == pytest.approx(picks)


def test_warm_up_before_the_start_is_not_traffic(checkpoint: Checkpoint, made: Plan) -> None:
    rank = Rank(checkpoint, made)
    rank.cache.started = False
    layer = rank.arena.plan.layers[0]
    hot = min(layer.host_experts - layer.slot_experts)
    for _ in range(20):
        rank.step({layer.layer: [hot]})
    rank.counters.reset()
    rank.cache.start()
    rank.step({})
    rank.cache.settle()
    assert rank.cache.tally.picks == [0, 0]
    assert rank.cache.tally.promotions == 0


def test_homes_and_slots_are_the_bytes_of_the_ledger(checkpoint: Checkpoint, made: Plan) -> None:
    arena = Rank(checkpoint, made).arena
    ledger = {line.part: line.size_bytes for line in arena.plan.ledger}
    assert arena.slot_bytes == ledger["cache slots"] > 0
    assert arena.pools["device"].size_bytes == arena.slot_bytes + arena.bytes_in("device")
    assert len(arena.held) == sum(place.cache_slots for place in arena.plan.layers)
