"""The only reader of the environment: APPLIANCE_* variables, their defaults, one frozen class."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import UsageError

if TYPE_CHECKING:
    from appliance.weights.network import Network

PREFIX = "APPLIANCE_"
# What compose.yaml alone reads. They may be in the environment of a shell that has read .env.
COMPOSE_ONLY = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("IMAGE", "DEMO_IMAGE", "BASE_IMAGE", "DEMO_BASE_IMAGE", "KERNELS", "MODELS", "LISTEN"),
        *("KEYS_FILE", "TLS_CERTIFICATE_FILE", "TLS_KEY_FILE", "SHM_SIZE", "STOP_GRACE"),
    )
)
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseModel):
    """What an operator may set with APPLIANCE_<FIELD>. Options on the command line win."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path = Field(description="state, logs, keys and plans of this appliance")
    engine_python: str = Field(sys.executable, description="the Python that has vLLM")
    host: str = Field("127.0.0.1", description="the address the server binds")
    port: Port = Field(8000, description="the port the server binds")
    drain_seconds: Annotated[float, Field(ge=0)] = Field(
        60.0, description="how long accepted requests may finish after a stop"
    )
    start_limit_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="give up on a start after this long; default: from the model's size"
    )
    weights_dir: Path | None = Field(
        None, description="the store of weights; default: weights in the state directory"
    )
    weights_token_file: Path | None = Field(
        None, description="file with the token that a mirror or `weights serve` asks for"
    )
    weights_public_key: Path | None = Field(
        None, description="file of minisign public keys; then unsigned weights are refused"
    )
    weights_arena: Path | None = Field(
        None, description="folder that `weights repack` wrote; host experts are read there in place"
    )
    model: Path | None = Field(None, description="folder of the checkpoint to serve")
    plan: Path | None = Field(None, description="serve this plan.json instead of making one")
    served_name: str | None = Field(None, description="name of the model in the API")
    streams: Annotated[int, Field(ge=1)] | None = Field(
        None, description="requests that decode at once; default 6"
    )
    context_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="longest conversation in tokens"
    )
    tensor_parallel: Annotated[int, Field(ge=1)] | None = Field(
        None, description="ranks to split over; default: every GPU"
    )
    host_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="share of the experts to keep on the host; default: what does not fit"
    )
    device: Literal["cuda", "cpu"] | None = Field(
        None, description="refuse to serve on anything else; default: what the plan says"
    )
    tls: Literal["off", "generated", "own"] = Field(
        "off", description="speak TLS: with a certificate made here, or with your own"
    )
    tls_certificate: Path | None = Field(None, description="your certificate, PEM; for tls=own")
    tls_key: Path | None = Field(None, description="its key, PEM, without a password; for tls=own")
    exl3_owner: str = Field(
        "appliance",
        description="the vLLM plugin that owns the method exl3; no other than ours obeys a plan",
    )
    deployment: Literal["local", "docker", "kubernetes"] = Field(
        "local", description="what preflight's remedies are worded for"
    )
    host_root: Path = Field(
        Path("/"), description="where the host's /proc and /sys are mounted in a container"
    )
    ignore_checks: str = Field(
        "", description="ids of preflight checks whose failure is only a warning, comma-separated"
    )
    hold_on_failure: bool = Field(
        False, description="in a container: stay up, not ready, when a step fails, until stopped"
    )
    agent_host: str = Field("127.0.0.1", description="the address of health and metrics")
    agent_port: Port | None = Field(
        None, description="the port of health and metrics; default: 8001 in a container, else none"
    )
    hang_seconds: Annotated[float, Field(ge=5)] = Field(
        45.0, description="no step for this long while requests wait: the engine hangs"
    )
    release: str | None = Field(None, description="the release in this image; set by the image")
    image_digest: str | None = Field(None, description="the image's digest, where known")
    image_public_key: Path | None = Field(
        None,
        description="minisign's public keys: `upgrade --at` refuses images none of them signed",
    )
    record: str | None = Field(
        None, description="which deployment this container was started as; set by `upgrade`"
    )
    gateway_keys: Path | None = Field(
        None, description="file of API keys, one a line; default: made in the state directory"
    )
    gateway_control_key: Path | None = Field(
        None, description="file with the control key; set for the engine, not by operators"
    )
    gateway_max_body_bytes: Annotated[int, Field(ge=1)] = Field(
        64 << 20, description="longest request body"
    )
    gateway_max_header_bytes: Annotated[int, Field(ge=1)] = Field(
        32 << 10, description="all request headers together"
    )


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. Raises UsageError on an unknown or impossible variable."""
    source = os.environ if environ is None else environ
    values: dict[str, object] = {"state_dir": _default_state_dir(source)}
    for name, value in source.items():
        if not name.startswith(PREFIX) or name in COMPOSE_ONLY:
            continue
        field = name.removeprefix(PREFIX).lower()
        if field not in Settings.model_fields:
            raise UsageError(f"{name} is not a setting of the appliance", fix=_suggestion(name))
        if value:  # compose passes what nobody set as an empty string
            values[field] = value
    try:
        return _consistent(Settings.model_validate(values))
    except ValidationError as error:
        first = error.errors()[0]
        variable = PREFIX + str(first["loc"][0]).upper()
        raise UsageError(f"{variable}={first['input']}: {first['msg']}") from error


def _consistent(settings: Settings) -> Settings:
    given = (settings.tls_certificate, settings.tls_key)
    if settings.tls == "own" and None in given:
        raise UsageError(
            "APPLIANCE_TLS is own, and certificate or key is missing",
            fix="set APPLIANCE_TLS_CERTIFICATE and APPLIANCE_TLS_KEY, or APPLIANCE_TLS=generated",
        )
    if settings.tls != "own" and given != (None, None):
        raise UsageError(
            f"a certificate is given and APPLIANCE_TLS is {settings.tls}", fix="APPLIANCE_TLS=own"
        )
    return settings


def read_network(settings: Settings, environ: Mapping[str, str] | None = None) -> Network:
    """Proxies, CA, hub and object store, from the variables that other programs read them from.

    Tokens come from files or the environment, never from arguments. Raises UsageError for a file
    of a token or a CA that cannot be read.
    """
    from appliance.weights.network import Network, S3Keys

    source = os.environ if environ is None else environ

    def either(*names: str) -> str | None:
        return next((source[name] for name in names if source.get(name)), None)

    access, secret = either("AWS_ACCESS_KEY_ID"), either("AWS_SECRET_ACCESS_KEY")
    ca_file = either("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    if ca_file is not None and not Path(ca_file).is_file():
        raise UsageError(f"the file of certificates {ca_file} does not exist")
    no_proxy = either("no_proxy", "NO_PROXY") or ""
    usual = Network()
    return Network(
        # Lower case only, as curl does: HTTP_PROXY may come from a request's header.
        http_proxy=either("http_proxy", "all_proxy", "ALL_PROXY"),
        https_proxy=either("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"),
        no_proxy=tuple(word.strip() for word in no_proxy.split(",") if word.strip()),
        ca_file=ca_file,
        hub_url=either("HF_ENDPOINT") or usual.hub_url,
        hub_token=_hub_token(source),
        mirror_token=_token_in(settings.weights_token_file),
        s3_endpoint=either("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        s3_region=either("AWS_REGION", "AWS_DEFAULT_REGION") or usual.s3_region,
        s3_keys=S3Keys(access, secret, either("AWS_SESSION_TOKEN")) if access and secret else None,
    )


def inherited_environment() -> dict[str, str]:
    """The environment a child process starts from."""
    return dict(os.environ)


def _default_state_dir(source: Mapping[str, str]) -> Path:
    # XDG: an unset, empty or relative XDG_STATE_HOME means ~/.local/state.
    base = Path(source.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():
        base = Path(source.get("HOME") or Path.home()) / ".local" / "state"
    return base / "moe-appliance"


def _hub_token(source: Mapping[str, str]) -> str | None:
    """As the hub's own client finds it: HF_TOKEN, else the file that `hf auth login` writes."""
    if source.get("HF_TOKEN"):
        return source["HF_TOKEN"].strip()
    if source.get("HF_TOKEN_PATH"):
        return _token_in(Path(source["HF_TOKEN_PATH"]))
    home = source.get("HF_HOME") or Path(source.get("HOME") or Path.home()) / ".cache/huggingface"
    usual = Path(home) / "token"
    return _token_in(usual) if usual.is_file() else None


def _token_in(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the token in {path}: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"{path} holds no token: one line, without spaces")
    return token


def _suggestion(name: str) -> str:
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(sorted(known))
