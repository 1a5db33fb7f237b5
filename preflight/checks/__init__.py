"""CHECKS: the table of all checks. Adding one is a row and a function in the module of its area."""

from preflight.checks import cards, driver, limits, links, measured, memory, nodes, storage, system
from preflight.checks.check import Check

CHECKS: tuple[Check, ...] = (
    *driver.CHECKS,
    *cards.CHECKS,
    *links.CHECKS,
    *nodes.CHECKS,
    *memory.CHECKS,
    *limits.CHECKS,
    *system.CHECKS,
    *storage.CHECKS,
    *measured.CHECKS,
)
