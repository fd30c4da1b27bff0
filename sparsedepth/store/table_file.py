"""A third-party table of runs as text, and in a fenced DuckDB: CSV, TSV, JSON, JSON-lines or Parquet, within bounds.

    read_texts(path, ..)  columns as text (NULL: missing), read in a child process (`sparsedepth.outside`)
    open_table(texts)     with their row from 1 on, in the table `texts`

One normaliser for `import`, `judge`, `scaling` and the runs of trackers: blanks around names and values are stripped,
columns without a name are left out, and both are said; `by_value` is one text for 0, 0.0 and 00.

An expression of a map is evaluated over the table `numbers`, where every column is in double precision, NULL where it
is no number; a condition over the view `mixed`, where a column is what all its values are: true or false, numbers,
whole ones exactly beyond 2^53 (ids), else text."""

import codecs
import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from sparsedepth.files import NotRegularError, read_regular, refuse_empty, unreadable
from sparsedepth.outside import SECONDS, in_child
from sparsedepth.store.fences import FENCES, after, limited, lock, read_only, refuse_functions, stoppable, syntax_nodes
from sparsedepth.words.plain_text import counted, database_line, in_shell

MAX_BYTES = 200_000_000
MAX_ROWS = 50_000
"""A table with more rows is of something else than runs, such as steps of curves."""
MAX_COLUMNS = 20_000
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
_BLANKS = " \t\n\v\f\r\x85\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_BLANKS += "\u2028\u2029\u202f\u205f\u3000\ufeff"
"""Around a name or value they are no part of it."""
MAX_LENGTH = 500
"""Characters of an expression."""
_NOTHING = " "
"""The column of a table of which no column is read; no name is a blank."""
Choose = Callable[[Sequence[str]], Collection[str]]
"""From the names of all columns to those that are read."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A table as it was read."""

    source: str
    """as messages name it"""
    name: str
    sha256: str
    """of the bytes that were read"""
    names: Sequence[str]
    """of all columns"""
    columns: pa.Table
    """the chosen ones, as text"""
    notes: Sequence[str] = ()
    """what was done to names"""
    ids: Sequence[str] = ()
    """of the rows: what a tracker names them, or 'line 3' of a text, as an editor counts"""

    def placed(self, told: str) -> str:
        """A message with the id of each 'row 2' in it."""
        ids = {str(number): f" ({name})" for number, name in enumerate(self.ids, start=1)}
        return re.sub(r"\brow (\d+)", lambda row: row[0] + ids.get(row[1], ""), told)


def read_texts(path: Path, choose: Choose, seconds: float = SECONDS) -> Texts:
    """The columns of a table that `choose` takes. Raises ValueError, one line, also for what that raises."""
    if path.suffix.lower() not in SUFFIXES:
        folder = f"; of a results folder: sparsedepth effects {in_shell(path)}" if path.is_dir() else ""
        raise ValueError(f"{str(path)!r} is not a table; use one of {', '.join(SUFFIXES)}{folder}")
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist; name a table")
    refuse_empty(path)
    with _errors_of(path):
        content = read_regular(path, MAX_BYTES, path.parent)
    head, stream = in_child(lambda: _parts(path, content, choose), repr(str(path)), seconds)
    columns = pa.ipc.open_stream(stream).read_all()
    sha256 = hashlib.sha256(content).hexdigest()
    first = {".jsonl": 1, ".csv": 2, ".tsv": 2}.get(path.suffix.lower(), 0)
    # Not where lines are empty, or a value has several.
    is_row_a_line = first and content.rstrip().count(b"\n") == columns.num_rows + first - 2
    ids = [f"line {first + row}" for row in range(columns.num_rows)] if is_row_a_line else []
    return Texts(source=str(path), name=path.name, sha256=sha256, columns=columns, ids=ids, **json.loads(head))


def _parts(path: Path, content: bytes, choose: Choose) -> Iterator[bytes]:
    """In a process of its own: the names of a table's columns with notes, and the chosen ones as an Arrow stream."""
    suffix = path.suffix.lower()
    os.chdir(os.environ["TMPDIR"])
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        with _errors_of(path):
            if suffix != ".parquet":
                encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")
                content = content.decode(encoding).encode()
            # A name without a folder: no part of it is a pattern, or the value of a Hive partition.
            Path(copy := f"table{suffix}").write_bytes(content)
            raw = _names(connection, content, copy, suffix)
            places, notes = named(raw)
        columns = choose([*places])
        yield json.dumps({"names": [*places], "notes": notes}).encode()
        with _errors_of(path):
            if twice := [name for name, n in Counter(map(str.lower, columns)).items() if n > 1]:
                raise ValueError(f"the columns {twice[0]!r} differ in upper case only; rename one of them")
            stream = io.BytesIO()
            table = _read(connection, copy, suffix, raw, {name: places[name] for name in columns})
            with pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table)
            yield stream.getvalue()


def named(raw: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The places of the columns by their names without blanks, and what that changed. Raises ValueError for a name
    that is there twice."""
    if len(raw) > MAX_COLUMNS:
        raise ValueError(f"it has {len(raw):,} columns; at most {MAX_COLUMNS:,} are read; leave some out")
    names = [name.strip(_BLANKS) for name in raw]
    places = {name: place for place, name in enumerate(names) if name}
    nameless = names.count("")
    if not places:
        raise ValueError("there are no columns; name a table that has some")
    if len(names) == 1 and (mark := re.search("[;\t]", names[0])):
        raise ValueError(f"the separator seems to be {mark[0]!r}; save it with commas, and with points in numbers")
    if len(places) + nameless < len(names):
        twice = next(name for name, n in Counter(names).items() if name and n > 1)
        raise ValueError(f"the column {twice!r} is twice in its header; rename one of them")
    notes = [f"{counted(nameless, 'column')} without a name left out"] if nameless else []
    if blank := [name for name, whole in zip(names, raw, strict=True) if name and name != whole]:
        notes.append(f"blanks around {counted(len(blank), 'name')} left out, such as {blank[0]!r}")
    return places, notes


class Table:
    """An open table, without access to files."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, n_rows: int, notes: Sequence[str]) -> None:
        """`notes`: what was done to names and values."""
        self.connection, self.n_rows, self.notes = connection, n_rows, notes

    def rows(self, sql: str, view: str, where: str = "true") -> list[tuple[Any, ...]]:
        """The number of each row of a view, in order, and `sql` of it. Raises ValueError, one line."""
        return self._answer(f"SELECT {ROW}, {sql} FROM {view} WHERE {where} ORDER BY {ROW}")

    def no_numbers(self, name: str, is_result: bool) -> list[tuple[int, str]]:
        """Numbers of rows whose value in a column is no finite number, and the value. As a result of a run an infinite
        one is missing: the run diverged."""
        number = f"TRY_CAST({quoted(name)} AS DOUBLE)" if is_result else number_of(name)
        return self.rows(quoted(name), "texts", f"{not_missing(name)} IS NOT NULL AND {number} IS NULL")

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
            with limited(SECONDS), read_only(self.connection):
                return stoppable(self.connection, SECONDS, lambda: self.connection.execute(sql).fetchall())
        except duckdb.Error as error:
            raise ValueError(database_line(error)[:300]) from None


def quoted(name: str) -> str:
    """A column as an identifier."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def open_table(texts: Texts) -> Generator[Table]:
    """The table without access to files; blanks around its values are left out. Raises ValueError, one line."""
    columns = [name for name in texts.columns.column_names if name != _NOTHING]
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        with _errors_of(texts.source), after(SECONDS, connection.interrupt):
            connection.register("given", texts.columns)
            values = [f"nullif(trim({quoted(name)}, '{_BLANKS}'), '') AS {quoted(name)}" for name in columns]
            counts = [f"count(*) FILTER (trim({quoted(name)}, '{_BLANKS}') != {quoted(name)})" for name in columns]
            n_rows, *blank = connection.execute(f"SELECT {', '.join(['count(*)', *counts])} FROM given").fetchone() or (
                0,
            )
            selected = ", ".join([f"row_number() OVER () AS {ROW}", *values])
            connection.execute(f"CREATE TABLE texts AS SELECT {selected} FROM given")
            connection.unregister("given")
            lock(connection)
            notes = [
                f"blanks around {counted(n, 'value')} of {name!r} left out"
                for name, n in zip(columns, blank, strict=True)
                if n
            ]
            table = Table(connection, n_rows, [*texts.notes, *notes])
            _make_views(table, columns)
        yield table


@contextmanager
def _errors_of(source: Path | str) -> Generator[None]:
    try:
        yield
    except (UnicodeError, NotRegularError) as error:
        raise unreadable(Path(source), error) from None
    except duckdb.OutOfMemoryException:  # DuckDB proposes settings, which the user cannot change
        limit = FENCES["memory_limit"]
        raise ValueError(
            f"{str(source)!r} cannot be read: its mapped columns need more than {limit} of memory"
        ) from None
    except (ValueError, OSError, duckdb.Error) as error:
        raise ValueError(f"{str(source)!r} cannot be read: {database_line(error)[:300]}") from None


def _names(connection: duckdb.DuckDBPyConnection, content: bytes, file: str, suffix: str) -> list[str]:
    """The names in a table's header, or the keys of its objects, in order."""
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(io.BytesIO(content))
        _check_rows(metadata.num_rows)  # before reading: the rows may be far larger than the file
        return metadata.schema.to_arrow_schema().names
    if suffix in _DELIMITERS:
        return next(csv.reader(io.StringIO(content.decode(), newline=""), delimiter=_DELIMITERS[suffix]), [])
    is_list, text = suffix == ".json", content.strip()
    needed = (
        "a list of objects, one per run; objects on lines of their own are a .jsonl"
        if is_list
        else "an object on each line, one per run"
    )
    if is_list and not (text.startswith(b"[") and text.endswith(b"]")):  # DuckDB reads a list that is cut off
        raise ValueError(f"it must be {needed}")
    connection.execute(f"SELECT json_type(json), json_keys(json) FROM {_json(suffix)}", [file])
    n_rows, names = 0, dict[str, None]()
    while (row := connection.fetchone()) and len(names) <= MAX_COLUMNS:
        n_rows += 1
        type, keys = row
        if type != "OBJECT":
            raise ValueError(f"it must be {needed}")
        if twice := [key for key, n in Counter(keys).items() if n > 1]:
            line = "line" if suffix == ".jsonl" else "row"
            raise ValueError(f"key {twice[0]!r} is twice in {line} {n_rows}; rename one")
        names |= dict.fromkeys(keys)
    _check_rows(n_rows)
    return [*names]


def _json(suffix: str) -> str:
    format = "newline_delimited" if suffix == ".jsonl" else "array"
    return f"(FROM read_json_objects($1, format='{format}') LIMIT {MAX_ROWS + 1})"


def _read(
    connection: duckdb.DuckDBPyConnection, file: str, suffix: str, raw: Sequence[str], places: Mapping[str, int]
) -> pa.Table:
    """The columns at these places of the header, as text."""
    given, positions = list[str](), [f"c{place}" for place in range(len(raw))]  # names may differ in upper case only
    values = [positions[place] for place in places.values()]
    if suffix in (".json", ".jsonl"):
        source, values = _json(suffix), [f"json ->> ${number + 2}" for number in range(len(places))]
        given = ['$."' + raw[place].replace("\\", "\\\\").replace('"', '\\"') + '"' for place in places.values()]
    elif suffix == ".parquet":
        source = f"read_parquet($1, hive_partitioning=false) AS given({', '.join(positions)})"
        values = [f"CAST({value} AS VARCHAR)" for value in values]
    else:
        types = ", ".join(f"'{position}': 'VARCHAR'" for position in positions)
        source = f"read_csv($1, delim=E{_DELIMITERS[suffix]!r}, {_QUOTES}, columns={{{types}}})"
    selected = ", ".join(f"{value} AS {quoted(name)}" for value, name in zip(values, places, strict=True))
    rows = f"SELECT {selected or f'NULL::VARCHAR AS {quoted(_NOTHING)}'} FROM {source} LIMIT {MAX_ROWS + 1}"
    connection.execute(f"CREATE TABLE texts AS {rows}", [file, *given])
    table = connection.table("texts").to_arrow_table()
    _check_rows(table.num_rows)
    return table


def _check_rows(n: int) -> None:
    if n > MAX_ROWS:
        raise ValueError(f"it has more than {MAX_ROWS:,} rows, the limit; a row must be a run, not a step of one")


def by_value(text: str) -> str:
    """One text for a value however its file writes it: '1' for 1.0 and 01, '1000' for 1E+03, 'true' for True."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]\d{1,2})?", text):
        number = f"{Decimal(text):f}"
        return number.rstrip("0").rstrip(".") if "." in number else number
    return text.lower() if text.lower() in ("true", "false") else text


def cluster_of(values: Sequence[str]) -> str:
    """The name of a cluster, which no other values give: beside others a value with a blank is quoted."""
    names = [*map(by_value, values)]
    return " ".join(json.dumps(name) if " " in name and len(names) > 1 else name for name in names)


def number_of(name: str) -> str:
    """SQL of a column of `texts` in double precision; NULL where it is missing, and where it is no finite number."""
    number = f"TRY_CAST({not_missing(name)} AS DOUBLE)"
    return f"if(isfinite({number}), {number}, NULL)"


def not_missing(name: str) -> str:
    """SQL of a column of `texts`, NULL where it is missing as a number or truth value."""
    missing = ", ".join(f"'{text}'" for text in MISSING)
    return f"if({quoted(name)} IN ({missing}), NULL, {quoted(name)})"


def _make_views(table: Table, columns: Collection[str]) -> None:
    """Two views of a table of texts: all columns as numbers, and each by the narrowest type that holds all its
    values."""
    mixed = []
    for name in columns:
        text, number = not_missing(name), number_of(name)
        whole = f"bool_and(regexp_full_match({text}, '-?[0-9]+'))"
        types = {  # the first whose condition holds for all values
            f"CAST({text} AS HUGEINT)": f"{whole} AND max(abs({number})) BETWEEN 2**53 AND 2**63",
            number: f"bool_and({text} IS NULL OR {number} IS NOT NULL)",
            f"CAST({text} AS BOOLEAN)": f"bool_and(lower({text}) IN ('true', 'false'))",
        }
        (holds,) = table.connection.execute(f"SELECT {', '.join(types.values())} FROM texts").fetchall()
        mixed.append(f"{next(compress(types, holds), quoted(name))} AS {quoted(name)}")
    numbers = [f"{number_of(name)} AS {quoted(name)}" for name in columns]
    for view, selected in (("TABLE numbers", numbers), ("VIEW mixed", mixed)):  # 1 s per query as a view of 70 columns
        table.connection.execute(f"CREATE {view} AS SELECT {', '.join([ROW, *selected])} FROM texts")


class Expression(NamedTuple):
    sql: str
    columns: frozenset[str]
    """All columns in it."""
    column: str | None
    """The column, if the expression is only its name."""


def condition(text: str, columns: Collection[str]) -> Expression:
    """Of a row. Raises ValueError, one line."""
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        try:
            return parse(connection, text, columns, is_condition=True)
        except ValueError as error:
            raise ValueError(f"{error}; the table has {', '.join([*columns][:20])}") from None


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
    if any(node.get("class") in ("SUBQUERY", "STAR", "WINDOW") for node in nodes):
        raise ValueError(f"{text!r} has a query, a window or * in it; use columns, operators and functions of one row")
    try:
        refuse_functions(nodes)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; use columns, operators and functions of one row") from None
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
