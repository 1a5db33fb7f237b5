"""The docker client against a real daemon: what it starts, and genuine errors as one sentence."""

import dataclasses
import gc
import time

import pytest

from appliance.errors import ServeError
from appliance.serve import docker
from appliance.serve.docker import Container

NAME = "appliance-client-test"
DEMO = Container(image="moe-appliance:cpu", name=NAME, gpus=False, demo=True, models="client",
                 state="client-state", port=18010, agent_port=18011, shm_bytes=1 << 30,
                 settings={"APPLIANCE_ENGINE_PYTHON": "/bin/false"})  # fmt: skip


@pytest.fixture(autouse=True)
def clean():
    yield
    if docker.status(NAME) is not None:
        docker.stop(NAME, 0.0)


def test_a_container_is_started_seen_read_and_stopped():
    assert docker.status(NAME) is None
    started = docker.apply(dataclasses.replace(DEMO, settings={"APPLIANCE_MODEL": "/nowhere",
                                                               "APPLIANCE_HOLD_ON_FAILURE": "true"},
                                               demo=False))  # fmt: skip
    found = docker.status(NAME)
    assert found.id == started and found.running and found.image_digest.startswith("sha256:")
    deadline = time.monotonic() + 60
    text = ""
    while "plan failed" not in text and time.monotonic() < deadline:
        text = "\n".join(docker.logs(NAME, 100, follow=False))
        time.sleep(0.5)
    assert "error: plan failed (exit code 5)" in text
    assert docker.stop(NAME, 5.0) == 5
    assert docker.status(NAME) is None


def test_an_image_that_is_not_there_is_one_sentence():
    with pytest.raises(ServeError, match="the image is not on this machine") as caught:
        docker.apply(dataclasses.replace(DEMO, image="local/nothing:here"))
    assert "docker compose build" in caught.value.fix


def test_a_port_that_is_published_already_is_one_sentence_and_leaves_no_container_behind():
    docker.apply(DEMO)
    second = dataclasses.replace(DEMO, name=NAME + "-2", agent_port=18012)
    with pytest.raises(ServeError, match=r"publishes that port|holds that port") as caught:
        docker.apply(second)
    assert "APPLIANCE_PORT" in caught.value.fix
    assert docker.status(NAME + "-2") is None


def test_a_name_that_is_taken_is_one_sentence():
    docker.apply(DEMO)
    with pytest.raises(ServeError, match="a container of that name exists"):
        docker.apply(dataclasses.replace(DEMO, port=18020, agent_port=18021))


# The docker client leaves the socket of a failed connection to the garbage collector, which
# would come in a later test.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_daemon_that_is_down_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(ServeError, match="the Docker daemon does not answer") as caught:
        try:
            docker.status(NAME)
        finally:
            monkeypatch.undo()
    assert "systemctl start docker" in caught.value.fix
    del caught
    gc.collect()


def test_a_container_that_is_not_there_is_one_sentence():
    with pytest.raises(ServeError, match="there is no such container"):
        docker.stop("never-was", 1.0)
