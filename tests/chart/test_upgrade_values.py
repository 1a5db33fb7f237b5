"""What an upgrade of a Helm release asks for is what the chart renders."""

from pathlib import Path

import pytest
import yaml
from charts import CHART, DEMO, flags, only

from appliance.cli.upgrading import _wanted
from appliance.serve.kubernetes import Release
from appliance.upgrade.away import Away, record_of
from appliance.upgrade.book import Deployment
from appliance.upgrade.helm import Helm, values_of
from appliance.upgrade.run import Runner

DIGEST = "sha256:" + "a" * 64
NOW = Deployment(release="1", image="old/appliance:1", model=Path("/models/current"))
GPU = ("flavour=gpu", "demo=false", "gpus.count=1", "memlock=root", "resources.memoryGiB=64",
       "resources.cpu=8", "resources.shmGiB=1")  # fmt: skip


def rendered(helm, asked: Deployment, values: tuple[str, ...]) -> dict:
    """The appliance's container after `helm upgrade` with these arguments."""
    done = helm("template", "a", str(CHART), *flags(values), *values_of(asked))
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.safe_load_all(done.stdout) if one]
    return only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("image", "runs"),
    [
        (f"registry.lan:5000/llm/appliance@{DIGEST}", f"registry.lan:5000/llm/appliance@{DIGEST}"),
        ("registry.lan:5000/llm/appliance:2", "registry.lan:5000/llm/appliance:2"),
        (f"ghcr.io/llm/appliance:2@{DIGEST}", f"ghcr.io/llm/appliance@{DIGEST}"),
        ("registry.lan:5000/appliance", "registry.lan:5000/appliance:cpu"),  # the flavour's tag
        ("appliance:2", "appliance:2"),
    ],
)
def test_the_image_that_was_asked_for_is_the_one_that_runs(helm, image, runs):
    place = Helm(Release("a", "ns"), None, {}, 0.0)
    asked = place.target(NOW, "2", image, None, "2-abc")
    assert rendered(helm, asked, DEMO)["image"] == runs
    assert asked.image_digest == (DIGEST if "@" in image else None)


def test_a_path_arrives_as_it_was_written(helm):
    model = "/models/V4.1, 3 bits {mcg}"
    asked = Helm(Release("a", "ns"), None, {}, 0.0).target(NOW, "2", None, Path(model), "2-abc")
    container = rendered(helm, asked, GPU)
    found = {one["name"]: one.get("value") for one in container["env"]}
    assert (found["APPLIANCE_MODEL"], found["APPLIANCE_RECORD"]) == (model, "2-abc")


@pytest.mark.parametrize("release", ["2.0+cuda13", "spring, second", "v2_rc1", "größer"])
def test_a_release_of_any_name_makes_a_record_that_the_chart_takes(helm, tmp_path, release):
    place = Helm(Release("a", "ns"), None, {}, 0.0)
    runner = Runner(Away(place, 1.0, 5.0), tmp_path)
    asked = _wanted(runner, NOW, release, None, None, "appliance:2")
    found = {one["name"]: one.get("value") for one in rendered(helm, asked, DEMO)["env"]}
    assert found["APPLIANCE_RECORD"] == record_of(asked) != "" and asked.release == release
