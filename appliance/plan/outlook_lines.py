"""Predictions in words, with their ranges."""

from __future__ import annotations

from appliance.plan.outlook import Forecast, Range, StreamPrediction
from preflight.counted import counted


def step_line(step: StreamPrediction) -> str:
    """One number of streams: what waits on the host, and the milliseconds by cause."""
    link = "rate unknown" if step.link_ms_per_step is None else f"{step.link_ms_per_step:.1f} ms"
    line = (
        f"{counted(step.streams, 'stream')}  {step.cold_share:.1%} of picks on the host, "
        f"{step.link_bytes_per_step / 1e6:,.0f} MB over the link a step ({link})"
    )
    speed, compute, waiting = step.tokens_per_second, step.compute_ms, step.waiting_ms
    if speed is None or compute is None or waiting is None:
        return line
    lost = step.topology_ms.likely if step.topology_ms else 0.0
    far = f" + {lost:.1f} far cards" if lost else ""
    return (
        f"{line}; {speed.likely:.0f} ({speed.low:.0f} to {speed.high:.0f}) tokens/s each: "
        f"{compute.likely:.1f} ms compute + {waiting.likely:.1f} host reads{far}"
    )


def forecast_lines(forecast: Forecast) -> list[str]:
    """First reads, loading, and the assumptions that move the numbers most."""
    lines = [
        f"first read of {p.tokens:,} tokens  {_span(p.seconds)} s; meanwhile others decode at "
        f"{_span(p.others_tokens_per_second)} tokens/s"
        for p in forecast.prefill
    ]
    if forecast.load_seconds is not None:
        lines.append(f"loading  {_span(forecast.load_seconds)} s")
    cold = forecast.cold
    if cold is not None and cold.held_out_settled is not None:
        share = f"{cold.held_out_settled:.1%}"
        lines.append(f"slots    once they have followed a topic that was left out, {share} of its "
                     "picks are on the host")  # fmt: skip
    return lines + [f"assumes: {text}" for text in forecast.assumptions]


def _span(value: Range) -> str:
    return f"{value.likely:.3g} ({value.low:.3g} to {value.high:.3g})"
