"""Whether the revision that Helm has deployed is the one of our record; helm plays a script."""

import json
import os
from pathlib import Path

import pytest

from appliance.errors import UsageError
from appliance.serve.kubernetes import Release
from appliance.upgrade.book import Deployment
from appliance.upgrade.helm import Helm


def helm(folder: Path, *history: tuple[int, str, str]) -> Helm:
    """`history`: revision, status and description, as `helm history -o json` has them."""
    rows = [dict(zip(("revision", "status", "description"), row, strict=True)) for row in history]
    (folder / "helm").write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    (folder / "helm").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return Helm(Release("flash", "serving", None), None, environment, 1.0)


def deployment(**settings: str) -> Deployment:
    return Deployment(release="2", model=Path("/models/current"), settings=settings)


FIRST = deployment(revision="1")
SECOND = deployment(APPLIANCE_RECORD="2-abc", record="2-abc")


def test_a_record_is_of_its_revision_and_of_a_rollback_to_it(tmp_path):
    old = (1, "superseded", "Install complete")
    ours = (2, "deployed", "record 2-abc")
    now = helm(tmp_path, old, ours)
    assert now.is_as_recorded(SECOND) and not now.is_as_recorded(FIRST)
    back = helm(tmp_path, old, (2, "superseded", "record 2-abc"), (3, "deployed", "Rollback to 1"))
    assert back.is_as_recorded(FIRST) and not back.is_as_recorded(SECOND)


def test_a_revision_of_somebody_elses_helm_upgrade_is_of_no_record(tmp_path):
    ours = (2, "superseded", "record 2-abc")
    by_hand = helm(tmp_path, ours, (3, "deployed", "Upgrade complete"))
    assert not by_hand.is_as_recorded(SECOND)


def test_where_no_revision_is_deployed_that_is_said(tmp_path):
    with pytest.raises(UsageError, match="no revision of the Helm release flash is deployed"):
        helm(tmp_path, (1, "failed", "it broke")).is_as_recorded(FIRST)
