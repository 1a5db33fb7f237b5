"""Every error the appliance raises on purpose: what is wrong, with the numbers, and the way out.

ApplianceError            1  the command failed
|- UsageError             2  the request itself makes no sense
|- CheckpointError        1  the files of a model are not what they should be
|- UnsupportedError       1  a valid model or machine that this engine cannot serve correctly
|- PlanError              1  plan.json is missing, corrupt, or made for something else
|  `- DoesNotFit          1  the bytes do not fit, with the ledger's numbers
|- ServeError             1  the engine did not start, died, or did not prove itself
|- WeightsError           1  the store of weights cannot do what was asked
|  `- SourceError         1  where weights come from answered wrong, or not at all
`- CheckFailed            3  a check said no

The number is the exit code (DESIGN.md). Errors are caught once, in cli.main.
"""

from __future__ import annotations

import shlex
import sys


class ApplianceError(Exception):
    """What went wrong in one sentence; `fix` is what the operator can do about it."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}. Try: {self.fix}"


class UsageError(ApplianceError):
    exit_code = 2


class CheckpointError(ApplianceError):
    pass


class UnsupportedError(ApplianceError):
    pass


class PlanError(ApplianceError):
    pass


class DoesNotFit(PlanError):
    pass


class ServeError(ApplianceError):
    pass


class WeightsError(ApplianceError):
    pass


class SourceError(WeightsError):
    pass


class CheckFailed(ApplianceError):
    exit_code = 3


def with_extra(name: str) -> str:
    """The command that installs an optional part, with the pip of this very Python."""
    return f"{shlex.quote(sys.executable)} -m pip install 'moe-appliance[{name}]'"
