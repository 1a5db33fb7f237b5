"""A plan as one HTML page that needs nothing else: expert map, ledger and predictions as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from appliance.plan.budget import GIB
from appliance.plan.explain import show_lines
from appliance.plan.model import Home, LayerPlacement, Plan, RankPlan
from appliance.plan.routing import Heat

CELL, GAP = 3, 1
HOMES = {"device": "#2f6f4f", "slot": "#d9a441", "host": "#9fb4c7"}
INK, FAINT = "#1d2428", "#dde3e8"
WIDTH = 1160
_PALETTE = ("#2f6f4f", "#d9a441", "#3f6fa0", "#8d5a97", "#b5533c", "#5f8f8b", "#8a8f3c", "#9fb4c7")
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;color:#1d2428;max-width:1200px;margin:2em auto;"
    "padding:0 1em}h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}svg{display:block;"
    "max-width:100%;height:auto}pre{white-space:pre-wrap;background:#f4f6f8;padding:1em}"
    "text{font:11px system-ui,sans-serif;fill:#1d2428}.key span{margin-right:1.5em}"
)


def page(plan: Plan, heat: Heat | None = None) -> str:
    """HTML with the layer x expert map (resident, slot, host; heat beneath where it is given), the
    ledger as bars and the speed by streams. No script, no link, no font from elsewhere."""
    body = [
        f"<h1>{escape(plan.model.family)}: {plan.model.layers} layers of {plan.model.experts} "
        f"experts on {len(plan.ranks)} rank{'s' if len(plan.ranks) > 1 else ''}</h1>",
        f"<pre>{escape(chr(10).join(show_lines(plan)))}</pre>",
        "<h2>Where the experts live</h2>",
        _key({"on the device": HOMES["device"], "in a cache slot, copy on the host": HOMES["slot"],
              "on the host": HOMES["host"]}),
        *(_map(rank, heat) for rank in _distinct(plan.ranks)),
        "<h2>Memory of each device</h2>",
        *(_bars(rank, "device", rank.device_capacity_bytes) for rank in plan.ranks),
        "<h2>Host memory of each rank</h2>",
        *(_bars(rank, "host", None) for rank in plan.ranks),
        *_curves(plan),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Plan of {escape(plan.model.family)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _distinct(ranks: Sequence[RankPlan]) -> list[RankPlan]:
    """Ranks that hold slices of the same experts in the same homes have one map."""
    seen: list[RankPlan] = []
    for rank in ranks:
        if all(rank.layers != other.layers for other in seen):
            seen.append(rank)
    return seen


def _map(rank: RankPlan, heat: Heat | None) -> str:
    width = 1 + max((max(p.device_experts | p.host_experts, default=0) for p in rank.layers),
                    default=0)  # fmt: skip
    high = CELL * 2 + GAP if heat else CELL
    parts = [
        _row(place, index * (high + GAP * 2), heat, high) for index, place in enumerate(rank.layers)
    ]
    left, bottom = 40, len(rank.layers) * (high + GAP * 2)
    labels = "".join(
        f'<text x="0" y="{i * (high + GAP * 2) + 9}">{place.layer}</text>'
        for i, place in enumerate(rank.layers)
        if i % 4 == 0
    )
    return (
        f'<svg role="img" aria-label="Homes of the experts of rank {rank.rank}, one row a layer" '
        f'viewBox="0 0 {left + width * CELL} {bottom + 14}" width="{left + width * CELL}">'
        f'<g transform="translate({left},0)">{"".join(parts)}</g>{labels}'
        f'<text x="{left}" y="{bottom + 12}">expert 0 to {width - 1}, rank {rank.rank}</text></svg>'
    )


def _row(place: LayerPlacement, top: int, heat: Heat | None, high: int) -> str:
    """Runs of one home are one rectangle; heat lies beneath, darker for more picks."""
    slots = place.slot_experts
    homes = dict.fromkeys(place.host_experts, "host") | dict.fromkeys(
        place.device_experts, "device"
    )
    homes |= dict.fromkeys(slots, "slot")
    out = [
        f'<rect x="{start * CELL}" y="{top}" width="{(stop - start) * CELL}" height="{CELL + 1}" '
        f'fill="{HOMES[home]}"/>'
        for start, stop, home in _runs(homes)
    ]
    row = heat.of(place.layer) if heat else None
    if row:
        steps = {e: f"{min(1.0, (c / max(row)) ** 0.5):.1f}" for e, c in enumerate(row)}
        out += [
            f'<rect x="{start * CELL}" y="{top + CELL + 2}" width="{(stop - start) * CELL}" '
            f'height="{CELL}" fill="{INK}" fill-opacity="{depth}"/>'
            for start, stop, depth in _runs(steps)
            if depth != "0.0"
        ]
    return "".join(out)


def _runs(values: dict[int, str]) -> Iterator[tuple[int, int, str]]:
    """(first, after the last, value) of neighbours that are equal."""
    ids = sorted(values)
    cuts = [n for n in range(1, len(ids))
            if ids[n] != ids[n - 1] + 1 or values[ids[n]] != values[ids[n - 1]]]  # fmt: skip
    for first, after in pairwise([0, *cuts, len(ids)]):
        if first < after:
            yield ids[first], ids[after - 1] + 1, values[ids[first]]


def _bars(rank: RankPlan, home: Home, capacity: int | None) -> str:
    lines = sorted((i for i in rank.ledger if i.home == home and i.size_bytes),
                   key=lambda i: -i.size_bytes)  # fmt: skip
    total = sum(i.size_bytes for i in lines)
    scale = WIDTH / max(capacity or 0, total, 1)
    x, rects, key = 0.0, [], {}
    for number, line in enumerate(lines):
        colour = _PALETTE[min(number, len(_PALETTE) - 1)]
        width = line.size_bytes * scale
        title = f"{line.part}: {line.size_bytes:,} B, {line.size_bytes / GIB:.2f} GiB"
        rects.append(f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="28" fill="{colour}">'
                     f"<title>{escape(title)}</title></rect>")  # fmt: skip
        if number < len(_PALETTE):
            last = number == len(_PALETTE) - 1 and len(lines) > len(_PALETTE)
            size = sum(i.size_bytes for i in lines[number:]) if last else line.size_bytes
            key[f"{'the rest' if last else line.part} {size / GIB:.2f} GiB"] = colour
        x += width
    of = f" of {capacity / GIB:.2f} GiB" if capacity else ""
    return (
        f"<p>rank {rank.rank}: {total / GIB:.2f} GiB{of}</p>"
        f'<svg role="img" aria-label="{home} memory of rank {rank.rank}" viewBox="0 0 {WIDTH} 28" '
        f'width="{WIDTH}"><rect width="{WIDTH}" height="28" fill="{FAINT}"/>{"".join(rects)}</svg>'
        f"{_key(key)}"
    )


def _curves(plan: Plan) -> Iterator[str]:
    """Speed of each stream by number of streams, with its range."""
    points = [(p.streams, p.tokens_per_second) for p in plan.predictions if p.tokens_per_second]
    if not points:
        return
    yield "<h2>Tokens a second of each stream</h2>"
    top = max(speed.high for _, speed in points)
    most = max(streams for streams, _ in points)
    place = [
        (40 + 520 * n / most, *(200 - 180 * v / top for v in (s.low, s.likely, s.high)))
        for n, s in points
    ]
    band = " ".join(f"{x:.0f},{h:.0f}" for x, _, _, h in place)
    band += " " + " ".join(f"{x:.0f},{low:.0f}" for x, low, _, _ in reversed(place))
    line = " ".join(f"{x:.0f},{y:.0f}" for x, _, y, _ in place)
    marks = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="{INK}"/>'
        f'<text x="{x + 5:.0f}" y="{y - 6:.0f}">{speed.likely:.0f}</text>'
        f'<text x="{x - 3:.0f}" y="216">{n}</text>'
        for (x, _, y, _), (n, speed) in zip(place, points, strict=True)
    )
    yield (
        '<svg role="img" aria-label="Tokens a second by streams" viewBox="0 0 620 240" width="620">'
        f'<line x1="40" y1="200" x2="600" y2="200" stroke="{INK}"/>'
        f'<polygon points="{band}" fill="{HOMES["host"]}" fill-opacity="0.4"/>'
        f'<polyline points="{line}" fill="none" stroke="{HOMES["device"]}" stroke-width="2"/>'
        f'{marks}<text x="280" y="234">streams</text></svg>'
    )


def _key(colours: dict[str, str]) -> str:
    spans = "".join(
        f'<span><svg width="12" height="12" style="display:inline"><rect width="12" height="12" '
        f'fill="{colour}"/></svg> {escape(words)}</span>'
        for words, colour in colours.items()
    )
    return f'<p class="key">{spans}</p>'
