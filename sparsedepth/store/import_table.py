"""Import a table of third-party training runs as a pack, with one record per row (`store.table_map`).

All errors of a map, or of a table's values, are reported at once. What the table does not state is unknown (NULL, and
listed in `unknown_fields`): no default is filled in. Two rows that are equal in all mapped fields are an error.
"""

import csv
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.mistakes import Mistakes, field_mistakes
from sparsedepth.config.plain_text import refuse_empty, unreadable
from sparsedepth.config.run import RunConfig
from sparsedepth.files import atomic_folder, json_text, sha256, write_bytes
from sparsedepth.quantities import IN_RUNS
from sparsedepth.store.checksums import Files, checksum_of, new_marker
from sparsedepth.store.formula import Formula
from sparsedepth.store.imported_run import ImportedRun
from sparsedepth.store.packing import contents_of, write_pack
from sparsedepth.store.run_record import IMPORTED, RUNS
from sparsedepth.store.table_map import (
    FACTS,
    MAP,
    OUTCOMES,
    READ_TYPES,
    SETTABLE,
    TARGETS,
    UNITS,
    Entry,
    Scalar,
    TableMap,
    as_type,
    formulas,
)
from sparsedepth.store.tables import read_rows, stored_run

if TYPE_CHECKING:
    import pandas as pd

MAX_BYTES = 200_000_000
MAX_ROWS = 50_000
"""A table with more rows is of something else than runs, such as steps of curves."""
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
MAX_MISTAKES = 12
"""Reported in one error."""
MISSING = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
"""Texts that stand for a missing number; in a column of text they are text, and only an empty field is missing."""
_KINDS = {"BIGINT": "a whole number", "DOUBLE": "a number", "BOOLEAN": "true or false", "VARCHAR": "text"}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Counts of an import."""

    rows: int
    """Of the table."""
    runs: int
    excluded: int
    """Rows that do not meet `where`."""
    incomplete: int
    """Rows left out because a value is missing."""
    clusters: int
    unknown: tuple[str, ...]
    """Fields that no row states."""


def import_table(table: Path, map_path: Path, out: Path) -> Imported:
    """Write the pack `out`, a new folder, atomically. Raises ValueError, one line."""
    table_map = build(TableMap, read_yaml(map_path), str(map_path))
    frame = read_table(table)
    try:
        parsed, where = formulas(table_map, frame.columns)
    except Mistakes as mistakes:
        raise ValueError(f"{map_path}: {mistakes}") from None
    n_rows = len(frame)
    try:
        if where is not None:
            frame = frame[np.broadcast_to(where.values(*_columns_of(frame, "where")), n_rows)]
        if not len(frame):
            raise Mistakes([f"no row meets where: {table_map.where}" if where else "there are no rows"])
        n_included = len(frame)
        frame, values = _values(frame, table_map, parsed)
        rows = _rows_of(frame, values, table_map)
    except Mistakes as error:
        mistakes, n_more = error.mistakes[:MAX_MISTAKES], len(error.mistakes) - MAX_MISTAKES
        mistakes += [f"and {n_more} more"] if n_more > 0 else []
        raise ValueError(f"{table}: {'; '.join(mistakes)}") from None
    origin = {"table": table.name, "table_sha256": sha256(table)}
    _write(out, rows, origin, map_path.read_bytes())
    runs = [run for run, *_ in rows]
    return Imported(
        rows=n_rows,
        runs=len(runs),
        excluded=n_rows - n_included,
        incomplete=n_included - len(runs),
        clusters=len({run.cluster or run.run_id for run in runs}),
        unknown=tuple(name for name in runs[0].unknown if all(name in run.unknown for run in runs)),
    )


# Values


def _columns_of(frame: "pd.DataFrame", place: str) -> tuple[Callable[[str], np.ndarray], Callable[[str], np.ndarray]]:
    """Functions that return a column's values as numbers (missing: NaN) and as texts (missing: ''), for the formula at
    this place of the map. Raise Mistakes; true is no number here, though pandas reads it as 1."""
    import pandas as pd

    def numbers(name: str) -> np.ndarray:
        column = _without_missing(frame[name])
        converted = pd.to_numeric(column, errors="coerce").astype(float)
        is_bool = column.map(lambda value: isinstance(value, bool))
        if (wrong := column.notna() & (is_bool | ~np.isfinite(converted))).any():
            raise Mistakes([f"{place}: column {name!r} is {_first(column, wrong)}: a number is needed"])
        return converted.to_numpy()

    def texts(name: str) -> np.ndarray:
        return frame[name].fillna("").astype(str).to_numpy()

    return numbers, texts


def _without_missing(column: "pd.Series") -> "pd.Series":
    """A column of numbers or truth values, NaN where one is missing."""
    return column.astype(object).mask(column.astype(str).isin(MISSING))


def _first(column: "pd.Series", wrong: "pd.Series | np.ndarray") -> str:
    """'"fast" in row 7 (and in 3 more rows)'."""
    rows = column[wrong]
    more = f" (and in {len(rows) - 1} more rows)" if len(rows) > 1 else ""
    return f"{json.dumps(rows.iloc[0], default=str)[:60]} in row {int(rows.index[0]) + 1}{more}"


def _values(
    frame: "pd.DataFrame", table_map: TableMap, parsed: Mapping[str, Formula]
) -> tuple["pd.DataFrame", dict[str, "pd.Series"]]:
    """The imported rows, and the values of each field in them; None where an optional one is missing."""
    mistakes: list[str] = []
    columns: dict[str, pd.Series] = {}
    for name, entry in table_map.entries():
        try:
            columns[name] = _field(frame, name, entry, parsed[name])
        except Mistakes as error:
            mistakes += error.mistakes
    required = [name for name, entry in table_map.entries() if not entry.optional and name in columns]
    if table_map.missing == "leave_out":
        complete = np.logical_and.reduce([columns[name].notna() for name in required])
        frame, columns = frame[complete], {name: values[complete] for name, values in columns.items()}
        mistakes += [] if len(frame) else ["no row has a value of every field"]
    else:
        for name in required:
            if (absent := columns[name].isna()).any():
                rows = f"row {int(columns[name].index[absent][0]) + 1}, and {int(absent.sum())} such rows"
                mistakes.append(f"{name} has no value in {rows}; state missing: leave_out, or optional: true")
    for name, value in table_map.constants.items():
        type = TARGETS[name]
        typed = as_type(value, type)
        wrong_type = [f"constants.{name} is {json.dumps(value)}: {_KINDS[type]} is needed"]
        mistakes += _mistakes_of(name, typed) if typed is not None else wrong_type
    if mistakes:
        raise Mistakes(mistakes)
    return frame, columns


def _field(frame: "pd.DataFrame", name: str, entry: Entry, formula: Formula) -> "pd.Series":
    """The values of a field, of its type and in its range. Raises Mistakes."""
    import pandas as pd

    type = TARGETS[name]
    if entry.values is not None or type in READ_TYPES:
        column = frame[formula.column or ""].map(lambda value: value if value is None or value != value else str(value))
        raw = column if type == "VARCHAR" else _without_missing(column)
        if entry.values is not None:
            wrong = column.notna() & ~column.isin(list(entry.values))
            raw = column.map(entry.values).astype(object)  # numpy's whole numbers are no int
            if wrong.any():
                mistake = f"{formula.column!r} is {_first(column, wrong)}, which `values` does not list"
                raise Mistakes([f"fields.{name}: {mistake}"])
    else:
        numbers = formula.values(*_columns_of(frame, f"fields.{name}")) * UNITS.get(entry.unit or "", 1.0)
        raw = pd.Series(np.broadcast_to(numbers, len(frame)).astype(float), index=frame.index)
        if (wrong := np.isinf(raw)).any() or (
            formula.column is None and (wrong := _undefined(frame, formula, raw)).any()
        ):
            raise Mistakes([f"fields.{name}: {entry.of!r} is {_first(raw, wrong)}: no finite number"])
    typed_values = {value: as_type(value, type) for value in raw.dropna().unique()}
    if mistyped := [value for value, typed in typed_values.items() if typed is None]:
        raise Mistakes([f"fields.{name} is {_first(raw, raw.isin(mistyped))}: {_KINDS[type]} is needed"])
    for value, typed in typed_values.items():
        if mistakes := _mistakes_of(name, typed):
            raise Mistakes([f"{mistakes[0]}: {_first(raw, raw == value)}"])
    return pd.Series([None if value != value else typed_values[value] for value in raw], index=raw.index, dtype=object)


def _undefined(frame: "pd.DataFrame", formula: Formula, raw: "pd.Series") -> "pd.Series":
    """The rows in which arithmetic has no result although all its columns have values."""
    return raw.isna() & frame[sorted(formula.columns)].apply(_without_missing).notna().all(axis=1)


def _mistakes_of(name: str, value: Scalar | None) -> list[str]:
    if name in SETTABLE:
        return field_mistakes(RunConfig, {name: value})
    if name == "outcome" and value not in ("ok", "diverged"):
        return [f"outcome={value!r} is neither ok nor diverged"]
    if name in IN_RUNS and isinstance(value, float):
        least, most = IN_RUNS[name].range
        if not least <= value <= most:
            return [f"{name}={value:g} must be from {least:g} to {most:g}; state its unit, or multiply in `of`"]
    return []


# Records

_Row = tuple[ImportedRun, int, dict[str, Any]]
"""A run, the number of its row in the table, and its known values by field."""


def _rows_of(frame: "pd.DataFrame", values: Mapping[str, "pd.Series"], table_map: TableMap) -> list[_Row]:
    """Every row as a run. Raises Mistakes where two rows are the same run."""
    constants = {name: as_type(value, TARGETS[name]) for name, value in table_map.constants.items()}
    rows, first, mistakes = [], dict[str, int](), []
    for index, cluster, *row in zip(frame.index, clusters_of(frame, table_map.clusters), *values.values(), strict=True):
        number = int(index) + 1
        known = constants | {name: value for name, value in zip(values, row, strict=True) if value is not None}
        config = {name: value for name, value in known.items() if name in SETTABLE}
        run = ImportedRun.model_construct(origin=table_map.source, cluster=cluster, config=config)
        if (other := first.setdefault(run.run_id, number)) != number:
            mistakes.append(f"rows {other} and {number} are equal in all mapped fields")
        rows.append((run, number, known))
    if mistakes:
        fix = "map a column in which they differ (seed, train_tokens, lr, cluster), or select one with where"
        raise Mistakes([*mistakes[: MAX_MISTAKES - 1], f"{len(mistakes)} such rows: {fix}"])
    return rows


def clusters_of(frame: "pd.DataFrame", columns: Sequence[str]) -> list[str | None]:
    """The cluster of each row, named by its values in these columns; None, a cluster of its own, if one is missing."""
    is_known = frame[columns].notna().all(axis=1) & bool(columns)
    rows = frame[columns].astype(object).itertuples(index=False, name=None)
    return [" ".join(map(str, row)) if known else None for row, known in zip(rows, is_known, strict=True)]


def _write(out: Path, rows: Sequence[_Row], origin: Mapping[str, str], map_text: bytes) -> None:
    contents: list[dict[str, Any]] = []
    stored = []
    for run, number, known in rows:
        place = f"{RUNS}/{run.run_id}"
        files = _record(run, known, {**origin, "row": number, "origin": run.origin}, Path(place))
        contents += contents_of(place, files)
        stored.append(stored_run(files, place))
    with atomic_folder(out) as aside:
        write_bytes(aside / MAP, map_text)
        write_pack(aside, read_rows(stored), contents, len(rows))


def _record(run: ImportedRun, known: Mapping[str, Any], manifest: Mapping[str, Any], folder: Path) -> Files:
    """The files of a record."""
    facts = {name: known[name] for name in FACTS if name in known}
    summary = {"outcome": "ok", **{name: known[name] for name in OUTCOMES if name in known}}
    tokens, params = summary.setdefault("tokens_trained", run.config.get("train_tokens")), summary.get("params_total")
    if tokens and params:
        summary.setdefault("tokens_per_param", tokens / params)
    parts = {
        IMPORTED: run.model_dump(mode="json"),
        "manifest.json": {**manifest, **facts},
        "summary.json": {name: summary.get(name) for name in OUTCOMES},
    }
    contents = {name: json_text(part).encode() for name, part in parts.items()}
    marker = new_marker(run.run_id, {name: checksum_of(content) for name, content in contents.items()})
    return Files(folder=folder, marker=marker, read=contents.__getitem__)


# Reading the table: CSV, TSV, JSON, JSON-lines or Parquet, bounded in bytes and rows


def read_table(path: Path) -> "pd.DataFrame":
    """The rows of a table, numbered from 0; all values of a CSV are text. Raises ValueError, one line."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} is not a table; use one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; name a table")
    refuse_empty(path)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{str(path)!r} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
    try:
        read = {".json": _json, ".jsonl": _json, ".parquet": _parquet}.get(path.suffix, _text)
        frame = read(path)
        _check_rows(len(frame))
    except UnicodeError as error:
        raise unreadable(path, error) from None
    except (ValueError, OSError, RecursionError) as error:  # ValueError: pandas', Arrow's and JSON's, too
        raise ValueError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())[:300]}") from None
    return frame.reset_index(drop=True)


def _check_rows(n: int) -> None:
    if n > MAX_ROWS:
        raise ValueError(f"it has more than {MAX_ROWS:,} rows, the limit; a row must be a run, not a step of one")


def _text(path: Path) -> "pd.DataFrame":
    import pandas as pd

    separator = "\t" if path.suffix == ".tsv" else ","
    with open(path, encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file, delimiter=separator), [])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the column {twice[0]!r} is twice in its header")
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        try:
            return pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, na_values=[""],
                               nrows=MAX_ROWS + 1, encoding="utf-8-sig", index_col=False)  # fmt: skip
        except pd.errors.ParserWarning:
            raise ValueError(f"row 1 has more values than the header has names ({len(names)})") from None


def _json(path: Path) -> "pd.DataFrame":
    import pandas as pd

    text = path.read_text(encoding="utf-8")
    is_lines = path.suffix == ".jsonl"
    lines = enumerate(text.split("\n"), 1)
    rows = [_parse_line(line, n) for n, line in lines if line.strip()] if is_lines else _parse_json(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it must be a list of objects, one per run")
    return pd.DataFrame(rows)


def _parse_json(text: str) -> Any:
    """JSON, with integers beyond double precision's range as infinity, since pandas fails on them."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))


def _parse_line(line: str, number: int) -> Any:
    try:
        return _parse_json(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from None


def _parquet(path: Path) -> "pd.DataFrame":
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    _check_rows(file.metadata.num_rows)  # before reading: the rows may be far larger than the file
    return file.read().to_pandas()
