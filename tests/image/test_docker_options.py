"""What the docker client is asked for is what compose.yaml says."""

import pytest
from composed import compose, environment

from appliance.serve import docker
from appliance.serve.docker import Container, options


@pytest.mark.parametrize(("service", "gpus"), [("appliance", True), ("demo", False)])
def test_the_client_is_asked_for_what_compose_says(service, gpus):
    one = compose()["services"][service]
    asked = options(Container(image="x", gpus=gpus, demo=not gpus))
    for key in ("read_only", "cap_drop", "cap_add", "security_opt"):
        assert asked[key] == one[key]
    assert set(asked["volumes"]) >= {v for v in one["volumes"] if v.startswith(("/proc", "/sys"))}
    assert asked["ports"]["8000/tcp"] == ("127.0.0.1", 8000)
    composed = environment(service)
    shared = {name: value for name, value in asked["environment"].items() if name in composed}
    assert shared == {name: composed[name] for name in shared}
    assert {"APPLIANCE_DEVICE", "APPLIANCE_HOST", "APPLIANCE_HOST_ROOT"} <= set(shared)


@pytest.mark.parametrize(
    ("said", "meaning", "fix"),
    [
        ("Error while fetching server API version: ('Connection aborted.', "
         "PermissionError(13, 'Permission denied'))",
         "no permission on Docker's socket", "usermod"),
        ("Error while fetching server API version: ('Connection aborted.', FileNotFoundError(2))",
         "the Docker daemon does not answer", "systemctl start docker"),
        ('could not select device driver "nvidia" with capabilities: [[gpu]]',
         "Docker cannot give the container GPUs", "nvidia-ctk runtime configure"),
        ("No such image: a:b", "the image is not on this machine", "docker compose build"),
    ],
)  # fmt: skip
def test_what_docker_says_becomes_a_sentence_with_the_way_out(said, meaning, fix):
    error = docker._sentence(RuntimeError(said))
    assert error.message.startswith(meaning) and fix in error.fix


def test_what_is_not_known_is_passed_on_as_it_is():
    assert docker._sentence(RuntimeError("something new")).message == "Docker: something new"
