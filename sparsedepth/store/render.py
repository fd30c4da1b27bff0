"""Format a query's result: an aligned table for the terminal; CSV, JSON, Markdown, LaTeX or Parquet for files.

For people (table, Markdown, LaTeX) a float has 4 significant digits, a decimal its own, and NULL is '-'; for programs
(CSV, JSON, Parquet) numbers are exact and NULL is empty or null. Text from a store is untrusted and ends up in
terminals, spreadsheets and papers: control characters are escaped, and formulas, markup and commands made inert.
"""

import csv
import datetime
import io
import itertools
import json
import math
import shutil
import textwrap
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from sparsedepth.config.plain_text import visible
from sparsedepth.store.query_result import QueryResult

MAX_TABLE_ROWS = 200
MAX_CELL_WIDTH = 60
CELL_LINES = 3
MIN_SETTING_WIDTH = 18
MAX_DECIMALS = 6
"""A float with more decimals was not rounded by the query."""
WIDTH = 100
"""Characters of a line in a file or a pipe."""


def render(result: QueryResult, format: str = "table") -> str:
    """The result as text in one of FORMATS, without a final newline. Raises ValueError for another format."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[format](result)


def encode(result: QueryResult, format: str = "table") -> bytes:
    """The result as a file's content, in one of FORMATS (with a final newline) or as Parquet. Raises ValueError."""
    return to_parquet(result) if format == PARQUET else f"{render(result, format)}\n".encode()


def choose_format(format: str | None, out: Path | None) -> str:
    """The requested format; else by the file's suffix; else a table. Raises ValueError."""
    suffixes = {f".{name}": name for name in (*FORMATS, PARQUET)} | {".md": "markdown", ".tex": "latex"}
    suffixes |= {"": "table", ".txt": "table"}
    if out is not None and format is None and out.suffix.lower() not in suffixes:
        allowed = ", ".join(suffix for suffix in suffixes if suffix not in ("", ".table"))
        raise ValueError(f"-o {str(out)!r}: {out.suffix} is no format of a result; end in {allowed}, or give --format")
    chosen = format or (suffixes.get(out.suffix.lower(), "table") if out else "table")
    if chosen not in (*FORMATS, PARQUET):
        raise ValueError(f"--format {chosen!r} is not one of {', '.join((*FORMATS, PARQUET))}")
    if chosen == PARQUET and out is None:
        raise ValueError("parquet is no text for a terminal; name a file: -o FILE.parquet")
    return chosen


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


def table(result: QueryResult, width: int | None = None, max_rows: int = MAX_TABLE_ROWS) -> str:
    """Columns side by side if they fit into `width` characters (default: the terminal's), else one line per value."""
    width = width or terminal_width()
    return side_by_side(result, width, max_rows) or _records(result, width, max_rows)


@dataclass(frozen=True, kw_only=True)
class CompactTable:
    """A table that was fitted into a width."""

    text: str
    """with a note on the columns that the width had no room for"""
    columns: tuple[str, ...]
    """those shown"""


def compact(
    result: QueryResult, optional: Sequence[str], width: int | None = None, max_rows: int = MAX_TABLE_ROWS
) -> str:
    """The text of `fit`."""
    return fit(result, optional, width, max_rows).text


def fit(
    result: QueryResult, optional: Sequence[str], width: int | None = None, max_rows: int = MAX_TABLE_ROWS
) -> CompactTable:
    """A table without empty columns, whose last column is a text. To give that text room, `optional` columns are left
    out, the first for a text in one line, all for a text in several lines; if that is not enough, the text is cut.
    Names in one string, such as 'lo hi', are left out together. A note names those left out."""
    width = width or terminal_width()
    left_out = [" ".join(optional[:n]).split() for n in range(len(optional) + 1)]
    result = without_empty(result)
    one_line = [(names, MAX_CELL_WIDTH) for names in left_out[:2]]
    several_lines = [(names, MIN_SETTING_WIDTH) for names in left_out[1:]]
    for names, text_width in (*one_line, *several_lines, (left_out[-1], 0)):
        part = columns_of(result, [name for name in result.columns if name not in names])
        if part.columns and (text := side_by_side(part, width, max_rows, text_width)):
            dropped = ", ".join(name for name in names if name in result.columns)
            note = f"\n{wrapped([f'left out for width: {dropped}'], width).rstrip()}" if dropped else ""
            return CompactTable(text=f"{text}{note}", columns=part.columns)
    return CompactTable(text=table(result, width, max_rows), columns=result.columns)


def without_empty(result: QueryResult) -> QueryResult:
    """The columns with any value that is not NULL."""
    columns = zip(result.columns, result.values(), strict=True)
    return columns_of(result, [name for name, values in columns if any(value is not None for value in values)])


def columns_of(result: QueryResult, names: Container[str]) -> QueryResult:
    indices = [index for index, name in enumerate(result.columns) if name in names]
    return QueryResult(
        columns=tuple(result.columns[index] for index in indices),
        rows=tuple(tuple(row[index] for index in indices) for row in result.rows),
    )


def side_by_side(result: QueryResult, width: int, max_rows: int = MAX_TABLE_ROWS, last: int = 0) -> str | None:
    """A table whose texts and column names are wrapped over up to CELL_LINES lines where needed; None where they do not
    fit, or the last column gets fewer than `last` characters or would be cut."""
    rows = result.rows[:max_rows]
    right = [_is_numeric([row[index] for row in rows]) for index in range(len(result.columns))]
    columns = [[visible(name), *(readable(row[index]) for row in rows)] for index, name in enumerate(result.columns)]
    sizes = [min(MAX_CELL_WIDTH, max(map(len, column))) for column in columns]
    least = [_least_width(*column) for column in columns]
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
    header, *lines = zip(
        *(
            [_lines(name, size, max_lines=None), *(_lines(cell, size) for cell in cells)]
            for (name, *cells), size in zip(columns, sizes, strict=True)
        ),
        strict=True,
    )
    text = [*_aligned(header, sizes, right), "  ".join("-" * size for size in sizes)]
    text += [line for row in lines for line in _aligned(row, sizes, right)]
    return "\n".join([*text, *_left_out(result, len(rows))])


def _least_width(name: str, *cells: str) -> int:
    """The length of the longest unbreakable piece of a column's name and texts."""
    pieces = [piece for cell in (name, *cells) for piece in _pieces(cell).split()]
    return min(MAX_CELL_WIDTH, max(map(len, pieces)))


def _pieces(cell: str) -> str:
    """A text with a blank at each possible line break: in a name after each underscore."""
    return cell.replace("_", "_ ") if cell.isidentifier() else cell


def _lines(cell: str, size: int, max_lines: int | None = CELL_LINES) -> list[str]:
    """The lines of a cell, broken at blanks; a name also after its underscores."""
    if len(cell) <= size:
        return [cell]
    is_name = cell.isidentifier()
    lines = textwrap.wrap(_pieces(cell), size, break_long_words=False, max_lines=max_lines, placeholder="...")
    return [shortened(line.replace("_ ", "_") if is_name else line, size) for line in lines or [cell]]


def _records(result: QueryResult, width: int, max_rows: int) -> str:
    """One line per value, for rows too wide to stand side by side."""
    names = [shortened(visible(column)) for column in result.columns]
    indent = max(map(len, names))
    rows = result.rows[: max(1, max_rows // 10)]
    lines = []
    for index, row in enumerate(rows, start=1):
        lines.append(f"row {index} ".ljust(min(width, indent + 20), "-"))
        lines += [
            f"{name:<{indent}}  {shortened(readable(value), max(8, width - indent - 2))}"
            for name, value in zip(names, row, strict=True)
        ]
    return "\n".join([*lines, *_left_out(result, len(rows))])


def _left_out(result: QueryResult, shown: int) -> list[str]:
    n_left_out = len(result.rows) - shown
    return [f"... and {n_left_out:,} more rows; csv or json has them all"] if n_left_out else []


def _aligned(cells: Iterable[list[str]], sizes: list[int], right: list[bool]) -> list[str]:
    """The lines of a row of cells."""
    return [
        "  ".join(
            part.rjust(size) if on_right else part.ljust(size)
            for part, size, on_right in zip(parts, sizes, right, strict=True)
        ).rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]


def to_csv(result: QueryResult) -> str:
    """RFC 4180, exact numbers, NULL empty. An apostrophe precedes text that a spreadsheet would read as a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_no_formula(visible(column)) for column in result.columns])
    for row in result.rows:
        writer.writerow([_csv_value(_plain(value)) for value in row])
    return text.getvalue().removesuffix("\n")


def _csv_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | dict):
        value = json.dumps(value)
    return _no_formula(visible(value))


def _no_formula(text: str) -> str:
    return "'" + text if text.lstrip().startswith(tuple("=+-@＝＋－＠")) else text


def to_json(result: QueryResult) -> str:
    """A list with one object per row, exact numbers; NULL, NaN and Inf are null. Duplicate columns are numbered."""
    names = _distinct(result.columns)
    rows = [dict(zip(names, map(_plain, row), strict=True)) for row in result.rows]
    return json.dumps(rows, indent=1, allow_nan=False)


def _distinct(columns: tuple[str, ...]) -> list[str]:
    names: list[str] = []
    for column in columns:
        name, number = column, 1
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def to_parquet(result: QueryResult) -> bytes:
    """A Parquet file with exact numbers. Duplicate columns are numbered; a column of mixed types becomes text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: list[Any]) -> pa.Array:
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            return pa.array([None if value is None else str(_plain(value)) for value in values])

    table = pa.table([*map(column, result.values())], names=_distinct(result.columns))
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


def to_markdown(result: QueryResult) -> str:
    """A GitHub table; text can hold no image, labelled link or HTML."""
    right = [*map(_is_numeric, result.values())]
    lines = [
        [_markdown_text(visible(column)) for column in result.columns],
        ["---:" if on_right else "---" for on_right in right],
        *([_markdown_text(readable(value)) for value in row] for row in result.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_text(text: str) -> str:
    return "".join("\\" + character if character in "\\`*[]<>|&~$" else character for character in text)


def to_latex(result: QueryResult) -> str:
    """A tabular environment that needs no package; text can run no command."""
    right = [*map(_is_numeric, result.values())]
    lines = [
        r"\begin{tabular}{" + "".join("r" if on_right else "l" for on_right in right) + "}",
        r"\hline",
        " & ".join(_latex_text(visible(column)) for column in result.columns) + r" \\",
        r"\hline",
        *(" & ".join(_latex_text(readable(value)) for value in row) + r" \\" for row in result.rows),
        r"\hline",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


_LATEX = {
    **{character: "\\" + character for character in "{}$&#%_"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after \\ it would open an optional argument
    "*": "{*}",
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


FORMATS: dict[str, Callable[[QueryResult], str]] = {
    "table": table,
    "csv": to_csv,
    "json": to_json,
    "markdown": to_markdown,
    "latex": to_latex,
}
FOR_PEOPLE = ("table", "markdown", "latex")
PARQUET = "parquet"


# Values


def readable(value: Any) -> str:
    """A value for people: floats with 4 significant digits, NULL (and NaN) as '-', no control characters."""
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    value = _plain(value)
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


def _plain(value: Any) -> Any:
    """The value in JSON's types; NaN and Inf become None."""
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def shortened(text: str, width: int = MAX_CELL_WIDTH) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _is_numeric(values: list[Any]) -> bool:
    values = [value for value in values if value is not None]
    return bool(values) and all(
        isinstance(value, int | float | Decimal) and not isinstance(value, bool) for value in values
    )
