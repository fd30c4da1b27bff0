"""The result of a query: named columns and rows of plain Python values; as a table for the terminal, as CSV, JSON,
Markdown, LaTeX or Parquet.

For people (table, Markdown, LaTeX) a float has 4 significant digits, a decimal its own, and NULL is '-'; for programs
(CSV, JSON, Parquet) numbers are exact and NULL is empty or null. Text from a store is untrusted and ends up in
terminals, spreadsheets and papers: control characters are escaped, and formulas, markup and commands made inert."""

import csv
import datetime
import io
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsedepth.words.plain_text import terminal_width, visible, wrapped

if TYPE_CHECKING:
    import pandas as pd

MAX_CELL_WIDTH = 60
MAX_DECIMALS = 6
"""A float with more decimals was not rounded by the query."""
MAX_TABLE_ROWS = 200
CELL_LINES = 3
MIN_SETTING_WIDTH = 18
PARQUET = "parquet"
FOR_PEOPLE = ("table", "markdown", "latex")


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


def relative(value: float | None, reference: float | None) -> float | None:
    """A cost over that of the baseline; None where either is unknown."""
    return value / reference if value and reference else None


def number_text(value: Any) -> str | None:
    """A number in its shortest form: 0.003."""
    return f"{value:g}" if isinstance(value, int | float) else value


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


# As a table for the terminal, laid out here, not by a library: names break after underscores, optional columns give way
# to the text of a setting, and a note names them. rich and tabulate cut names, and drop nothing (LOG, 2026-11-24).


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


def render(result: QueryResult, format: str = "table") -> str:
    """The result as text in one of FORMATS, without a final newline. Raises ValueError for another format."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[format](result)


def encode(result: QueryResult, format: str = "table") -> bytes:
    """The result as a file's content, in one of FORMATS (with a final newline) or as Parquet. Raises ValueError."""
    return to_parquet(result) if format == PARQUET else f"{render(result, format)}\n".encode()


def choose_format(format: str | None, out: Path | None) -> str:
    """The requested format; else by the file's suffix; else a table. Raises ValueError, also if the two differ."""
    named = {f".{name}": name for name in (*FORMATS, PARQUET)} | {".md": "markdown", ".tex": "latex"}
    suffixes = {**named, "": "table", ".txt": "table"}
    if out is not None and format is None and out.suffix.lower() not in suffixes:
        allowed = ", ".join(suffix for suffix in suffixes if suffix not in ("", ".table"))
        raise ValueError(f"-o {str(out)!r}: {out.suffix} is no format of a result; end in {allowed}, or give --format")
    chosen = format or (suffixes.get(out.suffix.lower(), "table") if out else "table")
    if chosen not in (*FORMATS, PARQUET):
        raise ValueError(f"--format {chosen!r} is not one of {', '.join((*FORMATS, PARQUET))}")
    if out is not None and (implied := named.get(out.suffix.lower(), chosen)) != chosen:
        raise ValueError(f"-o {str(out)!r} is for {implied}, and --format is {chosen!r}; drop one of the two")
    if chosen == PARQUET and out is None:
        raise ValueError("parquet is no text for a terminal; name a file: -o FILE.parquet")
    return chosen


def to_csv(result: QueryResult) -> str:
    """RFC 4180, exact numbers, NULL empty. An apostrophe precedes text that a spreadsheet would read as a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_no_formula(visible(column)) for column in result.columns])
    for row in result.rows:
        writer.writerow([_csv_value(plain(value)) for value in row])
    return text.getvalue().removesuffix("\n")


def _csv_value(value: Any) -> Any:
    """The value as `csv` writes it: numbers exactly, None as an empty field."""
    if isinstance(value, bool | list | dict):
        value = json.dumps(value)
    return _no_formula(visible(value)) if isinstance(value, str) else value


def _no_formula(text: str) -> str:
    return "'" + text if text.lstrip().startswith(tuple("=+-@＝＋－＠")) else text


def to_json(result: QueryResult) -> str:
    """A list with one object per row, exact numbers; NULL, NaN and Inf are null. Duplicate columns are numbered."""
    names = _distinct(result.columns)
    rows = [dict(zip(names, map(plain, row), strict=True)) for row in result.rows]
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
            return pa.array([None if value is None else str(plain(value)) for value in values])

    table = pa.table([*map(column, result.values())], names=_distinct(result.columns))
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


def to_markdown(result: QueryResult) -> str:
    """A GitHub table; text can hold no image, labelled link or HTML."""
    head, *rows = _escaped(result, _MARKDOWN)
    rule = ["---:" if is_numeric(values) else "---" for values in result.values()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def _escaped(result: QueryResult, escapes: dict[int, str]) -> list[list[str]]:
    """The names of the columns, then the values of each row."""
    rows = [[visible(column) for column in result.columns], *([*map(readable, row)] for row in result.rows)]
    return [[text.translate(escapes) for text in row] for row in rows]


_MARKDOWN = str.maketrans({character: "\\" + character for character in "\\`*[]<>|&~$"})


def to_latex(result: QueryResult) -> str:
    """A tabular environment that needs no package; text can run no command."""
    head, *rows = [" & ".join(line) + r" \\" for line in _escaped(result, _LATEX)]
    sides = "".join("r" if is_numeric(values) else "l" for values in result.values())
    begin, end = rf"\begin{{tabular}}{{{sides}}}", r"\end{tabular}"
    return "\n".join([begin, r"\hline", head, r"\hline", *rows, r"\hline", end])


_LATEX = str.maketrans(
    {
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
)


FORMATS: dict[str, Callable[[QueryResult], str]] = {
    "table": table,
    "csv": to_csv,
    "json": to_json,
    "markdown": to_markdown,
    "latex": to_latex,
}
