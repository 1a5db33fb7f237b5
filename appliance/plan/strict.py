"""The base of everything written to plan.json: frozen, and unknown keys are errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
