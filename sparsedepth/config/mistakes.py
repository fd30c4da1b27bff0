"""Error messages for invalid config values: the key as in the file, the value, and what it must be."""

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sparsedepth.config.section import Fields, Mistakes
from sparsedepth.words.mistakes import hint, how_to_write, in_our_words
from sparsedepth.words.plain_text import commas, listed
from sparsedepth.words.table import shortened

Keys = tuple[str | int, ...]


def explain(model: type[BaseModel], values: Fields, error: ValidationError) -> list[str]:
    """All mistakes: those of single keys, then those between valid keys that mention no invalid or misspelt one."""
    errors = error.errors()
    mistakes = _key_mistakes(model, values, errors)
    invalid = {str(details["loc"][0]) for details in errors if details["loc"]}
    needed = {name: model.model_fields[name] for name in invalid & {*model.model_fields}}
    needed = {name: field for name, field in needed.items() if field.is_required()}
    if not invalid or any(field.annotation is not str for field in needed.values()):
        return mistakes
    left = {name: value for name, value in values.items() if name not in invalid}
    left = _errors(model, left | dict.fromkeys(needed, "given"))
    causes = [details.get("ctx", {}).get("error") for details in left if not details["loc"]]
    between = [mistake for cause in causes if isinstance(cause, Mistakes) for mistake in cause.mistakes]
    doubtful = invalid | set(re.findall(r"did you mean '(\w+)'", " ".join(mistakes)))
    return mistakes + [mistake for mistake in between if not doubtful & set(re.findall(r"\w+", mistake))]


def field_mistakes(model: type[BaseModel], values: Fields) -> list[str]:
    """The mistakes of single keys; whether the values are consistent is not checked."""
    return _key_mistakes(model, values, [details for details in _errors(model, values) if details["loc"]])


def _errors(model: type[BaseModel], values: Fields) -> list[ErrorDetails]:
    try:
        model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        return error.errors()
    return []


def _key_mistakes(model: type[BaseModel], values: Fields, errors: Sequence[ErrorDetails]) -> list[str]:
    """One mistake per key; of a value that fits none of several types, the errors inside the nearest type."""
    by_path: dict[Keys, list[ErrorDetails]] = {}
    for details in errors:
        by_path.setdefault(_key_path(details, values), []).append(details)
    mistakes = []
    for path, details in by_path.items():
        has_inner = any(len(other) > len(path) and other[: len(path)] == path for other in by_path)
        if not (has_inner and details[0]["loc"]):  # a field that is filled from a mistaken one has no path, but a place
            mistakes.append(_message(model, path, details))
    return mistakes


def _key_path(details: ErrorDetails, values: Any) -> Keys:
    """The keys as in the file, from the outermost on, without the validator's names for the alternatives of a type."""
    path: list[str | int] = []
    for i, part in enumerate(details["loc"]):
        if isinstance(values, dict) and part in values:
            path.append(part)
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int):
            path.append(part)
            values = values[part] if part < len(values) else None
        elif i == len(details["loc"]) - 1 and details["type"] == "missing":
            path.append(part)
    return tuple(path)


def _message(model: type[BaseModel], path: Keys, errors: Sequence[ErrorDetails]) -> str:
    """The message for one key, from its errors for each alternative type."""
    details = errors[0]
    name = ".".join(map(str, path))
    given = shortened(repr(details["input"]), 200)
    if details["type"] == "extra_forbidden":
        owner = _model_at(model, path)
        known = [*owner.model_fields]
        keys = f"known keys: {commas(known)}" if len(known) < 30 else "`sparsedepth schema` lists the keys of a run"
        what = hint(str(path[-1]), known, getattr(owner, "base_fields", ())) or keys
        return f"unknown key {name!r} (value {given}); {what}"
    first, *others = dict.fromkeys(in_our_words(error["msg"]) for error in errors)
    message = listed([first, *(other.removeprefix("must be ") for other in others)], "or")
    if not name:
        return message
    field = model.model_fields.get(str(path[0]))
    meaning = f" ({' '.join(field.description.split())})" if field and field.description else ""
    if details["type"] == "missing":
        return f"{name} is missing{meaning}"
    separator = " " if message.startswith("must ") else ": "
    how = how_to_write({error["type"] for error in errors}, details["input"], message)
    return f"{name}={given}{separator}{message}{how}{meaning}"


def _model_at(model: type[BaseModel], path: Keys) -> type[BaseModel]:
    """The config that has the last key of a path: of ("scales", "micro", "seed") Scale."""
    for part in path[:-1]:
        field = model.model_fields.get(str(part))
        model = next(iter(_models_in(field.annotation)), model) if field else model
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
