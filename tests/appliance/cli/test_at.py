"""--at: which container is meant, and a sentence where none is."""

from pathlib import Path

import pytest

from appliance.cli.at import place_at
from appliance.errors import UsageError
from appliance.settings import read_settings
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
