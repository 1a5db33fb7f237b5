"""What this machine is, and whether it is good enough. No torch, no model."""

from preflight.host import Host
from preflight.inspect import inspect
from preflight.source import Live, Recorded, Recording

__all__ = ["Host", "Live", "Recorded", "Recording", "inspect"]
