"""TLS in front of the real gateway: what is served, who is trusted, and what is refused."""

import dataclasses
import ssl
import stat
import subprocess

import pytest
from machines import machine
from plan_builders import deepseek_v41_flash

from appliance.errors import ServeError, UsageError
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.serve.client import Client
from appliance.serve.keys import first_key
from appliance.serve.spec import Wishes, spec
from appliance.serve.state import Files, read_state
from appliance.serve.tls import ready_certificate
from appliance.settings import read_settings


def made_certificate(folder, name: str):
    """A certificate and its key, as an operator would bring them."""
    crt, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                    "-keyout", str(key), "-out", str(crt)], check=True, capture_output=True,
                   timeout=60)  # fmt: skip
    return crt, key


def with_tls(served, certificate, key) -> dict:
    argv = (*served.argv, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    return {"argv": argv, "certificate": certificate, "certificate_key": key}


def test_a_certificate_is_made_and_the_server_speaks_tls_with_it(
    supervised, standin_spec, tmp_path
):
    files = standin_spec.files
    running = supervised(**with_tls(standin_spec, files.certificate, files.certificate_key))
    running.wait_for("ready")
    assert stat.S_IMODE(files.certificate_key.stat().st_mode) == 0o600
    state = read_state(files)
    assert state.url.startswith("https://127.0.0.1")
    key = first_key(files.control_key)
    known = Client(state.host, state.port, key, files.certificate)
    assert known.get("/gateway/state")["admitted"]
    with pytest.raises(ServeError, match="got no answer"):
        Client(state.host, state.port, key).get("/gateway/state")
    other, _ = made_certificate(tmp_path, "other")
    with pytest.raises(ServeError, match="certificate verify failed"):
        Client(state.host, state.port, key, other).get("/gateway/state")


def test_your_own_certificate_is_served_under_the_name_in_it(supervised, standin_spec, tmp_path):
    certificate, key = made_certificate(tmp_path, "flash.example")
    running = supervised(**with_tls(standin_spec, certificate, key))
    running.wait_for("ready")
    served = ssl.get_server_certificate((running.spec.host, running.spec.port))
    assert served.strip() == certificate.read_text().strip()


def test_a_key_of_another_certificate_is_refused_before_anything_starts(standin_spec, tmp_path):
    certificate, _ = made_certificate(tmp_path, "a")
    _, key = made_certificate(tmp_path, "b")
    wrong = dataclasses.replace(standin_spec, **with_tls(standin_spec, certificate, key))
    with pytest.raises(UsageError, match=r"cannot be served: .*mismatch") as caught:
        ready_certificate(wrong, make=False)
    assert "the key that belongs to it" in caught.value.fix


def test_the_engine_is_told_of_the_certificate_only_where_tls_is_on(tmp_path):
    made = plan(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), None, Policy())
    files = Files.of(tmp_path)

    def argv(**wishes) -> tuple[str, ...]:
        ours = Wishes("python", "127.0.0.1", 8000, **wishes)
        return spec(made, tmp_path, tmp_path / "p.json", ours, files).argv

    assert "--ssl-certfile" not in argv()
    generated = argv(tls="generated")
    assert generated[generated.index("--ssl-certfile") + 1] == str(tmp_path / "tls.crt")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"APPLIANCE_TLS": "own"}, "certificate or key is missing"),
        ({"APPLIANCE_TLS_KEY": "/k"}, "APPLIANCE_TLS is off"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given, words):
    with pytest.raises(UsageError, match=words):
        read_settings({**given, "APPLIANCE_STATE_DIR": "/x"})
