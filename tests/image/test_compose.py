"""compose.yaml: every setting is a variable, every variable is documented, nothing is open."""

import re

import pytest
from composed import REPOSITORY, compose, environment, variables

from appliance.settings import COMPOSE_ONLY, PREFIX, Settings, read_settings

# The image or the command line decides these, or one service's compose file does.
OURS = {"STATE_DIR", "ENGINE_PYTHON", "PORT", "AGENT_PORT", "GATEWAY_CONTROL_KEY", "RELEASE"}
# `appliance weights` fills the store on the host; the containers only read it.
HOST_ONLY = {
    "IMAGE_PUBLIC_KEY",
    "WEIGHTS_DIR",
    "WEIGHTS_TOKEN_FILE",
    "WEIGHTS_PUBLIC_KEY",
    "WEIGHTS_ARENA",
}


def test_the_defaults_are_settings_that_the_appliance_accepts():
    for service in ("appliance", "demo"):
        settings = read_settings({**environment(service), "APPLIANCE_STATE_DIR": "/x"})
        assert settings.host == "0.0.0.0" and settings.deployment == "docker"


def test_every_setting_can_be_set_through_compose():
    named = {name.removeprefix(PREFIX) for name in environment("appliance")}
    assert {field.upper() for field in Settings.model_fields} - named == OURS | HOST_ONLY


def test_every_variable_is_documented_and_nothing_else_is():
    text = (REPOSITORY / ".env.example").read_text()
    documented = set(re.findall(r"^#(\w+)=", text, re.MULTILINE))
    assert documented == variables()


def test_a_line_of_env_example_can_be_uncommented_as_it_stands():
    # compose takes what follows an empty value for the value, even behind a #.
    for line in (REPOSITORY / ".env.example").read_text().splitlines():
        assert not line or line.startswith("# ") or re.fullmatch(r"#\w+=\S*", line), line


def test_a_shell_that_has_read_env_example_can_run_the_cli():
    names = {name for name in variables() if name.startswith(PREFIX)}
    settings = {PREFIX + field.upper() for field in Settings.model_fields}
    assert names - settings == COMPOSE_ONLY
    read_settings(dict.fromkeys(COMPOSE_ONLY, "anything"))


def test_compose_up_starts_the_appliance_alone_and_the_rest_is_asked_for():
    services = compose()["services"]
    assert [name for name, one in services.items() if "profiles" not in one] == ["appliance"]
    assert services["demo"]["profiles"] == ["demo"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["metrics"]


@pytest.mark.parametrize("service", ["appliance", "demo", "prometheus", "grafana"])
def test_every_port_is_published_on_loopback_only(service):
    ports = compose()["services"][service]["ports"]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("service", ["appliance", "demo"])
def test_a_container_may_do_next_to_nothing(service):
    one = compose()["services"][service]
    assert one["read_only"] and one["cap_drop"] == ["ALL"] and one["cap_add"] == ["SYS_NICE"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert {"/proc:/host/proc:ro", "/sys:/host/sys:ro"} <= set(one["volumes"])


def test_the_gpu_appliance_gets_all_gpus_unlimited_locked_memory_and_room_for_shared_memory():
    one = compose()["services"]["appliance"]
    (device,) = one["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert one["ulimits"]["memlock"] == -1 and one["shm_size"] == "8gb"
    assert one["environment"]["APPLIANCE_DEVICE"] == "cuda", "it must not fall back to the CPU"


def test_the_grace_period_is_longer_than_the_drain():
    for service in ("appliance", "demo"):
        grace = compose()["services"][service]["stop_grace_period"]
        drain = float(environment(service)["APPLIANCE_DRAIN_SECONDS"])
        assert float(grace.removesuffix("s")) >= drain + 30


def test_a_key_file_is_a_secret_in_the_container_and_without_one_a_key_is_made_there():
    assert environment("appliance")["APPLIANCE_GATEWAY_KEYS"] == ""
    given = compose(APPLIANCE_KEYS_FILE="./keys")
    assert given["secrets"]["api_keys"]["file"] == "./keys"
    keys = given["services"]["appliance"]["environment"]["APPLIANCE_GATEWAY_KEYS"]
    assert keys == "/run/secrets/api_keys"


def test_pinned_versions_of_the_dockerfile_and_compose_agree():
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    args = compose()["services"]["appliance"]["build"]["args"]
    for name in ("BASE_IMAGE", "KERNELS"):
        assert f"ARG {name}={args[name]}\n" in dockerfile
