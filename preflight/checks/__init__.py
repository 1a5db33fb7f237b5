"""CHECKS: the table of all checks. Adding one is a row and a function in the module of its area."""

from preflight.checks import (
    binding,
    cards,
    driver,
    health,
    limits,
    links,
    measured,
    memory,
    nodes,
    storage,
    system,
)
from preflight.checks.check import Check

CHECKS: tuple[Check, ...] = (
    *driver.CHECKS,
    *cards.CHECKS,
    *health.CHECKS,
    *links.CHECKS,
    *nodes.CHECKS,
    *binding.CHECKS,
    *memory.CHECKS,
    *limits.CHECKS,
    *system.CHECKS,
    *storage.CHECKS,
    *measured.CHECKS,
)
