"""The world of containers over a place that keeps notes: what is asked of it, in which order."""

import dataclasses
import time
from pathlib import Path

import minisign
import pytest

from appliance.errors import CheckFailed, ServeError
from appliance.upgrade import away
from appliance.upgrade.away import Away, Seen
from appliance.upgrade.book import Deployment, read_book
from appliance.upgrade.run import BOOK, Runner
from appliance.upgrade.signed import statement

DIGESTS = {"r/a:1": "sha256:" + "1" * 64, "r/a:2": "sha256:" + "2" * 64}


@dataclasses.dataclass
class Place:
    """A container engine in a variable: an image that is not in DIGESTS cannot be pulled."""

    live: Deployment | None
    broken: tuple[str, ...] = ()
    homeless: tuple[str, ...] = ()
    unanswered: int = 0  # so many looks at what was applied get no answer
    notes: list[str] = dataclasses.field(default_factory=list)

    def served(self) -> Deployment:
        assert self.live is not None
        return self.live

    def target(self, current, release, image, model, record) -> Deployment:
        settings = {"APPLIANCE_RECORD": record}
        return current.model_copy(update={"release": release, "image": image or current.image,
                                          "image_digest": None, "settings": settings})  # fmt: skip

    def look(self) -> Seen:
        if self.live is None:
            return Seen("stopped")
        record = self.live.settings.get("APPLIANCE_RECORD", "")
        if self.unanswered and "apply 2" in self.notes:
            self.unanswered -= 1
            raise ServeError("the cluster at https://10.0.0.1:6443 does not answer")
        if self.live.image in self.broken:
            return Seen("failed", record, "it ended 3 times, last with exit code 7")
        if self.live.image in self.homeless:
            return Seen("pending", record, "the scheduler: 1 Insufficient cpu", "set resources.cpu")
        return Seen("ready", record, image_digest=DIGESTS[self.live.image])

    def inside(self, argv, limit_seconds) -> tuple[int, str]:
        words = [w for w in argv if "=" not in w and w != "env"]
        self.notes.append("inside " + " ".join(words))
        return 0, 'said {"plan_digest": "abc", "last_finding": null}'

    def logs(self, lines):
        return iter(())

    def once(self, deployment, argv, *, state) -> tuple[str, str]:
        if deployment.image not in DIGESTS:
            raise ServeError(f"the image cannot be pulled: {deployment.image}")
        self.notes.append("once " + " ".join(argv))
        return "schema 1\n", DIGESTS[deployment.image]

    def apply(self, deployment) -> None:
        self.notes.append(f"apply {deployment.release}")
        self.live = deployment

    def halt(self) -> None:
        self.notes.append("halt")
        self.live = None

    def prove(self) -> None:
        self.notes.append("prove")


def deployed(tmp_path: Path, **world) -> tuple[Place, Runner]:
    place = Place(Deployment(release="1", image="r/a:1", model=Path("/models/current")))
    runner = Runner(Away(place, 1.0, 5.0, **world), tmp_path)
    runner.adopt(place.live)
    return place, runner


def wanted(place: Place, image: str) -> Deployment:
    return place.target(place.live, "2", image, None, "2-abc")


def test_the_live_container_is_asked_and_drained_before_it_is_replaced(tmp_path):
    place, runner = deployed(tmp_path)
    ended = runner.upgrade(wanted(place, "r/a:2"))
    assert ended.outcome == "committed", ended.reason
    notes = place.notes
    assert notes.index("inside appliance container --until preflight") < notes.index("halt")
    assert notes.index("inside appliance drain") < notes.index("halt") < notes.index("apply 2")
    current = read_book(tmp_path / BOOK).current
    assert (current.plan_digest, current.image_digest) == ("abc", DIGESTS["r/a:2"])


def test_an_image_that_cannot_be_pulled_never_touches_what_serves(tmp_path):
    place, runner = deployed(tmp_path)
    ended = runner.upgrade(wanted(place, "r/a:nowhere"))
    assert ended.outcome == "undone" and "cannot be pulled" in ended.reason
    assert "halt" not in place.notes and place.live.release == "1"


def test_a_container_that_does_not_start_is_replaced_by_the_old_one(tmp_path):
    place, runner = deployed(tmp_path)
    place.broken = ("r/a:2",)
    ended = runner.upgrade(wanted(place, "r/a:2"))
    assert ended.outcome == "undone" and "last with exit code 7" in ended.reason
    assert place.live.release == "1" and place.notes[-1] == "apply 1"


@pytest.mark.parametrize("limit", ["PENDING_SECONDS", "load"])
def test_a_pod_that_finds_no_node_is_not_waited_for_and_the_scheduler_is_quoted(
    tmp_path, monkeypatch, limit
):
    monkeypatch.setattr(away, "TICK_SECONDS", 0.01)
    if limit == "PENDING_SECONDS":
        monkeypatch.setattr(away, limit, 0.05)
    place, runner = deployed(tmp_path)
    if limit == "load":
        runner.world.limit_seconds = 0.05
    place.homeless = ("r/a:2",)
    began = time.monotonic()
    ended = runner.upgrade(wanted(place, "r/a:2"))
    assert ended.outcome == "undone" and place.live.release == "1"
    assert "the scheduler: 1 Insufficient cpu" in ended.reason and time.monotonic() - began < 4


def test_a_cluster_that_does_not_answer_for_a_moment_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(away, "TICK_SECONDS", 0.01)
    place, runner = deployed(tmp_path)
    place.unanswered = 20
    ended = runner.upgrade(wanted(place, "r/a:2"))
    assert (ended.outcome, ended.reason, place.live.release) == ("committed", None, "2")


def test_a_cluster_that_no_longer_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(away, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(away, "PENDING_SECONDS", 0.05)
    place, runner = deployed(tmp_path)
    place.unanswered = 10**6
    began = time.monotonic()
    with pytest.raises(ServeError, match="does not answer"):
        runner.upgrade(wanted(place, "r/a:2"))
    assert time.monotonic() - began < 5
    place.unanswered = 0
    assert runner.resume().outcome == "undone" and place.live.release == "1"


def test_an_image_of_another_digest_than_asked_for_is_refused(tmp_path):
    place, runner = deployed(tmp_path)
    asked = wanted(place, "r/a:2").model_copy(update={"image_digest": DIGESTS["r/a:1"]})
    ended = runner.upgrade(asked)
    assert ended.outcome == "undone" and ended.reason.startswith("verify: ")
    assert "halt" not in place.notes


@pytest.fixture
def key(tmp_path):
    pair = minisign.KeyPair.generate()
    (tmp_path / "keys.pub").write_bytes(bytes(pair.public_key))
    return pair.secret_key, tmp_path / "keys.pub"


@pytest.mark.parametrize(
    ("signed", "words"),
    [
        (None, "is not signed"),
        ("r/a:1", "none of the 1 keys"),
        ("nonsense", "none of minisign's"),
        ("r/a:2", None),
    ],
)
def test_with_a_key_set_only_an_image_that_it_signed_is_served(tmp_path, key, signed, words):
    secret, public = key
    place, runner = deployed(tmp_path, signed_by=public)
    target = wanted(place, "r/a:2")
    if signed in DIGESTS:
        made = bytes(secret.sign(statement(DIGESTS[signed]))).decode()
        target = target.model_copy(update={"image_signature": made})
    elif signed is not None:
        target = target.model_copy(update={"image_signature": signed})
    ended = runner.upgrade(target)
    assert ended.outcome == ("committed" if words is None else "undone"), ended.reason
    assert words is None or words in ended.reason
    assert place.live.release == ("2" if words is None else "1")


def test_a_command_that_fails_inside_gives_its_own_sentence():
    place = Place(Deployment(release="1", image="r/a:1", model=Path("/m")))
    place.inside = lambda argv, limit: (3, "progress\nerror: too little memory\n  fix: buy some\n")
    with pytest.raises(CheckFailed, match=r"`appliance drain` there: error: too little memory"):
        Away(place, 1.0, 5.0).drain()
