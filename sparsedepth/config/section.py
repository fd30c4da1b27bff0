"""Section: what every configuration and stored record of settings is made of, and the bounds of its numbers."""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sparsedepth.config.mistakes import run_checks
from sparsedepth.config.plain_text import visible

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _check_plain(text: str) -> str:
    if visible(text, keep="\n\t") != text:
        raise ValueError("must be plain text: a terminal would act on its control characters")
    return text


Sentence = Annotated[str, Field(min_length=1), AfterValidator(_check_plain)]


class Section(BaseModel):
    """A part of a configuration: frozen, strict, without unknown keys; what its checks find is told at once. Its
    validator is built when it is first used: most commands use few of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """A field's description is the text below it. Pydantic can do that too (`use_attribute_docstrings`), in more
        time than all else takes that it does for a class."""
        own = [field for name, field in cls.model_fields.items() if name in cls.__annotations__]
        if any(field.description is None for field in own):
            texts = _texts_below(cls.__module__).get(cls.__qualname__, {})
            for name in texts.keys() & cls.model_fields.keys():
                cls.model_fields[name].description = cls.model_fields[name].description or texts[name]

    @model_validator(mode="after")
    def _run_checks(self) -> Self:
        run_checks(self)
        return self


@cache
def _texts_below(module: str) -> dict[str, dict[str, str]]:
    """class -> field -> the text below it, of the classes of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # typed at a prompt
        return {}
    return {part.name: dict(_texts_in(part)) for part in tree.body if isinstance(part, ast.ClassDef)}


def _texts_in(part: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(part.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
