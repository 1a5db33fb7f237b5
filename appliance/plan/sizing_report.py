"""The answer of `appliance size` in words: the decision path in its order, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.checkpoint.model import Checkpoint
from appliance.errors import UnsupportedError
from appliance.plan.budget import GIB, ON_HOST, RESIDENT, SLOTS
from appliance.plan.hardware import gpu_model, host_model
from appliance.plan.model import Plan
from appliance.plan.routing import Heat
from appliance.plan.sizing import (
    HEADROOM,
    Answer,
    Ask,
    Load,
    answer,
    answer_here,
    changes,
    people,
)
from preflight.counted import counted
from preflight.host import Host

# Of one kind of change the first that helps is enough.
_MOST_OPTIONS = 4


def size_lines(checkpoint: Checkpoint, ask: Ask, heat: Heat | None = None) -> list[str]:
    """Yes or no, what binds first, the smallest changes that help, and the numbers on the way."""
    found = answer(checkpoint, ask, heat)
    lines = [_title(ask), _activation(checkpoint)]
    if found.plan is None:
        lines.append(f"2. memory     {found.refusal}")
    else:
        lines += _memory(found.plan)
        lines.append(_streams(found))
        said = found.plan.forecast.assumptions if found.plan.forecast else ()
        lines += [f"assumes       {text}" for text in said]
    lines.append(f"answer        {_verdict(found)}")
    return lines + _options(checkpoint, found, heat)


def lines_here(checkpoint: Checkpoint, host: Host, load: Load) -> list[str]:
    """The same for this machine, and without what another one would give."""
    found = answer_here(checkpoint, host, load)
    lines = [_activation(checkpoint)]
    if found.plan is None:
        lines.append(f"2. memory     {found.refusal}")
    else:
        lines += [*_memory(found.plan), _streams(found)]
    # Here the cards are what they are: what this release cannot serve is no question of the split.
    foreign = isinstance(found.refusal, UnsupportedError)
    verdict = "no: not with this release" if foreign else _verdict(found)
    return [*lines, f"answer        {verdict}"]


def compare_lines(
    checkpoint: Checkpoint, asks: Sequence[Ask], heat: Heat | None = None
) -> list[str]:
    """Options side by side, a row each."""
    titles = _titles(asks)
    wide = max(map(len, titles)) + 2
    lines = [f"{'option':<{wide}}{'answer':<6}{'on host':>8}{'host GiB':>10}{'tokens/s':>10}"
             f"{'people':>8}  binds"]  # fmt: skip
    for ask, title in zip(asks, titles, strict=True):
        found = answer(checkpoint, ask, heat)
        if found.plan is None:
            lines.append(
                f"{title:<{wide}}{'no':<6}{'-':>8}{'-':>10}{'-':>10}{'-':>8}  {_binds(found)}"
            )
            continue
        share = _on_host(found.plan)
        host = sum(rank.total_bytes("host") for rank in found.plan.ranks) / GIB
        said = "-" if found.speed is None else f"{found.speed.likely:.0f}"
        lines.append(
            f"{title:<{wide}}{'yes' if found.yes else 'no':<6}{share:>8.1%}{host:>10.1f}{said:>10}"
            f"{people(ask.users):>8}  {_binds(found)}"
        )
    return lines


def _titles(asks: Sequence[Ask]) -> list[str]:
    """Cards and memory of each, and what else differs between them."""
    titles = []
    for ask in asks:
        title = f"{ask.count} x {gpu_model(ask.gpu).title}, {ask.host_bytes / GIB:,.0f} GiB"
        if len({other.users for other in asks}) > 1:
            title += f", {counted(ask.users, 'user')}"
        if len({other.context_tokens for other in asks}) > 1:
            title += f", {_short(ask.context_tokens)}"
        titles.append(title)
    return titles


def _short(tokens: int | None) -> str:
    if tokens is None:
        return "all context"
    return f"{tokens:,} tokens" if tokens % 1024 else f"{tokens >> 10}K tokens"


def _title(ask: Ask) -> str:
    card, box = gpu_model(ask.gpu), host_model(ask.host)
    context = "the model's context" if ask.context_tokens is None else (
        f"{ask.context_tokens:,} tokens of context")  # fmt: skip
    return (
        f"{ask.count} x {card.title} ({card.memory_bytes / GIB:.1f} GiB, {card.source}) in "
        f"{box.title} ({box.source}), {ask.host_bytes / GIB:,.0f} GiB, "
        f"{counted(ask.users, 'user')} at once, {context}"
    )


def _activation(checkpoint: Checkpoint) -> str:
    layers = checkpoint.target_layers
    if not layers:
        return "1. activation this model has no routed experts"
    experts, top_k = len(layers[0].experts), layers[0].top_k
    routed = sum(layer.size_bytes for layer in layers)
    return (
        f"1. activation a token uses {top_k} of {experts} experts a layer ({top_k / experts:.1%}): "
        f"of {routed / GIB:.1f} GiB of experts in {counted(len(layers), 'layer')} it reads "
        f"{routed * top_k / experts / GIB:.2f} GiB"
    )


def _memory(made: Plan) -> list[str]:
    host = sum(rank.total_bytes("host") for rank in made.ranks)
    rate = made.ranks[0].link_bytes_per_second
    milliseconds = made.predictions[0].link_ms_per_step if made.predictions else None
    link = "unknown" if rate is None or milliseconds is None else (
        f"{rate / 1e9:.0f} GB/s, {milliseconds:.1f} ms a step of one row")  # fmt: skip
    # Without a GPU that is RAM, too.
    where = "on each card" if made.ranks[0].device == "cuda" else "of RAM as each rank's device"
    return [
        f"2. memory     {_on_host(made):.1%} of the experts wait in host memory: {host / GIB:.1f} "
        f"GiB over {counted(len(made.ranks), 'rank')} with tables, load and reserve; "
        f"{made.ranks[0].total_bytes('device') / GIB:.1f} GiB {where}",
        f"              link: {link}",
    ]


def _streams(found: Answer) -> str:
    ask, step, speed = found.ask, found.step, found.speed
    if step is None or speed is None:
        return f"3. streams    nobody has measured {counted(ask.users, 'stream')} on this card"
    return (
        f"3. streams    {step.streams} at {speed.likely:.0f} tokens/s each "
        f"({speed.low:.0f} to {speed.high:.0f}); target {ask.target:.0f} with {HEADROOM:.0%} "
        f"headroom; seats {counted(people(ask.users), 'person', 'people')}"
    )


def _verdict(found: Answer) -> str:
    if found.yes:
        return "yes"
    if found.plan is None:
        return f"no: {_binds(found)} binds first"
    if found.fast_enough is None:
        return "it fits; how fast is unknown"
    return f"it fits, and is too slow: {_binds(found)} binds first"


def _binds(found: Answer) -> str:
    """Memory where it does not fit, else what takes most of a step."""
    if found.plan is None:
        if isinstance(found.refusal, UnsupportedError):
            return "the split over cards"
        text = str(found.refusal)
        return "host memory" if "of host memory" in text or "memory node" in text else "card memory"
    step = found.step
    if step is None or not (step.compute_ms and step.waiting_ms and step.topology_ms):
        return "unknown"
    parts = {"the card": step.compute_ms.likely, "the link": step.waiting_ms.likely,
             "cards far apart": step.topology_ms.likely}  # fmt: skip
    return max(parts, key=lambda name: parts[name])


def _options(checkpoint: Checkpoint, found: Answer, heat: Heat | None) -> list[str]:
    """The smallest change of each kind that turns no into yes, or makes a yes faster."""
    before = found.speed.likely if found.speed else 0.0
    lines: list[str] = []
    kinds: set[str] = set()
    assert isinstance(found.ask, Ask)
    for words, model, ask in changes(checkpoint, found.ask, heat):
        kind = words.split(" ", 1)[1] if words[0].isdigit() else words[:10]
        if kind in kinds or len(lines) == _MOST_OPTIONS:
            continue
        other = answer(model, ask, heat)
        if other.plan is None or (found.plan is not None and not other.speed):
            continue
        after = other.speed.likely if other.speed else 0.0
        if found.plan is None or after > 1.02 * before:
            kinds.add(kind)
            gain = f"{before:.0f} -> {after:.0f} tokens/s each" if before else (
                f"fits, {after:.0f} tokens/s each" if after else "fits")  # fmt: skip
            lines.append(f"option        {words}: {gain}{', enough' if other.yes else ''}")
    return lines or ["option        no single change helps"]


def _on_host(made: Plan) -> float:
    """Share of the experts' bytes that live on the host."""
    lines = [line for rank in made.ranks for line in rank.ledger]
    size = {part: sum(line.size_bytes for line in lines if line.part == part)
            for part in (ON_HOST, RESIDENT, SLOTS)}  # fmt: skip
    return (size[ON_HOST] - size[SLOTS]) / (size[ON_HOST] + size[RESIDENT])
