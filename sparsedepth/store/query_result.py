"""The result of a query: named columns and rows of plain Python values; and a value as text, and in JSON's types.

For people a float has 4 significant digits, a decimal its own, and NULL is '-'. Text from a store is untrusted and ends
up in terminals: control characters are escaped.
"""

import datetime
import json
import math
from collections.abc import Container
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from sparsedepth.config.plain_text import visible

if TYPE_CHECKING:
    import pandas as pd

MAX_CELL_WIDTH = 60
MAX_DECIMALS = 6
"""A float with more decimals was not rounded by the query."""


@dataclass(frozen=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """NULL is None."""

    @classmethod
    def of_frame(cls, frame: "pd.DataFrame") -> "QueryResult":
        """The rows of a frame, NULL where a value is missing."""
        plain = frame.astype(object).where(frame.notna(), None)
        return cls(columns=tuple(plain.columns), rows=tuple(plain.itertuples(index=False, name=None)))

    def values(self) -> list[list[Any]]:
        """The values of each column."""
        return [[row[index] for row in self.rows] for index in range(len(self.columns))]

    def records(self) -> list[dict[str, Any]]:
        """Each row as a mapping of column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def of_columns(self, names: Container[str]) -> "QueryResult":
        """The columns of these names, in their order here."""
        indices = [index for index, name in enumerate(self.columns) if name in names]
        return QueryResult(
            columns=tuple(self.columns[index] for index in indices),
            rows=tuple(tuple(row[index] for index in indices) for row in self.rows),
        )

    def without_empty(self) -> "QueryResult":
        """The columns with any value that is not NULL."""
        columns = zip(self.columns, self.values(), strict=True)
        return self.of_columns([name for name, values in columns if any(value is not None for value in values)])

    def with_decimals(self) -> "QueryResult":
        """Floats that the query rounded to at most MAX_DECIMALS as decimals, which are shown with all their digits."""
        return QueryResult(columns=self.columns, rows=tuple(zip(*map(_as_decimals, self.values()), strict=True)))


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


def _as_decimals(values: list[Any]) -> list[Any]:
    known = [value for value in values if value is not None]
    if not all(isinstance(value, float) and abs(value) < 1e7 for value in known):  # NaN, too
        return values
    places = max([0, *(-int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in known)])
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
