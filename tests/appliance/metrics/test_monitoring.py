"""Alert rules and the dashboard ask only for metrics that there are."""

import json
import re
from pathlib import Path

import pytest
import yaml

from appliance import metrics

MONITORING = Path(__file__).resolve().parents[3] / "helm" / "monitoring"
NAME = re.compile(r"\b(?:moe_appliance_|vllm:)\w+")


def known() -> set[str]:
    ours = re.findall(r'Metric\(\s*"(\w+)"', Path(metrics.__file__).read_text())
    passed = {family + suffix for family in metrics.PASSED_ON for suffix in metrics.SUFFIXES}
    return {metrics.PREFIX + name for name in ours} | passed


def rules() -> list[dict]:
    (group,) = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return group["rules"]


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "appliance.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_that_is_asked_for_exists(expression):
    assert set(NAME.findall(expression)) <= known()


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_how_bad_it_is_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].endswith(".") and rule["annotations"]["fix"]


def test_panels_do_not_overlap():
    panels = json.loads((MONITORING / "appliance.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
