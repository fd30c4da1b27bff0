"""Pack a results folder."""

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparsedepth import __version__
from sparsedepth.config.plain_text import counted
from sparsedepth.files import MARKER, atomic_folder
from sparsedepth.store import tables
from sparsedepth.store.checksums import Files
from sparsedepth.store.find import find_groups, find_runs, no_run_text
from sparsedepth.store.pack import PLACE, RECORDS, RECORDS_SCHEMA, WORK
from sparsedepth.store.run_record import EVALS, MODELS, RUNS, TOYS, WEIGHTS
from sparsedepth.store.schema import TABLES

WORK_FILES = ("config.yaml", "pruned.json", "failures.json", "memory.json")
"""Files of a run without a result, which say why it ended."""
_TABLE_FILES = {f"{table}.parquet" for table in TABLES}

LEVEL = 10
"""Level of brotli: a tenth smaller than the best of zstd, since a pack is written once and kept in repositories."""


def pack(results: Path, out: Path) -> str:
    """Write the complete records of a results folder into the new folder `out`, atomically; returns '1 record in 4
    files, 81.2 kB'. Raises DamagedRun, and ValueError if there is no record, or one is outside the folders of KINDS."""
    parts = find_runs([results])
    stored = [run for part in parts for run in part.runs]
    records = [(run.place, run.files()) for run in stored]
    for kind in (TOYS, EVALS):
        records += [(f"{kind}/{files.folder.name}", files) for files in find_groups(results, kind)]
    if any(part.root != results for part in parts) or not all(PLACE.fullmatch(place) for place, _ in records):
        raise ValueError(f"{str(results)!r} holds runs of several results folders; pack each by itself")
    if not records:
        raise ValueError(no_run_text([results]))
    contents: list[dict[str, Any]] = []
    for place, files in records:
        contents += contents_of(place, files)
    contents += _unfinished(results, {place for place, _ in records})
    rows = tables.read_rows(stored)
    with atomic_folder(out) as aside:
        for path in sorted(results.iterdir()):  # a definition, a plan, figures; not the study, which can be rebuilt
            if path.is_file() and not path.is_symlink() and not path.name.startswith((".", "study.")):
                shutil.copyfile(path, aside / path.name)
        write_pack(aside, rows, contents, len(records))
    sizes = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    size = f"{sum(sizes) / 1e6:,.1f} MB" if sum(sizes) >= 1e6 else f"{sum(sizes) / 1e3:.1f} kB"
    return f"{counted(len(records), 'record')} in {counted(len(sizes), 'file')}, {size}"


def contents_of(place: str, files: Files) -> Iterator[dict[str, Any]]:
    """The rows of a record in records.parquet: its marker and all files that are not stored apart."""
    yield {"place": place, "name": MARKER, "content": files.marker.content}
    stored_apart = {*_TABLE_FILES, WEIGHTS} if place.startswith((f"{RUNS}/", f"{MODELS}/")) else ()
    for name in files.marker.files:
        if name not in stored_apart:
            yield {"place": place, "name": name, "content": files.read(name)}


def write_pack(folder: Path, rows: tables.Rows, contents: list[dict[str, Any]], n_records: int) -> None:
    """Write the tables of a pack: the rows of the views, and the other files of the records."""
    records = pa.Table.from_pylist(contents, RECORDS_SCHEMA)
    tables.write_tables(folder, rows, {"sparsedepth": __version__, "records": n_records}, LEVEL, {RECORDS: records})


def _unfinished(results: Path, places: Collection[str]) -> Iterator[dict[str, Any]]:
    """The files of runs without a result, which say why."""
    for path in sorted((results / WORK).glob("*/*.*")):
        if path.name in WORK_FILES and path.is_file() and f"{RUNS}/{path.parent.name}" not in places:
            yield {"place": f"{WORK}/{path.parent.name}", "name": path.name, "content": path.read_bytes()}
