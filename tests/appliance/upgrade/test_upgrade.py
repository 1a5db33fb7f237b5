"""Whatever fails, wherever it is cut off: in the end one recorded deployment serves."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from file_world import Fault, FileWorld, inject_into_writes, rewrite

from appliance.cli.upgrading import steadily
from appliance.errors import CheckFailed, ServeError, UsageError
from appliance.upgrade.book import Book, Deployment, changes, read_book
from appliance.upgrade.migrate import MIGRATIONS, migrate, version_of
from appliance.upgrade.run import BOOK, Runner
from appliance.upgrade.steps import NAMES

OLD = Deployment(release="1.0", model=Path("/models/a"), plan_digest="plan-of-1.0")
NEW = Deployment(release="2.0", model=Path("/models/b"), schema_version=3)
RUNS = int(os.environ.get("MOE_APPLIANCE_SOAK", "60"))  # `make soak` asks for 200


def deploy(folder: Path) -> Runner:
    """The old deployment, recorded and serving."""
    rewrite(folder, 1, None)
    runner = Runner(FileWorld(folder), folder)
    runner.world.start(OLD)
    runner.adopt(OLD)
    return runner


def faulty(folder: Path, fault: Fault | None) -> Runner:
    return Runner(FileWorld(folder, fault), folder)


def assert_serving_and_recorded(folder: Path) -> Book:
    book = read_book(folder / BOOK)
    assert book.running is None and book.current is not None
    engine = FileWorld(folder).engine
    assert engine == {
        "deployment": book.current.model_dump(mode="json"), "ready": True, "admitted": True,
    }  # fmt: skip
    assert version_of(folder) == book.current.schema_version
    assert json.loads((folder / "keys.json").read_text())["version"] == book.current.schema_version
    return book


def test_an_upgrade_without_faults_commits_the_new_deployment_with_its_plan(tmp_path):
    outcome = deploy(tmp_path).upgrade(NEW)
    assert outcome.outcome == "committed"
    book = assert_serving_and_recorded(tmp_path)
    assert book.current == NEW.model_copy(update={"plan_digest": "plan-of-2.0"})


FAILING = ["pull", "verify", "preflight", "plan", "drain", "stop", "start", "prove",
           "migrate to 2", "migrate to 3"]  # fmt: skip


@pytest.mark.parametrize("call", FAILING)
def test_a_step_that_fails_leaves_the_old_deployment_serving_and_the_reason_recorded(
    tmp_path, call
):
    deploy(tmp_path)
    outcome = faulty(tmp_path, Fault(call, "error")).upgrade(NEW)
    assert outcome.outcome == "undone" and "injected" in outcome.reason
    assert assert_serving_and_recorded(tmp_path).current == OLD


def test_an_engine_that_never_becomes_ready_is_replaced_by_the_old_one(tmp_path):
    deploy(tmp_path)
    outcome = faulty(tmp_path, Fault("start", "error", "inside")).upgrade(NEW)
    assert outcome.outcome == "undone" and outcome.reason.startswith("switch: ")
    assert assert_serving_and_recorded(tmp_path).current == OLD


def places() -> list[Fault]:
    crashes = [Fault(call, "crash", place) for call in FAILING for place in ("before", "after")]
    crashes.append(Fault("start", "crash", "inside"))
    writes = range(1, 2 * len(NAMES) + 2)
    crashes += [Fault("write", "crash", place, n) for n in writes for place in ("before", "after")]
    return crashes + [Fault("write", "error", "before", nth) for nth in range(1, 2 * len(NAMES))]


def in_a_process_that_may_be_killed(call) -> int:
    """How the child ended: 0, or the signal's number."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except ServeError:
            pass
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def soak(folder: Path, fault: Fault, second: Fault | None, power_cut: bool) -> bool:
    """One upgrade with a fault, perhaps another while it is taken up. True: it was cut off."""
    deploy(folder)
    monkeypatch = pytest.MonkeyPatch()

    def attempt(injected: Fault | None, resume: bool) -> int:
        def call() -> None:
            inject_into_writes(monkeypatch, injected)
            runner = faulty(folder, injected)
            if resume:
                runner.resume()
            else:
                runner.upgrade(NEW)

        return in_a_process_that_may_be_killed(call)

    cut = attempt(fault, resume=False)
    assert cut in (0, -signal.SIGKILL)
    if cut and power_cut:
        (folder / "engine.json").unlink(missing_ok=True)  # the engine died with the machine
    if second is not None:
        attempt(second, resume=True)
    if read_book(folder / BOOK).running is None and power_cut:
        # Cut off before or after everything: a boot starts what is recorded.
        FileWorld(folder).start(read_book(folder / BOOK).current)
    assert attempt(None, resume=True) == 0
    assert_serving_and_recorded(folder)
    return bool(cut)


def test_every_upgrade_ends_serving_and_recorded_wherever_it_is_cut_off(tmp_path):
    dice = random.Random(20261129)
    every = places()
    cuts = 0
    for run in range(RUNS):
        fault = every[run % len(every)]
        fault = Fault(fault.call, fault.kind, fault.place, fault.nth)
        second = dice.choice(every) if run % 3 == 0 else None
        second = second and Fault(second.call, second.kind, second.place, second.nth)
        folder = tmp_path / str(run)
        folder.mkdir()
        try:
            cuts += soak(folder, fault, second, power_cut=run % 2 == 0)
        except AssertionError as error:
            raise AssertionError(f"run {run}: {fault}, then {second}: {error}") from error
    assert cuts > RUNS / 3, "most runs must really have been cut off"


def test_an_upgrade_that_was_cut_off_must_be_taken_up_before_another(tmp_path):
    deploy(tmp_path)
    in_a_process_that_may_be_killed(lambda: faulty(tmp_path, Fault("plan", "crash")).upgrade(NEW))
    with pytest.raises(UsageError, match=r"cut off at plan.*appliance upgrade resume"):
        faulty(tmp_path, None).upgrade(NEW)


def test_a_rollback_goes_back_to_the_deployment_before_with_its_schema(tmp_path):
    runner = deploy(tmp_path)
    runner.upgrade(NEW)
    assert runner.rollback().outcome == "committed"
    assert assert_serving_and_recorded(tmp_path).current.release == "1.0"


def test_without_an_earlier_deployment_there_is_no_rollback(tmp_path):
    with pytest.raises(UsageError, match="no earlier deployment"):
        deploy(tmp_path).rollback()


def test_where_nothing_was_ever_deployed_one_sentence_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"nothing is deployed: there is no .*/never") as caught:
        Runner(FileWorld(tmp_path), tmp_path / "never").resume()
    assert caught.value.fix == "appliance up first"


def test_a_second_upgrade_at_the_same_time_is_refused(tmp_path):
    deploy(tmp_path)
    refused = []

    class Meanwhile(FileWorld):
        def prove(self, deployment: Deployment) -> None:
            with pytest.raises(UsageError, match="another upgrade is running") as caught:
                Runner(FileWorld(tmp_path), tmp_path).upgrade(NEW)
            refused.append(caught.value)

    Runner(Meanwhile(tmp_path), tmp_path).upgrade(NEW)
    assert refused


def test_a_release_that_knows_no_way_to_a_schema_says_so_and_nothing_changes(tmp_path):
    with pytest.raises(ServeError, match="no way from schema version 1 to 9"):
        migrate(tmp_path, 9, MIGRATIONS)
    assert version_of(tmp_path) == 1


def test_a_book_of_a_newer_release_is_an_error_and_not_a_guess(tmp_path):
    (tmp_path / BOOK).write_text('{"format": 2}')
    with pytest.raises(ServeError, match="cannot make sense of the record of deployments"):
        read_book(tmp_path / BOOK)


def test_what_an_upgrade_changes_is_told_field_by_field_and_nothing_else_is():
    assert changes(OLD, NEW) == {
        "release": "1.0 -> 2.0", "model": "/models/a -> /models/b",
        "plan_digest": "plan-of-1.0 -> None", "schema_version": "1 -> 3",
    }  # fmt: skip
    assert changes(OLD, OLD.model_copy(update={"plan": Path("/elsewhere.json")})) == {}


class Kept:
    """A proof that says what it was asked, and finds the new deployment worse where told to."""

    def __init__(self, asked: list, worse: bool) -> None:
        self.asked, self.worse = asked, worse

    def before(self) -> None:
        self.asked.append("before")

    def after(self) -> None:
        self.asked.append("after")
        if self.worse:
            raise CheckFailed("p5 is 0.900 of what it was: at least 0.95 is asked for")


@pytest.mark.parametrize(("worse", "outcome"), [(False, "committed"), (True, "undone")])
def test_what_is_to_be_proved_is_measured_before_and_after_and_decides(tmp_path, worse, outcome):
    runner, asked = deploy(tmp_path), []
    runner.prover = lambda text, started: Kept(asked, worse)
    ended = runner.upgrade(NEW, ["speed:4:120"])
    assert ended.outcome == outcome and asked == ["before", "after"]
    assert ended.proofs == ("speed:4:120",)
    assert_serving_and_recorded(tmp_path)
    assert not worse or "0.900" in ended.reason


def test_a_fault_of_our_own_is_undone_like_any_other_failure(tmp_path):
    deploy(tmp_path)

    class Buggy(FileWorld):
        def prove(self, deployment: Deployment) -> None:
            raise TypeError("'NoneType' object is not subscriptable")

    outcome = Runner(Buggy(tmp_path), tmp_path).upgrade(NEW)
    assert outcome.outcome == "undone" and "TypeError" in outcome.reason
    assert assert_serving_and_recorded(tmp_path).current == OLD


@pytest.mark.parametrize("call", ["drain", "stop", "start", "prove"])
def test_an_upgrade_that_is_interrupted_goes_back_like_one_that_failed(tmp_path, call):
    deploy(tmp_path)

    class Interrupted(Fault):
        def meet(self, call: str, place: str) -> None:
            if (call, place) == (self.call, self.place) and not self.seen:
                self.seen += 1
                raise KeyboardInterrupt

    outcome = faulty(tmp_path, Interrupted(call, "interrupt")).upgrade(NEW)
    step = "switch" if call == "start" else call
    assert (outcome.outcome, outcome.reason) == ("undone", f"{step}: interrupted")
    assert assert_serving_and_recorded(tmp_path).current == OLD


def test_what_undoes_an_upgrade_may_be_interrupted_too_and_is_taken_up_again(tmp_path):
    deploy(tmp_path)

    class Twice(Fault):
        def meet(self, call: str, place: str) -> None:
            if call in ("prove", "stop") and self.seen < 3 and place == "before":
                self.seen += 1  # the upgrade's own stop, its proof, and the stop that undoes it
                if self.seen > 1:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        faulty(tmp_path, Twice("", "")).upgrade(NEW)
    assert faulty(tmp_path, None).resume().outcome == "undone"
    assert assert_serving_and_recorded(tmp_path).current == OLD


def test_a_terminal_that_goes_away_does_not_stop_an_upgrade_and_sigterm_interrupts_it(capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt), steadily():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert "appliance upgrade resume" in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before
