"""The chart's README says what values.yaml and its schema say."""

import importlib.util

import pytest
import yaml
from charts import CHART


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("chart_readme", CHART / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_what_the_comments_say(readme):
    assert (CHART / "README.md").read_text() == readme.readme(), "run: python helm/readme.py"


def leaves(values: object, prefix: str = "") -> set[str]:
    if not isinstance(values, dict) or not values:
        return {prefix[:-1]}
    return set().union(*(leaves(inner, f"{prefix}{name}.") for name, inner in values.items()))


def test_every_value_has_a_row_and_a_place_in_the_schema(readme):
    values = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    rows = {path for path, _, _ in readme.rows((CHART / "values.yaml").read_text())}
    assert values <= rows | {"tolerations"}
    assert values <= readme.schema_paths()
