"""The map of an import: which columns of a table of others are which fields of a run, and which have numbers of layers.

A field is a RunConfig field, a measured quantity of `runs`, or a fact (device, seconds, training_seconds). Its values
are those of a column, of arithmetic over columns in DuckDB's SQL and double precision (odd names in backticks), of a
column in another unit or with other texts, or a constant; `where` is a condition over columns. See
sparsedepth/examples/maps/example.yaml."""

import math
import re
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Annotated, Literal

import duckdb
from pydantic import Field

from sparsedepth import quantities
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Mistakes, Section, check
from sparsedepth.store.fences import FENCES
from sparsedepth.store.schema import RUN_COLUMNS
from sparsedepth.store.table_file import Expression, parse
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


class Entry(Section):
    """Where a field's values come from."""

    of: Annotated[str, Field(min_length=1, description="a column, or arithmetic over columns")]
    unit: Annotated[str | None, Field(description=f"the column's: {', '.join(UNITS)}")] = None
    values: dict[str, Scalar | None] | None = None
    """the column's texts -> our values; null: missing"""
    optional: bool = False
    """rows may lack a value"""

    @check
    def _check_unit(self) -> None:
        if self.unit is not None and self.unit not in UNITS:
            raise ValueError(f"unit={self.unit!r} is not known; choose one of {', '.join(UNITS)}, or multiply in `of`")
        if self.unit is not None and self.values is not None:
            raise ValueError(f"unit={self.unit!r} and values do not go together; the values are ours already")


class LayerEntry(Section):
    """Columns with a number of each layer, as rows of the view `layers`."""

    metric: str
    """a metric of `layers`"""
    value: str
    """a column; {layer} in it stands for the number of a block"""
    layer: Annotated[int, Field(ge=0, description="its layer; with {layer}, the number of the first block")] = 1

    def fields(self, columns: Collection[str]) -> dict[str, Entry]:
        """METRIC@LAYER -> its column."""
        pattern = re.compile(re.escape(self.value).replace(r"\{layer\}", r"(\d+)"))
        matches = filter(None, map(pattern.fullmatch, columns))
        layers = {int(match[1]) - self.layer + 1 if pattern.groups else self.layer: match[0] for match in matches}
        return {f"{self.metric}@{n}": Entry(of=name, optional=True) for n, name in layers.items()}


class TableMap(Section):
    source: Annotated[str, Field(min_length=1, max_length=200, description="whose runs these are, and where they lie")]
    where: str | None = None
    """rows to take, as a condition over columns"""
    fields: Annotated[dict[str, str | Entry], Field(min_length=1, description="field -> column, arithmetic or entry")]
    constants: dict[str, Scalar] = {}
    """field -> its value in every row"""
    layers: list[LayerEntry] = []
    """columns of each layer: metric, value, layer"""
    cluster: str | list[str] | None = None
    """columns that name what rows share"""
    tuned: list[str] = []
    """fields of which each configuration takes its best value"""
    objective: str = "val_loss"
    """what tuning is judged by"""
    missing: Literal["refuse", "leave_out"] = "refuse"
    """what becomes of a row without a value"""

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
        for entry in self.layers:
            if entry.metric not in quantities.BY_LAYER:
                fix = hint(entry.metric, quantities.BY_LAYER) or "see `sparsedepth schema`"
                mistakes.append(f"layers: {entry.metric} is no metric of layers; {fix}")
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


def with_layers(table_map: TableMap, columns: Collection[str]) -> TableMap:
    """With the columns of `layers` as fields."""
    fields = {**table_map.fields}
    for entry in table_map.layers:
        fields |= entry.fields(columns)
    return table_map.model_copy(update={"fields": fields})


def expressions(table_map: TableMap, columns: Collection[str]) -> dict[str, Expression]:
    """The expression of each field, and of WHERE. Raises Mistakes with all errors."""
    parsed: dict[str, Expression] = {}
    mistakes = [
        f"layers.{entry.metric}: no column {entry.value!r}" for entry in table_map.layers if not entry.fields(columns)
    ]
    with closing(duckdb.connect(":memory:", config=FENCES)) as connection:
        for name, entry in table_map.entries.items():
            try:
                parsed[name] = parse(connection, entry.of, columns)
                if (entry.values is not None or TARGETS.get(name) in READ_TYPES) and parsed[name].column is None:
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
