"""The chart on a real node (node.sh): install, helm test, upgrades that undo themselves, two GPUs.

KUBECONFIG and DOCKER_HOST name the node; helm and kubectl are on PATH. Part of `make check-node`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = REPOSITORY / "image" / "tests"
NAMESPACE = "appliance-tests"
CARDS = ["GPU-00000000-0000-0000-0000-000000000000", "GPU-11111111-1111-1111-1111-111111111111"]
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {name}}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteOnce]
  claimRef: {{namespace: {namespace}, name: {name}}}
  hostPath: {{path: {path}}}
"""


def run(*argv: str, given: str | None = None, seconds: float = 900, **variables: str):
    return subprocess.run(
        argv, input=given, capture_output=True, text=True, check=False, timeout=seconds,
        env={**os.environ, **variables}, cwd=REPOSITORY,
    )  # fmt: skip


def must(*argv: str, **options) -> str:
    done = run(*argv, **options)
    said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{argv}: {said}{'' if argv[0] == 'docker' else warnings()}"
    return done.stdout


def warnings() -> str:
    """What the cluster complains of: why a pod waits for the scheduler, among others."""
    done = run("kubectl", "-n", NAMESPACE, "get", "events", "--field-selector", "type=Warning",
               "-o", "custom-columns=:involvedObject.name,:reason,:message")  # fmt: skip
    return f"\nThe cluster's warnings:{done.stdout[-3000:]}{done.stderr}"


def kubectl(*argv: str, **options) -> str:
    return must("kubectl", "-n", NAMESPACE, *argv, **options)


def image(name: str, base: str) -> None:
    made_of = ("--build-arg", f"IMAGE=moe-appliance:{base}")
    file = ("-f", str(HERE / f"{name}.Dockerfile"))
    must("docker", "build", "-q", "-t", f"moe-appliance:{name}", *made_of, *file, str(HERE))


@contextmanager
def release(name: str, values: Path, folder: Path, *more: str) -> Iterator[None]:
    """Installed, with a volume for its state: there is no provisioner. Its pods end with it."""
    state = folder / f"{name}-state"
    state.mkdir()
    os.chown(state, 10001, 10001)
    claim = f"{name}-moe-appliance-state"
    kubectl("apply", "-f", "-",
            given=VOLUME.format(name=claim, namespace=NAMESPACE, path=state))  # fmt: skip
    try:
        must("helm", "install", name, "helm/", "-n", NAMESPACE, "-f", str(values), *more)
        yield
    finally:
        must("helm", "uninstall", name, "-n", NAMESPACE, "--wait", "--ignore-not-found")
        # The next install needs their CPUs, and a preflight that failed is left to be read.
        pods = ("pod", "-l", f"app.kubernetes.io/instance={name}")
        kubectl("delete", "job", f"{name}-moe-appliance-preflight", "--ignore-not-found")
        kubectl("wait", "--for=delete", *pods, "--timeout=180s")


@pytest.fixture(scope="module", autouse=True)
def namespace():
    must("kubectl", "create", "namespace", NAMESPACE)
    yield
    must("kubectl", "delete", "namespace", NAMESPACE, "--timeout=180s")


@pytest.fixture(scope="class")
def demo(tmp_path_factory):
    """The demo, ready, under the names that its service has."""
    folder = tmp_path_factory.mktemp("demo")
    folder.chmod(0o755)
    name = "demo-moe-appliance"
    hosts = Path(os.environ["KUBECONFIG"]).parent / "hosts" / NAMESPACE
    with release("demo", HERE / "values-demo.yaml", folder):
        address = kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
        hosts.write_text(f"{address} {name} {name}.{NAMESPACE}.svc.cluster.local\n")
        kubectl("rollout", "status", f"deployment/{name}", "--timeout=900s")
        yield folder


def appliance(folder: Path, *arguments: str):
    argv = [sys.executable, "-W", "ignore", "-m", "appliance.cli", *arguments]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels"), *sys.path])
    return run(*argv, APPLIANCE_STATE_DIR=str(folder / "operator"), PYTHONPATH=path)


def upgrade(folder: Path, image: str):
    return appliance(folder, "upgrade", "run", "--at", f"kubernetes:{NAMESPACE}/demo", "--chart",
                     "helm/", "--release", image, "--image", f"moe-appliance:{image}")  # fmt: skip


def running_image() -> str:
    return kubectl("get", "deployment", "demo-moe-appliance", "-o",
                   "jsonpath={.spec.template.spec.containers[0].image}")  # fmt: skip


class TestTheDemo:
    """As long as the demo lives: two GPUs are given two CPUs, and that is all that the node has."""

    def test_helm_test_passes_on_the_installed_demo(self, demo):
        assert "Phase:          Succeeded" in must("helm", "test", "demo", "-n", NAMESPACE)

    def test_an_image_that_cannot_be_had_is_found_before_anything_is_touched(self, demo):
        before = kubectl("get", "pods", "-o", "name", "-l", "app.kubernetes.io/component=appliance")
        done = upgrade(demo, "nowhere")
        assert done.returncode == 3 and "the image cannot be pulled" in done.stderr, done.stderr
        after = kubectl("get", "pods", "-o", "name", "-l", "app.kubernetes.io/component=appliance")
        assert after == before

    def test_an_upgrade_to_a_broken_image_goes_back_by_itself(self, demo):
        image("broken", "cpu")
        done = upgrade(demo, "broken")
        assert done.returncode == 3 and "still serving" in done.stderr, done.stderr
        assert running_image() == "moe-appliance:cpu"
        assert "Phase:          Succeeded" in must("helm", "test", "demo", "-n", NAMESPACE)

    def test_an_upgrade_is_committed_and_can_be_rolled_back(self, demo):
        must("docker", "tag", "moe-appliance:cpu", "moe-appliance:two")
        assert upgrade(demo, "two").returncode == 0 and running_image() == "moe-appliance:two"
        back = appliance(demo, "upgrade", "rollback", "--at", f"kubernetes:{NAMESPACE}/demo")
        assert back.returncode == 0, back.stderr
        assert running_image() == "moe-appliance:cpu"
        book = json.loads(next((demo / "operator" / "at").rglob("deployments.json")).read_text())
        assert [one["outcome"] for one in book["past"]][-2:] == ["committed", "committed"]
        assert book["running"] is None and book["current"]["plan_digest"]


def test_two_gpus_are_given_to_the_engine_of_the_gpu_flavour(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    folder.chmod(0o755)
    image("stub", os.environ.get("APPLIANCE_GPU_TAG", "cpu"))
    must("docker", "run", "--rm", "--user", "0", "-v", f"{folder}:/models", "--entrypoint",
         "appliance", "moe-appliance:stub", "weights", "synth", "/models/current")  # fmt: skip
    # Plans count memory that is truly free, and images fill the page cache.
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    with release("gpu", HERE / "values-gpu.yaml", folder, "--set", f"store.hostPath={folder}"):
        deadline, text = time.monotonic() + 240, ""
        while time.monotonic() < deadline and not text:
            seen = run("kubectl", "-n", NAMESPACE, "exec", "deployment/gpu-moe-appliance", "--",
                       "cat", "/var/lib/appliance/launched.json")  # fmt: skip
            text = seen.stdout
            time.sleep(1)
        log = run("kubectl", "-n", NAMESPACE, "logs", "deployment/gpu-moe-appliance").stdout
        assert text, log + warnings()
        seen = json.loads(text)
        argv = seen["argv"]
        assert argv[argv.index("--tensor-parallel-size") + 1] == "2"
        assert sorted(seen["environment"]["CUDA_VISIBLE_DEVICES"].split(",")) == CARDS
        assert seen["environment"]["APPLIANCE_DEPLOYMENT"] == "kubernetes"
        # Before 1.22 a memory volume is as large as half of the node, whatever its limit says.
        assert seen["uid"] == 10001 and seen["shm_bytes"] >= 8 << 30
