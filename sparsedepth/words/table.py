"""A table for the terminal. Columns stand side by side where they fit: texts and names of columns take several lines,
optional columns give way to the text of a setting, and a note names them; else each value has a line.

Laid out here, not by a library: rich and tabulate break `depth_scale=lns` or cut names, and leave out no column. Text
from a store is untrusted: control characters are escaped."""

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparsedepth.words.plain_text import commas, terminal_width, visible, wrapped
from sparsedepth.words.values import readable

if TYPE_CHECKING:
    from sparsedepth.store.query_result import QueryResult

MAX_CELL_WIDTH = 60
MAX_TABLE_ROWS = 200
CELL_LINES = 3
MIN_SETTING_WIDTH = 18


def table(result: "QueryResult", width: int | None = None, max_rows: int = MAX_TABLE_ROWS) -> str:
    """Columns side by side if they fit into `width` characters (default: the terminal's), else one line per value."""
    width = width or terminal_width()
    shown = result.first(max_rows)
    return f"{_side_by_side(shown, width) or _line_per_value(shown, width)}{_more(result, max_rows)}"


class FittedTable(NamedTuple):
    """A table that was fitted into a width, with a note on the columns that had no room; and the columns shown."""

    text: str
    columns: tuple[str, ...]


def fitted_table(
    result: "QueryResult", optional: Sequence[str] = (), width: int | None = None, max_rows: int = MAX_TABLE_ROWS
) -> FittedTable:
    """A table without empty columns, whose last column is a text. To give that text room, `optional` columns are left
    out, the first for a text in one line, all for a text in several lines; if that is not enough, the text is cut.
    Names in one string, such as 'lo hi', are left out together. A note names those left out."""
    width = width or terminal_width()
    shown = result.first(max_rows).without_empty()
    more = _more(result, max_rows)
    left_out = [" ".join(optional[:n]).split() for n in range(len(optional) + 1)]
    one_line = [(names, MAX_CELL_WIDTH) for names in left_out[:2]]
    several_lines = [(names, MIN_SETTING_WIDTH) for names in left_out[1:]]
    for names, text_width in (*one_line, *several_lines, (left_out[-1], 0)):
        part = shown.of_columns([name for name in shown.columns if name not in names])
        if text := _side_by_side(part, width, text_width):
            dropped = commas(name for name in names if name in shown.columns)
            note = f"\n{wrapped([f'columns that did not fit: {dropped}'], width).rstrip()}" if dropped else ""
            return FittedTable(f"{text}{more}{note}", part.columns)
    return FittedTable(f"{_line_per_value(shown, width)}{more}", shown.columns)


def _more(result: "QueryResult", max_rows: int) -> str:
    n_left_out = len(result.rows) - max_rows
    return f"\n... and {n_left_out:,} more rows; csv or json has them all" if n_left_out > 0 else ""


def _side_by_side(result: "QueryResult", width: int, last: int = 0) -> str | None:
    """A table whose texts and column names are wrapped over up to CELL_LINES lines where needed; None where they do not
    fit, or the last column gets fewer than `last` characters or would be cut."""
    columns = [
        [visible(name), *map(readable, values)] for name, values in zip(result.columns, result.values(), strict=True)
    ]
    sizes = _widths(columns, width, last) if columns else None
    if sizes is None:
        return None
    names, *rows = [
        [_lines(cell, size, CELL_LINES if index else None) for cell, size in zip(row, sizes, strict=True)]
        for index, row in enumerate(zip(*columns, strict=True))
    ]
    texts = zip(columns[-1][1:], rows, strict=True)
    if last and any(len(text) > sizes[-1] and row[-1][-1].endswith("...") for text, row in texts):
        return None
    sides = [f"{'>' if on_right else '<'}{size}" for on_right, size in zip(result.are_numeric(), sizes, strict=True)]
    rule = "  ".join("-" * size for size in sizes)
    return "\n".join([*_aligned(names, sides), rule, *(line for row in rows for line in _aligned(row, sides))])


def _widths(columns: Sequence[Sequence[str]], width: int, last: int) -> list[int] | None:
    """The width of each column of cells: the widest gives way, down to its longest piece, the last column down to
    `last`, and the last takes what remains. None where they do not fit into `width`."""
    longest = [max(map(len, cells)) for cells in columns]
    pieces = (" ".join(map(_pieces, cells)).split() for cells in columns)
    least = [min(MAX_CELL_WIDTH, max(map(len, unbroken), default=0)) for unbroken in pieces]
    sizes = [min(MAX_CELL_WIDTH, size) for size in longest]
    least[-1] = max(least[-1], min(last, sizes[-1]))
    room = width - 2 * (len(sizes) - 1)
    while sum(sizes) > room:
        can_shrink = [index for index, size in enumerate(sizes) if size > least[index]]
        if not can_shrink:
            return None
        sizes[max(can_shrink, key=lambda index: sizes[index])] -= 1
    return [*sizes[:-1], min(max(sizes[-1], room - sum(sizes[:-1])), longest[-1])]


def _pieces(cell: str) -> str:
    """The text with a blank at each possible line break: in a name after each underscore."""
    return cell.replace("_", "_ ") if cell.isidentifier() else cell


def _lines(cell: str, size: int, max_lines: int | None) -> list[str]:
    """The lines of a cell, broken at blanks; a name also after its underscores."""
    if len(cell) <= size:
        return [cell]
    is_name = cell.isidentifier()
    lines = textwrap.wrap(_pieces(cell), size, break_long_words=False, max_lines=max_lines, placeholder="...")
    return [shortened(line.replace("_ ", "_") if is_name else line, size) for line in lines or [cell]]


def _aligned(cells: Iterable[list[str]], sides: Sequence[str]) -> list[str]:
    """The lines of one row of the table."""
    return ["  ".join(map(format, parts, sides)).rstrip() for parts in itertools.zip_longest(*cells, fillvalue="")]


def _line_per_value(result: "QueryResult", width: int) -> str:
    """For rows too wide to stand side by side."""
    names = [shortened(visible(column)) for column in result.columns]
    indent = max(map(len, names), default=0)
    lines = []
    for index, row in enumerate(result.rows, start=1):
        lines.append(f"row {index} ".ljust(min(width, indent + 20), "-"))
        lines += [
            f"{name:<{indent}}  {shortened(readable(value), max(8, width - indent - 2))}"
            for name, value in zip(names, row, strict=True)
        ]
    return "\n".join(lines) or "no rows"


def shortened(text: str, width: int = MAX_CELL_WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
