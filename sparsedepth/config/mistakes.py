"""Error messages for invalid config values: the key as in the file, the value, and what it must be."""

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
"""The validator's wording -> ours."""


def check(method: Check) -> Check:
    """Marks a method of a `Section` that raises ValueError for inconsistent values; all of them are run."""
    vars(method)["is_check"] = True
    return method


@cache
def checks(model: type) -> tuple[str, ...]:
    """The names of the checks of a class, those of its bases first. Only functions are inspected: inspecting a
    validator would build it."""
    marked = (name for base in reversed(model.__mro__) for name, value in vars(base).items()
              if isinstance(value, FunctionType) and "is_check" in vars(value))  # fmt: skip
    return tuple(dict.fromkeys(marked))


class Mistakes(ValueError):
    """Several mistakes, in one line."""

    def __init__(self, mistakes: Iterable[str]):
        self.mistakes = list(dict.fromkeys(mistakes))
        super().__init__("; ".join(self.mistakes))


def run_checks(section: BaseModel) -> None:
    """Run all checks. Raises one ValueError with the mistakes of all."""
    mistakes: list[str] = []
    for name in checks(type(section)):
        try:
            getattr(section, name)()
        except ValueError as error:
            mistakes += error.mistakes if isinstance(error, Mistakes) else [str(error)]
    if mistakes:
        raise Mistakes(mistakes)


def explain(model: type[BaseModel], values: Mapping[str, Any], error: ValidationError) -> list[str]:
    """All mistakes: those of single keys, then those between valid keys."""
    errors = error.errors()
    mistakes = _key_mistakes(model, values, errors)
    invalid = {str(details["loc"][0]) for details in errors if details["loc"]}
    if invalid and all(
        name not in model.model_fields or not model.model_fields[name].is_required() for name in invalid
    ):
        mistakes += _mistakes_between(model, values, invalid, mistakes)
    return mistakes


def field_mistakes(model: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """The mistakes of single keys; whether the values are consistent is not checked."""
    try:
        model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        located = [details for details in error.errors() if details["loc"]]
        return _key_mistakes(model, values, located)
    return []


def _mistakes_between(
    model: type[BaseModel], values: Mapping[str, Any], invalid: set[str], mistakes: Sequence[str]
) -> list[str]:
    """The mistakes between valid keys that do not mention an invalid or misspelt key."""
    try:
        model.model_validate_json(json.dumps({name: value for name, value in values.items() if name not in invalid}))
    except ValidationError as error:
        causes = [details.get("ctx", {}).get("error") for details in error.errors() if not details["loc"]]
        between = [mistake for cause in causes if isinstance(cause, Mistakes) for mistake in cause.mistakes]
        doubtful = invalid | set(re.findall(r"did you mean '(\w+)'", " ".join(mistakes)))
        return [mistake for mistake in between if not doubtful & set(re.findall(r"\w+", mistake))]
    return []


def _key_mistakes(model: type[BaseModel], values: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> list[str]:
    """One mistake per key; of a value that fits none of several types, the errors inside the nearest type."""
    by_path: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in errors:
        by_path.setdefault(_key_path(details, values), []).append(details)
    mistakes = []
    for path, details in by_path.items():
        has_inner = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
        if not (has_inner and details[0]["loc"]):  # a field that is filled from a mistaken one has no path, but a place
            mistakes.append(_message(model, path, details))
    return mistakes


def _key_path(details: ErrorDetails, values: Any) -> tuple[str | int, ...]:
    """The path of keys as in the file, without the validator's names for the alternatives of a type."""
    path: list[str | int] = []
    for i, part in enumerate(details["loc"]):
        is_last = i == len(details["loc"]) - 1
        if isinstance(values, dict) and part in values:
            path.append(part)
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int):
            path.append(part)
            values = values[part] if part < len(values) else None
        elif is_last and details["type"] == "missing":
            path.append(part)
    return tuple(path)


def _message(model: type[BaseModel], path: tuple[str | int, ...], errors: Sequence[ErrorDetails]) -> str:
    """The message for one key, from its errors for each alternative type."""
    details, name = errors[0], ".".join(map(str, path))
    if details["type"] == "extra_forbidden":
        owner = _model_at(model, path)
        run_fields = getattr(owner, "base_fields", ())
        fix = hint(str(path[-1]), owner.model_fields, run_fields) or _known_keys(owner)
        return f"unknown key {name!r} (value {short(details['input'])}); {fix}"
    messages = list(dict.fromkeys(_plain(error["msg"]) for error in errors))
    alternatives = [messages[0], *(message.removeprefix("must be ") for message in messages[1:])]
    message = " or ".join(filter(None, [", ".join(alternatives[:-1]), alternatives[-1]]))
    if not name:
        return message
    field = model.model_fields.get(str(path[0]))
    meaning = f" ({' '.join(field.description.split())})" if field and field.description else ""
    if details["type"] == "missing":
        return f"{name} is missing{meaning}"
    separator = " " if message.startswith("must ") else ": "
    quotes = _quotes(details["input"]) if all(error["type"] == "string_type" for error in errors) else ""
    quotes = _in_digits(details["input"]) if details["type"] in ("int_type", "float_type") else quotes
    return f"{name}={short(details['input'])}{separator}{message}{quotes}{meaning}"


def _in_digits(value: Any) -> str:
    """How to write 100k as a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbBgG])", value) if isinstance(value, str) else None
    if not found:
        return ""
    return f": write {float(found[1]) * {'k': 1e3, 'm': 1e6}.get(found[2].lower(), 1e9):.15g}"


def _quotes(value: Any) -> str:
    """How to write, as text, a word that YAML reads as another value."""
    if isinstance(value, bool):
        words = "yes, on and true" if value else "no, off and false"
        return f": YAML reads {words} as {value}, so put the word in quotes"
    return ": put the number in quotes" if isinstance(value, int | float) else ""


def _known_keys(model: type[BaseModel]) -> str:
    """The keys of a model in one line, or, for a run, the command that lists them."""
    names = [*model.model_fields]
    return f"known keys: {', '.join(names)}" if len(names) < 30 else "`sparsedepth schema` lists the keys of a run"


def _model_at(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The config that has the last key of a path: of ("scales", "micro", "seed") Scale."""
    for part in path[:-1]:
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
    plain = message[0].lower() + message[1:]
    if plain.startswith(("input should", "list should", "tuple should", "dictionary should", "string should")):
        for theirs, ours in PLAIN.items():
            plain = plain.replace(theirs, ours)
        return plain
    return message


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
