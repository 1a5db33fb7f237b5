"""An appliance in a Docker container: start it, ask it, read its log, stop it.

The container runs `appliance container`, so plan and ServeSpec are made inside, on the machine as
the container sees it; here is what surrounds them. The only importer of the docker client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ServeError, with_extra

API_PORT, AGENT_PORT = 8000, 8001
INSIDE = {
    "APPLIANCE_HOST": "0.0.0.0",
    "APPLIANCE_AGENT_HOST": "0.0.0.0",
    "APPLIANCE_DEPLOYMENT": "docker",
    "APPLIANCE_HOST_ROOT": "/host",
    "APPLIANCE_MODEL": "/models/current",
}
STOP_SECONDS_MORE = 30
ONCE_SECONDS = 900.0


@dataclass(frozen=True)
class Container:
    """What a container is made of. `models`: a folder of this host, or a volume's name."""

    image: str
    name: str = "moe-appliance"
    models: str = "models"
    state: str = "state"
    gpus: bool = True
    demo: bool = False
    listen: str = "127.0.0.1"
    port: int = API_PORT
    agent_port: int = AGENT_PORT
    shm_bytes: int = 8 << 30
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A container as Docker sees it. `exit_code` is None while it runs."""

    id: str
    image_digest: str
    running: bool
    health: str | None
    exit_code: int | None
    reason: str | None
    name: str = ""
    image: str = ""
    restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)


def options(made: Container) -> dict[str, Any]:
    """Arguments of the client's `containers.create`: what compose.yaml's service says. Pure."""
    environment = {**INSIDE, "APPLIANCE_DEVICE": "cuda" if made.gpus else "cpu", **made.settings}
    return {
        "image": made.image,
        "name": made.name,
        "command": ["--demo"] if made.demo else [],
        "environment": environment,
        "read_only": True,
        "tmpfs": {"/tmp": ""},
        "cap_drop": ["ALL"],
        "cap_add": ["SYS_NICE"],
        "security_opt": ["no-new-privileges:true"],
        "ports": {
            f"{API_PORT}/tcp": (made.listen, made.port),
            f"{AGENT_PORT}/tcp": ("127.0.0.1", made.agent_port),
        },
        "volumes": [
            f"{made.state}:/var/lib/appliance",
            f"{made.models}:/models:ro",
            "/proc:/host/proc:ro",
            "/sys:/host/sys:ro",
        ],
        "shm_size": made.shm_bytes,
        "restart_policy": {"Name": "unless-stopped"},
    }


def apply(made: Container) -> str:
    """Create and start it; its id. Raises ServeError with Docker's reason as one sentence."""
    with _client() as client:
        docker = _docker()
        limits = [docker.types.Ulimit(name="memlock", soft=-1, hard=-1)]
        devices = [docker.types.DeviceRequest(driver="nvidia", count=-1, capabilities=[["gpu"]])]
        container = client.containers.create(
            **options(made), ulimits=limits, device_requests=devices if made.gpus else None
        )
        try:
            container.start()
        except Exception:
            # Left behind, it would hold the name, and the next try would fail for that.
            container.remove(force=True)
            raise
        return str(container.id)


def status(name: str) -> Found | None:
    """The container of that name; None where there is none."""
    with _client() as client:
        try:
            attributes = client.containers.get(name).attrs
        except _docker().errors.NotFound:
            return None
    return _found(attributes)


def composed(project: str, service: str) -> Found | None:
    """The container of a service that `docker compose` started, running or not."""
    labels = [f"com.docker.compose.project={project}", f"com.docker.compose.service={service}",
              "com.docker.compose.oneoff=False"]  # fmt: skip
    with _client() as client:
        listed = client.containers.list(all=True, filters={"label": labels})
        return _found(listed[0].attrs) if listed else None


def _found(attributes: Mapping[str, Any]) -> Found:
    state = attributes["State"]
    pairs = (entry.partition("=") for entry in attributes["Config"]["Env"] or ())
    return Found(
        id=attributes["Id"],
        image_digest=attributes["Image"],
        running=state["Running"],
        health=state.get("Health", {}).get("Status"),
        exit_code=None if state["Running"] else state["ExitCode"],
        reason=state["Error"] or ("out of memory" if state["OOMKilled"] else None),
        name=attributes["Name"].lstrip("/"),
        image=attributes["Config"]["Image"],
        restarts=attributes.get("RestartCount", 0),
        environment={name: value for name, _, value in pairs},
        mounts={m["Destination"]: m.get("Name") or m["Source"] for m in attributes["Mounts"]},
    )


def logs(name: str, lines: int, *, follow: bool) -> Iterator[str]:
    with _client() as client:
        stream = client.containers.get(name).logs(tail=lines, follow=follow, stream=True)
        rest = b""
        for piece in stream:
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)


def inside(name: str, argv: Sequence[str], limit_seconds: float) -> tuple[int, str]:
    """Exit code and output of a command in the running container, silent for so long at most."""
    with _client(timeout_seconds=limit_seconds) as client:
        done = client.containers.get(name).exec_run(list(argv))
        return int(done.exit_code), done.output.decode("utf-8", "replace")


def pull(image: str) -> tuple[str, frozenset[str]]:
    """The image is here, pulled if it was not: its id, and the digests that registries know."""
    with _client(timeout_seconds=ONCE_SECONDS) as client:
        try:
            found = client.images.get(image)
        except _docker().errors.ImageNotFound:
            found = client.images.pull(image)
        known = found.attrs.get("RepoDigests") or ()
        return found.id, frozenset(entry.rpartition("@")[2] for entry in known)


def once(image: str, argv: Sequence[str], state: str | None = None) -> str:
    """What a command says in a container of its own, with the volume `state` where given."""
    volumes = [f"{state}:/var/lib/appliance"] if state else []
    with _client(timeout_seconds=ONCE_SECONDS) as client:
        try:
            said = client.containers.run(
                image, list(argv[1:]), entrypoint=[argv[0]], remove=True, volumes=volumes,
                network_mode="none", cap_drop=["ALL"], stderr=False,
            )  # fmt: skip
        except _docker().errors.ContainerError as error:
            words = error.stderr.decode("utf-8", "replace").split()
            raise ServeError(f"{' '.join(argv)} failed there: {' '.join(words[-40:])}") from error
        return bytes(said).decode("utf-8", "replace")


def stop(name: str, drain_seconds: float) -> int:
    """Let accepted requests finish, end it, remove it; its exit code."""
    with _client(timeout_seconds=drain_seconds + 2 * STOP_SECONDS_MORE) as client:
        container = client.containers.get(name)
        container.stop(timeout=round(drain_seconds) + STOP_SECONDS_MORE)
        code = int(container.wait()["StatusCode"])
        container.remove()
        return code


def _docker() -> Any:
    try:
        import docker
    except ImportError as error:
        raise ServeError(
            "the docker client is not installed here", fix=with_extra("docker")
        ) from error
    return docker


@contextmanager
def _client(timeout_seconds: float = 60.0) -> Iterator[Any]:
    docker = _docker()
    client = None
    try:
        client = docker.from_env(timeout=timeout_seconds)
        yield client
    except (docker.errors.DockerException, OSError) as error:
        raise _sentence(error) from error
    finally:
        if client is not None:
            client.close()


# What Docker says, what that means, and what to do.
SENTENCES = (
    ("permission denied", "no permission on Docker's socket",
     "sudo usermod -aG docker $USER, and log in again"),
    ("error while fetching server api version", "the Docker daemon does not answer",
     "sudo systemctl start docker, or set DOCKER_HOST"),
    ("could not select device driver", "Docker cannot give the container GPUs",
     "install nvidia-container-toolkit and run: sudo nvidia-ctk runtime configure"),
    ("no such image", "the image is not on this machine",
     "docker compose build, or pull it by its digest"),
    ("pull access denied", "the image is not on this machine and its registry gave none",
     "docker login, or docker compose build"),
    ("port is already allocated", "another container publishes that port",
     "stop it, or choose another with APPLIANCE_PORT"),
    ("address already in use", "another program holds that port",
     "stop it, or choose another with APPLIANCE_PORT"),
    ("is already in use by container", "a container of that name exists",
     "appliance down, or docker rm it"),
    ("no such container", "there is no such container", "appliance up"),
)  # fmt: skip


def _sentence(error: Exception) -> ServeError:
    text = str(getattr(error, "explanation", None) or error).strip()
    for words, meaning, fix in SENTENCES:
        if words in text.lower() or words in str(error).lower():
            return ServeError(f"{meaning} ({text.splitlines()[0][:200]})", fix=fix)
    return ServeError(f"Docker: {text.splitlines()[0][:300]}")
