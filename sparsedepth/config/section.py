"""Section: the base class of all configurations and stored records, and common bounds of numbers."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sparsedepth.config.mistakes import run_checks
from sparsedepth.config.plain_text import visible


def _whole(value: Any) -> Any:
    """1e6 as 1000000: YAML reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _check_plain(text: str) -> str:
    if visible(text, keep="\n\t") != text:
        raise ValueError("must be plain text: a terminal would act on its control characters")
    return text


Sentence = Annotated[str, Field(min_length=1), AfterValidator(_check_plain)]


class Section(BaseModel):
    """A frozen, strict record without unknown keys. All its checks (`mistakes.check`) are reported at once. Validators
    are built on first use, since most commands need few of them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    @model_validator(mode="after")
    def _run_checks(self) -> Self:
        run_checks(self)
        return self
