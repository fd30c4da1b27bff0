"""What a question to the store returns: named columns and rows of plain Python values."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """NULL is None."""

    def records(self) -> list[dict[str, Any]]:
        """Each row with its values by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]
