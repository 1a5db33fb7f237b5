"""Rates that `preflight --measure` saw, kept beside the plan: later plans are made with them."""

from __future__ import annotations

from pydantic import ValidationError

from appliance.errors import ServeError
from appliance.serve.state import Files, make_folder, write_aside
from preflight import Host
from preflight.host import Facts, Measured


class Kept(Facts):
    """`cards`: UUID and memory node of each GPU in order; of other cards the rates say nothing."""

    cards: tuple[tuple[str | None, int | None], ...]
    rates: Measured


def keep_rates(files: Files, host: Host) -> None:
    """Write what was measured of links and disk; trials belong to one plan and are not kept."""
    if host.measured is None or not host.measured.links:
        return
    rates = host.measured.model_dump(
        include={"links", "links_all_at_once", "disk_read_bytes_per_second"}
    )
    make_folder(files)
    kept = Kept(cards=_cards(host), rates=Measured.model_validate(rates))
    write_aside(files.rates, kept.model_dump_json(indent=1) + "\n")


def with_kept_rates(host: Host, files: Files) -> Host:
    """The same facts with the rates kept for exactly these cards, if there are any.

    Raises ServeError where the file cannot be understood.
    """
    if host.measured is not None or not files.rates.exists():
        return host
    try:
        kept = Kept.model_validate_json(files.rates.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ServeError(
            f"the measured rates in {files.rates} cannot be read: {error}",
            fix="appliance preflight --measure writes them again",
        ) from error
    if kept.cards != _cards(host):
        return host
    return host.model_copy(update={"measured": kept.rates})


def _cards(host: Host) -> tuple[tuple[str | None, int | None], ...]:
    return tuple((gpu.uuid, gpu.numa_node) for gpu in host.gpus or ())
