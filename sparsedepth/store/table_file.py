"""A third-party table of runs in a fenced DuckDB: CSV, TSV, JSON, JSON-lines or Parquet, bounded in bytes and rows.

    header(path)          its columns, read alone
    open_table(path, ..)  the mapped columns as text (NULL: missing), with their row from 1 on, in the table `texts`

Afterwards files and network are out of reach, as in queries (`store.fences`). An expression of the map is evaluated
over the view `numbers`, where every column is in double precision, NULL where it is no number; a condition over the
view `mixed`, where a column is in double precision if all its values are numbers, else text.
"""

import codecs
import csv
import tempfile
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import duckdb

from sparsedepth.config.plain_text import refuse_empty, unreadable
from sparsedepth.store.fences import FENCES, interrupt_after, lock, read_only

MAX_BYTES = 200_000_000
MAX_ROWS = 50_000
"""A table with more rows is of something else than runs, such as steps of curves."""
MAX_COLUMNS = 20_000
SECONDS = 60.0
"""Time limit of reading, and of an expression."""
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
MISSING = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
"""Texts that stand for a missing number; in a column of text they are text, and only an empty field is missing."""
_QUOTES = """delim=?, quote='"', escape='"', null_padding=true, auto_detect=false, header=true, parallel=false"""


class Table:
    """An open table, without access to files."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, names: Sequence[str], n_rows: int) -> None:
        self.connection, self.names, self.n_rows = connection, names, n_rows

    def rows(self, sql: str, view: str, where: str = "true") -> list[tuple[Any, ...]]:
        """`sql` of each row of a view, in order. Raises ValueError, one line."""
        return self._answer(f"SELECT {sql} FROM {view} WHERE {where} ORDER BY row_number")

    def type_of(self, expression: str, view: str) -> str:
        """The SQL type of an expression. Raises ValueError, one line."""
        return self._answer(f"DESCRIBE SELECT ({expression}\n) FROM {view}")[0][1]

    def _answer(self, sql: str) -> list[tuple[Any, ...]]:
        try:
            with read_only(self.connection), interrupt_after(self.connection, SECONDS):
                return self.connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise ValueError(_one_line(error)) from None


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
        raise ValueError(f"{str(path)!r} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
    with _errors_of(path):
        names = _names(path, path.suffix.lower())
        if not names:
            raise ValueError("there are no columns")
        if len(names) > MAX_COLUMNS:
            raise ValueError(f"it has {len(names):,} columns; at most {MAX_COLUMNS:,} are read")
        if twice := [name for name, n in Counter(names).items() if n > 1]:
            raise ValueError(f"the column {twice[0]!r} is twice in its header")
        return names


@contextmanager
def open_table(path: Path, columns: Collection[str], names: Sequence[str]) -> Generator[Table]:
    """A table with `names` in its header, of which `columns` are read. Raises ValueError, one line."""
    if twice := [name for name, n in Counter(map(str.lower, columns)).items() if n > 1]:
        raise ValueError(f"the columns named {twice[0]!r} differ in upper case only; rename one of them")
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        with _errors_of(path), interrupt_after(connection, SECONDS):
            n_rows = _read(connection, path, columns, names)
        lock(connection)
        table = Table(connection, names, n_rows)
        _make_views(table, columns)
        yield table


@contextmanager
def _errors_of(path: Path) -> Generator[None]:
    try:
        yield
    except UnicodeError as error:
        raise unreadable(path, error) from None
    except (ValueError, OSError, duckdb.Error) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split("\n\nLINE ")[0].split("Possible fixes:")[0].split())
    return "".join(character if character.isprintable() else "?" for character in text)[:300]


def _names(path: Path, suffix: str) -> list[str]:
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        _check_rows(metadata.num_rows)  # before reading: the rows may be far larger than the file
        return metadata.schema.to_arrow_schema().names
    _check_text(path)
    if suffix in (".csv", ".tsv"):
        with open(path, encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file, delimiter=_delimiter(suffix)), [])
    with closing(duckdb.connect()) as connection, _without_mark(path) as file, interrupt_after(connection, SECONDS):
        rows = connection.execute(
            f"SELECT json_type(json), json_keys(json) FROM {_json(suffix)}", [str(file)]
        ).fetchall()
    _check_rows(len(rows))
    names: dict[str, None] = {}
    for number, (type, keys) in enumerate(rows, start=1):
        if type != "OBJECT":
            raise ValueError("it must be a list of objects, one per run")
        if len(set(keys)) < len(keys):
            twice = next(key for key, n in Counter(keys).items() if n > 1)
            raise ValueError(f"key {twice!r} is twice in {'line' if suffix == '.jsonl' else 'row'} {number}")
        names |= dict.fromkeys(keys)
    return [*names]


def _check_text(path: Path) -> None:
    """Raises UnicodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            decoder.decode(part)
    decoder.decode(b"", final=True)


def _delimiter(suffix: str) -> str:
    return "\t" if suffix == ".tsv" else ","


def _json(suffix: str) -> str:
    format = "newline_delimited" if suffix == ".jsonl" else "array"
    return f"(FROM read_json_objects(?, format='{format}') LIMIT {MAX_ROWS + 1})"


@contextmanager
def _without_mark(path: Path) -> Generator[Path]:
    """The file, or a copy without its byte order mark."""
    with open(path, "rb") as file:
        if file.read(3) != codecs.BOM_UTF8:
            yield path
            return
        with tempfile.NamedTemporaryFile(suffix=path.suffix) as copy:
            copy.write(file.read())
            copy.flush()
            yield Path(copy.name)


def _read(connection: duckdb.DuckDBPyConnection, path: Path, columns: Collection[str], names: Sequence[str]) -> int:
    """Make the table `texts`; its number of rows."""
    suffix = path.suffix.lower()
    given: list[Any] = []
    if suffix in (".json", ".jsonl"):
        source = _json(suffix)
        values = [f"json ->> ${index + 2}" for index in range(len(columns))]
        source = source.replace("?", "$1")
        given = ['$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"' for name in columns]
    elif suffix == ".parquet":
        source, values = "read_parquet($1)", [f"CAST({quoted(name)} AS VARCHAR)" for name in columns]
    else:
        positions = ", ".join(f"'c{index}': 'VARCHAR'" for index in range(len(names)))
        source = f"read_csv($1, {_QUOTES.replace('?', repr(_delimiter(suffix)))}, columns={{{positions}}})"
        values = [f"c{names.index(name)}" for name in columns]
        source = source.replace("'\\t'", "E'\\t'")
    selected = ", ".join(f"{value} AS {quoted(name)}" for value, name in zip(values, columns, strict=True))
    with _without_mark(path) as file:
        rows = f"SELECT {selected or 'NULL AS nothing'} FROM {source} LIMIT {MAX_ROWS + 1}"
        connection.execute(
            f"CREATE TABLE texts AS SELECT row_number() OVER () AS row_number, * FROM ({rows})", [str(file), *given]
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
    checks = ", ".join(f"bool_and({not_missing(name)} IS NULL OR {number_of(name)} IS NOT NULL)" for name in columns)
    (is_number,) = table.connection.execute(f"SELECT {checks or 1} FROM texts").fetchall()
    numbers = [f"{number_of(name)} AS {quoted(name)}" for name in columns]
    mixed = [n if yes else quoted(name) for n, yes, name in zip(numbers, is_number, columns, strict=False)]
    for view, selected in (("numbers", numbers), ("mixed", mixed)):
        table.connection.execute(f"CREATE VIEW {view} AS SELECT {', '.join(['row_number', *selected])} FROM texts")
