"""The gpu flavour as built: its pins, kernels from the cache stage, nothing that compiles."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path

from expert_kernels.build import digest

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "image" / "kernels"
LIBRARY = "libexpert_kernels.so"
IMAGE = os.environ["APPLIANCE_IMAGE"]


def run(*arguments: str, image: str = IMAGE) -> subprocess.CompletedProcess[str]:
    shape = ["docker", "run", "--rm", "--read-only", "--network", "none", "--entrypoint"]
    first, *rest = (one.replace("IMAGE", image) for one in arguments)
    return subprocess.run([*shape, first, *rest], capture_output=True, text=True, timeout=120,
                          check=False)  # fmt: skip


def inside(*command: str) -> str:
    done = run(command[0], "IMAGE", *command[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pins(name: str) -> dict[str, str]:
    text = (REPOSITORY / "constraints" / name).read_text()
    # Without those of other systems: `colorama==0.4.6 ; sys_platform == 'win32' \`.
    found = re.findall(r"^([\w.-]+)==([\w.+!-]+) \\$", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", one).lower(): version for one, version in found}


def test_the_library_is_the_cached_one_byte_for_byte_and_of_these_sources():
    look = (
        "import hashlib, expert_kernels.build as b, pathlib;"
        f"p = pathlib.Path(b.__file__).parent / '{LIBRARY}';"
        "print(p.resolve(), hashlib.sha256(p.read_bytes()).hexdigest(), b.source_of(p))"
    )
    place, sha256, sources = inside("python", "-c", look).split()
    assert place == f"/opt/kernels/{LIBRARY}"
    assert sha256 == hashlib.sha256((KERNELS / LIBRARY).read_bytes()).hexdigest()
    assert sources == digest()


def test_it_holds_code_for_the_architectures_that_its_record_names():
    record = json.loads(inside("cat", "/opt/kernels/build.json"))
    content = (KERNELS / LIBRARY).read_bytes()
    assert record["architectures"] and record["bytes"][LIBRARY] == len(content)
    for architecture in record["architectures"]:
        assert re.search(rb"\.target\s+" + architecture.encode(), content) or (
            architecture.encode() in content
        )


def test_tritons_binding_is_there_since_nothing_in_the_image_could_compile_it():
    assert "cuda_utils" in inside("find", "/opt/kernels/triton", "-name", "*.so")
    look = "for c in cc gcc g++ clang nvcc ld as ptxas; do command -v $c; done; true"
    assert inside("sh", "-c", look).strip() == ""
    assert inside("find", "/opt/appliance", "-name", "nvcc").strip() == ""


def test_every_component_has_the_version_that_is_pinned():
    components = json.loads(inside("cat", "/opt/appliance/sbom.json"))["components"]
    there = {re.sub(r"[-_.]+", "-", c["name"]).lower(): c["version"] for c in components}
    wanted = {**pins("base.txt"), **pins("engine-gpu.txt")}
    assert {name: there.get(name) for name in wanted} == wanted
    assert {"torch", "vllm", "moe-appliance"} <= there.keys()


def test_the_stage_refuses_a_library_of_other_sources(tmp_path):
    """The very command of the stage `kernels-cache`, on a library that is none of ours."""
    (tmp_path / "compile.py").write_bytes((REPOSITORY / "image" / "compile.py").read_bytes())
    mounts = ("-v", f"{tmp_path}:/kernels", "-v", f"{REPOSITORY / 'kernels'}:/build/kernels:ro")
    check = ("python3", *mounts, os.environ["APPLIANCE_BASE_IMAGE"], "/kernels/compile.py", "check",
             "/kernels")  # fmt: skip
    missing = run(*check)
    assert missing.returncode and f"image/kernels holds no {LIBRARY}" in missing.stderr
    (tmp_path / LIBRARY).write_bytes(b"\x7fELF of somebody else")
    stale = run(*check)
    assert stale.returncode and "is of other sources than these: `make kernels`" in stale.stderr


def test_a_release_is_refused_on_a_base_that_is_a_tag_and_names_its_base():
    base = os.environ["APPLIANCE_BASE_IMAGE"]
    build = ["docker", "build", "--network", "host", "--build-arg", f"BASE_IMAGE={base}",
             "--build-arg", "KERNELS=none", "--build-arg", "PIP_NO_CACHE_DIR=1",
             "--build-arg", "RELEASE=1.2.0"]  # fmt: skip
    done = subprocess.run([*build, "--target", "runtime", "."], cwd=REPOSITORY, check=False,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode and f"release 1.2.0 on {base}, which is no fixed image" in done.stderr
    labels = subprocess.run(["docker", "inspect", "-f", "{{json .Config.Labels}}", IMAGE],
                            capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    assert json.loads(labels.stdout)["org.opencontainers.image.base.name"] == base
