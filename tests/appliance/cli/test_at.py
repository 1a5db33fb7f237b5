"""--at: which container is meant, and a sentence where none is."""

import json
import sys
from pathlib import Path

import pytest

from appliance.cli import at as at_module
from appliance.cli.at import place_at, runner_at, status_at
from appliance.errors import UsageError
from appliance.settings import read_settings
from appliance.upgrade.away import Seen
from appliance.upgrade.compose import Compose
from appliance.upgrade.helm import Helm


def place(at: str, file: Path):
    return place_at(at, None, file, read_settings({"APPLIANCE_STATE_DIR": "/x"}))


@pytest.fixture
def file(tmp_path) -> Path:
    folder = tmp_path / "My.Models"
    folder.mkdir()
    (folder / "compose.yaml").write_text("services: {}\n")
    return folder / "compose.yaml"


def test_a_service_of_compose_is_found_by_the_projects_name_as_docker_makes_it(file, monkeypatch):
    monkeypatch.delenv("COMPOSE_PROJECT_NAME", raising=False)
    found = place("compose:demo", file)
    assert isinstance(found, Compose)
    assert (found.project, found.service, found.env_file.name) == ("mymodels", "demo", ".env")


def test_a_helm_release_is_named_with_its_namespace(file):
    found = place("kubernetes:serving/flash", file)
    assert isinstance(found, Helm)
    assert (found.release.namespace, found.release.name) == ("serving", "flash")


def test_each_appliance_has_a_record_of_its_own(file, tmp_path, monkeypatch):
    """One that is read as another's would give it that one's settings, and its revisions."""
    monkeypatch.delenv("COMPOSE_PROJECT_NAME", raising=False)
    monkeypatch.setenv("APPLIANCE_STATE_DIR", str(tmp_path / "state"))
    other = tmp_path / "other" / "compose.yaml"
    other.parent.mkdir()
    other.write_text("services: {}\n")
    places = [("compose", file), ("compose:demo", file), ("compose", other),
              ("kubernetes:llm-prod/flash", file), ("kubernetes:llm/prod-flash", file)]  # fmt: skip
    folders = [runner_at(at, None, compose).folder for at, compose in places]
    assert len(set(folders)) == 5 and all(one.is_dir() for one in folders)
    assert runner_at("compose:appliance", None, file).folder == folders[0]


def test_a_cluster_is_the_one_that_was_current_when_the_command_began(file, monkeypatch):
    class Client:
        """The part of the kubernetes client that reads kubeconfig."""

        class config:
            ConfigException = RuntimeError
            current = "arn:aws:eks:eu-west-1:1:cluster/staging"

            @classmethod
            def list_kube_config_contexts(cls):
                return [], {"name": cls.current}

    monkeypatch.setitem(sys.modules, "kubernetes", Client)
    staging = place("kubernetes:serving/flash", file)
    Client.config.current = "prod"
    assert staging.release.context == "arn:aws:eks:eu-west-1:1:cluster/staging"
    assert staging.folder.parts[1] == "arn%3Aaws%3Aeks%3Aeu-west-1%3A1%3Acluster%2Fstaging"
    assert place("kubernetes:serving/flash", file).folder != staging.folder


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("compose:grafana", "no service grafana"),
        ("kubernetes:flash", "names no place"),
        ("swarm", "names no place"),
    ],
)
def test_what_names_no_place_is_refused_with_what_would(file, at, words):
    with pytest.raises(UsageError, match=words):
        place(at, file)


def test_a_compose_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match="there is no"):
        place("compose", tmp_path / "compose.yaml")


class There:
    """A place with what is seen of it and what a command in it says."""

    def __init__(self, seen: Seen, code: int = 0, said: str = "") -> None:
        self.seen, self.answer = seen, (code, said)

    def look(self) -> Seen:
        return self.seen

    def inside(self, argv, limit_seconds) -> tuple[int, str]:
        return self.answer


@pytest.mark.parametrize(
    ("there", "code", "found"),
    [
        (There(Seen("pending", None, "the scheduler: 0/1 nodes", "free a node")), 3,
         {"serving": False, "phase": "pending", "message": "the scheduler: 0/1 nodes",
          "fix": "free a node"}),
        (There(Seen("ready"), 0, 'warning: slow\n{\n "serving": true\n}\nbye\n'), 0,
         {"serving": True}),
        (There(Seen("ready"), 1, "error: no state\n"), 1,
         {"serving": False, "phase": "unknown", "message": "error: no state", "fix": None}),
    ],
)  # fmt: skip
def test_the_status_of_a_container_is_json_also_where_it_is_not_ready(
    file, monkeypatch, capsys, there, code, found
):
    monkeypatch.setattr(at_module, "place_at", lambda *_: there)
    assert status_at("compose", file, json=True) == code
    assert json.loads(capsys.readouterr().out) == found
