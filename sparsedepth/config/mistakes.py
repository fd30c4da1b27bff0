"""What is wrong with the values of a config, in words: the key as the file has it, the value, what it must be."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sparsedepth.config.synonyms import hint

Check = TypeVar("Check", bound=Callable[..., None])

PLAIN = {
    "input should be": "must be",
    "a valid integer, got a number with a fractional part": "a whole number",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "keys and values",
    "an object": "keys and values",
    "list should have": "must have",
    "tuple should have": "must have",
    "dictionary should have": "must have",
    "string should have": "must have",
    "string should match": "must match",
    " after validation": "",
}
"""The validator's words, and ours."""


def check(method: Check) -> Check:
    """Marks a method of a `Section` that raises ValueError for values that do not go together; all of them are run."""
    vars(method)["is_check"] = True
    return method


@cache
def checks(model: type) -> tuple[str, ...]:
    """The names of the checks of a class, those of its bases first. Of what is no function nothing is asked: a
    validator would be built to answer."""
    marked = (name for base in reversed(model.__mro__) for name, value in vars(base).items()
              if isinstance(value, FunctionType) and "is_check" in vars(value))  # fmt: skip
    return tuple(dict.fromkeys(marked))


class Mistakes(ValueError):
    """Several mistakes, told in one line."""

    def __init__(self, mistakes: Iterable[str]):
        self.mistakes = list(dict.fromkeys(mistakes))
        super().__init__("; ".join(self.mistakes))


def run_checks(section: BaseModel) -> None:
    """Run all checks. Raises one ValueError that holds the mistakes of all checks."""
    mistakes: list[str] = []
    for name in checks(type(section)):
        try:
            getattr(section, name)()
        except ValueError as error:
            mistakes += error.mistakes if isinstance(error, Mistakes) else [str(error)]
    if mistakes:
        raise Mistakes(mistakes)


def explain(model: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Every mistake, one line each: those of single keys, and those between keys that are right on their own."""
    errors = error.errors()
    mistakes = _of_keys(model, values, errors)
    wrong = {str(details["loc"][0]) for details in errors if details["loc"]}
    if wrong and all(name not in model.model_fields or not model.model_fields[name].is_required() for name in wrong):
        mistakes += _between_keys(model, values, wrong, mistakes)
    return mistakes


def field_mistakes(model: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """The mistakes of single keys; whether the values go together is not asked."""
    try:
        model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        located = [details for details in error.errors() if details["loc"]]
        return _of_keys(model, values, located)
    return []


def _between_keys(
    model: type[BaseModel], values: Mapping[str, Any], wrong: set[str], mistakes: Sequence[str]
) -> list[str]:
    """What the checks say of the keys that are right, where it is not about a key that is wrong or misspelt."""
    try:
        model.model_validate_json(json.dumps({name: value for name, value in values.items() if name not in wrong}))
    except ValidationError as error:
        causes = [details.get("ctx", {}).get("error") for details in error.errors() if not details["loc"]]
        between = [mistake for cause in causes if isinstance(cause, Mistakes) for mistake in cause.mistakes]
        doubtful = wrong | set(re.findall(r"did you mean '(\w+)'", " ".join(mistakes)))
        return [mistake for mistake in between if not doubtful & set(re.findall(r"\w+", mistake))]
    return []


def _of_keys(model: type[BaseModel], values: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> list[str]:
    """A value that fits none of several kinds is one mistake; where it is nearly one of them, that one's is told."""
    kinds: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in errors:
        kinds.setdefault(_place(details, values), []).append(details)
    mistakes = []
    for place, alike in kinds.items():
        deeper = [other for other in kinds if len(other) > len(place) and other[: len(place)] == place]
        if not (place and deeper):
            mistakes.append(_explain(model, place, alike))
    return mistakes


def _place(details: ErrorDetails, values: Any) -> tuple[str | int, ...]:
    """The path of keys as the file has them: without the names that the validator gives to the kinds of a value."""
    place: list[str | int] = []
    for i, part in enumerate(details["loc"]):
        is_last = i == len(details["loc"]) - 1
        if isinstance(values, dict) and part in values:
            place.append(part)
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int):
            place.append(part)
            values = values[part] if part < len(values) else None
        elif is_last and details["type"] == "missing":
            place.append(part)
    return tuple(place)


def _explain(model: type[BaseModel], place: tuple[str | int, ...], alike: Sequence[ErrorDetails]) -> str:
    details, name = alike[0], ".".join(map(str, place))
    if details["type"] == "extra_forbidden":
        owner = _model_at(model, place)
        of_run = getattr(owner, "fields_of_parts", ())
        known = hint(str(place[-1]), owner.model_fields, of_run) or f"known keys: {', '.join(owner.model_fields)}"
        return f"unknown key {name!r} (value {short(details['input'])}); {known}"
    messages = list(dict.fromkeys(_plain(each["msg"]) for each in alike))
    kinds = [messages[0], *(each.removeprefix("must be ") for each in messages[1:])]
    message = " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
    if not name:
        return message
    field = model.model_fields.get(str(place[0]))
    meaning = f" ({field.description})" if field and field.description else ""
    if details["type"] == "missing":
        return f"{name} is missing{meaning}"
    joint = " " if message.startswith("must ") else ": "
    return f"{name}={short(details['input'])}{joint}{message}{meaning}"


def _model_at(model: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """The config whose key a place names: ("scales", "micro", "seed") names a key of Scale."""
    for part in place[:-1]:
        field = model.model_fields.get(str(part))
        nested = next(iter(_models_in(field.annotation)), None) if field else None
        model = nested or model
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    words = message[0].lower() + message[1:]
    if words.startswith(("input should", "list should", "tuple should", "dictionary should", "string should")):
        for theirs, ours in PLAIN.items():
            words = words.replace(theirs, ours)
        return words
    return message


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
