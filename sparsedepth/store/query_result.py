"""The result of a query: named columns and rows of plain Python values. `words.table` and `words.formats` write it."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import compress
from typing import TYPE_CHECKING, Any

from sparsedepth.quantities.quantity import Named, Row

if TYPE_CHECKING:
    import pandas as pd

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
        rows = frame.to_numpy(dtype=object, na_value=None).tolist()
        return cls(columns=tuple(frame.columns), rows=tuple(map(tuple, rows)))

    @classmethod
    def of_records(cls, records: Iterable[Row], columns: Sequence[str]) -> "QueryResult":
        """These columns of rows that may have more."""
        return cls(columns=tuple(columns), rows=tuple(tuple(record[name] for name in columns) for record in records))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]]) -> "QueryResult":
        return cls(columns=tuple(columns), rows=tuple(zip(*columns.values(), strict=True)))

    def values(self) -> list[list[Any]]:
        return [[row[index] for row in self.rows] for index in range(len(self.columns))]

    def records(self) -> list[Named]:
        """Each row as a mapping of column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def frame(self) -> "pd.DataFrame":
        """The rows as a DataFrame."""
        import pandas as pd

        return pd.DataFrame([*self.rows], columns=[*self.columns])

    def first(self, n_rows: int) -> "QueryResult":
        return replace(self, rows=self.rows[:n_rows])

    def of_columns(self, names: Container[str]) -> "QueryResult":
        """The columns of these names, in their order here."""
        kept = [name in names for name in self.columns]
        return QueryResult(tuple(compress(self.columns, kept)), tuple(tuple(compress(row, kept)) for row in self.rows))

    def without_empty(self) -> "QueryResult":
        """The columns with any value that is not NULL."""
        columns = zip(self.columns, self.values(), strict=True)
        return self.of_columns([name for name, values in columns if any(value is not None for value in values)])

    def are_numeric(self) -> list[bool]:
        """Of each column, whether it has numbers, and nothing else."""
        known = ([value for value in values if value is not None] for values in self.values())
        return [
            bool(values)
            and all(isinstance(value, int | float | Decimal) and type(value) is not bool for value in values)
            for values in known
        ]

    def with_decimals(self) -> "QueryResult":
        """Floats that the query rounded to at most MAX_DECIMALS as decimals, which are shown with all their digits."""
        return QueryResult(columns=self.columns, rows=tuple(zip(*map(_as_decimals, self.values()), strict=True)))


def _as_decimals(values: list[Any]) -> list[Any]:
    known = [value for value in values if value is not None]
    if not all(isinstance(value, float) and abs(value) < 1e7 for value in known):  # NaN, too
        return values
    places = max([0, *(-int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in known)])
    if places > MAX_DECIMALS:
        return values
    return [None if value is None else Decimal(f"{value:.{places}f}") for value in values]
