"""A world of files, and faults to meet in it: what is switched is real, only the engine is not.

The book, the steps, the runner and the migrations under test are the real ones. The engine is a
file that says which deployment is started, whether it is ready and whether it takes requests.
"""

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from appliance.errors import ServeError
from appliance.upgrade import book as book_module
from appliance.upgrade.book import Deployment
from appliance.upgrade.migrate import Migration, migrate

CALLS = ("pull", "verify", "preflight", "plan", "drain", "stop", "start", "prove")


@dataclass
class Fault:
    """`kind`: crash (kill -9) or error, at the n-th time that `call` is reached, in `place`."""

    call: str
    kind: str
    place: str = "before"
    nth: int = 1
    seen: int = field(default=0)

    def meet(self, call: str, place: str) -> None:
        if (call, place) != (self.call, self.place):
            return
        self.seen += 1
        if self.seen != self.nth:
            return
        if self.kind == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ServeError(f"{call} cannot be done: injected")


@dataclass
class FileWorld:
    folder: Path
    fault: Fault | None = None

    def _meet(self, call: str, place: str) -> None:
        if self.fault is not None:
            self.fault.meet(call, place)

    @property
    def engine(self) -> dict | None:
        path = self.folder / "engine.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _engine(self, value: dict | None) -> None:
        path = self.folder / "engine.json"
        if value is None:
            path.unlink(missing_ok=True)
            return
        aside = path.with_suffix(".aside")
        aside.write_text(json.dumps(value))
        aside.replace(path)

    def served(self) -> Deployment:
        return Deployment.model_validate(self.engine["deployment"])

    def is_what_serves(self, recorded: Deployment) -> bool:
        return self.engine is None or self.served() == recorded

    def _around(self, call: str, work) -> None:
        self._meet(call, "before")
        work()
        self._meet(call, "after")

    def pull(self, target: Deployment) -> None:
        self._around("pull", lambda: (self.folder / f"image-{target.release}").touch())

    def verify(self, target: Deployment) -> None:
        def work() -> None:
            if not (self.folder / f"image-{target.release}").exists():
                raise ServeError("the image is not here")

        self._around("verify", work)

    def preflight(self, target: Deployment) -> None:
        self._around("preflight", lambda: None)

    def plan(self, target: Deployment) -> Deployment:
        self._around("plan", lambda: None)
        return target.model_copy(update={"plan_digest": f"plan-of-{target.release}"})

    def drain(self) -> None:
        engine = self.engine
        self._around("drain", lambda: engine and self._engine({**engine, "admitted": False}))

    def stop(self) -> None:
        self._around("stop", lambda: self._engine(None))

    def start(self, deployment: Deployment) -> None:
        self._meet("start", "before")
        state = json.loads((self.folder / "keys.json").read_text())
        if state["version"] != deployment.schema_version:
            raise ServeError(f"release {deployment.release} cannot read these files")
        name = deployment.model_dump(mode="json")
        self._engine({"deployment": name, "ready": False, "admitted": False})
        self._meet("start", "inside")
        self._engine({"deployment": name, "ready": True, "admitted": True})
        self._meet("start", "after")

    def prove(self, deployment: Deployment) -> None:
        def work() -> None:
            if not self.serves(deployment):
                raise ServeError("nothing answers")

        self._around("prove", work)

    def serves(self, deployment: Deployment) -> bool:
        engine = self.engine
        here = deployment.model_dump(mode="json")
        return bool(engine and engine["ready"] and engine["deployment"] == here)

    def admit(self) -> None:
        self._engine({**self.engine, "admitted": True})

    def migrate(self, version: int, knows: Deployment) -> None:
        migrate(self.folder, version, migrations(self.fault))

    def recorded(self, deployment: Deployment) -> Deployment:
        return deployment


def rewrite(folder: Path, version: int, fault: Fault | None) -> None:
    """The files of the state directory as this version wants them, written in place."""
    if fault is not None:
        fault.meet(f"migrate to {version}", "before")
    aside = folder / "keys.aside"
    aside.write_text(json.dumps({"version": version, "keys": ["a", "b"]}))
    aside.replace(folder / "keys.json")
    if fault is not None:
        fault.meet(f"migrate to {version}", "after")


def migrations(fault: Fault | None) -> dict[int, Migration]:
    return {
        2: Migration(lambda f: rewrite(f, 2, fault), lambda f: rewrite(f, 1, fault)),
        3: Migration(lambda f: rewrite(f, 3, fault), lambda f: rewrite(f, 2, fault)),
    }


def inject_into_writes(monkeypatch, fault: Fault | None) -> None:
    """Meet the fault before and after each write of the book, full disks included."""
    real = book_module.write_aside

    def write(path: Path, text: str) -> None:
        if fault is not None:
            fault.meet("write", "before")
        real(path, text)
        if fault is not None:
            fault.meet("write", "after")

    monkeypatch.setattr(book_module, "write_aside", write)
