"""Routed experts from names: which tensors are theirs, and the MoE layers that they make."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from appliance.checkpoint.config import Architecture
from appliance.checkpoint.linears import PARTS, Linears
from appliance.checkpoint.model import ExpertShape, MoeLayer, ProjectionShape, Tensor
from appliance.checkpoint.names import layer_of
from appliance.errors import CheckpointError

# FACTS section 1: w1 = gate, w3 = up, w2 = down.
_PROJECTIONS = {
    "gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2"),
}  # fmt: skip
_ROLE_OF = {word: role for role, words in _PROJECTIONS.items() for word in words}
_ONE_EXPERT = re.compile(
    r"(.*\bexperts)\.(0|[1-9]\d{0,5})\.(\w+?)(?:\.rank(0|[1-9]\d{0,3}))?\.(\w+)"
)
_ROUTED = re.compile(r"(.*\bexperts)\.\w")
WHOLE = -1  # in place of a rank: the projection is not rank-sliced

# (expert, the checkpoint's word for the projection, rank or WHOLE) -> part -> tensor
Groups = dict[tuple[int, str, int], dict[str, Tensor]]


@dataclass(slots=True)
class Bank:
    """What is stored under one `....experts`: one tensor set per expert, or anything else."""

    groups: Groups = field(default_factory=dict)
    fused: list[Tensor] = field(default_factory=list)

    @property
    def is_exl3(self) -> bool:
        return any(not PARTS.isdisjoint(parts) for parts in self.groups.values())

    def tensors(self) -> Iterable[Tensor]:
        yield from self.fused
        for parts in self.groups.values():
            yield from parts.values()


def take_experts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Bank], dict[str, Tensor]]:
    """Split into routed experts, by prefix, and the rest. Shared experts are in the rest."""
    banks: dict[str, Bank] = {}
    rest: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _ONE_EXPERT.fullmatch(name)
        if match:
            prefix, expert, word, rank, part = match.groups()
            bank = banks.get(prefix)
            if bank is None:
                bank = banks[prefix] = Bank()
            key = (int(expert), word, WHOLE if rank is None else int(rank))
            parts = bank.groups.get(key)
            if parts is None:
                parts = bank.groups[key] = {}
            parts[part] = tensor
        elif match := _ROUTED.match(name):
            banks.setdefault(match[1], Bank()).fused.append(tensor)
        else:
            rest[name] = tensor
    return banks, rest


class LayerReader:
    """Makes MoeLayers; equal experts share one ExpertShape."""

    def __init__(self, architecture: Architecture, linears: Linears) -> None:
        self._architecture = architecture
        self._linears = linears
        self._experts: dict[tuple[int, ...], ExpertShape] = {}
        self.ranks: set[int] = set()  # tensor-parallel degrees met; 1 is not sliced

    def read(self, prefix: str, bank: Bank) -> MoeLayer:
        """One MoE layer. Raises CheckpointError for anything missing, extra or inconsistent."""
        a = self._architecture
        layer, draft = layer_of(prefix + ".", a.hidden_layers)
        if layer is None:
            raise CheckpointError(f"{prefix} holds EXL3 experts but names no layer")
        if bank.fused:
            raise CheckpointError(f"{prefix} has experts one by one and also {bank.fused[0].name}")
        by_expert = self._projections(prefix, bank.groups)
        check_expert_ids(prefix, by_expert.keys(), a.draft_experts if draft else a.experts)
        words = _words(prefix, by_expert[0].keys())
        experts = []
        for expert in range(len(by_expert)):
            projections = by_expert[expert]
            if projections.keys() != set(words):
                raise _odd_expert(prefix, expert, words, projections.keys())
            experts.append(self._expert(f"{prefix}.{expert}", [projections[w] for w in words]))
        _check_codebooks(prefix, words, experts)
        top_k = a.draft_top_k if draft else a.top_k
        return MoeLayer(layer, prefix, words, tuple(experts), top_k, draft)

    def _projections(self, prefix: str, groups: Groups) -> dict[int, dict[str, ProjectionShape]]:
        by_expert: dict[int, dict[str, ProjectionShape]] = {}
        slices: dict[tuple[int, str], dict[int, ProjectionShape]] = {}
        for (expert, word, rank), parts in groups.items():
            shape = self._linears.read(f"{prefix}.{expert}.{word}", parts)
            if rank == WHOLE:
                by_expert.setdefault(expert, {})[word] = shape
                self.ranks.add(1)
            else:
                slices.setdefault((expert, word), {})[rank] = shape
        for (expert, word), by_rank in slices.items():
            key = f"{prefix}.{expert}.{word}"
            projections = by_expert.setdefault(expert, {})
            if word in projections:
                raise CheckpointError(f"{key} is stored whole and also sliced by rank")
            projections[word] = self._linears.shared(_join(key, _ROLE_OF.get(word), by_rank))
            self.ranks.add(len(by_rank))
        return by_expert

    def _expert(self, key: str, projections: list[ProjectionShape]) -> ExpertShape:
        # The shapes are shared, so their ids are a key; hashing 46,080 of them by value is slow.
        ids = tuple(map(id, projections))
        expert = self._experts.get(ids)
        if expert is None:
            expert = self._experts[ids] = ExpertShape(*projections)
            self._check_sizes(key, expert)
        return expert

    def _check_sizes(self, key: str, expert: ExpertShape) -> None:
        hidden, inner = self._architecture.hidden_size, self._architecture.intermediate_size
        for word, shape, k, n in (
            ("gate", expert.gate, hidden, inner),
            ("up", expert.up, hidden, inner),
            ("down", expert.down, inner, hidden),
        ):
            if (shape.k, shape.n) != (k, n):
                raise CheckpointError(
                    f"{key}: the {word} projection is {shape.k} x {shape.n} by its trellis, "
                    f"and {k} x {n} by config.json"
                )


def check_expert_ids(prefix: str, ids: Iterable[int], count: int) -> None:
    """The experts must be 0 .. count-1, `count` from config.json."""
    have = set(ids)
    missing = sorted(set(range(count)) - have)
    if missing:
        raise CheckpointError(
            f"{prefix} has {len(have)} experts, config.json says {count}: "
            f"expert {missing[0]} is missing"
            + (f" and {len(missing) - 1} more" * (len(missing) > 1))
        )
    if len(have) > count:
        raise CheckpointError(
            f"{prefix} has {len(have)} experts, up to number {max(have)}; config.json says {count}"
        )


def _words(prefix: str, words: Iterable[str]) -> tuple[str, str, str]:
    """The checkpoint's own words for gate, up and down, from its first expert."""
    found: dict[str, str] = {}
    for word in words:
        role = _ROLE_OF.get(word)
        if role is None or role in found:
            raise CheckpointError(
                f"{prefix}.0 has the projection {word}; gate, up and down are expected, once each"
            )
        found[role] = word
    for role, names in _PROJECTIONS.items():
        if role not in found:
            raise CheckpointError(f"{prefix}.0 has no {role} projection ({' or '.join(names)})")
    return found["gate"], found["up"], found["down"]


def _odd_expert(
    prefix: str, expert: int, words: Iterable[str], have: Iterable[str]
) -> CheckpointError:
    missing, extra = sorted(set(words) - set(have)), sorted(set(have) - set(words))
    what = f"no {missing[0]}" if missing else f"also {extra[0]}"
    return CheckpointError(f"{prefix}.{expert} has {what}, unlike expert 0")


def _join(key: str, role: str | None, by_rank: dict[int, ProjectionShape]) -> ProjectionShape:
    """The whole projection of a rank-sliced one: gate and up are cut along n, down along k."""
    if by_rank.keys() != set(range(len(by_rank))):
        raise CheckpointError(
            f"{key} has the slices of ranks {sorted(by_rank)}; {len(by_rank)} slices are numbered "
            f"0 to {len(by_rank) - 1}"
        )
    first = by_rank[0]
    if any(replace(s, stored_bytes=None) != replace(first, stored_bytes=None)
           for s in by_rank.values()):  # fmt: skip
        raise CheckpointError(f"{key} is cut into unequal slices")
    ranks = len(by_rank)
    cut_k, cut_n = (ranks, 1) if role == "down" else (1, ranks)
    whole = replace(first, k=first.k * cut_k, n=first.n * cut_n, stored_bytes=None)
    stored = sum(s.size_bytes for s in by_rank.values())
    return whole if whole.size_bytes == stored else replace(whole, stored_bytes=stored)


def _check_codebooks(prefix: str, words: Iterable[str], experts: list[ExpertShape]) -> None:
    for i, word in enumerate(words):
        books = [expert.projections[i].codebook for expert in experts]
        (usual, _), *others = Counter(books).most_common()
        if others:
            odd = next(e for e, book in enumerate(books) if book != usual)
            raise CheckpointError(
                f"{prefix}.{odd}.{word} has {_marker(books[odd])}; most experts of this layer have "
                f"{_marker(usual)}"
            )


def _marker(codebook: str) -> str:
    return "no codebook marker" if codebook == "3inst" else f"the codebook marker {codebook}"
