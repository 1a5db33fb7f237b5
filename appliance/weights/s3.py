"""S3-compatible stores: a mirror whose requests are signed, where keys are set.

Signature Version 4, GET with an empty body. Source: "Signature Version 4 signing process", AWS
General Reference; the test holds it against the worked example of the S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import SplitResult, parse_qsl, quote, unquote

from appliance.errors import UsageError
from appliance.weights.mirror import MirrorSource
from appliance.weights.network import Network, S3Keys

_EMPTY = hashlib.sha256(b"").hexdigest()


def s3_source(rest: str, network: Network) -> MirrorSource:
    """`//BUCKET/PREFIX` at the endpoint of the environment; signed where keys are set."""
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    if not bucket:
        raise UsageError("s3: needs a bucket", fix="s3://BUCKET/PREFIX")
    endpoint = network.s3_endpoint or f"https://s3.{network.s3_region}.amazonaws.com"
    url = f"{endpoint.rstrip('/')}/{bucket}/{quote(prefix)}"
    keys = network.s3_keys
    if keys is None:
        return MirrorSource(url, network, lambda method, parts, sent: {})
    return MirrorSource(
        url,
        network,
        lambda method, parts, sent: sign(
            method, parts, sent, keys, network.s3_region, datetime.now(UTC)
        ),
    )


def sign(
    method: str,
    parts: SplitResult,
    sent: Mapping[str, str],
    keys: S3Keys,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """The headers that sign one request without a body; a range is signed with it."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if "Range" in sent:
        headers["range"] = sent["Range"]
    if keys.session_token is not None:
        headers["x-amz-security-token"] = keys.session_token
    names = ";".join(sorted(headers))
    query = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted(parse_qsl(parts.query, keep_blank_values=True))
    )
    canonical = "\n".join(
        [
            method,
            quote(unquote(parts.path) or "/", safe="/-_.~"),
            query,
            *(f"{name}:{headers[name]}" for name in sorted(headers)),
            "",
            names,
            _EMPTY,
        ]
    )
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashed}"
    key = f"AWS4{keys.secret_key}".encode()
    for step in (*scope.split("/"), to_sign):
        key = hmac.digest(key, step.encode(), "sha256")
    del headers["host"], headers["x-amz-date"]
    headers.pop("range", None)
    return {
        **headers,
        "x-amz-date": moment,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={key.hex()}",
    }
