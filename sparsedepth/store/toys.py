"""Toy groups in a results folder, apart from the runs: the views `toys` (a row per student) and `toy_curves`.

    RESULTS/toys/<run_id>/   config.yaml  manifest.json  summary.json  students.parquet  curves.parquet  complete

As with a run, the folder appears whole, carries checksums, and never changes.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from sparsedepth.config.load import build, parse_yaml
from sparsedepth.config.toy import AXES, ToyConfig
from sparsedepth.files import appearing, write_bytes, write_json, write_text
from sparsedepth.store.checksums import DamagedRun, Marker, is_complete, parse_marker, read_verified, seal
from sparsedepth.store.schema import Column

FOLDER = "toys"
ToyView = Literal["toys", "toy_curves"]
STUDENTS, CURVES = "students.parquet", "curves.parquet"
FILES = ("config.yaml", "manifest.json", "summary.json", STUDENTS, CURVES)
MAX_ROWS = 5_000_000

_KINDS = {"integer": "BIGINT", "number": "DOUBLE", "string": "VARCHAR"}
_ARROW = {"BIGINT": pa.int64(), "DOUBLE": pa.float64(), "VARCHAR": pa.string()}
_LOSS = "KL divergence in nat per input, or mean squared error (target mse)"


def _columns() -> dict[ToyView, tuple[Column, ...]]:
    def column(view: ToyView, name: str, type: str, meaning: str, unit: str = "") -> Column:
        return Column(view=view, name=name, type=type, meaning=meaning, unit=unit)

    fields = ToyConfig.model_json_schema()["properties"]
    kinds = {name: _kind(field["items"] if name in AXES else field) for name, field in fields.items()}
    both = (
        ("run_id", "VARCHAR", "the group: all students of one depth, trained as one"),
        ("student", "BIGINT", "number of the student in its group, from 0"),
    )
    return {
        "toys": (
            *(column("toys", *one) for one in both),
            *(column("toys", name, kinds[name], field["description"]) for name, field in fields.items()),
            column("toys", "test_loss", "DOUBLE", f"{_LOSS}, on inputs never trained on; NULL = not finite"),
            column("toys", "train_loss", "DOUBLE", f"{_LOSS}, on the last batch"),
        ),
        "toy_curves": (
            *(column("toy_curves", *one) for one in both),
            column("toy_curves", "step", "BIGINT", "optimiser steps done", "step"),
            column("toy_curves", "lr", "DOUBLE", "learning rate of that step"),
            column("toy_curves", "train_loss", "DOUBLE", f"{_LOSS}, on that step's batch"),
            column("toy_curves", "test_loss", "DOUBLE", f"{_LOSS}, on inputs never trained on"),
        ),
    }


def _kind(described: Mapping[str, Any]) -> str:
    options = described.get("anyOf", [described])
    return _KINDS[next(option["type"] for option in options if option.get("type") != "null")]


COLUMNS = _columns()
"""The columns of both views, in order."""
_OWN = {
    STUDENTS: (*AXES, "student", "test_loss", "train_loss"),
    CURVES: [column.name for column in COLUMNS["toy_curves"]],
}


def toy_folder(results: Path, config: ToyConfig) -> Path:
    return results / FOLDER / config.run_id


def save_toy(
    results: Path,
    config: ToyConfig,
    students: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
    manifest: Mapping[str, Any],
) -> Path:
    """Write the group's folder, whole or not at all; the folder."""
    folder = toy_folder(results, config)
    losses = [row["test_loss"] for row in students if row["test_loss"] is not None]
    summary = {
        "n_students": len(students),
        "n_diverged": len(students) - len(losses),
        "steps": config.n_steps,
        "test_loss_min": min(losses, default=None),
        "test_loss_max": max(losses, default=None),
    }
    with appearing(folder) as aside:
        write_text(aside / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        write_json(aside / "manifest.json", dict(manifest))
        write_json(aside / "summary.json", summary)
        for name, rows in ((STUDENTS, students), (CURVES, curves)):
            content = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(list(rows), schema=_file_schema(name)), content, compression="zstd")
            write_bytes(aside / name, content.getvalue())
        seal(aside, config.run_id, FILES)
    return folder


def read_toys(roots: Iterable[Path]) -> dict[ToyView, pa.Table]:
    """The rows of both views from every complete group of results folders; a group met twice counts once. Raises
    DamagedRun where a file is not the one that was written."""
    found: dict[str, tuple[pa.Table, pa.Table]] = {}
    for folder in (folder for root in roots for folder in _complete_groups(root)):
        marker = parse_marker(folder)
        if marker.run_id not in found:
            found[marker.run_id] = _read_group(folder, marker)
    empty = {view: pa.Table.from_batches([], _view_schema(view)) for view in COLUMNS}
    return {
        view: pa.concat_tables([empty[view], *(tables[index] for tables in found.values())])
        for index, view in enumerate(COLUMNS)
    }


def _complete_groups(root: Path) -> Iterator[Path]:
    """The groups of a results folder, or one group given by itself."""
    if root.resolve().parent.name == FOLDER and is_complete(root):
        yield root
    elif (root / FOLDER).is_dir():
        yield from sorted(
            folder for folder in (root / FOLDER).iterdir() if is_complete(folder) and folder.name[0] != "."
        )


def _read_group(folder: Path, marker: Marker) -> tuple[pa.Table, pa.Table]:
    if set(marker.files) != set(FILES):
        raise DamagedRun(folder, "complete", f"does not list exactly {', '.join(FILES)}")
    contents = {name: read_verified(folder, name, marker) for name in FILES}
    try:
        config = build(ToyConfig, parse_yaml(contents["config.yaml"].decode(), "config.yaml"), "config.yaml")
        students, curves = (_parse(contents[name], name) for name in (STUDENTS, CURVES))
    except (ValueError, KeyError, pa.ArrowException, OSError) as error:
        raise DamagedRun(folder, "config.yaml or a table", f"is not of this version ({str(error)[:200]})") from None
    if config.run_id != marker.run_id:
        raise DamagedRun(folder, "complete", f"is of group {marker.run_id}, and config.yaml is {config.run_id}")
    shared: dict[str, Any] = config.model_dump(mode="json", exclude=set(AXES)) | {"run_id": marker.run_id}
    return _with(students, shared, "toys"), _with(curves, shared, "toy_curves")


def _with(rows: pa.Table, shared: Mapping[str, Any], view: ToyView) -> pa.Table:
    """The view's columns: those of the file, and the same value in every row for the others."""
    schema = _view_schema(view)
    columns = [
        rows[field.name] if field.name in rows.column_names else pa.array([shared[field.name]] * len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _parse(content: bytes, name: str) -> pa.Table:
    file = pq.ParquetFile(pa.BufferReader(content))
    if file.metadata.num_rows > MAX_ROWS:
        raise ValueError(f"{name} has more than {MAX_ROWS:,} rows")
    schema = _file_schema(name)
    return file.read(use_threads=False).select(schema.names).cast(schema)


def _view_schema(view: ToyView) -> pa.Schema:
    return pa.schema([pa.field(column.name, _ARROW[column.type]) for column in COLUMNS[view]])


def _file_schema(name: str) -> pa.Schema:
    types = {column.name: _ARROW[column.type] for columns in COLUMNS.values() for column in columns}
    return pa.schema([pa.field(own, types[own]) for own in _OWN[name] if own != "run_id"])
