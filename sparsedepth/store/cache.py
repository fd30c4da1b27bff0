"""A cache of the rows of the views: the run folders of a results folder in two files.

    RESULTS/.cache/runs.parquet  rows.parquet  pack.json
    RESULTS/.cache/runs/     `runs` alone, of a large folder whose tables were not queried yet

The cache is a pack without the records (`store.tables`), and can be deleted at any time. Its key for a run is the
checksum of the marker, which covers the checksums of all files, so replaced, moved and removed runs are detected, and
only new ones are read (and verified). A damaged cache is made again; a read-only results folder has none; a pack needs
none, unless it was written with other columns.
"""

import functools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparsedepth.files import write_text
from sparsedepth.store.checksums import DamagedRun, damage_text
from sparsedepth.store.find import Part, find_runs
from sparsedepth.store.run_record import RUNS
from sparsedepth.store.schema import TABLES
from sparsedepth.store.tables import READABLE, Rows, UnreadTable, open_rows, read_index, read_rows, write_tables

CACHE_FROM = 32
"""Fewer runs need no cache."""

TABLES_LATER_FROM = 500
"""From so many uncached runs on, tables other than `runs` are read when a query names one: parsing and writing them
takes longer than everything else together."""

STALE_SHARE = 1 / 16
"""The cache is rewritten when it lacks more than this share of the runs, so that each run is rewritten few times."""


def load(part: Part, damaged: list[DamagedRun] | None = None) -> list[Rows]:
    """The rows of these runs, from their pack or cache if possible. Raises DamagedRun; given a list, damaged runs are
    added to it instead."""
    if part.pack and (rows := part.pack.rows()):
        return [rows]
    if len(part.runs) < CACHE_FROM:
        return [read_rows(part.runs, damaged)]
    folder = part.root / ".cache"
    cached = _open_cache(folder)
    is_later = cached is None and len(part.runs) >= TABLES_LATER_FROM and not folder.is_symlink()
    if is_later and (cached := _open_cache(folder / "runs")):
        cached = _with_tables_later(folder, cached.runs, part, damaged)
    known = set() if cached is None else set(cached.keys)
    fresh = [run for run in part.runs if run.key not in known]
    if cached is not None and len(known) + len(fresh) == len(part.runs) and len(fresh) <= STALE_SHARE * len(known):
        return [cached, read_rows(fresh, damaged)] if fresh else [cached]
    rows = read_rows(fresh, damaged, with_tables=not is_later)
    if is_later:
        runs = rows.runs if cached is None else pa.concat_tables([_existing(cached.runs, part), rows.runs])
        _write_cache(folder / "runs", Rows(runs=runs, tables={}))
        return [_with_tables_later(folder, runs, part, damaged)]
    if cached:
        rows = _extended(cached, part, rows)
    _write_cache(folder, rows)
    return [rows]


def _with_tables_later(folder: Path, runs: pa.Table, part: Part, damaged: list[DamagedRun] | None) -> Rows:
    """These rows of `runs`, with tables that are read and cached when a query names one."""

    @functools.cache
    def read() -> Rows:
        keys = set(Rows(runs=runs, tables={}).keys)
        newly_damaged = None if damaged is None else []
        rows = read_rows((run for run in part.runs if run.key in keys), newly_damaged)
        _write_cache(folder, rows)
        if newly_damaged:
            warnings.warn(damage_text(newly_damaged), stacklevel=2)
        return rows

    return Rows(runs=runs, tables={table: UnreadTable(table, read) for table in TABLES})


def read_columns(
    results: Path, names: Iterable[str], damaged: list[DamagedRun] | None = None
) -> dict[str, dict[str, Any]]:
    """run_id -> some columns of `runs`, for the trained runs in a results folder, without a database. Raises as `load`
    does."""
    rows: dict[str, dict[str, Any]] = {}
    columns = ("run_id", "folder", *names)
    for part in find_runs([results], damaged):
        for runs in (loaded.runs for loaded in load(part, damaged) if part.root == results):
            values = [runs[name].to_pylist() for name in columns]
            for row in zip(*values, strict=True):
                if row[1] == f"{RUNS}/{row[0]}":
                    rows[row[0]] = dict(zip(columns, row, strict=True))
    return rows


def _open_cache(folder: Path) -> Rows | None:
    """The cache; None if it is missing, damaged or of another version."""
    try:
        if folder.is_symlink():
            return None
        index = read_index(folder)
        return open_rows(folder, index) if index["version"] in READABLE else None
    except (OSError, ValueError, KeyError):
        return None


def _existing(runs: pa.Table, part: Part) -> pa.Table:
    """The cached runs that still exist."""
    keys = {run.key for run in part.runs}
    return runs.filter(pa.array([key in keys for key in Rows(runs=runs, tables={}).keys], pa.bool_()))


def _extended(cached: Rows, part: Part, fresh: Rows) -> Rows:
    """The cached rows of runs that still exist, and fresh ones, in memory."""
    import pyarrow.compute as pc  # slow to import, and rarely needed

    runs = _existing(cached.runs, part)
    exists = pc.field("run_id").isin(runs["run_id"].combine_chunks())
    tables = {
        table: pa.concat_tables([cached.in_memory(table).filter(exists), fresh.in_memory(table)]) for table in TABLES
    }
    return Rows(runs=pa.concat_tables([runs, fresh.runs]), tables=tables)


def _write_cache(folder: Path, rows: Rows) -> None:
    if folder.is_symlink():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".gitignore", "*\n")
        write_tables(folder, rows, {})
    except OSError:
        return  # read-only or full: no cache
