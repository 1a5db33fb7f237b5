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
RENEWED_DAYS = 30  # before a certificate of ours expires, the next start makes another
OPENSSL_SECONDS = 60.0


def ready_certificate(spec: ServeSpec, *, make: bool) -> None:
    """The certificate and key of the spec are there and belong together.

    With `make`, made where there are none, or none that can be served for much longer. Raises
    UsageError or ServeError with what is wrong.
    """
    if spec.certificate is None or spec.certificate_key is None:
        return
    problem = _problem(spec.certificate, spec.certificate_key)
    if make and (problem is not None or _expires_soon(spec.certificate)):
        _make(spec.certificate, spec.certificate_key)
        problem = _problem(spec.certificate, spec.certificate_key)
    if problem is not None:
        raise UsageError(
            f"the certificate {spec.certificate} cannot be served: {problem}",
            fix="give the key that belongs to it, without a password, as PEM",
        ) from problem


def _problem(certificate: Path, key: Path) -> Exception | None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        return error
    return None


def _no_password() -> str:
    raise ValueError("its key has a password")


def _expires_soon(certificate: Path) -> bool:
    seconds = str(RENEWED_DAYS * 24 * 3600)
    try:
        code, _, _ = _openssl("x509", "-noout", "-in", str(certificate), "-checkend", seconds)
    except ServeError:
        return False  # without openssl none could be made either, and this one can be served
    return code != 0


def _make(certificate: Path, key: Path) -> None:
    """Both beside the old ones and then in their place; a half of a new pair is made again."""
    names = {socket.gethostname(), "localhost"}
    alternative = ",".join([*(f"DNS:{name}" for name in sorted(names)), "IP:127.0.0.1", "IP:::1"])
    next_certificate, next_key = (
        path.with_name(f"{path.name}.next") for path in (certificate, key)
    )
    next_key.unlink(missing_ok=True)
    next_key.touch(mode=0o600)
    code, _, said = _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", str(DAYS), "-subj", "/CN=moe-appliance", "-addext",
        f"subjectAltName={alternative}", "-keyout", str(next_key), "-out", str(next_certificate),
    )  # fmt: skip
    if code:
        next_key.unlink(missing_ok=True)
        raise ServeError(f"openssl made no certificate: {said.strip()[-300:]}")
    next_key.replace(key)
    next_certificate.replace(certificate)


def _openssl(*arguments: str) -> tuple[int, str, str]:
    try:
        environment = {"PATH": os.defpath}
        return process.output(
            ["openssl", *arguments], environment=environment, limit_seconds=OPENSSL_SECONDS
        )
    except (OSError, TimeoutError) as error:
        raise ServeError(
            f"cannot make a certificate: {error}", fix="install openssl, or APPLIANCE_TLS=own"
        ) from error
