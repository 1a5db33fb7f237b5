"""TLS of the API: a certificate of yours, or one made here."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

from appliance import process
from appliance.errors import ServeError, UsageError
from appliance.serve.spec import ServeSpec

DAYS = 825
OPENSSL_SECONDS = 60.0


def ready_certificate(spec: ServeSpec, *, make: bool) -> None:
    """The certificate and key of the spec are there and belong together.

    With `make`, made where there are none. Raises UsageError or ServeError with what is wrong.
    """
    if spec.certificate is None or spec.certificate_key is None:
        return
    if make and not (spec.certificate.exists() and spec.certificate_key.exists()):
        _make(spec.certificate, spec.certificate_key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            spec.certificate, spec.certificate_key, password=_no_password
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the certificate {spec.certificate} cannot be served: {error}",
            fix="give the key that belongs to it, without a password, as PEM",
        ) from error


def _no_password() -> str:
    raise ValueError("its key has a password")


def _make(certificate: Path, key: Path) -> None:
    names = {socket.gethostname(), "localhost"}
    alternative = ",".join([*(f"DNS:{name}" for name in sorted(names)), "IP:127.0.0.1", "IP:::1"])
    argv = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", str(DAYS), "-subj", "/CN=moe-appliance", "-addext",
        f"subjectAltName={alternative}", "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    key.touch(mode=0o600)
    try:
        environment = {"PATH": os.defpath}
        code, _, said = process.output(argv, environment=environment, limit_seconds=OPENSSL_SECONDS)
    except (OSError, TimeoutError) as error:
        raise ServeError(
            f"cannot make a certificate: {error}", fix="install openssl, or APPLIANCE_TLS=own"
        ) from error
    if code:
        key.unlink(missing_ok=True)
        raise ServeError(f"openssl made no certificate: {said.strip()[-300:]}")
