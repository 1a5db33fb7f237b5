"""The chart and compose.yaml start the same engine from the same wishes."""

from pathlib import Path

import pytest
from charts import only
from composed import environment
from machines import machine
from plan_builders import deepseek_v41_flash

from appliance.cli.serving import files_of, wishes_of
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.serve.spec import ServeSpec, spec
from appliance.settings import read_settings

COMPOSE = {
    "APPLIANCE_KEYS_FILE": "./keys", "APPLIANCE_SERVED_NAME": "flash",
    "APPLIANCE_DRAIN_SECONDS": "80", "APPLIANCE_GATEWAY_MAX_BODY_BYTES": "1000000",
    "APPLIANCE_START_LIMIT_SECONDS": "4000", "APPLIANCE_STREAMS": "4",
}  # fmt: skip
VALUES = (
    "settings.servedName=flash", "settings.drainSeconds=80", "settings.maxBodyBytes=1000000",
    "settings.startLimitSeconds=4000", "settings.streams=4",
)  # fmt: skip


def chart_environment(helm, *values: str) -> dict[str, str]:
    pod = only(helm.render(*values), "Deployment")["spec"]["template"]["spec"]
    return {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}


def spec_of(variables: dict[str, str]) -> ServeSpec:
    settings = read_settings({**variables, "APPLIANCE_STATE_DIR": "/var/lib/appliance"})
    wishes = wishes_of(settings, name=settings.served_name)
    files = files_of(settings)
    model = settings.model or Path("/none")
    made = plan(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), None, Policy())
    return spec(made, model, files.plan, wishes, files)


@pytest.mark.parametrize(("given", "values"), [({"APPLIANCE_KEYS_FILE": "./keys"}, ()),
                                               (COMPOSE, VALUES)])  # fmt: skip
def test_the_same_wishes_give_the_same_serve_spec(helm, given, values):
    composed = spec_of(environment("appliance", **given))
    charted = spec_of(chart_environment(helm, *values))
    assert charted == composed


def test_the_same_settings_are_set_but_for_what_only_one_of_them_has(helm):
    composed = set(environment("appliance"))
    charted = set(chart_environment(helm, *VALUES, "settings.contextTokens=1000",
                                    "settings.tensorParallel=2", "settings.hostShare=0.5",
                                    "settings.maxHeaderBytes=9000"))  # fmt: skip
    assert composed - charted == {"APPLIANCE_PLAN"}, "a plan file is not part of the chart"
    assert charted <= composed
