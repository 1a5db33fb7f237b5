"""The only reader of the environment: APPLIANCE_* variables, their defaults, one frozen class."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import UsageError

PREFIX = "APPLIANCE_"
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
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        if field not in Settings.model_fields:
            raise UsageError(f"{name} is not a setting of the appliance", fix=_suggestion(name))
        values[field] = value
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        variable = PREFIX + str(first["loc"][0]).upper()
        raise UsageError(f"{variable}={first['input']}: {first['msg']}") from error


def inherited_environment() -> dict[str, str]:
    """The environment a child process starts from."""
    return dict(os.environ)


def _default_state_dir(source: Mapping[str, str]) -> Path:
    # XDG: an unset, empty or relative XDG_STATE_HOME means ~/.local/state.
    base = Path(source.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():
        base = Path(source.get("HOME") or Path.home()) / ".local" / "state"
    return base / "moe-appliance"


def _suggestion(name: str) -> str:
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(sorted(known))
