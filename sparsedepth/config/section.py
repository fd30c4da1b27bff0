"""Section: the base class of all configurations and stored records, and common bounds of numbers."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from sparsedepth.words.plain_text import visible

Check = TypeVar("Check", bound=Callable[..., None])
Fields = Mapping[str, Any]
"""Values by the names of fields."""


def whole_number(value: Any) -> Any:
    """1e6 as 1000000: YAML reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole_number)
Count = Annotated[int, Field(ge=1), WHOLE]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
"""A share that is neither nothing nor all."""


def _check_plain(text: str) -> str:
    if visible(text, keep="\n\t") != text:
        raise ValueError("must be plain text: a terminal would act on its control characters")
    return text


Sentence = Annotated[str, Field(min_length=1), AfterValidator(_check_plain)]


class Mistakes(ValueError):
    """Several mistakes, in one line."""

    def __init__(self, mistakes: Iterable[str]):
        self.mistakes = list(dict.fromkeys(mistakes))
        super().__init__("; ".join(self.mistakes))


def check(method: Check) -> Check:
    """Marks a method of a `Section` that raises ValueError for inconsistent values; all of them are run."""
    vars(method)["is_check"] = True
    return method


@cache
def _checks(model: type) -> tuple[str, ...]:
    """The names of a class's checks, those of its bases first. Inspecting a validator, no function, would build it."""
    methods = (entry for base in reversed(model.__mro__) for entry in vars(base).items())
    marked = (name for name, value in methods if isinstance(value, FunctionType) and "is_check" in vars(value))
    return tuple(dict.fromkeys(marked))


class Section(BaseModel):
    """A frozen, strict record without unknown keys. All its checks are reported at once. Validators are built on first
    use, since most commands need few of them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, defer_build=True
    )

    @model_validator(mode="after")
    def _run_checks(self) -> Self:
        mistakes: list[str] = []
        for name in _checks(type(self)):
            try:
                getattr(self, name)()
            except ValueError as error:
                mistakes += error.mistakes if isinstance(error, Mistakes) else [str(error)]
        if mistakes:
            raise Mistakes(mistakes)
        return self
