"""The rows of many runs as two Parquet files with checksums: the format of packs and of the cache.

    FOLDER/runs.parquet   the view `runs`
    FOLDER/rows.parquet   the other views, one after another, each in its own row groups: `view`, and the columns of all
                          views (NULL where a view has no such column); no file if there are no rows
    FOLDER/pack.json      last: {"version", "views": {view: [first row group, end]}, "files": {name: sha256}}, and more

`runs` also has the checksums of the run's marker, which covers all its files, and of its summary. The rows of one run
are contiguous, in the order of its own files."""

import functools
import hashlib
import io
import json
import math
import os
import stat
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from sparsedepth import quantities
from sparsedepth.config.run import DEFAULTS_VERSION, REPLICATE_FIELDS, RunConfig
from sparsedepth.files import digest, parse_json, read_regular, write_json
from sparsedepth.quantities.quantity import Named, Row, Table, without_none
from sparsedepth.store.checksums import DamagedRun, Files, collecting
from sparsedepth.store.made_with import plugins_of
from sparsedepth.store.parquet import (
    arrow_schema,
    check_within,
    codec_of,
    empty_table,
    encoded,
    read_within,
    refuse_twice,
    rows_table,
    table_bytes,
)
from sparsedepth.store.run_record import INDEX, Record, Subject, parse_record, subject_file
from sparsedepth.store.schema import COLUMNS, MANIFEST_COLUMNS, RUN_COLUMNS, TABLES, stored_fields, stored_value
from sparsedepth.store.subject import ImportedRun
from sparsedepth.words.plain_text import utf8

if TYPE_CHECKING:
    import pyarrow.dataset as ds

ROWS = "rows"
VERSION = digest([5, DEFAULTS_VERSION])
READABLE = frozenset({VERSION, "a93173b6111e"})
"""Versions in which a column means what it means now. Files of others are not used: the rows are made again from the
records. Columns that left are not read, those that came since are filled (`completed`)."""

GROUP_ROWS = 2**20

MARKER_COLUMNS = ("marker_sha256", "summary_sha256")
"""Columns of runs.parquet that the view does not have."""


class OtherColumns(ValueError):
    """A file of another version, which lacks a column."""

    def __init__(self, name: str) -> None:
        super().__init__(f"has no column {name} of this version")


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A complete record that was located, but not read."""

    folder: Path
    """Where its files are, or would be if its pack were a folder."""
    place: str
    """Path below its results folder or pack."""
    run_id: str
    marker_sha256: str
    summary_sha256: str
    files: Callable[[], Files]

    @property
    def key(self) -> tuple[str, str]:
        return self.marker_sha256, self.place


def stored_run(files: Files, place: str) -> StoredRun:
    return StoredRun(
        folder=files.folder,
        place=place,
        run_id=files.marker.run_id,
        marker_sha256=files.marker.digest,
        summary_sha256=files.marker.files["summary.json"][0],
        files=lambda: files,
    )


@dataclass(frozen=True)
class StoredTable:
    """A table in some row groups of an open file: it stays readable while another process replaces the file."""

    path: Path
    file: pa.NativeFile
    schema: pa.Schema
    groups: range
    keys: tuple[str, ...] = ()
    """No two rows may have the same values of these; not checked without."""

    def part(self, schema: pa.Schema, groups: range | None = None) -> "StoredTable":
        """Some columns, and all or some row groups. Raises ValueError where there are no such."""
        types = dict(zip(self.schema.names, self.schema.types, strict=True))
        for field in schema:
            if types.get(field.name) != field.type:
                raise OtherColumns(field.name)
        groups = self.groups if groups is None else groups
        if groups.start < 0 or groups.stop > self.groups.stop:
            raise ValueError(f"has no row groups {groups.start} to {groups.stop}")
        return replace(self, schema=schema, groups=groups)

    def dataset(self) -> "ds.Dataset":
        """The table as a Dataset, of which a query reads only the columns and metrics it needs. Raises ValueError."""
        import pyarrow.dataset as ds  # 0.3 s, because it imports pandas; queries of `runs` alone do not need it

        try:
            check_within(self.file, self.schema.names, self.groups)
            self._check_keys()
        except ValueError as error:
            raise ValueError(f"{str(self.path)!r} {error}; pack its results folder again") from None
        text = ds.ParquetReadOptions(dictionary_columns={"run_id", "metric"})
        fragment = ds.ParquetFileFormat(read_options=text).make_fragment(self.file).subset(row_group_ids=[*self.groups])
        schema = pa.schema([fragment.physical_schema.field(name) for name in self.schema.names])
        return ds.FileSystemDataset([fragment], schema=schema, format=fragment.format)

    def in_memory(self) -> pa.Table:
        rows = read_within(self.file, self.schema.names, self.groups)
        self._check_keys()
        return rows

    def _check_keys(self) -> None:
        """Of a table whose size is checked."""
        if self.keys:
            texts = [name for name in self.keys if pa.types.is_string(self.schema.field(name).type)]
            refuse_twice(encoded(self.file, self.keys, self.groups, texts), self.keys)


@dataclass(frozen=True)
class UnreadTable:
    """A table of runs whose folders are not read yet, except for the rows of `runs`; all tables are read together."""

    table: Table
    read: Callable[[], "Rows"]

    def dataset(self) -> "ds.Dataset | pa.Table":
        """The table, from the file that it was cached in if there is one. Raises DamagedRun."""
        rows = self.read().tables[self.table]
        return rows if isinstance(rows, pa.Table) else rows.dataset()


LazyTable = StoredTable | UnreadTable
"""A table whose rows are read when a query names it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of all views for some runs of one results folder."""

    runs: pa.Table
    """RUN_COLUMNS and MARKER_COLUMNS; `folder` is relative to the results folder."""
    tables: Mapping[Table, pa.Table | LazyTable]
    left_out: frozenset[str] = frozenset()
    """run_ids in the tables of runs that are not among them."""
    folder: Path | None = None
    """In the cache; None where they are not in files there."""

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def keys(self) -> list[tuple[str, str]]:
        """`StoredRun.key` of each run."""
        columns = [self.runs[name].to_pylist() for name in (MARKER_COLUMNS[0], "folder")]
        return list(zip(*columns, strict=True))

    def in_memory(self, table: Table) -> pa.Table:
        rows = self.tables[table]
        return rows if isinstance(rows, pa.Table) else rows.in_memory()


# The files


def write_tables(
    folder: Path, rows: Rows, facts: Row, level: int | None = None, others: Mapping[str, pa.Table] = {}
) -> None:
    """Write the files and `others`, compressed at `level`, into a folder that nobody reads; the index has `facts`."""
    contents = {name: table_bytes(table, level) for name, table in {"runs": rows.runs, **others}.items() if len(table)}
    views = {}
    if in_memory := {view: part for view in rows.tables if len(part := rows.in_memory(view))}:
        views, contents[ROWS] = _rows_bytes(in_memory, level)
    checksums = {}
    for name, content in contents.items():
        (folder / f"{name}.parquet").write_bytes(content)
        checksums[f"{name}.parquet"] = hashlib.sha256(content).hexdigest()
    write_json(folder / INDEX, {"version": VERSION, **facts, "views": views, "files": checksums})


def _rows_bytes(tables: Mapping[Table, pa.Table], level: int | None) -> tuple[dict[Table, tuple[int, int]], bytes]:
    """The row groups of each view, and the Parquet file that has them all."""
    views: dict[Table, tuple[int, int]] = {}
    fields = {field.name: field for table in TABLES for field in view_schema(table)}  # a name has the same type in all
    schema = pa.schema([pa.field("view", pa.string()), *fields.values()])
    content = io.BytesIO()
    floats = [field.name for field in schema if pa.types.is_floating(field.type)]
    with pq.ParquetWriter(
        content,
        schema,
        compression=codec_of(sum(rows.nbytes for rows in tables.values()), level),
        compression_level=level,
        # a dictionary of distinct floats only adds bytes
        use_dictionary=[name for name in schema.names if name not in floats],
        use_byte_stream_split=floats,
    ) as writer:
        end = 0
        for view, rows in tables.items():
            named = rows.append_column("view", _repeated(view, len(rows)))
            whole = pa.concat_tables([empty_table(schema), named], promote_options="default")  # NULL where it lacks one
            writer.write_table(whole, row_group_size=GROUP_ROWS)
            first, end = end, end + math.ceil(len(rows) / GROUP_ROWS)
            views[view] = first, end
    return views, content.getvalue()


def read_index(folder: Path) -> Named:
    """The index. Raises ValueError or OSError where it is missing or invalid."""
    index = parse_json(read_regular(folder / INDEX))
    if not isinstance(index, dict) or not all(isinstance(index.get(name, {}), dict) for name in ("files", "views")):
        raise ValueError("is not an index of tables")
    return {"files": {}, **index}


def open_file(folder: Path, index: Row, name: str) -> StoredTable | None:
    """An open file, its checksum verified; None if the index lists none of that name. Raises ValueError or OSError."""
    expected = index["files"].get(f"{name}.parquet")
    if expected is None:
        return None
    path = folder / f"{name}.parquet"
    if not stat.S_ISREG(os.lstat(path).st_mode):  # a link or a pipe is not opened
        raise ValueError("is no file")
    file = pa.OSFile(str(path))
    if hashlib.file_digest(file, "sha256").hexdigest() != expected:
        raise ValueError("is not the file that was written (its checksum differs)")
    file.seek(0)
    metadata = pq.read_metadata(file)
    return StoredTable(path, file, metadata.schema.to_arrow_schema(), range(metadata.num_row_groups))


def read_table(folder: Path, index: Row, name: str, schema: pa.Schema) -> pa.Table:
    """The columns of a schema in a file. Raises as `open_file` does."""
    file = open_file(folder, index, name)
    return file.part(schema).in_memory() if file else empty_table(schema)


def read_runs(folder: Path, index: Row) -> pa.Table:
    """`runs`, `completed`; its keys alone of a version that is not READABLE, or where it lacks what a plugin that was
    not loaded when it was written measured. Raises as `open_file` does."""
    schema = runs_schema()
    file = open_file(folder, index, "runs")
    if file is None:
        return empty_table(schema)
    present = {*file.schema.names}
    lacking = {each.measure for each in quantities.RUNS if each.name not in present}
    is_readable = index.get("version") in READABLE
    if is_readable and lacking and "plugins" in present:
        made = file.part(pa.schema([schema.field("plugins")])).in_memory()["plugins"]
        is_readable = not lacking & plugins_of(made.to_pylist()).keys()
    wanted = present if is_readable else {"run_id", "folder", *MARKER_COLUMNS}
    runs = file.part(pa.schema([field for field in schema if field.name in wanted])).in_memory()
    return completed(runs, schema) if is_readable else runs


def open_views(folder: Path, index: Row) -> dict[Table, pa.Table | LazyTable]:
    """All views but `runs`, from one open file. Raises as `open_file` does."""
    views: dict[Table, pa.Table | LazyTable] = {view: empty_table(view_schema(view)) for view in TABLES}
    if "views" in index:
        file = open_file(folder, index, ROWS)
        ends = {view: index["views"].get(view, (0, 0)) for view in TABLES}
        stored = [(view, file, range(first, end)) for view, (first, end) in ends.items()]
    else:  # 0.1.0 wrote a file for each
        stored = [(view, open_file(folder, index, view), None) for view in TABLES]
    for view, file, groups in stored:
        if file and (part := file.part(view_schema(view), groups)).groups:
            views[view] = part
    return views


def completed(runs: pa.Table, schema: pa.Schema) -> pa.Table:
    """`runs` with the columns that it was written without: a field of the configuration has its default in every run
    whose configuration is known, a quantity and `plugins` are NULL. Raises ValueError where another is missing."""
    present = frozenset(runs.column_names)
    absent = [field for field in schema if field.name not in present]
    if not absent:
        return runs.select(schema.names)
    fields = RunConfig.model_fields
    later = {column.name for column in (*MANIFEST_COLUMNS, *quantities.RUNS)}
    if missing := [field.name for field in absent if field.name not in fields and field.name not in later]:
        raise OtherColumns(missing[0])
    defaults = {field.name: stored_value(fields[field.name].default) for field in absent if field.name in fields}
    known = [defaults if value is not None else {} for value in runs["warmup_frac"].to_pylist()]
    filled = rows_table(known, pa.schema(absent))
    columns = [(runs if name in present else filled)[name] for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)


# From records to rows


def read_rows(
    stored: Iterable[StoredRun], damaged: list[DamagedRun] | None = None, *, with_tables: bool = True
) -> Rows:
    """Read and verify records, all files even without tables. Raises DamagedRun, or adds it to the list if given."""
    runs: list[Named] = []
    tables = {table: [empty_table(view_schema(table))] for table in (TABLES if with_tables else ())}
    for record in stored:
        with collecting(damaged):
            run = parse_record(record.files())
            checksums = {name: getattr(record, name) for name in MARKER_COLUMNS}
            runs.append({**_run_row(run), "folder": record.place, **checksums})
            for table, parts in tables.items():
                if len(rows := run.tables[table]):
                    columns = [_repeated(run.run_id, len(rows)), *rows.columns]
                    parts.append(pa.Table.from_arrays(columns, schema=view_schema(table)))
    return Rows(
        runs=rows_table(runs, runs_schema()), tables={table: pa.concat_tables(parts) for table, parts in tables.items()}
    )


_TYPES = {column.name: column.type for column in RUN_COLUMNS}
_KINDS = {
    "BIGINT": (int, 2**63 - 1), "DOUBLE": (float, sys.float_info.max), "VARCHAR": (str, None), "BOOLEAN": (bool, None)
}  # fmt: skip
"""Type of a column -> Python type of its values, and their largest magnitude."""


def _run_row(run: Record) -> Named:
    """The record as a row of `runs`, without NULL. Raises DamagedRun for a value that does not fit its column."""
    facts = {column.name: run.manifest.get(column.name) for column in MANIFEST_COLUMNS}
    for name in ("packages", "plugins"):
        if isinstance(facts[name], dict):
            facts[name] = json.dumps(facts[name], sort_keys=True)
    parts = {
        subject_file(run.subject): _subject_columns(run.subject),
        "summary.json": {column.name: run.summary.get(column.name) for column in quantities.RUNS},
        "manifest.json": facts,
    }
    row = {"run_id": run.run_id}
    for file, values in parts.items():
        row |= _typed(run, file, values)
    return row


def _subject_columns(subject: Subject) -> Named:
    """The cell, and the known fields of RunConfig: few for a measured model, those of its table for an imported run."""
    if isinstance(subject, ImportedRun):
        return {
            "cell_id": subject.cell_id,
            "origin": subject.origin,
            "cluster": subject.cluster,
            "unknown_fields": ",".join(subject.unknown),
            **{name: stored_value(value) for name, value in subject.config.items()},
        }
    if isinstance(subject, RunConfig):
        return {**_cell_columns(subject.cell), **{name: getattr(subject, name) for name in REPLICATE_FIELDS}}
    return {"cell_id": f"c-{subject.run_id}", "model": subject.model, **stored_fields(subject)}


@functools.lru_cache(maxsize=2048)
def _cell_columns(cell: RunConfig) -> Named:
    """The columns that all replicates share."""
    return {"cell_id": cell.cell_id, **without_none(stored_fields(cell))}


def _typed(run: Record, file: str, values: Row) -> Named:
    """The values that are not NULL, each in its column's type. Raises DamagedRun."""
    typed = {}
    for name, value in values.items():
        if value is None:
            continue
        kind, largest = _KINDS[_TYPES[name]]
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if not is_kind or (largest is not None and not -largest <= value <= largest):
            raise DamagedRun(run.folder, file, f"has {name}={str(value)[:40]!r}, which is not a {_TYPES[name]}")
        typed[name] = utf8(value) if kind is str and not value.isascii() else value
    return typed


@functools.cache
def view_schema(view: Table) -> pa.Schema:
    return arrow_schema(COLUMNS[view])


@functools.cache
def runs_schema() -> pa.Schema:
    return pa.schema([*view_schema("runs"), *(pa.field(name, pa.string()) for name in MARKER_COLUMNS)])


def _repeated(run_id: str, n: int) -> pa.Array:
    """`run_id` n times; from buffers, also to avoid importing pandas."""
    offsets = array("i", range(0, len(run_id) * (n + 1), len(run_id)))
    return pa.Array.from_buffers(pa.string(), n, [None, pa.py_buffer(offsets), pa.py_buffer(run_id.encode() * n)])
