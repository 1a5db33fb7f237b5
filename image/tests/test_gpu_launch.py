"""Two fake cards: the gpu appliance of compose.yaml gets as far as the engine's launch."""

import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = "appliance-fake-gpus"
FILES = ("-p", PROJECT, "-f", "compose.yaml", "-f", "image/tests/fake-gpus.yaml")
CARDS = ("GPU-00000000-0000-0000-0000-000000000000", "GPU-11111111-1111-1111-1111-111111111111")
# What this machine cannot be, whatever cards it pretends to have: it has one memory node, too
# little memory, no kernel module of NVIDIA's, and a limit on locks that its root may not raise.
IGNORED = ",".join((
    "uvm-module-missing", "gpu-node-without-memory", "cpuset-excludes-gpu-node", "memlock-low",
    "load-peak-short",
))  # fmt: skip


def compose(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(["docker", "compose", *FILES, *arguments], cwd=REPOSITORY, check=False,
                          capture_output=True, text=True, timeout=300, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inside(*command: str) -> str:
    done = subprocess.run(["docker", "compose", *FILES, "exec", "-T", "appliance", *command],
                          cwd=REPOSITORY, check=False, capture_output=True, text=True,
                          timeout=60)  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def launched():
    """What the stub in place of the engine saw, and the log up to there."""
    image = os.environ.get("APPLIANCE_IMAGE", "moe-appliance:cpu")
    synth = ["docker", "run", "--rm", "--network", "none", "-v", f"{PROJECT}_models:/models",
             "--entrypoint", "appliance", image, "weights", "synth", "/models/current"]  # fmt: skip
    made = subprocess.run(synth, check=False, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    # Plans count memory that is truly free, and building an image fills the page cache.
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    variables = {"APPLIANCE_IGNORE_CHECKS": IGNORED}
    compose("up", "-d", "appliance", **variables)
    deadline, text = time.monotonic() + 120, ""
    while time.monotonic() < deadline and not text:
        text = inside("cat", "/var/lib/appliance/launched.json")
        if "staying up" in compose("logs", "appliance", **variables):
            break
        time.sleep(0.5)
    log = compose("logs", "appliance", **variables)
    try:
        assert text, log
        yield json.loads(text), log
    finally:
        compose("down", "--volumes", **variables)
        # `docker run` made this one, so compose leaves it.
        subprocess.run(["docker", "volume", "rm", f"{PROJECT}_models"], check=False,
                       capture_output=True, timeout=60)  # fmt: skip


def argument(seen: dict, name: str) -> str:
    return seen["argv"][seen["argv"].index(name) + 1]


def test_it_plans_for_both_cards_and_gives_each_rank_its_own(launched):
    seen, _ = launched
    assert argument(seen, "--tensor-parallel-size") == "2"
    assert tuple(seen["environment"]["CUDA_VISIBLE_DEVICES"].split(",")) == CARDS
    plan = json.loads(inside("cat", "/var/lib/appliance/plan.json"))
    assert [rank["gpu"] for rank in plan["ranks"]] == list(CARDS)
    assert argument(seen, "--max-num-seqs") == str(plan["serving"]["streams"])


def test_the_limits_are_those_that_pinning_and_ranks_need(launched):
    seen, _ = launched
    # compose asks for no limit; the runtime in these tests gives as much as the machine has.
    assert seen["memlock"] == resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    assert seen["shm_bytes"] == 8 << 30 and seen["uid"] == 10001


def test_the_command_is_vllm_behind_the_gateway_on_the_containers_port(launched):
    seen, _ = launched
    assert seen["argv"][:5] == ["-P", "-m", "vllm.entrypoints.cli.main", "serve", "/models/current"]
    assert argument(seen, "--middleware") == "appliance.gateway.Gateway"
    assert (argument(seen, "--host"), argument(seen, "--port")) == ("0.0.0.0", "8000")


def test_compile_caches_are_of_this_image_and_plan_only(launched):
    seen, _ = launched
    assert seen["environment"]["VLLM_CACHE_ROOT"].startswith("/var/lib/appliance/cache/")


def test_all_four_steps_are_in_the_log(launched):
    _, log = launched
    assert all(f"{step}: " in log for step in ("preflight", "plan", "bind", "engine"))
