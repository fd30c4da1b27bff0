"""A table as CSV, JSON, Markdown, LaTeX or Parquet. For people (Markdown, LaTeX) values are rounded; for programs
(CSV, JSON, Parquet) they are exact. Text from a store is untrusted and ends up in spreadsheets and papers: control
characters are escaped, and formulas, markup and commands made inert."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedepth.words.plain_text import commas, visible
from sparsedepth.words.table import table
from sparsedepth.words.values import plain, readable

if TYPE_CHECKING:
    import pyarrow as pa

    from sparsedepth.store.query_result import QueryResult

PARQUET = "parquet"
FOR_PEOPLE = ("table", "markdown", "latex")


def render(result: "QueryResult", format: str = "table") -> str:
    """The result as text in one of FORMATS, without a final newline. Raises ValueError for another format."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not one of {commas(FORMATS)}")
    return FORMATS[format](result)


def encode(result: "QueryResult", format: str = "table") -> bytes:
    """The result as a file's content, in one of FORMATS (with a final newline) or as Parquet. Raises ValueError."""
    return to_parquet(result) if format == PARQUET else f"{render(result, format)}\n".encode()


def choose_format(format: str | None, out: Path | None) -> str:
    """The requested format; else by the file's suffix; else a table. Raises ValueError, also if the two differ."""
    names = (*FORMATS, PARQUET)
    suffixes = {f".{name}": name for name in names} | {".md": "markdown", ".tex": "latex"}
    suffix = out.suffix.lower() if out else ""
    implied = suffixes.get(suffix)
    if format is None and implied is None and suffix not in ("", ".txt"):
        allowed = commas([*list(suffixes)[1:], ".txt"])
        raise ValueError(f"-o {str(out)!r}: {suffix} is no format of a result; end in {allowed}, or give --format")
    chosen = format or implied or "table"
    if chosen not in names:
        raise ValueError(f"--format {chosen!r} is not one of {commas(names)}")
    if implied not in (None, chosen):
        raise ValueError(f"-o {str(out)!r} is for {implied}, and --format is {chosen!r}; drop one of the two")
    if chosen == PARQUET and out is None:
        raise ValueError("parquet is no text for a terminal; name a file: -o FILE.parquet")
    return chosen


def to_csv(result: "QueryResult") -> str:
    """RFC 4180, exact numbers, NULL empty. An apostrophe precedes text that a spreadsheet would read as a formula."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*map(_csv_value, row)] for row in (result.columns, *result.rows))
    return text.getvalue().removesuffix("\n")


def _csv_value(value: Any) -> Any:
    """The value as `csv` writes it: numbers exactly, None as an empty field."""
    value = plain(value)
    if isinstance(value, bool | list | dict):
        value = json.dumps(value)
    if not isinstance(value, str):
        return value
    text = visible(value)
    return "'" + text if text.lstrip().startswith(tuple("=+-@＝＋－＠")) else text


def to_json(result: "QueryResult") -> str:
    """A list with one object per row, exact numbers; NULL, NaN and Inf are null. Duplicate columns are numbered."""
    names = _distinct(result.columns)
    rows = [dict(zip(names, map(plain, row), strict=True)) for row in result.rows]
    return json.dumps(rows, indent=1, allow_nan=False)


def _distinct(columns: tuple[str, ...]) -> list[str]:
    names: list[str] = []
    for column in columns:
        name = column
        number = 1
        while name in names:
            number += 1
            name = f"{column}_{number}"
        names.append(name)
    return names


def to_parquet(result: "QueryResult") -> bytes:
    """A Parquet file with exact numbers. Duplicate columns are numbered; a column of mixed types becomes text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: list[Any]) -> "pa.Array":
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            return pa.array([None if value is None else str(plain(value)) for value in values])

    content = io.BytesIO()
    rows = pa.table([*map(column, result.values())], names=_distinct(result.columns))
    pq.write_table(rows, content, compression="zstd")
    return content.getvalue()


def to_markdown(result: "QueryResult") -> str:
    """A GitHub table; text can hold no image, labelled link or HTML."""
    head, *rows = _escaped(result, _MARKDOWN)
    rule = ["---:" if is_numeric else "---" for is_numeric in result.are_numeric()]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def _escaped(result: "QueryResult", escapes: dict[int, str]) -> list[list[str]]:
    """The names of the columns, then the values of each row."""
    return [[readable(value).translate(escapes) for value in row] for row in (result.columns, *result.rows)]


_MARKDOWN = str.maketrans({character: "\\" + character for character in "\\`*[]<>|&~$"})


def to_latex(result: "QueryResult") -> str:
    """A tabular environment that needs no package; text can run no command."""
    head, *rows = [" & ".join(line) + r" \\" for line in _escaped(result, _LATEX)]
    sides = "".join("r" if is_numeric else "l" for is_numeric in result.are_numeric())
    begin = rf"\begin{{tabular}}{{{sides}}}"
    end = r"\end{tabular}"
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


FORMATS: dict[str, Callable[["QueryResult"], str]] = {
    "table": table,
    "csv": to_csv,
    "json": to_json,
    "markdown": to_markdown,
    "latex": to_latex,
}
