"""An appliance of a Helm release: its deployments are Helm's revisions; its state is ours.

`helm rollback` brings back chart and values, and not what a newer release wrote into the state
volume: the upgrade's own steps undo that first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance import process
from appliance.errors import ServeError, UsageError
from appliance.serve import kubernetes
from appliance.upgrade.away import Seen
from appliance.upgrade.book import Deployment
from preflight.counted import counted

HELM_SECONDS = 300.0
KEPT_REVISIONS = 100
TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Helm:
    """`chart`: the chart of this release, as a folder or an archive."""

    release: kubernetes.Release
    chart: Path | None
    inherited: Mapping[str, str]
    grace_seconds: float

    @property
    def folder(self) -> Path:
        """Of its record. Names of contexts may hold anything, those of addresses for one."""
        context = quote(self.release.context or "current", safe="")
        return Path("kubernetes", context, self.release.namespace, self.release.name)

    def served(self) -> Deployment:
        """What runs now. Raises UsageError where no revision is deployed."""
        found = [r for r in self._history() if r["status"] == "deployed"]
        if not found:
            raise UsageError(
                f"no revision of the Helm release {self.release.name} is deployed",
                fix="helm history says what became of each",
            )
        revision = str(found[-1]["revision"])
        asked = ("get", "values", self.release.name, "--revision", revision, "--all", "-o", "json")
        values = json.loads(self._helm(*asked))
        return Deployment(
            release=str(found[-1]["app_version"]), image=_image(values),
            image_digest=values["image"]["digest"] or None, model=_model(values),
            settings={"revision": revision},
        )  # fmt: skip

    def target(self, current: Deployment, release: str, image: str | None, model: Path | None,
               record: str) -> Deployment:  # fmt: skip
        """The current deployment with what was asked for."""
        settings = {"APPLIANCE_RECORD": record, "record": record}
        repository, tag, digest = reference(image or "")
        if image is not None:
            settings |= {"image.repository": repository, "image.digest": digest, "image.tag": tag}
        if model is not None:
            settings["model.path"] = str(model)
        return Deployment(
            release=release, image=image or current.image,
            image_digest=digest or (None if image else current.image_digest),
            model=model or current.model, settings=settings,
        )  # fmt: skip

    def look(self) -> Seen:
        found = kubernetes.status(self.release)
        return Seen(found.state, found.record, found.reason, found.fix, found.image_digest)  # type: ignore[arg-type]

    def logs(self, lines: int) -> Iterator[str]:
        yield from kubernetes.logs(self.release, lines)

    def inside(self, argv: Sequence[str], limit_seconds: float) -> tuple[int, str]:
        return kubernetes.inside(self.release, argv, limit_seconds)

    def once(self, deployment: Deployment, argv: Sequence[str], *, state: bool) -> tuple[str, str]:
        assert deployment.image is not None
        return kubernetes.once(self.release, deployment.image, argv, state=state)

    def apply(self, deployment: Deployment) -> None:
        revision = self._revision(deployment)
        if revision is not None:
            self._helm("rollback", self.release.name, revision, *self._forced())
        else:
            if self.chart is None:
                raise UsageError("which chart? Give the new release's with --chart")
            self._helm(
                "upgrade", self.release.name, str(self.chart), "--reset-then-reuse-values",
                "--description", _description(deployment), "--history-max", str(KEPT_REVISIONS),
                *values_of(deployment), *self._forced(),
            )  # fmt: skip
        kubernetes.scale(self.release, 1)

    def halt(self) -> None:
        kubernetes.scale(self.release, 0)
        deadline = time.monotonic() + self.grace_seconds
        while left := kubernetes.pods_left(self.release):
            if time.monotonic() > deadline:
                raise ServeError(
                    f"{counted(left, 'pod')} still ending after {self.grace_seconds:.0f} s"
                )
            time.sleep(TICK_SECONDS)

    def prove(self) -> None:
        self._helm("test", self.release.name, "--timeout", f"{HELM_SECONDS:.0f}s")

    def _history(self) -> list[Any]:
        history = json.loads(self._helm("history", self.release.name, "-o", "json"))
        assert isinstance(history, list)
        return history

    def _revision(self, deployment: Deployment) -> str | None:
        """Helm's number of it; also of one whose `helm upgrade` was cut off half-way."""
        if given := deployment.settings.get("revision"):
            return given
        wanted = _description(deployment)
        found = [r for r in self._history() if r["description"] == wanted]
        return str(found[-1]["revision"]) if found else None

    def _forced(self) -> list[str]:
        """Stopping set the number of replicas: Helm 4 must be told that it may set it back."""
        version = self._helm("version", "--template", "{{.Version}}")
        return ["--force-conflicts"] if version.lstrip("v").startswith("4") else []

    def _helm(self, *arguments: str) -> str:
        where = ["--namespace", self.release.namespace]
        if self.release.context is not None:
            where += ["--kube-context", self.release.context]
        argv = ["helm", *arguments, *([] if arguments[0] == "version" else where)]
        limit = HELM_SECONDS + 60
        try:
            code, text, said = process.output(argv, environment=self.inherited, limit_seconds=limit)
        except TimeoutError as error:
            raise ServeError(f"helm {arguments[0]}: {error}") from error
        except OSError as error:
            raise ServeError(f"helm: {error}", fix="install Helm 3.14 or newer") from error
        if code:
            raise ServeError(f"helm {arguments[0]}: {(said or text).strip()[-400:]}")
        return text


def values_of(deployment: Deployment) -> list[str]:
    """Helm's arguments for what was asked for. Literal: a path may hold commas and braces."""
    chosen = {k: v for k, v in deployment.settings.items() if k != "APPLIANCE_RECORD"}
    return [word for k, v in chosen.items() for word in ("--set-literal", f"{k}={v}")]


def reference(image: str) -> tuple[str, str, str]:
    """Repository, tag and digest of `registry:5000/name:tag@sha256:...`; empty where not given."""
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # the colon of a registry's port
        return name, "", digest
    return repository, tag, digest


def _description(deployment: Deployment) -> str:
    return f"record {deployment.settings['APPLIANCE_RECORD']}"


def _image(values: Any) -> str:
    image = values["image"]
    if image["digest"]:
        return f"{image['repository']}@{image['digest']}"
    return f"{image['repository']}:{image['tag'] or values['flavour']}"


def _model(values: Any) -> Path:
    return Path("/demo") if values["demo"] else Path(values["model"]["path"])
