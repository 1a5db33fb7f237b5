"""A client of a server whose certificate lies here as a file: that one is trusted, and no other."""

from __future__ import annotations

import ssl
from pathlib import Path

from appliance.errors import ServeError

# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl does not name.
NO_CHECK_TIME = 0x200000


def trusting(certificate: Path, *, dated: bool = False) -> ssl.SSLContext:
    """A client's context that takes this certificate and no other, whatever the name.

    `dated`: only while it is good, as other people's clients do.
    """
    try:
        context = ssl.create_default_context(cafile=str(certificate))
    except OSError as error:
        raise ServeError(f"cannot use the certificate {certificate}: {error}") from error
    context.check_hostname = False  # 127.0.0.1 is in nobody's certificate; the file itself is named
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # The very file is trusted, not a date: else the day on which it expires, or a clock that was
    # set back, makes an engine that serves look as if it had not answered, and it is ended.
    if not dated:
        context.verify_flags |= NO_CHECK_TIME
    return context
