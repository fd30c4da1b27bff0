"""One value as text. For people a float has 4 significant digits, a decimal its own, and NULL is '-'; for programs
numbers are exact and NULL is null."""

import datetime
import json
import math
from decimal import Decimal
from typing import Any

from sparsedepth.words.plain_text import commas, visible


def readable(value: Any) -> str:
    """A value for people: floats with 4 significant digits, NULL (and NaN) as '-', no control characters."""
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return _four_digits(value)
    return visible(value if isinstance(value, str) else json.dumps(value))


def _four_digits(value: float) -> str:
    """0.001234, 3.142, 1234567, 1.235e+09: below ten million, every digit left of the point is kept."""
    if value == 0:
        return "0"
    rounded = f"{value:.3e}"
    exponent = int(rounded.partition("e")[2])
    return f"{value:.{max(0, 3 - exponent)}f}" if -4 <= exponent < 7 else rounded


def plain(value: Any) -> Any:
    """The value in JSON's types; NaN and Inf become None."""
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


def number_text(value: Any) -> str | None:
    """A number in its shortest form: 0.003."""
    return f"{value:g}" if isinstance(value, int | float) else value


def assignment(name: str, value: Any) -> str:
    """'n_kv_heads=1': a field's value in every text and figure, as in `--set`; floats in six digits."""
    if value is None:
        return f"{name} unset"
    if isinstance(value, float):
        value = int(value) if value.is_integer() else f"{value:.6g}"
    if isinstance(value, tuple):
        value = json.dumps(value)
    if isinstance(value, str) and value.startswith("[["):  # a mapping, as its column has it
        value = f"{{{commas(f'{key}: {number:g}' for key, number in json.loads(value))}}}"
    return f"{name}={value}"
