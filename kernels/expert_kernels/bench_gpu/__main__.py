"""The kernels against this machine's own ceilings: `python -m expert_kernels.bench_gpu`.

A script for each claim; each says first what is predicted, then one JSON line a measurement, with
its ratio to a ceiling measured in the same run. Times are medians of `--repeats` replays of a CUDA
graph, on events; a graph holds several calls over different experts, so that weights in device
memory do not come from the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from expert_kernels import launch
from expert_kernels.bench_gpu import (
    dense_matrices,
    device_experts,
    host_experts,
    lookup_rows,
    mixed_layers,
    prefill_layer,
    trace,
    tuning,
    write_through,
)
from expert_kernels.bench_gpu.timing import Claim, Printer, machine, parser

CLAIMS: dict[str, Claim] = {
    "host_experts": host_experts.measure,
    "device_experts": device_experts.measure,
    "mixed_layers": mixed_layers.measure,
    "dense_matrices": dense_matrices.measure,
    "prefill_layer": prefill_layer.measure,
    "write_through": write_through.measure,
    "lookup_rows": lookup_rows.measure,
    "trace": trace.measure,
    "tuning": tuning.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("expert_kernels.bench_gpu", __doc__)
    made.add_argument("--only", nargs="+", choices=CLAIMS, help="claims to measure")
    made.add_argument("--seconds", type=float, default=150.0, help="start no claim after this")
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="of launch.py")
    a = made.parse_args(argv)
    for name, _, number in (given.partition("=") for given in a.set):
        if not isinstance(getattr(launch, name, None), int | float):
            made.error(f"launch.py has no number {name!r}")
        setattr(launch, name, float(number) if "." in number else int(number))
    printer, fine = Printer(a.out), True
    printer.say({**machine(), "set": a.set})
    for name, claim in CLAIMS.items():
        if a.only and name not in a.only:
            continue
        if printer.seconds > a.seconds:
            printer.say({"claim": name, "skipped": f"{a.seconds:g} s are over"})
            continue
        fine = printer.measure(name, claim, a.repeats) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
