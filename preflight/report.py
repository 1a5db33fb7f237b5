"""check(host, needs) -> Report: what the checks found, worst first, for people and for machines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Literal, NamedTuple

from preflight.checks import CHECKS
from preflight.checks.check import FAIL, WARN, Check, Saw, Severity
from preflight.host import Facts, Host, Measured
from preflight.measured_lines import measured_lines, prometheus_lines
from preflight.needs import Needs

WIDTH = 100
ORDER: dict[Severity, int] = {"fail": 0, "warn": 1, "unknown": 2}
FINE, FAILED, WARNED = 0, 3, 4
Tone = Literal["fail", "warn", "unknown", "plain", "fine"]


class UnknownCheck(ValueError):
    """--ignore names no check; the message suggests the nearest id."""


class Finding(Facts):
    """One thing that is wrong, or that could not be looked at (severity unknown)."""

    check: str
    area: str
    severity: Severity
    saw: str
    threshold: str
    source: str
    fix: str | None = None
    ignored: bool = False


class Line(NamedTuple):
    """One line of the text report, and how to colour it."""

    text: str
    tone: Tone = "plain"


class Report(Facts):
    """All findings, worst first, then in the order of CHECKS."""

    schema_version: Literal[1] = 1
    label: str | None = None
    findings: tuple[Finding, ...] = ()
    checks_run: int = 0
    # What --measure saw; None where nothing was measured.
    measured: Measured | None = None

    @property
    def failures(self) -> tuple[Finding, ...]:
        return self._of("fail")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return self._of("warn")

    @property
    def unknowns(self) -> tuple[Finding, ...]:
        return self._of("unknown")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == severity)

    def exit_code(self, *, strict: bool = False) -> int:
        """0 fine, 3 a check failed, 4 only warnings (3 with strict).

        What could not be seen fails nothing by itself; it is always shown and counted.
        """
        if self.failures:
            return FAILED
        if self.warnings:
            return FAILED if strict else WARNED
        return FINE

    @property
    def verdict(self) -> str:
        """One line: may this machine serve, and how many things stand in the way."""
        unseen = len(self.unknowns)
        tail = f"; {_count(unseen, 'fact')} could not be seen" if unseen else ""
        if self.failures:
            also = f" and {_count(len(self.warnings), 'warning')}" if self.warnings else ""
            return f"Not ready: {_count(len(self.failures), 'check')} failed{also}{tail}."
        if self.warnings:
            return f"Ready, with {_count(len(self.warnings), 'warning')}{tail}."
        return f"Ready: nothing wrong in {self.checks_run} checks{tail}."

    def lines(self, width: int = WIDTH) -> Iterator[Line]:
        """The report for people: a verdict, then a block per finding, then what was not seen."""
        tone: Tone = "fail" if self.failures else "warn" if self.warnings else "fine"
        yield from (Line(text, tone) for text in _wrapped(self.verdict, "", width))
        if self.label:
            yield from (Line(text) for text in _wrapped(f"machine: {self.label}", "", width))
        for finding in self.failures + self.warnings:
            yield Line("")
            yield from _block(finding, width)
        if self.unknowns:
            yield Line("")
            yield Line("Could not be seen:", "unknown")
            for finding in self.unknowns:
                text = f"{finding.area}: {finding.saw} ({finding.check})"
                yield from (Line(t, "unknown") for t in _wrapped(text, "  ", width))
        if self.measured is not None:
            yield from (Line(""), Line("Measured:"))
            for text in measured_lines(self.measured):
                yield from (Line(t) for t in _wrapped(text, "  ", width))

    def text(self, width: int = WIDTH) -> str:
        return "\n".join(line.text for line in self.lines(width)) + "\n"

    def to_json(self) -> str:
        """The report as JSON; docs/schema/preflight-report.json describes it."""
        return self.model_dump_json(indent=1) + "\n"


def check(host: Host, needs: Needs | None = None, ignore: Collection[str] = ()) -> Report:
    """Run every check over the facts. `ignore`: ids whose failure becomes a warning that shows.

    Raises UnknownCheck where `ignore` names no check.
    """
    _refuse_unknown(ignore)
    wanted = needs or Needs()
    found = [
        (finding, place)
        for place, row in enumerate(CHECKS)
        for finding in _findings(row, host, wanted, row.id in ignore)
    ]
    found.sort(key=lambda pair: (ORDER[pair[0].severity], pair[1]))
    return Report(
        label=host.label,
        findings=tuple(f for f, _ in found),
        checks_run=len(CHECKS),
        measured=host.measured,
    )


def _findings(row: Check, host: Host, needs: Needs, ignored: bool) -> Iterator[Finding]:
    """At most two for a check: one for all that is wrong, one for all that could not be read."""
    results = list(row.run(host, needs))
    wrong = [result for result in results if isinstance(result, Saw)]
    unseen = [result for result in results if not isinstance(result, Saw)]
    rest = {"check": row.id, "area": row.area, "threshold": row.threshold, "source": row.source}
    if wrong:
        yield Finding(
            severity=WARN if ignored else row.severity,
            saw="; ".join(result.text for result in wrong),
            fix="; ".join(dict.fromkeys(result.fix or row.fix for result in wrong)),
            ignored=ignored and row.severity == FAIL,
            **rest,
        )
    if unseen:
        yield Finding(
            severity=WARN if row.must_see and not ignored else "unknown",
            saw=f"could not read {', '.join(dict.fromkeys(result.what for result in unseen))}",
            **rest,
        )


def _refuse_unknown(ignore: Collection[str]) -> None:
    ids = [row.id for row in CHECKS]
    for name in ignore:
        if name not in ids:
            near = get_close_matches(name, ids, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; `preflight list` prints them all"
            raise UnknownCheck(f"there is no check {name!r}{hint}")


def _block(finding: Finding, width: int) -> Iterator[Line]:
    mark = {"fail": "FAIL", "warn": "warn", "unknown": "????"}[finding.severity]
    ignored = " (ignored)" if finding.ignored else ""
    yield Line(f"{mark}  {finding.area:<8} {finding.check}{ignored}", finding.severity)
    for label, text in (("", finding.saw), ("want ", f"{finding.threshold}  [{finding.source}]"),
                        ("fix  ", finding.fix)):  # fmt: skip
        if text:
            yield from (Line(line) for line in _wrapped(label + text, "      ", width))


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    """Lines of at most `width`; a word longer than that (a command, a path) is cut across lines."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent + "  " * bool(indent),
        break_on_hyphens=False,
    ) or [""]  # fmt: skip


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def prometheus(report: Report) -> str:
    """The report as a textfile for node_exporter: a gauge per check, 0 fine to 3 failed."""
    level = {"unknown": 1, "warn": 2, "fail": 3}
    worst: Counter[str] = Counter()
    for finding in report.findings:
        worst[finding.check] = max(worst[finding.check], level[finding.severity])
    lines = [
        "# HELP moe_appliance_preflight_check 0 fine, 1 could not be seen, 2 warning, 3 failed",
        "# TYPE moe_appliance_preflight_check gauge",
        *(
            f'moe_appliance_preflight_check{{check="{row.id}",area="{row.area}"}} {worst[row.id]}'
            for row in CHECKS
        ),
        "# HELP moe_appliance_preflight_exit_code exit code of the last preflight",
        "# TYPE moe_appliance_preflight_exit_code gauge",
        f"moe_appliance_preflight_exit_code {report.exit_code()}",
        *(prometheus_lines(report.measured) if report.measured else ()),
    ]
    return "\n".join(lines) + "\n"
