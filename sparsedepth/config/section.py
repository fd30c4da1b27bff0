"""Section: what every configuration and stored record of settings is made of, and the bounds of its numbers."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparsedepth.config.mistakes import run_checks

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of a configuration: frozen, strict, without unknown keys; what its checks find is told at once."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _run_checks(self) -> Self:
        run_checks(self)
        return self
