"""The base of everything written to plan.json: frozen; unknown keys and numbers that are none (NaN,
infinity) are errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
