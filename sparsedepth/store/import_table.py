"""Import a table of third-party training runs as a pack, with one record per row, by a map (`import.yaml`).

All errors of a map, or of a table's values, are reported at once. What the table does not state is unknown (NULL, and
listed in `unknown_fields`): no default is filled in; a run whose loss is infinite diverged. Two rows that are equal in
all mapped fields are an error."""

import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sparsedepth import quantities
from sparsedepth.config.load import build, read_yaml
from sparsedepth.config.mistakes import field_mistakes
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Mistakes
from sparsedepth.files import atomic_folder, json_text, read_regular, write_bytes
from sparsedepth.quantities.quantity import Named, Row
from sparsedepth.store.checksums import Files, checksum_of, new_marker
from sparsedepth.store.comparable_loss import LOSSES
from sparsedepth.store.packs import contents_of, write_pack
from sparsedepth.store.run_record import IMPORTED, RUNS, table_content
from sparsedepth.store.stored_rows import read_rows, stored_run
from sparsedepth.store.subject import ImportedRun
from sparsedepth.store.table_file import (
    Choose,
    Expression,
    Table,
    Texts,
    by_value,
    cluster_of,
    not_missing,
    open_table,
    quoted,
    read_texts,
)
from sparsedepth.store.table_map import (
    FACTS,
    MAP,
    OUTCOMES,
    READ_TYPES,
    SETTABLE,
    TARGETS,
    UNITS,
    WHERE,
    Entry,
    Scalar,
    TableMap,
    expressions,
    with_layers,
)
from sparsedepth.words.plain_text import counted

MAX_MISTAKES = 12
"""Reported in one error."""
_NUMERIC = re.compile(r"DOUBLE|FLOAT|DECIMAL.*|U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?")
_KINDS = {"BIGINT": "a whole number", "DOUBLE": "a number", "BOOLEAN": "true or false", "VARCHAR": "text"}


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
            return expressions(with_layers(table_map, names), names)
        except Mistakes as mistakes:
            raise ValueError(f"{map_path}: {mistakes}") from None

    def used(names: Sequence[str]) -> Collection[str]:
        found = {*table_map.clusters}.union(*(expression.columns for expression in parsed(names).values()))
        return [name for name in names if name in found]

    texts = read(source, used)
    table_map = with_layers(table_map, texts.names)
    with open_table(texts) as opened:
        try:
            numbers, rows = _runs_in(opened, table_map, parsed(texts.names))
        except Mistakes as error:
            raise _with_source(texts, error) from None
    _write(out, rows, {"table": texts.name, "table_sha256": texts.sha256}, read_regular(map_path))
    runs = [run for run, *_ in rows]
    n_beyond = sum(len(_beyond(known)) for *_, known in rows)
    beyond = [f"{counted(n_beyond, 'value')} of layers that a run does not have left out"] if n_beyond else []
    stated = {name for run in runs for name in run.config}
    return Imported(
        rows=opened.n_rows,
        runs=len(runs),
        excluded=opened.n_rows - len(numbers),
        incomplete=len(numbers) - len(runs),
        clusters=len({run.cluster or run.run_id for run in runs}),
        unknown=tuple(name for name in runs[0].unknown if name not in stated),
        notes=(*opened.notes, *beyond),
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
    shared = table.rows(", ".join(map(quoted, table_map.clusters)) or "NULL", "texts")
    clusters = {number: None if None in values else cluster_of(values) for number, *values in shared}
    return numbers, _rows_of(kept, values, clusters, table_map.source)


def _with_source(texts: Texts, error: Mistakes) -> ValueError:
    """The first mistakes, with the ids of the rows."""
    n_more = len(error.mistakes) - MAX_MISTAKES
    told = "; ".join([*error.mistakes[:MAX_MISTAKES], *[f"and {n_more} more"] * (n_more > 0)])
    return ValueError(f"{texts.source}: {texts.placed(told)}")


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
    mistakes, missing = list[str](), list[str]()
    fields: dict[str, _Values] = {}
    outcomes = _outcomes(table, parsed)
    lacking = set[int]()
    for name, entry in table_map.entries.items():
        try:
            fields[name] = _field(table, name, entry, parsed[name])
        except ValueError as error:
            mistakes.append(f"fields.{name}: {error}")
            continue
        may_lack = {*numbers} if entry.optional else set[int]()
        if name not in SETTABLE:  # a run that diverged has no results
            may_lack |= {number for number, outcome in outcomes.items() if outcome == "diverged"}
        absent = [number for number in numbers if fields[name][number] is None and number not in may_lack]
        lacking.update(absent)
        if absent and table_map.missing == "refuse":
            rows = f"{counted(len(absent), 'row')}, first in row {absent[0]}"
            missing.append(f"{name} has no value in {rows}; state missing: leave_out, or optional: true")
    kept = [number for number in numbers if number not in lacking]
    if not kept and table_map.missing == "leave_out":
        missing.append("no row has a value of every field")
    mistakes += missing
    constants: dict[str, _Values] = {}
    for name, value in table_map.constants.items():
        typed = as_type(value, TARGETS[name])
        wrong_type = [f"constants.{name} is {json.dumps(value)}: {_KINDS[TARGETS[name]]} is needed"]
        mistakes += _mistakes_of(name, typed) if typed is not None else wrong_type
        constants[name] = dict.fromkeys(numbers, typed)
    if mistakes:
        raise Mistakes(mistakes)
    return kept, {"outcome": outcomes} | constants | fields


def _outcomes(table: Table, parsed: Mapping[str, Expression]) -> _Values:
    """'diverged' of a row with an infinite loss."""
    of_loss = {column for name in LOSSES if name in parsed for column in parsed[name].columns}
    infinite = [f"coalesce(isinf(TRY_CAST({quoted(column)} AS DOUBLE)), false)" for column in of_loss]
    return dict(table.rows(f"if({' OR '.join(infinite) or 'false'}, 'diverged', 'ok')", "texts"))


def _field(table: Table, name: str, entry: Entry, expression: Expression) -> _Values:
    """The values of a field, of its type and in its range. Raises ValueError."""
    type = TARGETS.get(name, "DOUBLE")
    if entry.values is not None or type in READ_TYPES:
        raw = _read(table, name, entry, expression)
    else:
        raw = _computed(table, entry, expression, name not in SETTABLE)
        if wrong := _wrong(raw, lambda value: not math.isfinite(value)):
            raise ValueError(f"{entry.of!r} is {wrong}: no finite number; change `of`")
    typed = {value: as_type(value, type) for value in dict.fromkeys(raw.values())}
    if wrong := _wrong(raw, lambda value: typed[value] is None):
        raise ValueError(f"{name} is {wrong}: {_KINDS[type]} is needed; change `of`")
    for value, typed_value in typed.items():
        if value is not None and (mistakes := _mistakes_of(name, typed_value)):
            raise ValueError(f"{mistakes[0]}: {_wrong(raw, partial(operator.eq, value))}")
    return {number: typed[value] for number, value in raw.items()}


def _read(table: Table, name: str, entry: Entry, expression: Expression) -> _Values:
    """The texts of a column, or our values for them."""
    assert expression.column is not None
    is_text = TARGETS[name] == "VARCHAR" or entry.values is not None
    texts = dict(table.rows(quoted(expression.column) if is_text else not_missing(expression.column), "texts"))
    if entry.values is None:
        return texts
    listed = {by_value(text): value for text, value in entry.values.items()} | entry.values | {None: None}
    found = {text: text if text in listed else by_value(text) for text in {*texts.values()}}
    if wrong := _wrong(texts, lambda text: found[text] not in listed):
        raise ValueError(f"{expression.column!r} is {wrong}, which `values` does not list; list it there")
    return {number: listed[found[text]] for number, text in texts.items()}


def _computed(table: Table, entry: Entry, expression: Expression, is_result: bool) -> _Values:
    """The numbers that an expression has; NULL where one of its columns is missing. Raises ValueError."""
    for name in sorted(expression.columns):
        if wrong := _wrong(dict(table.no_numbers(name, is_result)), lambda _: True):
            raise ValueError(
                f"column {name!r} is {wrong}: a number is needed, without unit and separators; edit the table, or "
                "change `of`"
            )
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
    quantity = quantities.IN_RUNS.get(name) or quantities.BY_LAYER.get(name.partition("@")[0])
    if quantity and isinstance(value, float):
        least, most = quantity.range
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
        whole = round(value)
        is_whole = math.isclose(value, whole, rel_tol=1e-12)  # 4.1 * 1e6 is 4099999.9999999995
        return whole if is_whole and abs(whole) < 2**63 else None
    return float(value)


_Row = tuple[ImportedRun, int, Named]
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
            mistakes.append(f"row {other} and row {number} are equal in all mapped fields")
        rows.append((run, number, known))
    if mistakes:
        fix = (
            f"{len(mistakes)} such rows: map a field in which they differ (seed, train_tokens, lr, cluster; a quantity "
            "does not tell runs apart), or select one with where"
        )
        raise Mistakes([*mistakes[: MAX_MISTAKES - 1], fix])
    return rows


def _write(out: Path, rows: Sequence[_Row], origin: Mapping[str, str], map_text: bytes) -> None:
    contents: list[Named] = []
    stored = []
    for run, number, known in rows:
        place = f"{RUNS}/{run.run_id}"
        files = _record(run, known, {**origin, "row": number, "origin": run.origin}, Path(place))
        contents += contents_of(place, files)
        stored.append(stored_run(files, place))
    with atomic_folder(out) as aside:
        write_bytes(aside / MAP, map_text)
        write_pack(aside, read_rows(stored), contents, len(rows))


def _beyond(known: Row) -> list[str]:
    """The fields of layers that a run does not have."""
    return [name for name in known if "@" in name and not 0 <= int(name.partition("@")[2]) <= known["n_layers"]]


def _record(run: ImportedRun, known: Row, manifest: Row, folder: Path) -> Files:
    facts = {name: known[name] for name in FACTS if name in known}
    summary = {"outcome": "ok", **{name: known[name] for name in OUTCOMES if name in known}}
    tokens, params = summary.setdefault("tokens_trained", run.config.get("train_tokens")), summary.get("params_total")
    if tokens and params:
        summary.setdefault("tokens_per_param", tokens / params)
    beyond = _beyond(known)
    layers = [
        {"step": 0, "layer": int(layer), "metric": metric, "value": value}
        for name, value in known.items()
        for metric, at, layer in [name.partition("@")]
        if at and name not in beyond
    ]
    summary.setdefault("residual_variance_last", known.get(f"residual_variance@{known['n_layers']}"))
    parts = {
        IMPORTED: run.model_dump(mode="json"),
        "manifest.json": {**manifest, **facts},
        "summary.json": {name: summary.get(name) for name in OUTCOMES},
    }
    contents = {name: json_text(part).encode() for name, part in parts.items()}
    contents |= {"layers.parquet": table_content("layers", layers)} if layers else {}
    marker = new_marker(run.run_id, {name: checksum_of(content) for name, content in contents.items()})
    return Files(folder=folder, marker=marker, read=contents.__getitem__)
