"""Speed against streams: lines for a terminal, or SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from appliance.bench.table import Row
from preflight.counted import counted

CELLS = 48
WIDTH, HEIGHT, EDGE = 640, 360, 48


def plot_lines(rows: Sequence[Row], threshold: float) -> Iterator[str]:
    """A row for each number of streams: p5 `#` up to the median `-`; `|` is the threshold."""
    most = max([threshold, *(row.median for row in rows)])
    at = round(threshold / most * (CELLS - 1))
    for row in rows:
        p5, median = (round(value / most * CELLS) for value in (row.p5, row.median))
        bar = list(("#" * p5 + "-" * (median - p5)).ljust(CELLS))
        bar[at] = "|"
        yield f"{row.streams:>4} {''.join(bar)} p5 {row.p5:.1f}, median {row.median:.1f}"
    yield f"     | = {threshold:g} tokens per second and stream"


def plot_svg(rows: Sequence[Row], threshold: float) -> str:
    """Median and p5 over the number of streams, with the threshold, as one SVG document."""
    most = 1.05 * max([threshold, *(row.median for row in rows)])
    last = max(row.streams for row in rows)

    def x(streams: float) -> float:
        return EDGE + (WIDTH - 2 * EDGE) * streams / last

    def y(speed: float) -> float:
        return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * speed / most

    def line(values: Sequence[tuple[int, float]], color: str) -> str:
        points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in values)
        dots = "".join(
            f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="3" fill="{color}">'
            f"<title>{counted(n, 'stream')}: {v:.1f}</title></circle>"
            for n, v in values
        )
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>{dots}'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        line([(row.streams, row.median) for row in rows], "#888888"),
        line([(row.streams, row.p5) for row in rows], "#0b6e4f"),
        f'<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{y(threshold):.1f}" y2="{y(threshold):.1f}" '
        'stroke="#b00020" stroke-dasharray="6 4"/>',
        f'<text x="{WIDTH - EDGE}" y="{y(threshold) - 6:.1f}" text-anchor="end" fill="#b00020">'
        f"threshold {threshold:g}</text>",
        f'<text x="{EDGE}" y="{EDGE / 2}">tokens per second and stream: median (grey), p5 (green)'
        "</text>",
    ]
    parts += [
        f'<text x="{x(row.streams):.1f}" y="{HEIGHT - EDGE / 2}" text-anchor="middle">'
        f"{row.streams}</text>"
        for row in rows
    ]
    return "\n".join([*parts, "</svg>", ""])
