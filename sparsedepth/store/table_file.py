"""A third-party table of runs in a fenced DuckDB: CSV, TSV, JSON, JSON-lines or Parquet, bounded in bytes and rows.

    header(path)          its columns, read alone
    open_table(path, ..)  the mapped columns as text (NULL: missing), with their row from 1 on, in the table `texts`

Afterwards files and network are out of reach (`store.fences`). An expression of the map is evaluated over the table
`numbers`, where every column is in double precision, NULL where it is no number; a condition over the view `mixed`,
where a column is what all its values are: true or false, numbers, whole ones exactly beyond 2^53 (ids), else text."""

import codecs
import csv
import tempfile
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from sparsedepth.files import refuse_empty, unreadable
from sparsedepth.store.fences import FENCES, after, lock, one_line, read_only, syntax_nodes

MAX_BYTES = 200_000_000
MAX_ROWS = 50_000
"""A table with more rows is of something else than runs, such as steps of curves."""
MAX_COLUMNS = 20_000
SECONDS = 60.0
"""Time limit of reading, and of an expression."""
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
MISSING = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
"""Texts that stand for a missing number; in a column of text they are text, and only an empty field is missing."""
ROW = '"number of the row"'
"""A column of every view; a quoted name that no table has."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_QUOTES = """quote='"', escape='"', null_padding=true, auto_detect=false, header=true, parallel=false"""
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark begins it
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks, as spreadsheets write them."""
MAX_LENGTH = 500
"""Characters of an expression."""


class Table:
    """An open table, without access to files."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, n_rows: int) -> None:
        self.connection, self.n_rows = connection, n_rows

    def rows(self, sql: str, view: str, where: str = "true") -> list[tuple[Any, ...]]:
        """The number of each row of a view, in order, and `sql` of it. Raises ValueError, one line."""
        return self._answer(f"SELECT {ROW}, {sql} FROM {view} WHERE {where} ORDER BY {ROW}")

    def keep(self, condition: str) -> None:
        """Leave out the rows that do not meet a condition over `mixed`. Raises ValueError, one line."""
        if (type := self.type_of(condition, "mixed")) != "BOOLEAN":
            raise ValueError(f"{condition!r} is {type}; a condition must be true or false, such as batch_size == 64")
        numbers = [number for number, _ in self.rows("1", "mixed", f"({condition}\n)")]
        for name in ("texts", "numbers"):
            self.connection.execute(f"DELETE FROM {name} WHERE {ROW} NOT IN (SELECT unnest(?))", [numbers])

    def type_of(self, expression: str, view: str) -> str:
        """The SQL type of an expression. Raises ValueError, one line."""
        return self._answer(f"DESCRIBE SELECT ({expression}\n) FROM {view}")[0][1]

    def _answer(self, sql: str) -> list[tuple[Any, ...]]:
        try:
            with read_only(self.connection), after(SECONDS, self.connection.interrupt):
                return self.connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise ValueError(one_line(error)[:300]) from None


def quoted(name: str) -> str:
    """A column as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def header(path: Path) -> list[str]:
    """The columns of a table. Raises ValueError, one line."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(path)!r} is not a table; use one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; name a table")
    refuse_empty(path)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read; cut it")
    with _errors_of(path):
        names = _names(path, path.suffix.lower())
        if not names:
            raise ValueError("there are no columns; name a table that has some")
        if len(names) > MAX_COLUMNS:
            raise ValueError(f"it has {len(names):,} columns; at most {MAX_COLUMNS:,} are read; leave some out")
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise ValueError(f"the column {twice[0]!r} is twice in its header; rename one of them")
        return names


@contextmanager
def open_table(path: Path, columns: Collection[str], names: Sequence[str]) -> Generator[Table]:
    """A table with `names` in its header, of which `columns` are read. Raises ValueError, one line."""
    if twice := [name for name, n in Counter(map(str.lower, columns)).items() if n > 1]:
        raise ValueError(f"the columns named {twice[0]!r} differ in upper case only; rename one of them")
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        with _errors_of(path), after(SECONDS, connection.interrupt):
            table = Table(connection, _read(connection, path, columns, names))
            lock(connection)
            _make_views(table, columns)
        yield table


@contextmanager
def _errors_of(path: Path) -> Generator[None]:
    try:
        yield
    except UnicodeError as error:
        raise unreadable(path, error) from None
    except duckdb.OutOfMemoryException:  # DuckDB proposes settings, which the user cannot change
        limit = FENCES["memory_limit"]
        raise ValueError(f"{str(path)!r} cannot be read: its mapped columns need more than {limit} of memory") from None
    except (ValueError, OSError, duckdb.Error) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {one_line(error)[:300]}") from None


def _names(path: Path, suffix: str) -> list[str]:
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        _check_rows(metadata.num_rows)  # before reading: the rows may be far larger than the file
        return metadata.schema.to_arrow_schema().names
    with _as_utf8(path) as file:
        if suffix in _DELIMITERS:
            with open(file, encoding="utf-8", newline="") as lines:
                return next(csv.reader(lines, delimiter=_DELIMITERS[suffix]), [])
        with closing(duckdb.connect(config=FENCES)) as connection, after(SECONDS, connection.interrupt):
            return _keys(connection, file, suffix)


def _keys(connection: duckdb.DuckDBPyConnection, file: Path, suffix: str) -> list[str]:
    """The keys of the objects in a JSON file, in order."""
    connection.execute(f"SELECT json_type(json), json_keys(json) FROM {_json(suffix)}", [str(file)])
    n_rows, names = 0, dict[str, None]()
    while (row := connection.fetchone()) and len(names) <= MAX_COLUMNS:
        n_rows += 1
        type, keys = row
        if type != "OBJECT":
            raise ValueError("it must be a list of objects, one per run")
        if twice := [key for key, n in Counter(keys).items() if n > 1]:
            line = "line" if suffix == ".jsonl" else "row"
            raise ValueError(f"key {twice[0]!r} is twice in {line} {n_rows}; rename one")
        names |= dict.fromkeys(keys)
    _check_rows(n_rows)
    return [*names]


def _json(suffix: str) -> str:
    format = "newline_delimited" if suffix == ".jsonl" else "array"
    return f"(FROM read_json_objects($1, format='{format}') LIMIT {MAX_ROWS + 1})"


@contextmanager
def _as_utf8(path: Path) -> Generator[Path]:
    """The text file, or without its byte order mark a copy in UTF-8. Raises UnicodeError."""
    content = path.read_bytes()
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")
    text = content.decode(encoding)
    if encoding == "utf-8":
        yield path
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", suffix=path.suffix) as copy:
        copy.write(text)
        copy.flush()
        yield Path(copy.name)


def _read(connection: duckdb.DuckDBPyConnection, path: Path, columns: Collection[str], names: Sequence[str]) -> int:
    """Make the table `texts`; its number of rows."""
    suffix, given = path.suffix.lower(), list[str]()
    positions = [f"c{index}" for index in range(len(names))]  # names may differ in upper case only
    if suffix in (".json", ".jsonl"):
        source, values = _json(suffix), [f"json ->> ${index + 2}" for index in range(len(columns))]
        given = ['$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"' for name in columns]
    elif suffix == ".parquet":
        source = f"read_parquet($1) AS given({', '.join(positions)})"
        values = [f"CAST(c{names.index(name)} AS VARCHAR)" for name in columns]
    else:
        types = ", ".join(f"'{position}': 'VARCHAR'" for position in positions)
        source = f"read_csv($1, delim=E{_DELIMITERS[suffix]!r}, {_QUOTES}, columns={{{types}}})"
        values = [f"c{names.index(name)}" for name in columns]
    selected = ", ".join(f"{value} AS {quoted(name)}" for value, name in zip(values, columns, strict=True))
    rows = f"SELECT {selected or 'NULL AS nothing'} FROM {source} LIMIT {MAX_ROWS + 1}"
    with nullcontext(path) if suffix == ".parquet" else _as_utf8(path) as file:
        connection.execute(
            f"CREATE TABLE texts AS SELECT row_number() OVER () AS {ROW}, * FROM ({rows})", [str(file), *given]
        )
    ((n_rows,),) = connection.execute("SELECT count(*) FROM texts").fetchall()
    _check_rows(n_rows)
    return n_rows


def _check_rows(n: int) -> None:
    if n > MAX_ROWS:
        raise ValueError(f"it has more than {MAX_ROWS:,} rows, the limit; a row must be a run, not a step of one")


def number_of(name: str) -> str:
    """SQL of a column of `texts` in double precision; NULL where it is missing, and where it is no finite number."""
    number = f"TRY_CAST({not_missing(name)} AS DOUBLE)"
    return f"if(isfinite({number}), {number}, NULL)"


def not_missing(name: str) -> str:
    """SQL of a column of `texts`, NULL where it is missing as a number or truth value."""
    missing = ", ".join(f"'{text}'" for text in MISSING)
    return f"if({quoted(name)} IN ({missing}), NULL, {quoted(name)})"


def _make_views(table: Table, columns: Collection[str]) -> None:
    mixed = []
    for name in columns:
        text, number = not_missing(name), number_of(name)
        whole = f"regexp_full_match({text}, '-?[0-9]+')"
        checks = (  # the first that holds for all values
            f"bool_and({whole}) AND max(abs({number})) BETWEEN 2**53 AND 2**63",
            f"bool_and({text} IS NULL OR {number} IS NOT NULL)",
            f"bool_and(lower({text}) IN ('true', 'false'))",
        )
        answers = table.connection.execute(f"SELECT {', '.join(checks)} FROM texts").fetchone() or ()
        types = (f"CAST({text} AS HUGEINT)", number, f"CAST({text} AS BOOLEAN)")
        value = next((type for type, holds in zip(types, answers, strict=True) if holds), quoted(name))
        mixed.append(f"{value} AS {quoted(name)}")
    numbers = [f"{number_of(name)} AS {quoted(name)}" for name in columns]
    for view, selected in (("TABLE numbers", numbers), ("VIEW mixed", mixed)):  # 1 s per query as a view of 70 columns
        table.connection.execute(f"CREATE {view} AS SELECT {', '.join([ROW, *selected])} FROM texts")


class Expression(NamedTuple):
    sql: str
    columns: frozenset[str]
    """All columns in it."""
    column: str | None
    """The column, if the expression is only its name."""


def parse(
    connection: duckdb.DuckDBPyConnection, text: str, columns: Collection[str], is_condition: bool = False
) -> Expression:
    """Parse an expression, and run nothing. Raises ValueError, one line."""
    if text in columns and not is_condition:
        return Expression(quoted(text), frozenset({text}), text)
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression of {len(text):,} characters; at most {MAX_LENGTH} are read")
    try:  # without brackets, an unbalanced bracket is an error; with, a following FROM
        nodes, _ = (syntax_nodes(connection, select) for select in (f"SELECT {text}\n", f"SELECT ({text}\n)"))
    except (duckdb.Error, ValueError, RecursionError):
        fix = "write e.g. tokens * 1e6, and odd columns in backticks"
        raise ValueError(f"{text!r} is no expression; {fix}") from None
    if any(node.get("class") in ("SUBQUERY", "STAR") for node in nodes):
        raise ValueError(f"{text!r} has a query or * in it; use columns, operators and functions of one row")
    parts = [node["column_names"] for node in nodes if node.get("class") == "COLUMN_REF"]
    named = [".".join(names) for names in parts]
    if dotted := [name for name, names in zip(named, parts, strict=True) if len(names) > 1 and name in columns]:
        raise ValueError(f"{text!r}: the column {dotted[0]!r} must stand in backticks: `{dotted[0]}`")
    known = {name.lower(): name for name in reversed([*columns])} | {name: name for name in columns}
    if missing := sorted({name for name in named if name not in known and name.lower() not in known}):
        raise ValueError(f"no column {', '.join(map(repr, missing))}")
    found = frozenset(known.get(name, known[name.lower()]) for name in named)
    is_name = nodes[0].get("class") == "COLUMN_REF" and len(nodes[0]["column_names"]) == 1
    return Expression(text, found, next(iter(found)) if is_name and not is_condition else None)
