"""Tokens of a few kinds, and routers that know each kind: what they choose, rounding cannot change.

A drawn router leaves the k-th and the next expert nearly tied at every few hundredth token, and a
sum in another order swaps them. A trained router has made up its mind. So has this one: there are
as many kinds as experts, token t is of kind t mod experts, and its embedding is KIND times the
kind's own signs plus OWN times noise. In each layer, in an order of that layer's own, every kind
has its k experts, and every expert k kinds; its row of the router is the sum of their signs.

In units of a logit's own deviation a chosen expert is `lead(spec)` above the others on average.
Logits deviate by SPREAD, so weights of chosen experts differ by some e^0.5, and rounding to fp16
moves a logit by about a thousandth of its deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING

from appliance.checkpoint.synth import draw
from appliance.errors import UsageError

if TYPE_CHECKING:
    from appliance.checkpoint.synth.spec import SynthSpec

KIND, OWN = 2.0, 1.0
SPREAD = 0.5
CLEAR = 8.0  # deviations: of some thousand tokens the least lead is then about half of it
FAMILIES = ("qwen3_moe", "mixtral")  # a plain softmax: no groups, no bias that chooses

_NORMAL = tuple(NormalDist().inv_cdf((i + 0.5) / 128) for i in range(128))


def lead(hidden: int, layers: int, top_k: int) -> float:
    """How far a chosen expert's logit is above another's, in their deviations, in the last layer.

    A kind's signs are found in a row of top_k kinds, among what embedding, attention and experts
    (about 1 a layer each) add to the residual.
    """
    return math.sqrt(hidden / top_k) * KIND / math.sqrt(KIND**2 + OWN**2 + 2 * layers)


def check(spec: SynthSpec) -> None:
    """Raises UsageError where a router of this size cannot be sure."""
    if spec.family not in FAMILIES:
        raise UsageError(
            f"a decided router of a {spec.family} is not made",
            fix=f"family {' or '.join(FAMILIES)}, or router drawn",
        )
    found = lead(spec.hidden_size, spec.layers, spec.top_k)
    if found < CLEAR:
        needed = spec.hidden_size * (CLEAR / found) ** 2
        raise UsageError(
            f"hidden_size {spec.hidden_size} gives a router of {spec.layers} layers and top_k "
            f"{spec.top_k} a lead of {found:.1f} deviations; to be decided takes {CLEAR:g}",
            fix=f"hidden_size {math.ceil(needed / 128) * 128}, or router drawn",
        )


def embedding(spec: SynthSpec) -> draw.Draw:
    """bf16 [vocabulary, hidden]: of each token its kind's signs and noise of its own."""
    size = spec.hidden_size
    noise = int.from_bytes(b"\x7f" * size)
    values = [draw.bf16(sign * KIND + OWN * x) for sign in (-1, 1) for x in _NORMAL]

    def rows(random: Random) -> bytes:
        out = bytearray()
        for token in range(spec.vocab_size):
            own = int.from_bytes(random.randbytes(size)) & noise
            kind = _signs(spec.seed, token % spec.experts, size) << 7
            out += _chosen((own | kind).to_bytes(size), values)
        return bytes(out)

    return rows


def router(spec: SynthSpec) -> draw.Draw:
    """bf16 [experts, hidden]: of each expert the sum of its kinds' signs."""
    size, k = spec.hidden_size, spec.top_k
    scale = SPREAD / math.sqrt(k * size)
    values = [draw.bf16(scale * (2 * plus - k)) for plus in range(k + 1)]

    def rows(random: Random) -> bytes:
        kinds = random.sample(range(spec.experts), spec.experts)
        places = random.sample(range(spec.experts), spec.experts)
        out = bytearray()
        for place in places:
            mine = [kinds[(place + other) % spec.experts] for other in range(k)]
            plus = sum(_signs(spec.seed, kind, size) for kind in mine)
            out += _chosen(plus.to_bytes(size), values)
        return bytes(out)

    return rows


@cache
def _signs(seed: int, kind: int, size: int) -> int:
    """`size` bytes as one number, each 1 for plus or 0 for minus: such numbers add bytewise."""
    ones = int.from_bytes(b"\x01" * size)
    return int.from_bytes(Random(f"{seed}/kind {kind}").randbytes(size)) & ones


def _chosen(places: bytes, values: Sequence[bytes]) -> bytearray:
    """The two-byte value at each place."""
    table = [*values, *[bytes(2)] * (256 - len(values))]
    out = bytearray(2 * len(places))
    out[0::2] = places.translate(bytes(value[0] for value in table))
    out[1::2] = places.translate(bytes(value[1] for value in table))
    return out
