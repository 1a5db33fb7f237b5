"""The server that a measurement is taken of: the appliance that runs here, or any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from appliance.errors import ServeError, UsageError
from appliance.settings import read_settings

if TYPE_CHECKING:
    from appliance.bench.client import Endpoint
    from appliance.serve.client import Client
    from appliance.serve.state import Files

PREFIX_COUNTERS = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}


@dataclass(frozen=True)
class Measured:
    """How to reach it, what it counts, and what it is; None: it does not say."""

    endpoint: Endpoint
    counters: Callable[[], dict[str, float] | None]
    engine: Callable[[], str | None]
    context_tokens: Callable[[], int | None] = lambda: None
    host_digest: str | None = None
    plan_digest: str | None = None
    weights_digest: str | None = None
    image_digest: str | None = None
    chat_template_sha256: str | None = None


def find(
    url: str | None, model: str | None, key_file: Path | None, *, ignore_eos: bool
) -> Measured:
    """The server named, else the appliance of this state directory. Raises where none serves."""
    from appliance.bench.client import Endpoint
    from appliance.cli.serving import files_of
    from appliance.serve.keys import first_key

    extra = {"ignore_eos": True} if ignore_eos else {}
    if url is not None:
        if model is None:
            raise UsageError("a server at --url needs --model", fix="the name it lists at /models")
        key = None if key_file is None else first_key(key_file)
        return _elsewhere(Endpoint(url, model, key, extra=extra))
    files = files_of(read_settings())
    return _appliance(files, model, extra)


def _elsewhere(endpoint: Endpoint) -> Measured:
    """Any OpenAI-compatible server; one that has vLLM's /metrics beside /v1 tells more."""
    from appliance.serve.client import Client

    url = urlsplit(endpoint.url)
    if url.scheme != "http" or url.hostname is None:
        return Measured(endpoint, lambda: None, lambda: None)
    client = Client(url.hostname, url.port or 80, endpoint.key or "")

    def engine() -> str | None:
        began = _metric(client, "process_start_time_seconds")
        return None if began is None else f"{url.netloc} since {began:.2f}"

    return Measured(
        endpoint,
        lambda: _prefix_counters(client) or None,
        engine,
        lambda: _context_tokens(client, f"{url.path.rstrip('/')}/models"),
    )


def _prefix_counters(client: Client) -> dict[str, float]:
    found = {name: _metric(client, metric) for name, metric in PREFIX_COUNTERS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _metric(client: Client, name: str) -> float | None:
    try:
        return client.metric(name)
    except (ServeError, ValueError):
        return None  # other servers have no such page


def _context_tokens(client: Client, path: str) -> int | None:
    try:
        found = client.get(path)["data"][0].get("max_model_len")
    except (ServeError, LookupError, TypeError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def _appliance(files: Files, model: str | None, extra: dict[str, bool]) -> Measured:
    from appliance.bench.client import Endpoint
    from appliance.plan.model import load_plan
    from appliance.serve import local
    from appliance.serve.client import Client
    from appliance.serve.keys import first_key
    from appliance.serve.trust import trusting

    found = local.status(files)
    if found is None or not found.is_serving:
        raise ServeError(
            "no appliance serves from this state directory",
            fix="`appliance up --model DIR --detach`, or --url and --model of another server",
        )
    state = found.state
    key = first_key(state.keys)
    plan = load_plan(state.plan)

    def engine() -> str | None:
        now = local.status(files)
        return None if now is None else now.state.engine_identity

    return Measured(
        endpoint=Endpoint(
            f"{state.url}/v1",
            model or state.served_name,
            key,
            extra=extra,
            tls=None if state.certificate is None else trusting(state.certificate),
        ),
        counters=lambda: _counters(files),
        engine=engine,
        context_tokens=lambda: _context_tokens(
            Client(state.host, state.port, key, state.certificate), "/v1/models"
        ),
        host_digest=plan.made_from.host,
        plan_digest=state.plan_digest,
        weights_digest=plan.made_from.checkpoint,
        image_digest=read_settings().image_digest,
        chat_template_sha256=_chat_template(state.model),
    )


def _chat_template(model: Path) -> str | None:
    """sha256 of the template, which is a file of its own or in the tokenizer's."""
    try:
        file = model / "chat_template.jinja"
        if file.exists():
            found = file.read_text(encoding="utf-8")
        else:
            found = json.loads((model / "tokenizer_config.json").read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError):
        return None
    text = found if isinstance(found, str) else json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _counters(files: Files) -> dict[str, float] | None:
    """Totals over ranks since the engine started; None where it did not answer."""
    from appliance.serve import local
    from appliance.serve.client import Client
    from appliance.serve.keys import first_key

    found = local.status(files)
    if found is None or found.engine is None:
        return None
    ranks = found.engine["ranks"]
    counted: dict[str, float] = {
        "host_bytes": sum(rank["host_bytes_read"] for rank in ranks),
        "host_picks": sum(rank["picks"]["host"] for rank in ranks),
        "picks": sum(sum(rank["picks"].values()) for rank in ranks),
    }
    client = Client(
        found.state.host, found.state.port, first_key(files.control_key), found.state.certificate
    )
    return counted | _prefix_counters(client)
