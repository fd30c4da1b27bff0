"""Text for a terminal: wrapped lines, durations, and a query's result as a table that fits into its width.

Columns are laid out here, not by a library: names break after underscores, optional columns give way to the text of a
setting, and a note names them. rich and tabulate cut names instead, and drop nothing (LOG, 2026-11-24).
"""

import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from sparsedepth.config.plain_text import visible
from sparsedepth.store.query_result import MAX_CELL_WIDTH, QueryResult, is_numeric, readable, shortened

MAX_TABLE_ROWS = 200
CELL_LINES = 3
MIN_SETTING_WIDTH = 18
WIDTH = 100
"""Characters of a line in a file or a pipe."""
DAY = 24 * 3600
YEAR = 365 * DAY


def terminal_width() -> int:
    """Characters in a line of the terminal; WIDTH for a pipe or a file."""
    return shutil.get_terminal_size(fallback=(WIDTH, 24)).columns


def wrapped(lines: Iterable[str], width: int | None = None) -> str:
    """Lines wrapped at `width` characters (default: the terminal's), continued two further in; paths stay whole."""
    width = width or terminal_width()

    def fold(line: str) -> str:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)

    return "".join(f"{fold(line)}\n" for text in lines for line in text.split("\n"))


def duration(seconds: float) -> str:
    """'12s', '3m05s', '1h02m'; from two days '3d04h', from two years '4.5 years'."""
    whole = max(0, round(seconds))
    if whole >= 2 * YEAR:
        return f"{whole / YEAR:,.{0 if whole >= 10 * YEAR else 1}f} years"
    if whole >= 2 * DAY:
        return f"{whole // DAY}d{whole % DAY // 3600:02d}h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def table(result: QueryResult, width: int | None = None, max_rows: int = MAX_TABLE_ROWS) -> str:
    """Columns side by side if they fit into `width` characters (default: the terminal's), else one line per value."""
    width, (shown, more) = width or terminal_width(), _first_rows(result, max_rows)
    return f"{_side_by_side(shown, width) or _records(shown, width)}{more}"


def _first_rows(result: QueryResult, max_rows: int) -> tuple[QueryResult, str]:
    """The rows that are shown, and a line on the others."""
    n_left_out = len(result.rows) - max_rows
    more = f"\n... and {n_left_out:,} more rows; csv or json has them all" if n_left_out > 0 else ""
    return replace(result, rows=result.rows[:max_rows]), more


class CompactTable(NamedTuple):
    """A table that was fitted into a width, with a note on the columns that had no room; and the columns shown."""

    text: str
    columns: tuple[str, ...]


def fit(
    result: QueryResult, optional: Sequence[str], width: int | None = None, max_rows: int = MAX_TABLE_ROWS
) -> CompactTable:
    """A table without empty columns, whose last column is a text. To give that text room, `optional` columns are left
    out, the first for a text in one line, all for a text in several lines; if that is not enough, the text is cut.
    Names in one string, such as 'lo hi', are left out together. A note names those left out."""
    width, (shown, more) = width or terminal_width(), _first_rows(result.without_empty(), max_rows)
    left_out = [" ".join(optional[:n]).split() for n in range(len(optional) + 1)]
    one_line = [(names, MAX_CELL_WIDTH) for names in left_out[:2]]
    several_lines = [(names, MIN_SETTING_WIDTH) for names in left_out[1:]]
    for names, text_width in (*one_line, *several_lines, (left_out[-1], 0)):
        part = shown.of_columns([name for name in shown.columns if name not in names])
        if part.columns and (text := _side_by_side(part, width, text_width)):
            dropped = ", ".join(name for name in names if name in shown.columns)
            note = f"\n{wrapped([f'columns that did not fit: {dropped}'], width).rstrip()}" if dropped else ""
            return CompactTable(text=f"{text}{more}{note}", columns=part.columns)
    return CompactTable(text=f"{table(shown, width, max_rows)}{more}", columns=shown.columns)


def _side_by_side(result: QueryResult, width: int, last: int = 0) -> str | None:
    """A table whose texts and column names are wrapped over up to CELL_LINES lines where needed; None where they do not
    fit, or the last column gets fewer than `last` characters or would be cut."""
    right = [*map(is_numeric, result.values())]
    named = zip(result.columns, result.values(), strict=True)
    columns = [[visible(name), *map(readable, values)] for name, values in named]
    sizes = [min(MAX_CELL_WIDTH, max(map(len, column))) for column in columns]
    pieces = [" ".join(map(_pieces, column)).split() for column in columns]
    least = [min(MAX_CELL_WIDTH, max(map(len, unbroken))) for unbroken in pieces]
    least[-1] = max(least[-1], min(last, sizes[-1]))
    gaps = 2 * (len(sizes) - 1)
    while sum(sizes) + gaps > width:
        can_shrink = [index for index, size in enumerate(sizes) if size > least[index]]
        if not can_shrink:
            return None
        sizes[max(can_shrink, key=lambda index: sizes[index])] -= 1
    room = width - gaps - sum(sizes[:-1])
    sizes[-1] = min(max(sizes[-1], room), max(map(len, columns[-1])))  # the last column takes the remaining width
    if last and any(_lines(cell, sizes[-1])[-1].endswith("...") for cell in columns[-1][1:] if len(cell) > sizes[-1]):
        return None
    header = [_lines(name, size, max_lines=None) for (name, *_), size in zip(columns, sizes, strict=True)]
    cells = ([_lines(cell, size) for cell in column[1:]] for column, size in zip(columns, sizes, strict=True))
    lines = zip(*cells, strict=True)
    text = [*_aligned(header, sizes, right), "  ".join("-" * size for size in sizes)]
    return "\n".join([*text, *(line for row in lines for line in _aligned(row, sizes, right))])


def _pieces(cell: str) -> str:
    """The text with a blank at each possible line break: in a name after each underscore."""
    return cell.replace("_", "_ ") if cell.isidentifier() else cell


def _lines(cell: str, size: int, max_lines: int | None = CELL_LINES) -> list[str]:
    """The lines of a cell, broken at blanks; a name also after its underscores."""
    if len(cell) <= size:
        return [cell]
    is_name = cell.isidentifier()
    lines = textwrap.wrap(_pieces(cell), size, break_long_words=False, max_lines=max_lines, placeholder="...")
    return [shortened(line.replace("_ ", "_") if is_name else line, size) for line in lines or [cell]]


def _records(result: QueryResult, width: int) -> str:
    """One line per value, for rows too wide to stand side by side."""
    if not result.rows:
        return "no rows"
    names = [shortened(visible(column)) for column in result.columns]
    indent = max(map(len, names))
    lines = []
    for index, row in enumerate(result.rows, start=1):
        lines.append(f"row {index} ".ljust(min(width, indent + 20), "-"))
        lines += [
            f"{name:<{indent}}  {shortened(readable(value), max(8, width - indent - 2))}"
            for name, value in zip(names, row, strict=True)
        ]
    return "\n".join(lines)


def _aligned(cells: Iterable[list[str]], sizes: list[int], right: list[bool]) -> list[str]:
    formats = [f"{'>' if on_right else '<'}{size}" for size, on_right in zip(sizes, right, strict=True)]
    return ["  ".join(map(format, parts, formats)).rstrip() for parts in itertools.zip_longest(*cells, fillvalue="")]
