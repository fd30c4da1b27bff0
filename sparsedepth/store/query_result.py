"""The result of a query: named columns and rows of plain Python values."""

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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
