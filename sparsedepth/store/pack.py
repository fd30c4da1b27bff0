"""Packs: a results folder as a few files (`sparsedepth pack`).

    PACK/runs.parquet, rows.parquet   the rows of the views (`store.tables`)
    PACK/records.parquet    place, name, content: all other files of the records, unchanged
    PACK/pack.json          last: the checksums of the above
    PACK/...                the other files of the results folder: sweep.yaml, figures

A pack is read like the folder, as fast as a cache. The Parquet files of a run are made again from the rows when they
are needed.
"""

import functools
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from sparsedepth.files import MARKER
from sparsedepth.quantities.record import Table
from sparsedepth.store import tables
from sparsedepth.store.checksums import RUN_ID, DamagedRun, Files, Marker, parse_marker
from sparsedepth.store.run_record import INDEX, KINDS
from sparsedepth.store.run_tables import file_schema, table_bytes
from sparsedepth.store.schema import TABLES
from sparsedepth.store.tables import ROWS, LazyTable, Rows, StoredRun

T = TypeVar("T")
RECORDS = "records"
WORK = "work"
RECORDS_SCHEMA = pa.schema({"place": pa.string(), "name": pa.string(), "content": pa.binary()})
PLACE = re.compile(rf"({'|'.join((*KINDS, WORK))})/[^./\0][^/\0]*")
_NAME = re.compile(r"[a-z][a-z_]*(\.[a-z]+)?")


class DamagedPack(DamagedRun):
    """A pack whose files differ from those it was written with."""

    what, fix = "pack", "copy the pack again from where it was made"


def is_pack(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def refuse_pack(results: Path) -> None:
    """Raises ValueError for a pack: runs can only be added to a results folder."""
    if is_pack(results):
        raise ValueError(f"{str(results)!r} is a pack, which is only read; name its results folder, or a new one")


def open_pack(folder: Path) -> "Pack":
    """Open a pack (cached until its index changes). Raises DamagedPack, OSError."""
    state = (folder / INDEX).stat()
    return _open(folder, state.st_mtime_ns, state.st_ino)


@functools.lru_cache(maxsize=16)
def _open(folder: Path, *state: int) -> "Pack":
    return Pack(folder)


class Pack:
    """An open pack; `runs` are read at once, the rest when needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: dict[str, Any] = self._checked(INDEX, lambda: tables.read_index(folder))
        self.runs = self._checked("runs.parquet", lambda: tables.read_runs(folder, self.index))

    @cached_property
    def stored_runs(self) -> list[StoredRun]:
        """The pack's runs and measured models."""
        runs = []
        for row in self.runs.select(["run_id", "folder", *tables.MARKER_COLUMNS]).to_pylist():
            run_id, place = row["run_id"], row.pop("folder")
            if not re.fullmatch(RUN_ID, run_id or "") or not PLACE.fullmatch(place or ""):
                raise DamagedPack(self.folder, "runs.parquet", f"names {run_id!r} in {place!r}"[:100])
            files = functools.partial(self.files, place)
            runs.append(StoredRun(folder=self.folder / place, place=place, files=files, **row))
        return runs

    @cached_property
    def run_ids(self) -> frozenset[str]:
        return frozenset(run.run_id for run in self.stored_runs)

    def rows(self) -> Rows | None:
        """The rows of the views; None if they were written by a version whose columns meant something else."""
        if self.index.get("version") not in tables.READABLE:
            return None
        return Rows(runs=self.runs, tables=self._views())

    def _views(self) -> dict[Table, pa.Table | LazyTable]:
        return self._checked(f"{ROWS}.parquet", lambda: tables.open_views(self.folder, self.index))

    def places(self, kind: str) -> list[str]:
        """The places of the records of one of KINDS."""
        return sorted(place for place in self._places if place.partition("/")[0] == kind)

    def files(self, place: str) -> Files:
        """The files of one record."""
        folder, content = self.folder / place, self.content(place, MARKER)
        if content is None:
            raise DamagedPack(self.folder, f"{RECORDS}.parquet", f"has no {place}/{MARKER}")
        marker = parse_marker(folder, content)
        return Files(folder=folder, marker=marker, read=lambda name: self._read(place, marker, name))

    def content(self, place: str, name: str) -> bytes | None:
        """A file in records.parquet; None where there is none."""
        return self.contents.get(place, {}).get(name)

    def _read(self, place: str, marker: Marker, name: str) -> bytes:
        """A file of a record; a run's Parquet files are made from its rows."""
        content = self.content(place, name)
        if content is not None:
            return content
        table = name.removesuffix(".parquet")
        if table not in TABLES:
            raise DamagedPack(self.folder, f"{RECORDS}.parquet", f"has no {place}/{name}")
        import pyarrow.compute as pc  # slow to import, and rarely needed

        rows, schema = self._tables[table].filter(pc.field("run_id") == marker.run_id), file_schema(table)
        return table_bytes(rows.select(schema.names).combine_chunks().cast(schema))

    @cached_property
    def _tables(self) -> dict[Table, pa.Table]:
        rows = Rows(runs=self.runs, tables=self._views())
        return self._checked(f"{ROWS}.parquet", lambda: {table: rows.in_memory(table) for table in rows.tables})

    @cached_property
    def _places(self) -> frozenset[str]:
        """The places of all records, read without their contents, which are most of the file."""
        places = self._table(RECORDS, pa.schema([RECORDS_SCHEMA.field("place")])).column(0)
        return frozenset(map(str, places.to_pylist()))

    @cached_property
    def contents(self) -> dict[str, dict[str, bytes]]:
        """records.parquet: place -> name -> content."""
        contents: dict[str, dict[str, bytes]] = {}
        columns = self._table(RECORDS, RECORDS_SCHEMA).columns
        for place, name, content in zip(*(column.to_pylist() for column in columns), strict=True):
            if not (place and name and PLACE.fullmatch(place) and _NAME.fullmatch(name)) or content is None:
                raise DamagedPack(self.folder, f"{RECORDS}.parquet", f"names {place}/{name}"[:100])
            contents.setdefault(place, {})[name] = content
        return contents

    def _table(self, name: str, schema: pa.Schema) -> pa.Table:
        return self._checked(f"{name}.parquet", lambda: tables.read_table(self.folder, self.index, name, schema))

    def _checked(self, name: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:  # ValueError: Arrow's, too
            raise DamagedPack(self.folder, name, " ".join(str(error).split())[:200]) from None
