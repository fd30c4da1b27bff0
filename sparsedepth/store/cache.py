"""The rows of the views, quickly: the run folders of a results folder are compacted into two files.

    RESULTS/.cache/runs.parquet  rows.parquet  pack.json
    RESULTS/.cache/runs/     `runs` alone, of a large folder whose tables no question has asked for yet

The cache is a pack without the records (`store.tables`). It is derived: delete it at any time. It holds each run under
the checksum of its marker, which covers the checksums of all its files, so a run that was replaced, moved or removed is
noticed, and only what is new is read (and verified) again. A cache that is damaged or half-written is made again; a
results folder that cannot be written goes without. A pack needs none, unless it was written with other columns.
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
from sparsedepth.store.tables import VERSION, Rows, UnreadTable, open_rows, read_index, read_rows, write_tables

CACHE_FROM = 32
"""Fewer runs than this are read faster than a cache is worth."""

TABLES_LATER_FROM = 500
"""Of so many runs and more that are met for the first time the tables are read when a question names one: to parse and
write them takes longer than everything else together."""

STALE_SHARE = 1 / 16
"""The cache is rewritten when this share of its runs would have to be read anew: each run is rewritten few times."""


def load(part: Part, damaged: list[DamagedRun] | None = None) -> list[Rows]:
    """The rows of the runs that were found, from their pack or cache where possible. Raises DamagedRun; given a list,
    damaged ones are left out and added to it."""
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
        runs = rows.runs if cached is None else pa.concat_tables([_kept(cached.runs, part), rows.runs])
        _write_cache(folder / "runs", Rows(runs=runs, tables={}))
        return [_with_tables_later(folder, runs, part, damaged)]
    if cached:
        rows = _joined(_keep(cached, part), rows)
    _write_cache(folder, rows)
    return [rows]


def _with_tables_later(folder: Path, runs: pa.Table, part: Part, damaged: list[DamagedRun] | None) -> Rows:
    """These rows of `runs`, with tables that are read, and cached, when a question names one."""

    @functools.cache
    def read() -> Rows:
        keys = set(Rows(runs=runs, tables={}).keys)
        since = None if damaged is None else []
        rows = read_rows((run for run in part.runs if run.key in keys), since)
        _write_cache(folder, rows)
        if since:
            warnings.warn(damage_text(since), stacklevel=2)
        return rows

    return Rows(runs=runs, tables={table: UnreadTable(table, read) for table in TABLES})


def read_columns(
    results: Path, names: Iterable[str], damaged: list[DamagedRun] | None = None
) -> dict[str, dict[str, Any]]:
    """run_id -> some columns of `runs`, of a results folder's own trained runs, without a database. Raises as `load`
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
    """The cache, or None where there is none that is whole and of this version."""
    try:
        if folder.is_symlink():
            return None
        index = read_index(folder)
        return open_rows(folder, index) if index["version"] == VERSION else None
    except (OSError, ValueError, KeyError):
        return None


def _kept(runs: pa.Table, part: Part) -> pa.Table:
    """The cached runs that still exist."""
    keys = {run.key for run in part.runs}
    return runs.filter(pa.array([key in keys for key in Rows(runs=runs, tables={}).keys], pa.bool_()))


def _keep(rows: Rows, part: Part) -> Rows:
    """The same with their tables, in memory."""
    import pyarrow.compute as pc  # slow to load, and for few

    runs = _kept(rows.runs, part)
    existing = pc.field("run_id").isin(runs["run_id"].combine_chunks())
    return Rows(runs=runs, tables={table: rows.in_memory(table).filter(existing) for table in TABLES})


def _joined(first: Rows, second: Rows) -> Rows:
    return Rows(
        runs=pa.concat_tables([first.runs, second.runs]),
        tables={table: pa.concat_tables([first.in_memory(table), second.in_memory(table)]) for table in TABLES},
    )


def _write_cache(folder: Path, rows: Rows) -> None:
    if folder.is_symlink():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / ".gitignore", "*\n")
        write_tables(folder, rows, {})
    except OSError:
        return  # read-only or full: the next reader reads the folders again
