"""A cache of the rows of the views: the run folders of a results folder in segments, each of up to SEGMENT_RUNS runs.

    RESULTS/.cache/<12 hex digits>/   runs.parquet  rows.parquet  pack.json

A segment is a pack without the records (`store.stored_rows`), and can be deleted at any time. Its key for a run is the
checksum of the marker, which covers all files: replaced, moved and removed runs are detected, and only new ones are
read and verified, in the memory of one segment. Of many new runs a segment has `runs` alone (its `Rows.tables` is
empty), until a query names another table. Small segments are merged into one at least twice as large, so that a run is
rewritten few times. A read-only folder has no cache; a pack needs none, unless it was written with other columns."""

import functools
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from sparsedepth.files import atomic_folder, digest, write_text
from sparsedepth.quantities.quantity import Named, Table
from sparsedepth.store import stored_rows
from sparsedepth.store.checksums import DamagedRun, is_complete
from sparsedepth.store.packs import Part, find_runs
from sparsedepth.store.parquet import empty_table
from sparsedepth.store.run_record import RUNS
from sparsedepth.store.schema import TABLES
from sparsedepth.store.stored_rows import Rows, StoredRun, UnreadTable, read_rows, view_schema
from sparsedepth.words.runs import damage_text

CACHE_FROM = 32
"""Fewer runs need no cache."""
SEGMENT_RUNS = 512
FRESH = 8
"""Fewer new runs are read beside the cache."""
TABLES_LATER_FROM = 500
"""From so many new runs on, tables other than `runs`, which take six times as long, are read when a query names one."""

_NAME = re.compile(r"[0-9a-f]{12}")
_LATER = "tables_later"
"""In the index of a segment that has `runs` alone."""


def load(part: Part, damaged: list[DamagedRun] | None = None) -> list[Rows]:
    """The rows of these runs, from their pack or cache if possible. Raises as `read_rows` does."""
    if part.pack and _is_readable(part.pack.runs):
        return [part.pack.rows()]
    if len(part.runs) < CACHE_FROM:
        return [read_rows(part.runs, damaged)]
    folder = part.root / ".cache"
    segments = _segments(folder, part)
    known = {key for segment in segments for key in segment.keys}
    fresh = [run for run in part.runs if run.key not in known]
    if segments and len(fresh) < FRESH:
        beside = [read_rows(fresh, damaged)] if fresh else []
        return [*_with_tables(folder, segments, part.runs, damaged), *beside]
    for first in range(0, len(fresh), SEGMENT_RUNS):
        new = fresh[first : first + SEGMENT_RUNS]
        segments = _added(folder, segments, read_rows(new, damaged, with_tables=len(fresh) < TABLES_LATER_FROM))
    return _with_tables(folder, segments, part.runs, damaged)


def read_columns(results: Path, names: Iterable[str], damaged: list[DamagedRun]) -> dict[str, Named]:
    """run_id -> some columns of `runs`, of trained runs in a results folder, without a database. Raises as `load`."""
    columns = [*dict.fromkeys(("run_id", "folder", *names))]
    loaded = [rows for part in find_runs([results], damaged) if part.root == results for rows in load(part, damaged)]
    runs = [run for rows in loaded for run in rows.runs.select(columns).to_pylist()]
    return {run["run_id"]: run for run in runs if run["folder"] == f"{RUNS}/{run['run_id']}"}


# Reading


def _segments(folder: Path, part: Part) -> list[Rows]:
    """The segments with runs of this part, the largest first, each run once; those of no use are deleted."""
    if folder.is_symlink():
        return []
    names = _names(folder)
    opened = dict[str, Rows | None]()
    for _ in range(3):  # another process may merge some meanwhile
        opened = {name: _open(folder / name) for name in names}
        if all(opened.values()) or names == (names := _names(folder)):
            break
    expected = {run.key for run in part.runs}
    missing = set(expected)
    segments = []
    for name, segment in sorted(opened.items(), key=lambda item: -len(item[1] or ())):
        keys = segment.keys if segment else []
        kept = [key in missing for key in keys]
        missing.difference_update(keys)
        if segment and any(kept):
            segments.append(segment if all(kept) else _only(segment, kept))
        elif not any(is_complete(part.root / place) for _, place in {*keys} - expected):  # which came meanwhile
            shutil.rmtree(folder / name, ignore_errors=True)
    return segments


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if _NAME.fullmatch(path.name) and not path.is_symlink())


def _open(folder: Path) -> Rows | None:
    """The segment; None if it is missing, damaged or of another version."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        index = stored_rows.read_index(folder)
        if _is_readable(runs := stored_rows.read_runs(folder, index)):
            views = {} if index.get(_LATER) else stored_rows.open_views(folder, index)
            return Rows(runs=runs, tables=views, folder=folder)
    return None


def _is_readable(runs: pa.Table) -> bool:
    """Whether `stored_rows.read_runs` has more than keys."""
    return runs.column_names == stored_rows.runs_schema().names


def _only(rows: Rows, kept: Sequence[bool]) -> Rows:
    """Some of the runs; the others stay in the tables, and are named."""
    run_ids = rows.runs["run_id"].to_pylist()
    left_out = frozenset(run_id for run_id, is_kept in zip(run_ids, kept, strict=True) if not is_kept)
    return replace(rows, runs=rows.runs.filter(pa.array(kept, pa.bool_())), left_out=left_out)


def _with_tables(
    folder: Path, segments: Iterable[Rows], runs: Iterable[StoredRun], damaged: list[DamagedRun] | None
) -> list[Rows]:
    """The segments in the order of their first places; tables that one lacks are read, and cached, when named."""
    by_key = {run.key: run for run in runs}

    def with_tables_later(segment: Rows) -> Rows:
        @functools.cache
        def read() -> Rows:
            newly_damaged = None if damaged is None else []
            written = _written(folder, read_rows((by_key[key] for key in segment.keys), newly_damaged), [segment])
            if newly_damaged:
                warnings.warn(damage_text(newly_damaged), stacklevel=2)
            return written

        return replace(segment, tables={table: UnreadTable(table, read) for table in TABLES})

    whole = sorted(filter(len, segments), key=lambda segment: min(place for _, place in segment.keys))
    return [segment if segment.tables else with_tables_later(segment) for segment in whole] or [read_rows([])]


# Writing


def _added(folder: Path, segments: Sequence[Rows], new: Rows) -> list[Rows]:
    """The segments and a new one, written together with those that are no larger than what they are merged with."""
    merged = [new]
    for segment in sorted(segments, key=len):
        n = sum(map(len, merged))
        if not (new.tables and segment.tables) or len(segment) > min(n, SEGMENT_RUNS - n):
            break
        merged.append(segment)
    others = [segment for segment in segments if segment not in merged]
    return [*others, _written(folder, new if len(merged) == 1 else _joined(merged), merged)]


def _joined(segments: Sequence[Rows]) -> Rows:
    import pyarrow.compute as pc  # slow to import, and rarely needed

    def kept(table: Table) -> Iterator[pa.Table]:
        yield empty_table(view_schema(table))
        for rows in segments:
            yield rows.in_memory(table).filter(pc.field("run_id").isin(rows.runs["run_id"].combine_chunks()))

    views = {table: pa.concat_tables(kept(table)) for table in TABLES}
    return Rows(runs=pa.concat_tables([rows.runs for rows in segments]), tables=views)


def _written(folder: Path, rows: Rows, replaced: Iterable[Rows]) -> Rows:
    """The rows as a segment in files, in place of others; in memory if the folder is read-only, full or a link."""
    is_later = not rows.tables
    place = folder / digest([is_later, sorted(rows.keys)])
    if folder.is_symlink() or not len(rows):
        return rows
    try:
        if not (folder / ".gitignore").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / ".gitignore", "*\n")
        with atomic_folder(place) as aside:
            stored_rows.write_tables(aside, rows, {_LATER: True} if is_later else {})
    except OSError:
        return rows
    segment = _open(place)
    for old in replaced:
        if segment and old.folder and old.folder != place:
            shutil.rmtree(old.folder, ignore_errors=True)
    return segment or rows
