"""`appliance plan values`: the chart takes what a plan says, and waits for its load."""

import math

import pytest
import yaml
from charts import only
from machines import machine
from plan_builders import GIB, checkpoint, deepseek_v41_flash, expert, host, layer

from appliance.cli import run
from appliance.plan.explain import show_lines
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.serve.spec import predicted_load_seconds


@pytest.fixture
def reference(tmp_path):
    made = plan(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), None, Policy())
    made.write(tmp_path / "plan.json")
    return made, tmp_path / "plan.json"


def test_the_startup_probe_waits_three_times_the_longest_load_that_the_plan_predicts(
    helm, reference, capsys, tmp_path
):
    made, path = reference
    assert run(["plan", "values", str(path)]) == 0
    said = capsys.readouterr().out
    values = yaml.safe_load(said)
    said_by_plan = made.forecast.load_seconds
    predicted = said_by_plan.high
    likely = predicted_load_seconds(made)
    assert likely == said_by_plan.likely, "`up`, `plan show` and the chart say one number"
    assert f"# predicted load: {likely:.0f} s, at the longest {predicted:.0f} s" in said
    assert any(f"loading  {likely:.3g} (" in line for line in show_lines(made))
    assert values["gpus"]["count"] == 2 and predicted <= values["loadSeconds"] < predicted + 1
    given = [f"loadSeconds={values['loadSeconds']}", "gpus.count=2",
             f"resources.memoryGiB={values['resources']['memoryGiB']}"]  # fmt: skip
    pod = only(helm.render(*given), "Deployment")["spec"]["template"]["spec"]
    probe = pod["containers"][0]["startupProbe"]
    waited = probe["failureThreshold"] * probe["periodSeconds"]
    assert 3 * predicted - 10 <= waited <= 3 * predicted + 10
    host = sum(rank.total_bytes("host") for rank in made.ranks)
    asked = int(pod["containers"][0]["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert asked > host + (16 << 30)


def test_without_a_gpu_the_pod_asks_for_both_homes_and_no_cuda_memory(helm, capsys, tmp_path):
    """6 GiB of experts and what runs beside them, not 24 GiB more."""
    made = plan(host(), checkpoint((layer(experts=68, shape=expert(8192, 10240)),)), None, Policy())
    made.write(tmp_path / "plan.json")
    assert run(["plan", "values", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    values = yaml.safe_load(said)
    homes = [made.ranks[0].total_bytes(home) for home in ("device", "host")]
    assert min(homes) > 3 << 30 and "both homes are RAM" in said
    assert (values["flavour"], values["gpus"]["count"]) == ("cpu", 0)
    assert values["resources"] == {"memoryGiB": math.ceil(sum(homes) / GIB) + 1, "shmGiB": 1}
    given = [f"resources.{name}={value}" for name, value in values["resources"].items()]
    pod = only(helm.render("flavour=cpu", "gpus.count=0", "memlock=none", *given), "Deployment")
    container = pod["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["memory"] == f"{values['resources']['memoryGiB']}Gi"
