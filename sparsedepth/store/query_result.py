"""The result of a query: named columns and rows of plain Python values."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """NULL is None."""

    def values(self) -> list[list[Any]]:
        """The values of each column."""
        return [[row[index] for row in self.rows] for index in range(len(self.columns))]

    def records(self) -> list[dict[str, Any]]:
        """Each row as a mapping of column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]
