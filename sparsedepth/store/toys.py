"""Teacher-student groups of `analysis/toy.py` in a results folder: the views `toys` (by student) and `toy_curves`.

    RESULTS/toys/<run_id>/   config.yaml  manifest.json  summary.json  students.parquet  curves.parquet  complete

Like a run's, the folder is written atomically, has checksums, and never changes.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from sparsedepth.config.load import parse_yaml, yaml_text
from sparsedepth.files import atomic_folder, write_bytes, write_json, write_text
from sparsedepth.quantities.record import Column
from sparsedepth.store.checksums import DamagedRun, Files, write_marker
from sparsedepth.store.find import find_groups
from sparsedepth.store.run_record import TOYS as FOLDER
from sparsedepth.store.run_tables import arrow_schema, read_within

ToyView = Literal["toys", "toy_curves"]
STUDENTS, CURVES = "students.parquet", "curves.parquet"
FILES = ("config.yaml", "manifest.json", "summary.json", STUDENTS, CURVES)
AXES = ("rho", "teacher_seed", "temperature", "seed")
"""Lists of a group's configuration: its students are their product. The last varies fastest."""

_LOSS = "KL divergence in nat per input, or mean squared error (target mse)"
_IDS = (
    ("run_id", "VARCHAR", "the group: all students of one depth, trained as one"),
    ("student", "BIGINT", "number of the student in its group, from 0"),
)
SETTINGS = (
    ("n_layers", "BIGINT", "steps of the student; a midpoint step has two blocks"),
    ("d_model", "BIGINT", "width of the residual stream (m)"),
    ("d_ff", "BIGINT", "width of the ReLU^2 layer; default 4 d_model"),
    ("vocab_size", "BIGINT", "outputs of the head (n)"),
    ("teacher_layers", "BIGINT", "blocks of the teacher; their output scales as 1/sqrt(teacher_layers)"),
    ("integrator", "VARCHAR", "the student's step: x + f(x), or x + g(x + f(x) / 2) (RK2)"),
    ("target", "VARCHAR", "the teacher's distribution, with a head to learn or the teacher's; or its normed state"),
    ("rho", "DOUBLE", "correlation of the teacher's layers: 1 = tied, 0 = independent"),
    ("teacher_seed", "BIGINT", "seeds, one per teacher"),
    ("temperature", "DOUBLE", "divides the teacher's logits; not for mse"),
    ("seed", "BIGINT", "the students' first weights; replicates"),
    ("data_seed", "BIGINT", "the stream of inputs, which all students share"),
    ("batch_size", "BIGINT", "inputs per step"),
    ("n_steps", "BIGINT", "optimiser steps"),
    ("lr", "DOUBLE", "Adam's learning rate"),
    ("lr_depth_factor", "DOUBLE", "the learning rate is lr x this / sqrt(n_layers); null = lr at every depth"),
    ("decay_from", "DOUBLE", "share of the steps after which lr falls linearly"),
    ("decay_to", "DOUBLE", "share of lr at the end"),
    ("test_batches", "BIGINT", "batches of the test loss, never trained on"),
    ("log_every", "BIGINT", "steps between two rows of the curves"),
)
_VIEWS: dict[ToyView, tuple[tuple[str, ...], ...]] = {
    "toys": (
        *_IDS,
        *SETTINGS,
        ("test_loss", "DOUBLE", f"{_LOSS}, on inputs never trained on; NULL = not finite"),
        ("train_loss", "DOUBLE", f"{_LOSS}, on the last batch"),
    ),
    "toy_curves": (
        *_IDS,
        ("step", "BIGINT", "optimiser steps done", "step"),
        ("lr", "DOUBLE", "learning rate of that step"),
        ("train_loss", "DOUBLE", f"{_LOSS}, on that step's batch"),
        ("test_loss", "DOUBLE", f"{_LOSS}, on inputs never trained on"),
    ),
}
COLUMNS = {
    view: tuple(
        Column(view=view, name=name, type=type, meaning=meaning, unit="".join(unit))
        for name, type, meaning, *unit in columns
    )
    for view, columns in _VIEWS.items()
}
"""The columns of both views, in order."""
_SCHEMAS = {view: arrow_schema(columns) for view, columns in COLUMNS.items()}
_FILE_SCHEMAS = {
    name: pa.schema([_SCHEMAS[view].field(column) for column in columns])
    for name, view, columns in (
        (STUDENTS, "toys", (*AXES, "student", "test_loss", "train_loss")),
        (CURVES, "toy_curves", _SCHEMAS["toy_curves"].names[1:]),
    )
}
"""The columns of a view that a file stores; the others are constant in a group."""


def save_toy(
    results: Path,
    run_id: str,
    config: Mapping[str, Any],
    students: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
    manifest: Mapping[str, Any],
) -> Path:
    """Write the group's folder, completely or not at all; returns it."""
    folder = results / FOLDER / run_id
    losses = [row["test_loss"] for row in students if row["test_loss"] is not None]
    summary = {
        "n_students": len(students),
        "n_diverged": len(students) - len(losses),
        "steps": config["n_steps"],
        "test_loss_min": min(losses, default=None),
        "test_loss_max": max(losses, default=None),
    }
    with atomic_folder(folder) as unfinished:
        write_text(unfinished / "config.yaml", yaml_text(dict(config)))
        write_json(unfinished / "manifest.json", dict(manifest))
        write_json(unfinished / "summary.json", summary)
        for name, rows in ((STUDENTS, students), (CURVES, curves)):
            content = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(list(rows), schema=_FILE_SCHEMAS[name]), content, compression="zstd")
            write_bytes(unfinished / name, content.getvalue())
        write_marker(unfinished, run_id, FILES)
    return folder


def read_toys(roots: Iterable[Path]) -> dict[ToyView, pa.Table]:
    """The rows of both views from all complete groups of results folders, without duplicate groups. Raises DamagedRun
    if a file's checksum differs."""
    tables_by_id: dict[str, dict[ToyView, pa.Table]] = {}
    for files in (files for root in roots for files in find_groups(root, FOLDER)):
        if files.marker.run_id not in tables_by_id:
            tables_by_id[files.marker.run_id] = _read_group(files)
    return {
        view: pa.concat_tables([pa.Table.from_batches([], schema), *(tables[view] for tables in tables_by_id.values())])
        for view, schema in _SCHEMAS.items()
    }


def _read_group(files: Files) -> dict[ToyView, pa.Table]:
    folder, marker = files.folder, files.marker
    if set(marker.files) != set(FILES):
        raise DamagedRun(folder, "complete", f"does not list exactly {', '.join(FILES)}")
    contents = {name: files.read(name) for name in FILES}
    try:
        config = parse_yaml(contents["config.yaml"].decode(), "config.yaml") | {"run_id": marker.run_id}
        return {
            "toys": _with(_parse(contents[STUDENTS], STUDENTS), config, "toys"),
            "toy_curves": _with(_parse(contents[CURVES], CURVES), config, "toy_curves"),
        }
    except (ValueError, KeyError, TypeError, pa.ArrowException, OSError) as error:
        raise DamagedRun(folder, "config.yaml or a table", f"is not of this version ({str(error)[:200]})") from None


def _with(rows: pa.Table, shared: Mapping[str, Any], view: ToyView) -> pa.Table:
    """The view's columns: the file's, and the group's constants."""
    columns = [
        rows[field.name] if field.name in rows.column_names else pa.array([shared[field.name]] * len(rows), field.type)
        for field in _SCHEMAS[view]
    ]
    return pa.table(columns, schema=_SCHEMAS[view])


def _parse(content: bytes, name: str) -> pa.Table:
    schema = _FILE_SCHEMAS[name]
    return read_within(pa.BufferReader(content), schema.names).select(schema.names).cast(schema)
