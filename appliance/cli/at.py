"""--at: an appliance in a container instead of this host's own."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.serving import files_of, supervisor_argv, wishes_of
from appliance.errors import UsageError
from appliance.settings import Settings, inherited_environment, read_settings

if TYPE_CHECKING:
    from appliance.upgrade.compose import Compose
    from appliance.upgrade.helm import Helm
    from appliance.upgrade.here import Here
    from appliance.upgrade.run import Runner
    from appliance.upgrade.steps import Proof

ChartAt = Annotated[
    Path | None, typer.Option("--chart", help="The new release's chart (kubernetes only).")
]
ComposeAt = Annotated[Path, typer.Option("--compose-file", help="compose.yaml (compose only).")]
COMPOSE = Path("compose.yaml")
GRACE_SECONDS = 60.0
STATUS_SECONDS = 60.0
LIMIT_SECONDS = 3600.0


def runner_at(at: str | None, chart: Path | None, compose_file: Path) -> Runner:
    """The upgrades of one appliance: each has a record of its own in the state directory."""
    from appliance.cli.proofs import proof_of
    from appliance.upgrade.run import Runner

    settings = read_settings()

    def tell(words: str) -> None:
        render.say(f"upgrade: {words}")

    if at is None:
        folder = files_of(settings).folder

        def prover(text: str, started: float) -> Proof:
            return proof_of(text, folder / "proofs" / f"{started:.0f}")

        return Runner(_here(settings), folder, tell=tell, prover=prover)
    from appliance.serve.state import Files, make_folder
    from appliance.upgrade.away import Away

    place = place_at(at, chart, compose_file, settings)
    files = Files.of(settings.state_dir / "at" / place.folder)
    make_folder(files)
    limit = settings.start_limit_seconds or LIMIT_SECONDS
    world = Away(place, settings.drain_seconds, limit, settings.image_public_key)
    return Runner(world, files.folder, tell=tell)


def place_at(at: str, chart: Path | None, compose_file: Path, settings: Settings) -> Compose | Helm:
    """Raises UsageError where `at` names no place."""
    from appliance.serve.kubernetes import Release, current_context
    from appliance.upgrade.compose import IMAGES, Compose
    from appliance.upgrade.helm import Helm

    kind, _, name = at.partition(":")
    inherited = inherited_environment()
    if kind == "compose":
        service = name or "appliance"
        if service not in IMAGES:
            raise UsageError(f"compose.yaml has no service {service}", fix=" or ".join(IMAGES))
        file = compose_file.absolute()
        if not file.is_file():
            raise UsageError(
                f"there is no {file}", fix="go to its folder (upgrades: or --compose-file)"
            )
        project = inherited.get("COMPOSE_PROJECT_NAME") or _project(file.parent.name)
        return Compose(file, project, service, inherited, settings.drain_seconds)
    namespace, slash, release = name.partition("/")
    if kind == "kubernetes" and slash and namespace and release:
        grace = settings.drain_seconds + GRACE_SECONDS
        # Asked once: an upgrade that takes an hour stays with the cluster that it began in.
        where = Release(release, namespace, current_context())
        return Helm(where, chart, inherited, grace)
    raise UsageError(
        f"--at {at} names no place", fix="compose, compose:demo or kubernetes:NAMESPACE/RELEASE"
    )


def status_at(at: str, compose_file: Path, *, json: bool) -> int:
    """What the appliance there says of itself; where it cannot, what is seen from outside."""
    place = place_at(at, None, compose_file, read_settings())
    seen = place.look()
    if seen.state != "ready":
        if json:
            render.as_json(_not_ready(seen.state, seen.reason, seen.fix))
        else:
            render.table([("state", seen.state), ("", seen.reason), ("fix", seen.fix)])
        return 3
    words = ("appliance", "status", *(("--json",) if json else ()))
    code, said = place.inside(words, STATUS_SECONDS)
    if json:  # what it said on stderr came with it
        start, end = said.find("{"), said.rfind("}") + 1
        said = said[start:end] if end else dumps(_not_ready("unknown", said.strip(), None))
    render.lines(said.splitlines())
    return code


def _not_ready(phase: str, message: str | None, fix: str | None) -> dict[str, object]:
    """The names that `status --json` has where it can be asked."""
    return {"serving": False, "phase": phase, "message": message, "fix": fix}


def logs_at(at: str, compose_file: Path, lines: int) -> None:
    render.lines(place_at(at, None, compose_file, read_settings()).logs(lines))


def down_at(at: str, compose_file: Path) -> int:
    place_at(at, None, compose_file, read_settings()).halt()
    render.say("stopped")
    return 0


def _project(folder: str) -> str:
    """The name that docker compose gives a project: its folder's, lower case, few signs."""
    return "".join(c for c in folder.lower() if c.isalnum() or c in "-_").lstrip("-_")


def _here(settings: Settings) -> Here:
    from appliance.upgrade.here import Here

    ignore = tuple(name for name in settings.ignore_checks.split(",") if name)
    return Here(
        files_of(settings),
        wishes_of(settings),
        supervisor_argv,
        inherited_environment(),
        settings.drain_seconds,
        ignore,
        options.asked_by(settings),
    )
