"""From run folders to the rows of the views, quickly: thousands of folders are compacted into one file per view.

    RESULTS/.cache/{runs,curves,layers,heads,pairs}.parquet
    RESULTS/.cache/index.json                               last: their checksums

The cache is derived: delete it at any time. It holds each run under the checksum of its marker, which covers the
checksums of all its files, so a run that was replaced, moved or removed is noticed, and only what is new is read (and
verified) again. A cache that is damaged or half-written is made again; a results folder that cannot be written goes
without.
"""

import hashlib
import io
import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from sparsedepth import quantities
from sparsedepth.config.run import DEFAULTS_VERSION, RunConfig
from sparsedepth.files import digest, write_bytes, write_json, write_text
from sparsedepth.quantities.record import Column, Table
from sparsedepth.store.evals import FOLDER as EVALS
from sparsedepth.store.folder import (
    CONFIG,
    MODEL,
    DamagedRun,
    Marker,
    Measured,
    Run,
    arrow_type,
    is_complete,
    read_marker,
    read_record,
)
from sparsedepth.store.schema import COLUMNS, RUN_COLUMNS, TABLES
from sparsedepth.toy.record import FOLDER as TOYS

if TYPE_CHECKING:
    import pyarrow.dataset as ds

DEPTH = 3
"""How many levels below a given folder run folders may lie."""

CACHE_FROM = 32
"""Fewer runs than this are read faster than a cache is worth."""

STALE_SHARE = 1 / 16
"""The cache is rewritten when this share of its runs would have to be read anew: each run is rewritten few times."""

VERSION = digest([1, DEFAULTS_VERSION, [repr(columns) for columns in COLUMNS.values()]])
"""A cache written under other columns is not used."""

CACHE_KEY = "cache_key"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete run folder, located but not read."""

    folder: Path
    place: str
    """Path below the folder it was found in."""
    marker: Marker

    @cached_property
    def key(self) -> str:
        return f"{self.marker.digest} {self.place}"


@dataclass(frozen=True)
class CachedTable:
    """A table of the cache behind an open handle: it stays what it is while another process rewrites the cache."""

    file: pa.NativeFile

    def dataset(self) -> "ds.Dataset":
        """The table as a Dataset, of which a query reads only the columns and metrics it needs."""
        import pyarrow.dataset as ds  # 0.3 s, because it imports pandas; a question to `runs` alone does without

        text = ds.ParquetReadOptions(dictionary_columns={"run_id", "metric"})
        fragment = ds.ParquetFileFormat(read_options=text).make_fragment(self.file)
        return ds.FileSystemDataset([fragment], schema=fragment.physical_schema, format=fragment.format)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of some runs of one results folder, as the views show them."""

    runs: pa.Table
    """RUN_COLUMNS and the cache key; `folder` is relative to the results folder."""
    tables: dict[Table, pa.Table | CachedTable]


def find_runs(root: Path) -> list[Found]:
    """The complete runs at or at most DEPTH levels below `root`, in order of path. Links are not followed and hidden
    folders are passed over. Raises ValueError where `root` is no readable folder, or where two runs of one run_id
    differ; an equal copy is left out."""
    try:
        return unique(
            Found(folder=folder, place=_utf8(folder.relative_to(root).as_posix()), marker=read_marker(folder))
            for folder in _complete_folders(root, DEPTH)
        )
    except OSError as error:
        raise ValueError(
            f"results folder {str(root)!r} cannot be read ({error.strerror}: {error.filename!r}); "
            f"name a folder that exists and may be read"
        ) from None


def _complete_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_complete(folder):
        if folder.parent.name not in (TOYS, EVALS):
            yield folder
    elif depth:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            )
        # a results folder also holds text and unfinished work
        for name in [name for name in names if name in ("models", "runs")] if "runs" in names else names:
            yield from _complete_folders(folder / name, depth - 1)


def unique(found: Iterable[Found]) -> list[Found]:
    """Each run once. Raises ValueError where the same run_id has two different summaries."""
    first: dict[str, Found] = {}
    for run in found:
        other = first.setdefault(run.marker.run_id, run)
        if run.marker.files["summary.json"] != other.marker.files["summary.json"]:
            raise ValueError(
                f"run {run.marker.run_id} lies in {str(other.folder)!r} and in {str(run.folder)!r} "
                f"with different results; leave one of the two out"
            )
    return list(first.values())


def load(root: Path, found: list[Found]) -> list[Rows]:
    """The rows of the runs that were found in `root`, from its cache where possible. Raises DamagedRun."""
    if len(found) < CACHE_FROM:
        return [read_rows(found)]
    cached = _open_cache(root)
    known = set() if cached is None else set(cached.runs[CACHE_KEY].to_pylist())
    fresh = [run for run in found if run.key not in known]
    if cached is not None and len(known) + len(fresh) == len(found) and len(fresh) <= STALE_SHARE * len(known):
        return [cached, read_rows(fresh)] if fresh else [cached]
    rows = read_rows(fresh)
    if cached:
        rows = _joined(_keep(cached, [run.key for run in found]), rows)
    _write_cache(root, rows)
    return [rows]


# Reading run folders


def read_rows(found: list[Found]) -> Rows:
    """Read and verify run folders. Raises DamagedRun."""
    runs: list[dict[str, Any]] = []
    tables: dict[Table, list[pa.Table]] = {table: [pa.Table.from_batches([], view_schema(table))] for table in TABLES}
    for place in found:
        run = read_record(place.folder)
        runs.append({**_run_row(run), "folder": place.place, CACHE_KEY: place.key})
        for table, rows in run.tables.items():
            tables[table].append(
                rows.add_column(0, "run_id", _repeated(run.run_id, len(rows))).cast(view_schema(table))
            )
    return Rows(
        runs=_runs_table(runs),
        tables={table: pa.concat_tables(parts) for table, parts in tables.items()},
    )


def view_schema(view: Table) -> pa.Schema:
    """The Arrow schema of a view's rows."""
    return pa.schema([pa.field(column.name, arrow_type(column)) for column in COLUMNS[view]])


def _runs_schema() -> pa.Schema:
    return view_schema("runs").append(pa.field(CACHE_KEY, pa.string()))


def _runs_table(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows as an Arrow table. By way of JSON, because `pa.array` on Python values imports pandas, which takes
    longer than the rest of opening a small store."""
    if not rows:
        return pa.Table.from_batches([], _runs_schema())
    content = "\n".join(map(json.dumps, rows)).encode()
    return pyarrow.json.read_json(
        io.BytesIO(content),
        read_options=pyarrow.json.ReadOptions(block_size=len(content) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=_runs_schema(), unexpected_field_behavior="error"),
    ).select(_runs_schema().names)


def _repeated(run_id: str, n: int) -> pa.Array:
    """`run_id` n times; from buffers for the same reason."""
    offsets = array("i", range(0, len(run_id) * (n + 1), len(run_id)))
    return pa.Array.from_buffers(pa.string(), n, [None, pa.py_buffer(offsets), pa.py_buffer(run_id.encode() * n)])


def _utf8(text: str) -> str:
    """The text with what UTF-8 cannot express (half characters, undecodable file names) as '?'."""
    return text.encode(errors="replace").decode()


FACTS = ("device", "started", "seconds", "training_seconds", "planned_seconds", "peak_memory_bytes")
FACTS = (*FACTS, "planned_memory_bytes", "packages")
"""What the columns of `runs` take from a manifest."""


def _run_row(run: Run | Measured) -> dict[str, Any]:
    facts = {name: run.manifest.get(name) for name in FACTS}
    if isinstance(facts["packages"], dict):
        facts["packages"] = json.dumps(facts["packages"], sort_keys=True)
    summary = {column.name: run.summary.get(column.name) for column in quantities.RUNS}
    values = {"run_id": run.run_id, **_config_columns(run), **summary, **facts}
    return {column.name: _typed(run, column, values.get(column.name)) for column in RUN_COLUMNS}


def _config_columns(run: Run | Measured) -> dict[str, Any]:
    """What is known of the RunConfig's fields, which for a measured model is little; and what names the cell."""
    subject = run.config if isinstance(run, Run) else run.model
    named = (
        {"cell_id": run.config.cell_id} if isinstance(run, Run) else {"cell_id": run.run_id, "model": run.model.model}
    )
    values = {name: getattr(subject, name, None) for name in RunConfig.model_fields}
    return named | {name: json.dumps(value) if isinstance(value, tuple) else value for name, value in values.items()}


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "BIGINT": (int,),
    "DOUBLE": (int, float),
    "VARCHAR": (str,),
    "BOOLEAN": (bool,),
}


_LARGEST = {"BIGINT": 2**63 - 1, "DOUBLE": sys.float_info.max}


def _typed(run: Run | Measured, column: Column, value: Any) -> Any:
    fits = value is None or (
        isinstance(value, _PYTHON_TYPES[column.type])
        and isinstance(value, bool) == (column.type == "BOOLEAN")
        and (column.type not in _LARGEST or abs(value) <= _LARGEST[column.type])
    )
    if not fits:
        in_config = column.name in RunConfig.model_fields
        in_summary = column in quantities.RUNS
        name = (
            (CONFIG if isinstance(run, Run) else MODEL)
            if in_config
            else "summary.json"
            if in_summary
            else "manifest.json"
        )
        raise DamagedRun(run.folder, name, f"has {column.name}={str(value)[:40]!r}, which is not a {column.type}")
    return _utf8(value) if isinstance(value, str) else value


# The cache's own files


def _cache_folder(root: Path) -> Path | None:
    folder = root / ".cache"
    return None if folder.is_symlink() else folder


def _open_cache(root: Path) -> Rows | None:
    """The cache of a results folder, or None where there is none that is whole and of this version."""
    folder = _cache_folder(root)
    if folder is None:
        return None
    try:
        index = json.loads((folder / "index.json").read_bytes())
        if index["version"] != VERSION:
            return None
        files = {name: pa.OSFile(str(folder / f"{name}.parquet")) for name in COLUMNS}
        if any(_sha256(file) != index["files"][name] for name, file in files.items()):
            return None
        runs = pq.ParquetFile(files["runs"]).read()
        return Rows(runs=runs, tables={table: CachedTable(files[table]) for table in TABLES})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _sha256(file: pa.NativeFile) -> str:
    found = hashlib.sha256()
    while block := file.read(2**20):
        found.update(block)
    file.seek(0)
    return found.hexdigest()


def _keep(rows: Rows, keys: list[str]) -> Rows:
    """The cached runs that still exist, in memory."""
    runs = rows.runs.filter(pc.field(CACHE_KEY).isin(pa.array(keys, pa.string())))
    existing = pc.field("run_id").isin(runs["run_id"].combine_chunks())
    return Rows(runs=runs, tables={name: _in_memory(table).filter(existing) for name, table in rows.tables.items()})


def _in_memory(table: pa.Table | CachedTable) -> pa.Table:
    return pq.ParquetFile(table.file).read() if isinstance(table, CachedTable) else table


def _joined(first: Rows, second: Rows) -> Rows:
    return Rows(
        runs=pa.concat_tables([first.runs, second.runs]),
        tables={
            table: pa.concat_tables([_in_memory(first.tables[table]), _in_memory(second.tables[table])])
            for table in TABLES
        },
    )


def _write_cache(root: Path, rows: Rows) -> None:
    folder = _cache_folder(root)
    if folder is None:
        return
    checksums = {}
    try:
        folder.mkdir(exist_ok=True)
        write_text(folder / ".gitignore", "*\n")
        for name, table in (("runs", rows.runs), *rows.tables.items()):
            assert isinstance(table, pa.Table)
            content = pa.BufferOutputStream()
            pq.write_table(table, content, compression="zstd")
            checksums[name] = hashlib.sha256(content.getvalue()).hexdigest()
            write_bytes(folder / f"{name}.parquet", content.getvalue().to_pybytes())
        write_json(folder / "index.json", {"version": VERSION, "files": checksums})
    except OSError:
        return  # read-only or full: the next reader reads the folders again
