"""Import a table of third-party training runs as a pack, with one record per row, by a map (`import.yaml`).

The map says which columns are which fields of a run. A field is a RunConfig field, a measured quantity of `runs`, or a
fact (device, seconds, training_seconds). Its values are those of a column, of arithmetic over columns in DuckDB's SQL
and double precision (odd names in backticks), of a column in another unit or with other texts, or a constant; `where`
is a condition over columns. See sparsedepth/examples/maps/example.yaml.

All errors of a map, or of a table's values, are reported at once. What the table does not state is unknown (NULL, and
listed in `unknown_fields`): no default is filled in. Two rows that are equal in all mapped fields are an error."""

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import duckdb
from pydantic import Field

from sparsedepth import quantities
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.mistakes import field_mistakes
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Mistakes, Section, check
from sparsedepth.files import atomic_folder, json_text, read_regular, write_bytes
from sparsedepth.store.checksums import Files, checksum_of, new_marker
from sparsedepth.store.fences import FENCES
from sparsedepth.store.packs import contents_of, write_pack
from sparsedepth.store.run_record import IMPORTED, RUNS
from sparsedepth.store.schema import RUN_COLUMNS
from sparsedepth.store.stored_rows import read_rows, stored_run
from sparsedepth.store.subject import ImportedRun
from sparsedepth.store.table_file import (
    Choose,
    Expression,
    Table,
    Texts,
    by_value,
    not_missing,
    number_of,
    open_table,
    parse,
    quoted,
    read_texts,
)
from sparsedepth.words.mistakes import hint

MAP = "import.yaml"
"""The map, in the folder that it filled."""
UNITS: Mapping[str, float] = {
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "percent": 0.01,
    "bit": math.log(2),
    "minute": 60.0,
    "hour": 3600.0,
}
"""Factor to our units: tokens, parameters and FLOPs, nat, shares, seconds."""
FACTS = ("device", "seconds", "training_seconds")
SETTABLE = fields_where(RunConfig, lambda role: role.kind not in ("record", "measure"))
OUTCOMES = tuple(column.name for column in quantities.RUNS)
TARGETS = {column.name: column.type for column in RUN_COLUMNS if column.name in {*SETTABLE, *OUTCOMES, *FACTS}}
"""Fields, measured quantities and facts, each with its column type."""
READ_TYPES = ("VARCHAR", "BOOLEAN")
"""Types of values that are read from a column, never computed."""

Scalar = bool | int | float | str
WHERE = "where"
MAX_MISTAKES = 12
"""Reported in one error."""
_NUMERIC = re.compile(r"DOUBLE|FLOAT|DECIMAL.*|U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?")
_KINDS = {"BIGINT": "a whole number", "DOUBLE": "a number", "BOOLEAN": "true or false", "VARCHAR": "text"}


# The map


class Entry(Section):
    """Where a field's values come from."""

    of: Annotated[str, Field(min_length=1, description="a column, or arithmetic over columns")]
    unit: Annotated[str | None, Field(description=f"the column's: {', '.join(UNITS)}")] = None
    values: Annotated[
        dict[str, Scalar | None] | None, Field(description="the column's texts -> our values; null: missing")
    ] = None
    optional: Annotated[bool, Field(description="rows may lack a value")] = False

    @check
    def _check_unit(self) -> None:
        if self.unit is not None and self.unit not in UNITS:
            raise ValueError(f"unit={self.unit!r} is not known; choose one of {', '.join(UNITS)}, or multiply in `of`")
        if self.unit is not None and self.values is not None:
            raise ValueError(f"unit={self.unit!r} and values do not go together; the values are ours already")


class TableMap(Section):
    source: Annotated[str, Field(min_length=1, max_length=200, description="whose runs these are, and where they lie")]
    where: Annotated[str | None, Field(description="rows to take, as a condition over columns")] = None
    fields: Annotated[dict[str, str | Entry], Field(min_length=1, description="field -> column, arithmetic or entry")]
    constants: Annotated[dict[str, Scalar], Field(description="field -> its value in every row")] = {}
    cluster: Annotated[str | list[str] | None, Field(description="columns that name what rows share")] = None
    tuned: Annotated[list[str], Field(description="fields of which each configuration takes its best value")] = []
    objective: Annotated[str, Field(description="what tuning is judged by")] = "val_loss"
    missing: Annotated[Literal["refuse", "leave_out"], Field(description="what becomes of a row without a value")] = (
        "refuse"
    )

    @check
    def _check_targets(self) -> None:
        """Raises Mistakes, all at once, for names that are no field or quantity, and for a map that cannot be
        compared."""
        mistakes = []
        for name in (*self.fields, *self.constants):
            if name not in TARGETS:
                fix = hint(name, TARGETS) or "see `sparsedepth schema`"
                mistakes.append(f"fields.{name} is no field of a run and no measured quantity; {fix}")
        mistakes += [f"{name} is in fields and in constants" for name in self.fields if name in self.constants]
        stated = {*self.fields, *self.constants}
        if "n_layers" not in stated:
            mistakes.append("n_layers is not mapped: without a depth there is nothing to compare")
        if not any(name in OUTCOMES and TARGETS[name] == "DOUBLE" for name in stated):
            mistakes.append("no measured quantity is mapped; map the loss: val_loss")
        mistakes += [f"tuned: {name} is not among the fields" for name in self.tuned if name not in self.fields]
        mistakes += [f"tuned: {name} is no choice of a run" for name in self.tuned if name not in SETTABLE]
        if self.tuned and self.objective not in stated:
            mistakes.append(f"tuned needs its objective, {self.objective}, among the fields")
        if self.tuned:
            quantities.rankable(self.objective)
        if mistakes:
            raise Mistakes(mistakes)

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: Entry(of=entry) if isinstance(entry, str) else entry for name, entry in self.fields.items()}

    @property
    def clusters(self) -> list[str]:
        return [self.cluster] if isinstance(self.cluster, str) else self.cluster or []


def expressions(table_map: TableMap, columns: Collection[str]) -> dict[str, Expression]:
    """The expression of each field, and of WHERE. Raises Mistakes with all errors."""
    parsed: dict[str, Expression] = {}
    mistakes: list[str] = []
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        for name, entry in table_map.entries.items():
            try:
                parsed[name] = parse(connection, entry.of, columns)
                if (entry.values is not None or TARGETS[name] in READ_TYPES) and parsed[name].column is None:
                    kind = "true or false" if TARGETS[name] == "BOOLEAN" else "text"
                    raise ValueError(f"{kind} must be a column, and {entry.of!r} is arithmetic")
            except ValueError as error:
                mistakes.append(f"fields.{name}: {error}")
        try:
            if table_map.where is not None:
                parsed[WHERE] = parse(connection, table_map.where, columns, is_condition=True)
        except ValueError as error:
            mistakes.append(f"where: {error}")
    if unknown := [name for name in table_map.clusters if name not in columns]:
        mistakes.append(f"cluster: no column {', '.join(map(repr, unknown))}")
    if any(": no column " in mistake for mistake in mistakes):
        mistakes.append(f"the table has the columns {', '.join(map(str, list(columns)[:20]))}")
    if mistakes:
        raise Mistakes(mistakes)
    return parsed


class Imported(NamedTuple):
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
    notes: tuple[str, ...]
    """What was done to names and values of the table."""


def import_table(source: Any, map_path: Path, out: Path, read: Callable[[Any, Choose], Texts] = read_texts) -> Imported:
    """Write the pack `out`, a new folder, atomically. Raises ValueError, one line."""
    table_map = build(TableMap, read_yaml(map_path), str(map_path))

    def parsed(names: Sequence[str]) -> dict[str, Expression]:
        try:
            return expressions(table_map, names)
        except Mistakes as mistakes:
            raise ValueError(f"{map_path}: {mistakes}") from None

    def used(names: Sequence[str]) -> Collection[str]:
        found = {*table_map.clusters}.union(*(expression.columns for expression in parsed(names).values()))
        return [name for name in names if name in found]

    texts = read(source, used)
    with open_table(texts) as opened:
        try:
            numbers, rows = _runs_in(opened, table_map, parsed(texts.names))
        except Mistakes as error:
            raise _with_source(texts, error) from None
    _write(out, rows, {"table": texts.name, "table_sha256": texts.sha256}, read_regular(map_path))
    runs = [run for run, *_ in rows]
    return Imported(
        rows=opened.n_rows,
        runs=len(runs),
        excluded=opened.n_rows - len(numbers),
        incomplete=len(numbers) - len(runs),
        clusters=len({run.cluster or run.run_id for run in runs}),
        unknown=tuple(name for name in runs[0].unknown if all(name in run.unknown for run in runs)),
        notes=tuple(opened.notes),
    )


def _runs_in(table: Table, table_map: TableMap, parsed: Mapping[str, Expression]) -> tuple[list[int], list["_Row"]]:
    """The numbers of the rows that meet `where`, and their runs. Raises Mistakes."""
    if where := parsed.get(WHERE):
        try:
            table.keep(where.sql)
        except ValueError as error:
            raise Mistakes([f"where: {error}"]) from None
    numbers = [number for number, _ in table.rows("1", "texts")]
    if not numbers:
        raise Mistakes([f"no row meets where: {table_map.where}; change it" if where else "there are no rows"])
    kept, values = _values(table, numbers, table_map, parsed)
    cluster_of = table.rows(", ".join(map(quoted, table_map.clusters)) or "NULL", "texts")
    clusters = {number: None if None in names else " ".join(map(by_value, names)) for number, *names in cluster_of}
    return numbers, _rows_of(kept, values, clusters, table_map.source)


def _with_source(texts: Texts, error: Mistakes) -> ValueError:
    """The first mistakes, with the tracker's ids of the rows."""
    n_more = len(error.mistakes) - MAX_MISTAKES
    told = "; ".join([*error.mistakes[:MAX_MISTAKES], *[f"and {n_more} more"] * (n_more > 0)])
    if texts.ids:
        told = re.sub(r"\brow (\d+)", lambda row: f"{row[0]} ({texts.ids[int(row[1]) - 1]})", told)
    return ValueError(f"{texts.source}: {told}")


_Values = dict[int, Any]
"""By the number of the row; None where one is missing."""


def _wrong(values: _Values, is_wrong: Callable[[Any], bool]) -> str:
    """'"fast" in row 7 (and in 3 more rows)', of the values that are; '' where none is."""
    wrong = [number for number, value in values.items() if value is not None and is_wrong(value)]
    more = f" (and in {len(wrong) - 1} more rows)" if len(wrong) > 1 else ""
    return f"{json.dumps(values[wrong[0]], default=str)[:60]} in row {wrong[0]}{more}" if wrong else ""


def _values(
    table: Table, numbers: Sequence[int], table_map: TableMap, parsed: Mapping[str, Expression]
) -> tuple[list[int], dict[str, _Values]]:
    """The numbers of the imported rows, and the values of each field in them."""
    mistakes: list[str] = []
    fields: dict[str, _Values] = {}
    for name, entry in table_map.entries.items():
        try:
            fields[name] = _field(table, name, entry, parsed[name])
        except ValueError as error:
            mistakes.append(f"fields.{name}: {error}")
    required = [name for name, entry in table_map.entries.items() if not entry.optional and name in fields]
    kept = list(numbers)
    if table_map.missing == "leave_out":
        kept = [number for number in numbers if all(fields[name][number] is not None for name in required)]
        mistakes += [] if kept else ["no row has a value of every field"]
    else:
        for name in required:
            if absent := [number for number in numbers if fields[name][number] is None]:
                rows = f"row {absent[0]}, and {len(absent)} such rows"
                mistakes.append(f"{name} has no value in {rows}; state missing: leave_out, or optional: true")
    constants: dict[str, _Values] = {}
    for name, value in table_map.constants.items():
        typed = as_type(value, TARGETS[name])
        wrong_type = [f"constants.{name} is {json.dumps(value)}: {_KINDS[TARGETS[name]]} is needed"]
        mistakes += _mistakes_of(name, typed) if typed is not None else wrong_type
        constants[name] = dict.fromkeys(numbers, typed)
    if mistakes:
        raise Mistakes(mistakes)
    return kept, constants | fields


def _field(table: Table, name: str, entry: Entry, expression: Expression) -> _Values:
    """The values of a field, of its type and in its range. Raises ValueError."""
    type = TARGETS[name]
    if entry.values is not None or type in READ_TYPES:
        raw = _read(table, name, entry, expression)
    else:
        raw = _computed(table, entry, expression)
        if wrong := _wrong(raw, lambda value: not math.isfinite(value)):
            raise ValueError(f"{entry.of!r} is {wrong}: no finite number; change `of`")
    typed = {value: as_type(value, type) for value in dict.fromkeys(raw.values()) if value is not None}
    if wrong := _wrong(raw, lambda value: typed[value] is None):
        raise ValueError(f"{name} is {wrong}: {_KINDS[type]} is needed; change `of`")
    for value, typed_value in typed.items():
        if mistakes := _mistakes_of(name, typed_value):
            raise ValueError(f"{mistakes[0]}: {_wrong(raw, partial(operator.eq, value))}")
    return {number: None if value is None else typed[value] for number, value in raw.items()}


def _read(table: Table, name: str, entry: Entry, expression: Expression) -> _Values:
    """The texts of a column, or our values for them."""
    assert expression.column is not None
    is_text = TARGETS[name] == "VARCHAR" or entry.values is not None
    texts = dict(table.rows(quoted(expression.column) if is_text else not_missing(expression.column), "texts"))
    if entry.values is None:
        return texts
    listed = {by_value(text): value for text, value in entry.values.items()} | entry.values
    found = {text: text if text in listed else by_value(text) for text in texts.values() if text is not None}
    if wrong := _wrong(texts, lambda text: found[text] not in listed):
        raise ValueError(f"{expression.column!r} is {wrong}, which `values` does not list; list it there")
    return {number: None if text is None else listed[found[text]] for number, text in texts.items()}


def _computed(table: Table, entry: Entry, expression: Expression) -> _Values:
    """The numbers that an expression has; NULL where one of its columns is missing. Raises ValueError."""
    for name in sorted(expression.columns):
        is_other = f"{not_missing(name)} IS NOT NULL AND {number_of(name)} IS NULL"
        if wrong := _wrong(dict(table.rows(quoted(name), "texts", is_other)), lambda _: True):
            raise ValueError(f"column {name!r} is {wrong}: a number is needed; change `of`")
    if not _NUMERIC.fullmatch(type := table.type_of(expression.sql, "numbers")):
        raise ValueError(f"{entry.of!r} is {type}, and a number is needed")
    missing = " OR ".join(f"{quoted(name)} IS NULL" for name in expression.columns) or "false"
    factor = UNITS.get(entry.unit or "", 1.0)
    undefined = {False: math.nan, True: None}
    results = table.rows(f"({expression.sql}\n), {missing}", "numbers")
    return {n: undefined[lacks] if result is None else float(result) * factor for n, result, lacks in results}


def _mistakes_of(name: str, value: Scalar | None) -> list[str]:
    if name in SETTABLE:
        return field_mistakes(RunConfig, {name: value})
    if name == "outcome" and value not in ("ok", "diverged"):
        return [f"outcome={value!r} is neither ok nor diverged; map it by `values`"]
    if name in quantities.IN_RUNS and isinstance(value, float):
        least, most = quantities.IN_RUNS[name].range
        if not least <= value <= most:
            return [f"{name}={value:g} must be from {least:g} to {most:g}; state its unit, or multiply in `of`"]
    return []


def as_type(value: Any, type: str) -> Scalar | None:
    """The value in a column type; None if it is of another type."""
    if type == "VARCHAR":
        return value if isinstance(value, str) else None
    if type == "BOOLEAN":
        return {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower().removesuffix(".0"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if type == "BIGINT":
        return int(value) if float(value).is_integer() and abs(value) < 2**63 else None
    return float(value)


_Row = tuple[ImportedRun, int, dict[str, Any]]
"""A run, the number of its row in the table, and its known values by field."""


def _rows_of(
    numbers: Sequence[int], values: Mapping[str, _Values], clusters: Mapping[int, str | None], source: str
) -> list[_Row]:
    """Every row as a run; a cluster of None is one of its own. Raises Mistakes where two rows are the same run."""
    rows, first, mistakes = [], dict[str, int](), []
    for number in numbers:
        known = {name: field[number] for name, field in values.items() if field[number] is not None}
        config = {name: value for name, value in known.items() if name in SETTABLE}
        run = ImportedRun.model_construct(origin=source, cluster=clusters[number], config=config)
        if (other := first.setdefault(run.run_id, number)) != number:
            mistakes.append(f"rows {other} and {number} are equal in all mapped fields")
        rows.append((run, number, known))
    if mistakes:
        fix = "map a column in which they differ (seed, train_tokens, lr, cluster), or select one with where"
        raise Mistakes([*mistakes[: MAX_MISTAKES - 1], f"{len(mistakes)} such rows: {fix}"])
    return rows


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
