"""TLS in front of the real gateway: what is served, who is trusted, and what is refused."""

import dataclasses
import ssl
import stat
import subprocess
import time

import pytest
from machines import machine
from plan_builders import deepseek_v41_flash

from appliance.errors import ServeError, UsageError
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.serve.canary import ask_twice
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


def made_for(certificate, key, *, start: str, end: str) -> None:
    """A certificate that is good from one date to another (YYYYMMDDHHMMSSZ), in these files."""
    folder = certificate.parent
    folder.mkdir(exist_ok=True)
    (folder / "index").write_text("")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=c\n[c]\ndatabase={folder}/index\nnew_certs_dir={folder}\n"
        "default_md=sha256\npolicy=p\nrand_serial=yes\n[p]\ncommonName=supplied\n"
    )
    csr = folder / "request"
    for argv in (
        ["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-subj", "/CN=old", "-keyout", str(key), "-out", str(csr)],
        ["ca", "-batch", "-selfsign", "-config", str(folder / "ca.cnf"), "-keyfile", str(key),
         "-in", str(csr), "-out", str(certificate), "-notext", "-startdate", start,
         "-enddate", end],
    ):  # fmt: skip
        subprocess.run(["openssl", *argv], check=True, capture_output=True, timeout=60)


def days_left(certificate) -> float:
    said = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", str(certificate)],
                          check=True, capture_output=True, text=True, timeout=60)  # fmt: skip
    end = ssl.cert_time_to_seconds(said.stdout.strip().removeprefix("notAfter="))
    return (end - time.time()) / 86400


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


def test_a_certificate_of_ours_that_is_about_to_expire_is_made_again_at_a_start(standin_spec):
    files = standin_spec.files
    certificate, key = files.certificate, files.certificate_key
    made_for(certificate, key, start="20200101000000Z", end="20220101000000Z")
    ours = dataclasses.replace(standin_spec, **with_tls(standin_spec, certificate, key))
    ready_certificate(ours, make=True)
    assert 820 < days_left(certificate) < 826
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    kept = certificate.read_text()
    ready_certificate(ours, make=True)
    assert certificate.read_text() == kept  # good for two more years: clients know it


def test_a_certificate_of_ours_without_its_own_key_is_made_again(standin_spec, tmp_path):
    files = standin_spec.files
    certificate, key = files.certificate, files.certificate_key
    ours = dataclasses.replace(standin_spec, **with_tls(standin_spec, certificate, key))
    files.folder.mkdir()
    ready_certificate(ours, make=True)
    _, other = made_certificate(tmp_path, "other")
    other.replace(key)  # as where the power went between the two
    ready_certificate(ours, make=True)
    ready_certificate(ours, make=False)


def test_an_engine_is_not_given_up_because_its_certificate_has_expired(
    supervised, standin_spec, tmp_path
):
    certificate, key = tmp_path / "own" / "own.crt", tmp_path / "own" / "own.key"
    made_for(certificate, key, start="20200101000000Z", end="20220101000000Z")
    running = supervised(**with_tls(standin_spec, certificate, key), start_limit_seconds=20.0)
    running.wait_for("ready", seconds=30.0)
    # Its users are refused, and so is the canary: that is what it is for.
    with pytest.raises(ServeError, match="certificate has expired"):
        ask_twice(running.spec.host, running.spec.port, running.spec.files.keys, certificate)


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
