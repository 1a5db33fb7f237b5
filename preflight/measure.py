"""`--measure`: what this machine really does, in under 60 s, in a child that may be killed.

    python -m preflight.measure --json [--model DIR] [--pin BYTES] [--python PATH]

prints a Measured as JSON. Steps that cannot run say why in `unmeasured`; the others go on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from preflight.answers import Unreadable
from preflight.host import Host, Measured, Unread
from preflight.inspect import inspect
from preflight.measuring.allreduce import SECONDS as ALL_REDUCE_SECONDS
from preflight.measuring.allreduce import all_reduce
from preflight.measuring.cuda import Cuda
from preflight.measuring.disk import largest_file, read_rate
from preflight.measuring.pins import pin_rates, pin_trial
from preflight.measuring.rates import link_rates, rates_together
from preflight.needs import CHUNK_BYTES
from preflight.source import Live, run_for

SECONDS = 60.0
# What the child leaves of its time, so that it ends by itself.
SPARE_SECONDS = 6.0
LEAST_SECONDS = 3.0
TRIAL_SECONDS = 20.0
ALL_REDUCE_PORT = 29417


class Wish(NamedTuple):
    """What to measure beside the links: the model's folder, bytes to pin, the engine's Python."""

    model: Path | None = None
    pin_bytes: int | None = None
    python: str = sys.executable


def measure(wish: Wish, seconds: float = SECONDS) -> Measured:
    """Measure in a child process, ended after `seconds`: a driver that hangs is a finding."""
    argv = [sys.executable, "-m", "preflight.measure", "--json", "--python", wish.python,
            "--seconds", str(seconds - SPARE_SECONDS)]  # fmt: skip
    if wish.model:
        argv += ["--model", str(wish.model)]
    if wish.pin_bytes is not None:
        argv += ["--pin", str(wish.pin_bytes)]
    try:
        ran = run_for(argv, seconds)
    except TimeoutError:
        reason = f"no answer within {seconds:.0f} s: the driver or the host hangs"
        return Measured(unmeasured=(Unread(what="measuring", reason=reason),))
    except Unreadable as error:
        return Measured(unmeasured=(Unread(what="measuring", reason=error.reason),))
    start = ran.out.find("{")
    try:
        return Measured.model_validate_json(ran.out[start : ran.out.rfind("}") + 1])
    except ValueError:
        lines = ran.out.strip().splitlines() or [f"exit code {ran.code}"]
        return Measured(unmeasured=(Unread(what="measuring", reason=lines[-1][:200]),))


def measure_here(wish: Wish, seconds: float = SECONDS) -> Measured:
    """Measure in this process: every step on its own, each with its reason where it fails.

    A step that no time is left for is left out with that reason.
    """
    end = time.monotonic() + seconds
    source = Live()
    host = inspect(source, {})
    facts: dict[str, Any] = {}
    missed: list[Unread] = []

    def step(what: str, work: Callable[[float], dict[str, Any]]) -> None:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            missed.append(Unread(what=what, reason=f"no time left of {seconds:.0f} s"))
            return
        try:
            facts.update(work(left))
        except (Unreadable, OSError, ValueError) as error:
            missed.append(Unread(what=what, reason=str(error)))

    if not host.gpus:
        missed.append(Unread(what="links and pins", reason="there is no GPU to measure"))
    else:
        facts["links"], lost = link_rates(source, host)
        facts["links_all_at_once"], lost_together = rates_together(host)
        missed += [*lost, *lost_together]
    if wish.model is not None:
        step("disk", lambda left: _disk(wish.model))
    if len(host.gpus or ()) > 1:
        step("all-reduce", lambda left: {"all_reduce": _all_reduce(wish, left / 2)})
    if host.gpus:
        step("pins", lambda left: _pins(source, host, wish, missed, left - 1))
    return Measured(**facts, unmeasured=tuple(missed))


def _pins(
    source: Live, host: Host, wish: Wish, missed: list[Unread], left: float
) -> dict[str, Any]:
    cuda = Cuda(0)
    try:
        rates, lost = pin_rates(host, cuda)
        missed += lost
        facts: dict[str, Any] = {"pins": rates}
        if wish.pin_bytes is not None:
            tried = pin_trial(source, host, cuda, wish.pin_bytes, CHUNK_BYTES,
                              min(TRIAL_SECONDS, left))  # fmt: skip
            facts |= {
                "trial_asked_bytes": tried.asked_bytes,
                "trial_registered_bytes": tried.registered_bytes,
                "trial_stopped": tried.stopped,
            }
        return facts
    finally:
        cuda.close()


def _disk(folder: Path | None) -> dict[str, Any]:
    path = largest_file(folder) if folder else None
    if path is None:
        raise ValueError(f"{folder} holds no file to read")
    return {"disk_read_bytes_per_second": round(read_rate(path))}


def _all_reduce(wish: Wish, left: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        port = ALL_REDUCE_PORT + int(time.time()) % 1000
        return all_reduce(wish.python, port, folder, min(ALL_REDUCE_SECONDS, left))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m preflight.measure")
    parser.add_argument("--json", action="store_true", help="print JSON (the only form there is)")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pin", type=int)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args(argv)
    found = measure_here(Wish(given.model, given.pin, given.python), given.seconds)
    sys.stdout.write(found.model_dump_json(indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
