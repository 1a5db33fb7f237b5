"""Upgrades of a supervisor on this host, with real checkpoints and plans and a stand-in engine."""

import dataclasses
import os
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest

from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.cli import serving as cli
from appliance.plan.model import load_plan
from appliance.plan.request import Policy
from appliance.serve import local
from appliance.serve import prepare as prepare_module
from appliance.serve.client import Client
from appliance.serve.keys import first_key
from appliance.serve.prepare import Request, prepare
from appliance.serve.spec import Wishes
from appliance.serve.state import Files, read_state
from appliance.upgrade.book import Deployment, read_book
from appliance.upgrade.here import Here
from appliance.upgrade.run import BOOK, Runner
from preflight import Host, inspect

REPOSITORY = Path(__file__).resolve().parents[3]
STANDIN = REPOSITORY / "tests" / "appliance" / "serve" / "standin.py"

# A detached supervisor outlives the one that started it, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """old, new: two small checkpoints; broken: one with a short shard; sick: its engine dies."""
    folder = tmp_path_factory.mktemp("models")
    synthesize(folder / "old", SynthSpec(seed=1))
    synthesize(folder / "new", SynthSpec(seed=2))
    shutil.copytree(folder / "new", folder / "sick")
    shutil.copytree(folder / "new", folder / "broken")
    shard = max((folder / "broken").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4096])
    return folder


@pytest.fixture
def runner(tmp_path, models):
    """`old` serves and is recorded."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in */sick*) export STANDIN="dies at start";; esac\n'
        f'exec {sys.executable} {STANDIN} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = Files.of(tmp_path / "state")
    wishes = Wishes(engine_python=str(python), host="127.0.0.1", port=port, drain_seconds=10.0)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("APPLIANCE_")}
    inherited = {
        **kept, "APPLIANCE_STATE_DIR": str(files.folder), "APPLIANCE_ENGINE_PYTHON": str(python),
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}",
    }  # fmt: skip

    here = Here(files, wishes, cli.supervisor_argv, inherited, drain_seconds=10.0)
    spec = prepare(Request(models / "old", None, Policy()), wishes, files).spec
    local.detach(cli.supervisor_argv(spec, ()), spec, inherited, lambda state: None)
    runner = Runner(here, files.folder)
    runner.adopt(here.served())
    yield runner
    local.stop(files, lambda state: None, 60.0)


def serving(runner: Runner) -> str:
    """The folder of the model that answers now."""
    here = runner.world
    client = Client("127.0.0.1", here._wishes().port, first_key(here.files.keys))
    body = {"model": "x", "prompt": [1], "max_tokens": 2}
    assert client.post("/v1/completions", body)["choices"][0]["token_ids"] == [2, 2]
    found = local.status(here.files)
    assert found.is_serving and found.gateway["admitted"] and not found.gateway["draining"]
    book = read_book(runner.folder / BOOK)
    assert book.running is None and book.current.plan_digest == found.state.plan_digest
    return found.state.model.name


class WithoutCanary(Here):
    """The stand-in has no chat route; what is proved here is the way there and back."""

    def prove(self, deployment: Deployment) -> None:
        now = self._wishes()
        client = Client(now.host, now.port, first_key(self.files.keys))
        client.post("/v1/completions", {"model": "x", "prompt": [1], "max_tokens": 1})


def target(models: Path, name: str) -> Deployment:
    return Deployment(release=name, model=models / name)


def test_an_upgrade_serves_the_new_model_with_a_plan_of_its_own_and_a_rollback_the_old(
    runner, models
):
    runner.world.__class__ = WithoutCanary
    outcome = runner.upgrade(target(models, "new"))
    assert outcome.outcome == "committed", outcome.reason
    assert serving(runner) == "new"
    assert runner.rollback().outcome == "committed"
    assert serving(runner) == "old"


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("absent", "pull", "there is no checkpoint at"),
        ("broken", "verify", "broken"),
        ("sick", "switch", "ValueError: No available memory"),
        ("new", "prove", "/v1/models"),
    ],
)
def test_what_fails_leaves_the_old_model_serving_and_says_at_which_step(
    runner, models, name, step, words
):
    outcome = runner.upgrade(target(models, name))
    assert outcome.outcome == "undone"
    assert outcome.reason.startswith(f"{step}: ") and words in outcome.reason
    assert serving(runner) == "old"


def test_clients_find_the_new_model_where_and_as_what_the_old_one_was(runner, models):
    """`up` was told port and name, and the settings have others."""
    here = runner.world
    here.__class__ = WithoutCanary
    local.stop(here.files, lambda state: None, 60.0)
    named = dataclasses.replace(here.wishes, served_name="flash")
    spec = prepare(Request(models / "old", None, Policy()), named, here.files).spec
    local.detach(cli.supervisor_argv(spec, ()), spec, here.inherited, lambda state: None)
    here.wishes = dataclasses.replace(here.wishes, port=1)
    here.policy = Policy(streams=3, context_tokens=512)
    outcome = runner.upgrade(target(models, "new"))
    assert outcome.outcome == "committed", outcome.reason
    state = read_state(here.files)
    assert (state.port, state.served_name, state.model.name) == (spec.port, "flash", "new")
    plan = load_plan(state.plan)
    assert (plan.serving.streams, plan.serving.context_tokens) == (3, 512)


def test_what_served_although_a_check_failed_serves_again_when_an_upgrade_does_not(
    runner, models, monkeypatch
):
    """`up --ignore shm-small` is not repeated by who upgrades: the new one is refused, not both."""
    small = lambda source: with_small_shm(inspect(source))  # noqa: E731
    monkeypatch.setattr(prepare_module, "inspect", small)
    asked: list[list[str]] = []
    here = runner.world
    plain = here.supervisor
    here.supervisor = lambda spec, ignore: asked.append(list(ignore)) or plain(spec, ignore)
    outcome = runner.upgrade(target(models, "new"))
    assert outcome.outcome == "undone"
    assert outcome.reason.startswith("switch: ") and "shm-small" in outcome.reason
    assert serving(runner) == "old" and asked == [["shm-small"]]


def with_small_shm(host: Host) -> Host:
    return host.model_copy(
        update={"limits": host.limits.model_copy(update={"shm_bytes": 64 << 20})}
    )
