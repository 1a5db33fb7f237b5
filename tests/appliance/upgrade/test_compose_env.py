"""Switching changes the settings in .env and nothing else of that file."""

import stat
from pathlib import Path

from appliance.upgrade.book import Deployment
from appliance.upgrade.compose import Compose, _lines, write_env

BEFORE = """# Settings of the appliance: see README.md
# How many requests decode at once:
APPLIANCE_STREAMS=4

PASSPHRASE="two
lines"
# APPLIANCE_TLS=generated
APPLIANCE_RECORD=1-abc
GRAFANA_PORT=3000
"""


def test_only_the_settings_change_and_comments_and_other_lines_stay(tmp_path):
    env = tmp_path / ".env"
    env.write_text(BEFORE)
    env.chmod(0o640)
    write_env(env, {"APPLIANCE_STREAMS": "6", "APPLIANCE_IMAGE": "appliance:2"})
    assert env.read_text() == BEFORE.replace("STREAMS=4", "STREAMS=6").replace(
        "APPLIANCE_RECORD=1-abc\n", ""
    ) + "APPLIANCE_IMAGE=appliance:2\n"  # fmt: skip
    assert stat.S_IMODE(env.stat().st_mode) == 0o640
    write_env(env, {"APPLIANCE_STREAMS": "4", "APPLIANCE_RECORD": "1-abc"})
    assert sorted(env.read_text().splitlines()) == sorted(BEFORE.splitlines())


def test_a_link_stays_a_link_and_what_it_leads_to_is_written(tmp_path):
    kept = tmp_path / "kept" / "appliance.env"
    kept.parent.mkdir()
    kept.write_text("# kept elsewhere\nAPPLIANCE_STREAMS=4\n")
    env = tmp_path / ".env"
    env.symlink_to(kept)
    write_env(env, {"APPLIANCE_STREAMS": "6"})
    assert env.is_symlink() and kept.read_text() == "# kept elsewhere\nAPPLIANCE_STREAMS=6\n"


def test_without_the_file_it_is_made_for_its_owner_alone(tmp_path):
    write_env(tmp_path / ".env", {"APPLIANCE_STREAMS": "6"})
    assert _lines(tmp_path / ".env") == ["APPLIANCE_STREAMS=6"]
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600


def test_a_digest_in_the_settings_is_the_images_own_after_an_upgrade(tmp_path):
    """Compiled code is kept by it: a new image must not take over what the old one compiled."""
    old, new = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    place = Compose(tmp_path / "compose.yaml", "a", "appliance", {}, 1.0)
    now = Deployment(release="1", image=f"a@{old}", model=Path("/models/current"),
                     settings={"APPLIANCE_IMAGE_DIGEST": old})  # fmt: skip
    asked = place.target(now, "2", f"a@{new}", None, "2-abc")
    assert asked.settings["APPLIANCE_IMAGE_DIGEST"] == asked.image_digest == new
    assert place.target(now, "2", "a:2", None, "2-abc").settings["APPLIANCE_IMAGE_DIGEST"] == ""
    kept = place.target(now, "2", None, Path("/models/next"), "2-abc")
    assert kept.settings["APPLIANCE_IMAGE_DIGEST"] == old
    plain = now.model_copy(update={"settings": {}})
    asked = place.target(plain, "2", f"a@{new}", None, "2-abc")
    assert "APPLIANCE_IMAGE_DIGEST" not in asked.settings
