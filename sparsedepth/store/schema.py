"""The schema of the store: the columns of all views, with type, unit and meaning.

Derived from `RunConfig` (a column per field) and `sparsedepth.quantities` (a column or metric per quantity), so that a
name has one meaning."""

import json
import math
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.quantities.quantity import Column, Named, Table

TABLES: tuple[Table, ...] = ("curves", "layers", "heads", "pairs", "tokens", "difficulty")
"""The tables of many rows per run; `runs` has one row per run."""


def _of_runs(name: str, meaning: str, unit: str = "", type: str = "DOUBLE") -> Column:
    return Column(view="runs", name=name, type=type, meaning=meaning, unit=unit)


def _text(name: str, meaning: str) -> Column:
    return _of_runs(name, meaning, type="VARCHAR")


_MEMORY = "peak memory: allocated on the GPU; on a CPU, growth of the process (manifest)"
_NODE_HOURS = "node time on a cluster, failed starts included; its share if the task computed several runs (manifest)"
MANIFEST_COLUMNS = (
    _text("device", "hardware that trained it (manifest)"),
    _text("started", "when it started, ISO 8601 (manifest)"),
    _of_runs("seconds", "wall-clock time (manifest)", "s"),
    _of_runs("training_seconds", "the part of seconds before anything was measured (manifest)", "s"),
    _of_runs("peak_memory_bytes", _MEMORY, "byte", "BIGINT"),
    _of_runs("node_hours", _NODE_HOURS, "h"),
    _text("packages", "versions of the packages used, as JSON (manifest)"),
    _text("plugins", "code and file of the plugins that made a measure or the task, as JSON (manifest)"),
    _text("checkpoint", "of a model of others: its name or folder, with @REVISION (manifest)"),
    _text("family", "of a model of others: the model_type of its config (manifest)"),
    _text("weights_dtype", "of a model of others: dtype of its layers' weights, which are computed in fp32 (manifest)"),
    _text("weights_hash", "of a model of others: digest of its weight files (manifest)"),
    _text("text", "of a model of others: the text that it was measured on; NULL for given tokens (manifest)"),
)
"""The columns of `runs` that come from the manifest."""


def column_type(annotation: Any) -> str:
    """The SQL type of a field's annotation; a tuple is JSON text, so that it can be grouped and compared."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin in (Union, types.UnionType, Annotated):
        return column_type(next(option for option in inner if option is not types.NoneType))
    return _TYPES[type(inner[0]) if origin is Literal else origin or annotation]


_TYPES = {int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", str: "VARCHAR", tuple: "VARCHAR"}


def stored_value(value: Any) -> Any:
    """A field's value as its column has it."""
    if isinstance(value, Mapping):  # of a record that was not built as a run, as `lr_of`
        value = sorted(value.items())
    return json.dumps(value) if isinstance(value, (tuple, list)) else value


def plain(value: Any) -> Any:
    """A cell of a frame as a plain value: NaN and NA -> None, whole floats -> int, arrays and JSON arrays -> tuples."""
    import numpy as np
    import pandas as pd

    if isinstance(value, str):
        with suppress(ValueError):
            return plain(json.loads(value)) if value.startswith("[") else value
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(plain(entry) for entry in value)
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if math.isnan(value) else int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value


def stored_fields(subject: object) -> Named:
    """The fields of RunConfig as columns of `runs` have them; None where a measured model has none."""
    return {name: stored_value(getattr(subject, name, None)) for name in RunConfig.model_fields}


RUN_COLUMNS: tuple[Column, ...] = (
    _text("run_id", "the hash of the configuration, seed included, or of a measured model's facts"),
    _text("cell_id", "the hash without the seed: runs that share it are replicates"),
    _text("model", "name of a model that was only measured; NULL for a trained run"),
    *(
        _of_runs(name, " ".join((field.description or "").split()), type=column_type(field.annotation))
        for name, field in RunConfig.model_fields.items()
    ),
    *quantities.RUNS,
    _text("folder", "folder of the run's files"),
    *MANIFEST_COLUMNS,
    _text("origin", "source of an imported run; NULL for a run of ours"),
    _text("cluster", "imported rows that share it are not independent, e.g. steps of one run"),
    _text("unknown_fields", "fields that an imported run's table does not state, comma-separated"),
)


def _metric_columns(view: Table, keys: dict[str, str]) -> tuple[Column, ...]:
    """The columns of a long table: one row per step, keys and metric."""
    columns = {
        "step": ("BIGINT", "optimiser steps done when it was measured"),
        **{name: ("BIGINT", meaning) for name, meaning in keys.items()},
        "metric": ("VARCHAR", "name of the quantity, with @threshold where it has one"),
        "value": ("DOUBLE", "its value, in the unit of the metric"),
        "n": ("BIGINT", "sample size behind the value; NULL where nothing was sampled"),
    }
    return tuple(
        Column(view=view, name=name, type=type, meaning=meaning, unit="step" if name == "step" else "")
        for name, (type, meaning) in columns.items()
    )


_BLOCK = "block, from 1 to n_layers; 0 = the embedding's output"
FILE_COLUMNS: dict[Table, tuple[Column, ...]] = {
    "curves": quantities.CURVES,
    "layers": _metric_columns("layers", {"layer": _BLOCK}),
    "heads": _metric_columns("heads", {"layer": _BLOCK, "head": "query head of the block, from 1 to n_heads"}),
    "pairs": _metric_columns("pairs", {"layer": _BLOCK, "other_layer": "the second, later block of the pair"}),
    "tokens": quantities.TOKENS,
    "difficulty": quantities.DIFFICULTY,
}
"""The columns of a run folder's Parquet files."""

SOURCE = _text("source", "results folder or pack that the run is from, as it was named")

TUNING_COLUMNS = (
    _text("tuned_fields", "fields that the sweep tuned for this configuration, comma-separated; NULL if none"),
    _text(
        "tuning",
        "best, edge (best, but the lowest or highest value tried), rejected (another value was better) or "
        "tuning (a seed of tuning alone, no result); carried (the value was chosen at another shape); "
        "earlier (a point of a watched training that is not compared); "
        "NULL if nothing was tuned",
    ),
    _text("tuned_by", "the objective whose mean over the tuning seeds chose the value; NULL if nothing was tuned"),
    _text("carried_from", "the shape at which the tuned values were chosen; NULL where it is the run's own"),
    _of_runs("carry_regret", "loss that carrying them adds, as the sweep states it; NULL if unknown", "nat/token"),
)
"""Like SOURCE, computed when a store is opened, so not in any cache."""

COLUMNS: dict[Table, tuple[Column, ...]] = {
    "runs": RUN_COLUMNS,
    **{
        table: (Column(view=table, name="run_id", type="VARCHAR", meaning="the run, as in runs"), *columns)
        for table, columns in FILE_COLUMNS.items()
    },
}
"""The columns of every view, in order."""

METRICS: dict[Table, tuple[Column, ...]] = {
    "layers": quantities.LAYERS, "heads": quantities.HEADS, "pairs": quantities.PAIRS
}  # fmt: skip
"""The values that `metric` takes."""

KEYS: dict[Table, tuple[str, ...]] = {
    "curves": ("step",),
    "layers": ("step", "layer", "metric"),
    "heads": ("step", "layer", "head", "metric"),
    "pairs": ("step", "layer", "other_layer", "metric"),
    "tokens": ("step", "sequence", "position"),
    "difficulty": ("step", "difficulty"),
}
"""The primary key of the rows of one run; never NULL."""
