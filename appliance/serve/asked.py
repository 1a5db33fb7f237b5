"""How what serves was asked for, kept beside its state: an upgrade keeps all of it that it is not
asked to change, going back brings it back, and `up` without a model asks for it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import ServeError
from appliance.plan.model import Plan
from appliance.plan.request import Policy
from appliance.serve.spec import ServeSpec, Wishes
from appliance.serve.state import Files, write_aside


class Asked(BaseModel):
    """What `up` was told, by options or settings, and another start would not know of itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    port: int
    served_name: str | None  # None: that of the model's folder
    keys: Path
    tls: Literal["off", "generated", "own"]
    certificate: Path | None
    certificate_key: Path | None
    policy: Policy
    plan: Path | None  # the plan that was given; None: one was made
    heat: tuple[Path, ...]

    def wishes(self, usual: Wishes) -> Wishes:
        """`usual`, with the place, the name and the certificate that were asked for."""
        return replace(
            usual,
            host=self.host,
            port=self.port,
            served_name=self.served_name,
            tls=self.tls,
            certificate=self.certificate,
            certificate_key=self.certificate_key,
        )

    def variables(self) -> Mapping[str, str]:
        """The settings of a process that is to start the same again."""
        named = {
            "APPLIANCE_GATEWAY_KEYS": self.keys,
            "APPLIANCE_TLS": self.tls,
            "APPLIANCE_TLS_CERTIFICATE": self.certificate,
            "APPLIANCE_TLS_KEY": self.certificate_key,
        }
        return {name: str(value or "") for name, value in named.items()}


class Served(BaseModel):
    """What served last, and how it was asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    plan_digest: str
    asked: Asked


def as_planned(policy: Policy, plan: Plan) -> Policy:
    """What a plan that was given answers of the policy: asked for again with another model."""
    serving = plan.serving
    waiting = policy.conversations
    return replace(
        policy,
        streams=serving.streams,
        context_tokens=serving.context_tokens,
        conversations=None if waiting is None else max(waiting, serving.streams),
        kv_dtype="fp8" if serving.kv_cache_dtype == "fp8" else "auto",
        tensor_parallel=plan.tensor_parallel,
        expert_parallel=plan.expert_parallel,
    )


def keep_asked(spec: ServeSpec) -> None:
    """Record what is about to serve. Raises ServeError where it cannot be written."""
    if spec.asked is None:
        return  # a container: its environment is the record
    served = Served(model=spec.model, plan_digest=spec.plan_digest, asked=spec.asked)
    write_aside(spec.files.asked, json.dumps(served.model_dump(mode="json"), indent=1) + "\n")


def read_served(files: Files) -> Served | None:
    """None where nothing served yet. Raises ServeError where the record makes no sense."""
    try:
        return Served.model_validate_json(files.asked.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ServeError(
            f"cannot make sense of {files.asked}, the record of what served last",
            fix="remove it: then `up` has to be told again what an upgrade or a restart is to keep",
        ) from error
