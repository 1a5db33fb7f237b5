"""What this machine is, and whether it is good enough. No torch, no model."""

from preflight.host import Host
from preflight.inspect import inspect
from preflight.needs import Needs, plan_needs, profile
from preflight.report import Finding, Report, check
from preflight.source import Live, Recorded, Recording

__all__ = [
    "Finding",
    "Host",
    "Live",
    "Needs",
    "Recorded",
    "Recording",
    "Report",
    "check",
    "inspect",
    "plan_needs",
    "profile",
]
