"""An appliance of `docker compose`: its deployment is the APPLIANCE_* lines of the file .env.

Switching replaces those lines and runs `docker compose up`, so that what a person types later
starts the same deployment.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance import durable, process
from appliance.errors import ServeError, UsageError
from appliance.serve import docker
from appliance.settings import PREFIX
from appliance.upgrade.away import Seen
from appliance.upgrade.book import Deployment

COMPOSE_SECONDS = 300.0
CRASHES = 2
# Which variable of compose.yaml names the image of a service.
IMAGES = {"appliance": "APPLIANCE_IMAGE", "demo": "APPLIANCE_DEMO_IMAGE"}


@dataclass(frozen=True)
class Compose:
    """`file`: compose.yaml; .env lies beside it. `project`: its name to Docker."""

    file: Path
    project: str
    service: str
    inherited: Mapping[str, str]
    drain_seconds: float

    @property
    def env_file(self) -> Path:
        return self.file.with_name(".env")

    @property
    def folder(self) -> Path:
        """Of its record: projects of other folders have services of the same names."""
        return Path("compose", self.project, self.service)

    def served(self) -> Deployment:
        """What runs now. Raises UsageError where nothing is ready."""
        found = docker.composed(self.project, self.service)
        if found is None or not found.running:
            raise UsageError(
                f"no service {self.service} runs in the compose project {self.project}",
                fix="docker compose up first",
            )
        lines = _lines(self.env_file)
        given = dict(entry.split("=", 1) for entry in lines if entry.startswith(PREFIX))
        return Deployment(
            release=found.environment.get("APPLIANCE_RELEASE", "as started"),
            image=given.get(IMAGES[self.service]) or found.image, image_digest=found.image_digest,
            model=Path(found.environment.get("APPLIANCE_MODEL") or "/demo"), settings=given,
        )  # fmt: skip

    def target(self, current: Deployment, release: str, image: str | None, model: Path | None,
               record: str) -> Deployment:  # fmt: skip
        """The current deployment with what was asked for."""
        settings = {**current.settings, "APPLIANCE_RECORD": record}
        if image is not None:
            settings[IMAGES[self.service]] = image
        if model is not None:
            settings["APPLIANCE_MODEL"] = str(model)
        _, _, digest = (image or current.image or "").partition("@")
        if settings.get("APPLIANCE_IMAGE_DIGEST", digest) != digest:
            # Of another image: the new one would take over what that one compiled.
            settings["APPLIANCE_IMAGE_DIGEST"] = digest
        return Deployment(
            release=release, image=image or current.image, image_digest=digest or None,
            model=model or current.model, settings=settings,
        )  # fmt: skip

    def look(self) -> Seen:
        found = docker.composed(self.project, self.service)
        if found is None:
            return Seen("stopped")
        record = found.environment.get("APPLIANCE_RECORD", "")
        if found.running and found.health == "healthy":
            return Seen("ready", record, image_digest=found.image_digest)
        if not found.running or found.restarts >= CRASHES:
            words = " ".join(list(docker.logs(found.id, 3, follow=False)))
            code = "" if found.exit_code is None else f" with exit code {found.exit_code}"
            return Seen("failed", record, f"the container ended{code}: {words[-300:]}")
        return Seen("starting", record, found.reason)

    def logs(self, lines: int) -> Iterator[str]:
        found = docker.composed(self.project, self.service)
        if found is None:
            raise ServeError(f"there is no container of the service {self.service}")
        yield from docker.logs(found.id, lines, follow=False)

    def inside(self, argv: Sequence[str], limit_seconds: float) -> tuple[int, str]:
        found = docker.composed(self.project, self.service)
        if found is None or not found.running:
            raise ServeError(f"the service {self.service} does not run")
        return docker.inside(found.id, argv, limit_seconds)

    def once(self, deployment: Deployment, argv: Sequence[str], *, state: bool) -> tuple[str, str]:
        assert deployment.image is not None
        image_id, known = docker.pull(deployment.image)
        volume = None
        if state:
            found = docker.composed(self.project, self.service)
            name = "demo-state" if self.service == "demo" else "state"
            usual = f"{self.project}_{name}"
            volume = usual if found is None else found.mounts["/var/lib/appliance"]
        said = docker.once(deployment.image, argv, volume)
        asked = deployment.image_digest
        return said, asked if asked in known else image_id

    def apply(self, deployment: Deployment) -> None:
        write_env(self.env_file, deployment.settings)
        self._compose("up", "--detach", "--no-build", self.service)

    def halt(self) -> None:
        found = docker.composed(self.project, self.service)
        if found is not None:
            docker.stop(found.id, self.drain_seconds)

    def prove(self) -> None:
        code, said = self.inside(("appliance", "canary"), COMPOSE_SECONDS)
        if code:
            raise ServeError(f"the canary failed: {said.strip()[-300:]}")

    def _compose(self, *arguments: str) -> None:
        # The file .env decides, not what this process happens to have in its environment.
        kept = {k: v for k, v in self.inherited.items() if not k.startswith(PREFIX)}
        argv = ["docker", "compose", "-p", self.project, "-f", str(self.file), *arguments]
        try:
            code, _, said = process.output(argv, environment=kept, limit_seconds=COMPOSE_SECONDS)
        except TimeoutError as error:
            raise ServeError(f"docker compose {arguments[0]}: {error}") from error
        except OSError as error:
            raise ServeError(f"docker compose: {error}", fix="install docker compose v2") from error
        if code:
            raise ServeError(f"docker compose {arguments[0]}: {said.strip()[-300:]}")


def write_env(path: Path, settings: Mapping[str, str]) -> None:
    """Exactly these APPLIANCE_* lines; all others, comments too, and the file's mode stay.

    Raises ServeError where it cannot be written.
    """
    path = path.resolve()  # where .env is a link, what it leads to is replaced
    left, lines, mode = dict(settings), [], durable.OWNER_ONLY
    if path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
        for line in path.read_text(encoding="utf-8").splitlines():
            name = line.strip().partition("=")[0]
            if not name.startswith(PREFIX):
                lines.append(line)
            elif name in left:
                lines.append(f"{name}={left.pop(name)}")
    lines += [f"{name}={value}" for name, value in sorted(left.items())]
    try:
        durable.write_file(path, ("\n".join(lines) + "\n").encode(), mode=mode)
    except OSError as error:
        raise ServeError(f"cannot write {path}: {error.strerror}") from error


def _lines(path: Path) -> list[str]:
    """The settings of an .env file, comments and empty lines left out."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    return [line for line in lines if line and not line.startswith("#") and "=" in line]
