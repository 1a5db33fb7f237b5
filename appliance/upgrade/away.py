"""The world of a container: the same steps for Docker compose and for a Helm release.

What differs between the two is a Place. Commands that belong to the appliance run inside its own
container, where its keys and its state are.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from appliance.errors import CheckFailed, ServeError
from appliance.upgrade.book import Deployment
from appliance.upgrade.signed import require_signature

TICK_SECONDS = 2.0
# The node has no room for it, and nothing serves meanwhile: not waited for as long as a load is.
PENDING_SECONDS = 300.0
COMMAND_SECONDS = 300.0
# Into a folder of its own, on a port of its own: the live one is not touched.
ASIDE = ("env", "APPLIANCE_STATE_DIR=/tmp/next", "APPLIANCE_AGENT_HOST=127.0.0.1",
         "APPLIANCE_AGENT_PORT=18999", "APPLIANCE_HOLD_ON_FAILURE=false")  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What runs: of which record ("" where it was started by hand), and how it is."""

    state: Literal["stopped", "pending", "starting", "ready", "failed"]
    record: str | None = None
    reason: str | None = None
    fix: str | None = None
    image_digest: str | None = None


class Place(Protocol):
    """Where one appliance runs in a container. All calls may be repeated."""

    def look(self) -> Seen: ...

    def served(self) -> Deployment:
        """What runs now, as a deployment. Raises UsageError where nothing does."""

    def target(
        self, current: Deployment, release: str, image: str | None, model: Path | None, record: str
    ) -> Deployment:
        """The current deployment with what was asked for."""

    def logs(self, lines: int) -> Iterator[str]:
        """The end of the container's log."""

    def inside(self, argv: Sequence[str], limit_seconds: float) -> tuple[int, str]:
        """Exit code and output of a command in the live container."""

    def once(self, deployment: Deployment, argv: Sequence[str], *, state: bool) -> tuple[str, str]:
        """What a command says in a container of that image, and the image's digest."""

    def apply(self, deployment: Deployment) -> None:
        """Have it run; returns before it is ready."""

    def halt(self) -> None:
        """Nothing runs any more; accepted requests have finished."""

    def prove(self) -> None:
        """It answers as it must, seen from outside."""


@dataclass
class Away:
    """`limit_seconds`: a container that is neither ready nor failed by then has failed.

    `signed_by`: public keys; where given, an image that none of them signed is refused.
    """

    place: Place
    drain_seconds: float
    limit_seconds: float
    signed_by: Path | None = None

    def served(self) -> Deployment:
        return self.place.served()

    def pull(self, target: Deployment) -> None:
        """The image is there and starts: it says which schema it writes."""
        self._schema(target)

    def verify(self, target: Deployment) -> None:
        _, digest = self._schema(target)
        if target.image_digest is not None and target.image_digest != digest:
            raise CheckFailed(
                f"the image {target.image} is {digest}, and {target.image_digest} was asked for",
                fix="name it by its digest",
            )
        if self.signed_by is not None:
            require_signature(digest, target.image_signature, self.signed_by)

    def preflight(self, target: Deployment) -> None:
        if self.place.look().state != "ready":
            return  # nobody to ask; the start checks again
        self._ask(*ASIDE, f"APPLIANCE_MODEL={target.model}", "appliance", "container",
                  "--until", "preflight")  # fmt: skip

    def plan(self, target: Deployment) -> Deployment:
        """The new release plans at its start; what is known before is the schema it writes."""
        version, _ = self._schema(target)
        return target.model_copy(update={"schema_version": version})

    def drain(self) -> None:
        if self.place.look().state == "ready":
            self._ask("appliance", "drain")

    def stop(self) -> None:
        self.place.halt()

    def migrate(self, version: int, knows: Deployment) -> None:
        self.place.once(knows, ("appliance", "upgrade", "migrate", str(version)), state=True)

    def start(self, deployment: Deployment) -> None:
        if self.serves(deployment):
            return
        self.place.apply(deployment)
        started = placed = time.monotonic()
        seen = Seen("starting")
        while (now := time.monotonic()) - started < self.limit_seconds:
            try:
                seen = self.place.look()
            except ServeError:
                # A cluster or a daemon that restarts says nothing of what it runs: asked again.
                if now - placed > PENDING_SECONDS:
                    raise
                time.sleep(TICK_SECONDS)
                continue
            if seen.state != "pending":
                placed = now
            elif now - placed > PENDING_SECONDS:
                break
            if seen.record == record_of(deployment):
                if seen.state == "ready":
                    return
                reason = seen.reason if seen.state == "failed" else self._held()
                if reason is not None:
                    raise ServeError(f"{deployment.release} does not start: {reason}", fix=seen.fix)
            elif seen.state == "failed":
                raise ServeError(f"{deployment.release} does not start: {seen.reason}",
                                 fix=seen.fix)  # fmt: skip
            time.sleep(TICK_SECONDS)
        why = f": {seen.reason}" if seen.reason else ""
        raise ServeError(f"{deployment.release} was not ready after {now - started:.0f} s{why}",
                         fix=seen.fix)  # fmt: skip

    def prove(self, deployment: Deployment) -> None:
        self.place.prove()

    def serves(self, deployment: Deployment) -> bool:
        seen = self.place.look()
        return seen.state == "ready" and seen.record == record_of(deployment)

    def admit(self) -> None:
        self._ask("appliance", "admit")

    def recorded(self, deployment: Deployment) -> Deployment:
        status = json.loads(_braces(self._ask("appliance", "status", "--json")))
        return deployment.model_copy(update={
            "plan_digest": status["plan_digest"],
            "image_digest": self.place.look().image_digest or deployment.image_digest,
        })  # fmt: skip

    def _schema(self, target: Deployment) -> tuple[int, str]:
        said, digest = self.place.once(target, ("appliance", "upgrade", "schema"), state=False)
        found = re.search(r"^schema (\d+)$", said, re.MULTILINE)
        if found is None:
            raise ServeError(f"the image {target.image} is not an appliance: it said {said[:200]}")
        return int(found[1]), digest

    def _held(self) -> str | None:
        """Why a start that is held failed; None while there is nothing to say."""
        try:
            _, said = self.place.inside(("appliance", "health", "--json"), COMMAND_SECONDS)
            health = json.loads(_braces(said))
        except (ServeError, ValueError):
            return None  # not up yet, or just gone
        return str(health["last_finding"]) if health.get("held") else None

    def _ask(self, *argv: str) -> str:
        limit = COMMAND_SECONDS + self.drain_seconds
        code, said = self.place.inside(argv, limit)
        if code:
            what = " ".join(word for word in argv if "=" not in word and word != "env")
            lines = [line for line in said.splitlines() if line.startswith(("error:", "  fix:"))]
            raise CheckFailed(f"`{what}` there: {' '.join(lines) or said.strip()[-300:]}")
        return said


def record_of(deployment: Deployment) -> str:
    """The name under which a deployment is started; empty for what was started by hand."""
    return deployment.settings.get("APPLIANCE_RECORD", "")


def _braces(text: str) -> str:
    return text[text.index("{") : text.rindex("}") + 1]
