"""A value of a query's result, as text and in JSON's types.

For people a float has 4 significant digits, a decimal its own, and NULL is '-'. Text from a store is untrusted and ends
up in terminals: control characters are escaped.
"""

import datetime
import json
import math
from decimal import Decimal
from typing import Any

from sparsedepth.config.plain_text import visible
from sparsedepth.store.query_result import QueryResult

MAX_CELL_WIDTH = 60
MAX_DECIMALS = 6
"""A float with more decimals was not rounded by the query."""


def readable(value: Any) -> str:
    """A value for people: floats with 4 significant digits, NULL (and NaN) as '-', no control characters."""
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _four_digits(value)
    if isinstance(value, list | dict):
        value = json.dumps(value)
    return visible(str(value))


def with_decimals(result: QueryResult) -> QueryResult:
    """Floats that the query rounded (columns with at most MAX_DECIMALS) as decimals, shown with all their digits."""
    return QueryResult(columns=result.columns, rows=tuple(zip(*map(_as_decimals, result.values()), strict=True)))


def _as_decimals(values: list[Any]) -> list[Any]:
    places = 0
    for value in values:
        if value is None:
            continue
        if not isinstance(value, float) or not abs(value) < 1e7:  # NaN, too
            return values
        places = max(places, -int(Decimal(repr(value)).normalize().as_tuple().exponent))
        if places > MAX_DECIMALS:
            return values
    return [None if value is None else Decimal(f"{value:.{places}f}") for value in values]


def _four_digits(value: float) -> str:
    """0.001234, 3.142, 1234567, 1.235e+09: below ten million, every digit left of the point is kept."""
    if value == 0:
        return "0"
    rounded = f"{value:.3e}"
    exponent = int(rounded.partition("e")[2])
    return f"{value:.{max(0, 3 - exponent)}f}" if -4 <= exponent < 7 else rounded


def plain(value: Any) -> Any:
    """The value in JSON's types; NaN and Inf become None."""
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def shortened(text: str, width: int = MAX_CELL_WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def is_numeric(values: list[Any]) -> bool:
    values = [value for value in values if value is not None]
    return bool(values) and all(
        isinstance(value, int | float | Decimal) and not isinstance(value, bool) for value in values
    )
