"""What the environment says about the network, as values. Secrets never show in a repr."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class S3Keys:
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Network:
    """Proxies as URLs; `no_proxy` as in the variable of that name; tokens as text, stripped.

    `hub_token` goes to the host of `hub_url` alone, `mirror_token` to the host of the mirror that
    was named on the command line; neither follows a redirect to another host.
    """

    http_proxy: str | None = field(default=None, repr=False)
    https_proxy: str | None = field(default=None, repr=False)
    no_proxy: tuple[str, ...] = ()
    ca_file: str | None = None
    stall_seconds: float = 30.0
    hub_url: str = "https://huggingface.co"
    hub_token: str | None = field(default=None, repr=False)
    mirror_token: str | None = field(default=None, repr=False)
    s3_endpoint: str | None = None
    s3_region: str = "us-east-1"
    s3_keys: S3Keys | None = None

    def proxy_for(self, scheme: str, host: str) -> str | None:
        """The proxy to use for a host, if any. `no_proxy` holds names, `.suffixes` or `*`."""
        for entry in self.no_proxy:
            name = entry.removeprefix("*").lower()
            if entry == "*" or host == name.lstrip(".") or host.endswith("." + name.lstrip(".")):
                return None
        return self.https_proxy if scheme == "https" else self.http_proxy
