"""The map of an import (`import.yaml`): which columns of a third-party table are which fields of a run.

A field is a RunConfig field, a measured quantity of `runs`, or a fact (device, seconds, training_seconds). Its values
are those of a column, of arithmetic over columns in DuckDB's SQL and double precision (odd names in backticks), of a
column in another unit or with other texts, or a constant; `where` is a condition over columns. See maps/example.yaml.
"""

import math
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Annotated, Any, Literal, NamedTuple

import duckdb
from pydantic import Field

from sparsedepth import quantities
from sparsedepth.config.mistakes import hint
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Mistakes, Section, check
from sparsedepth.store.fences import FENCES, syntax_nodes
from sparsedepth.store.schema import RUN_COLUMNS
from sparsedepth.store.table_file import quoted

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
    """A strict, frozen record."""

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
        """The columns that name a cluster."""
        return [self.cluster] if isinstance(self.cluster, str) else self.cluster or []


MAX_LENGTH = 500
"""Characters of an expression."""
WHERE = "where"


class Expression(NamedTuple):
    """An expression or condition of the map, which `store.table_file` evaluates."""

    sql: str
    columns: frozenset[str]
    """All columns in it."""
    column: str | None
    """The column, if the expression is only its name."""


def expressions(table_map: TableMap, columns: Collection[str]) -> dict[str, Expression]:
    """The expression of each field, and of WHERE. Raises Mistakes with all errors."""
    parsed: dict[str, Expression] = {}
    mistakes: list[str] = []
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        for name, entry in table_map.entries.items():
            try:
                parsed[name] = _parse(connection, entry.of, columns)
                if (entry.values is not None or TARGETS[name] in READ_TYPES) and parsed[name].column is None:
                    kind = "true or false" if TARGETS[name] == "BOOLEAN" else "text"
                    raise ValueError(f"{kind} must be a column, and {entry.of!r} is arithmetic")
            except ValueError as error:
                mistakes.append(f"fields.{name}: {error}")
        try:
            if table_map.where is not None:
                parsed[WHERE] = _parse(connection, table_map.where, columns, is_condition=True)
        except ValueError as error:
            mistakes.append(f"where: {error}")
    if unknown := [name for name in table_map.clusters if name not in columns]:
        mistakes.append(f"cluster: no column {', '.join(map(repr, unknown))}")
    if any(": no column " in mistake for mistake in mistakes):
        mistakes.append(f"the table has the columns {', '.join(map(str, list(columns)[:20]))}")
    if mistakes:
        raise Mistakes(mistakes)
    return parsed


def _parse(
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
