"""Pack a results folder, and unpack it."""

import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparsedepth import __version__, quantities
from sparsedepth.config.plain_text import counted
from sparsedepth.files import MARKER, atomic_folder, json_text, refuse_current, sha256
from sparsedepth.store import tables
from sparsedepth.store.checksums import Files, checksum_of, new_marker, write_marker
from sparsedepth.store.find import SINGLE_DIGITS, find_groups, find_runs, rounded_summary
from sparsedepth.store.pack import PLACE, RECORDS, RECORDS_SCHEMA, WORK, DamagedPack, Pack
from sparsedepth.store.run_record import EVALS, MODELS, RUNS, TOYS, WEIGHTS, run_files
from sparsedepth.store.schema import TABLES

WEIGHTS_FOLDER = "weights"
SUMMARY = "summary.json"
WORK_FILES = ("config.yaml", "pruned.json", "failures.json", "memory.json")
"""Files of a run without a result, which say why it ended."""
_TABLE_FILES = {f"{table}.parquet" for table in TABLES}

_QUANTITIES = {column.name for column in quantities.RUNS}

LEVEL = 10
"""Level of brotli: a tenth smaller than the best of zstd, since a pack is written once and kept in repositories."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Counts of what was packed or unpacked."""

    records: int
    files: int
    bytes: int
    rewritten: int = 0
    """Records whose tables are not byte-identical: written by another pyarrow, or rounded by the pack."""

    @property
    def text(self) -> str:
        """'1 record in 4 files, 81.2 kB'."""
        size = f"{self.bytes / 1e6:,.1f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:.1f} kB"
        return f"{counted(self.records, 'record')} in {counted(self.files, 'file')}, {size}"


def check_new(folder: Path, source: Path | None = None) -> None:
    """Raises ValueError if the folder is not new, or is inside its `source`, where its runs would be found twice."""
    if source and source.resolve() in folder.resolve().parents:
        raise ValueError(f"{str(folder)!r} is inside its source {str(source)!r}; name a folder outside with -o")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is not an empty folder; name a new one with -o")
    refuse_current(folder)


def pack(results: Path, out: Path, weights: bool = False, digits: int | None = None) -> Packed:
    """Write the complete records of a results folder into the new folder `out`, atomically.

    `digits` rounds the rows of all views but `runs` to that many significant digits, and the quantities of `runs` to
    single precision (7 digits): so they were measured, and further digits are noise that does not compress. A run and
    its rounded copy count once (`find.without_copies`).

    Raises DamagedRun, and ValueError if there is no record, or one is outside the folders of KINDS.
    """
    parts = find_runs([results])
    stored = [run for part in parts for run in part.runs]
    if digits is not None:
        stored = [tables.stored_run(_in_single_precision(run.files()), run.place) for run in stored]
    records = [(run.place, run.files()) for run in stored]
    for kind in (TOYS, EVALS):
        records += [(f"{kind}/{files.folder.name}", files) for files in find_groups(results, kind)]
    if any(part.root != results for part in parts) or not all(PLACE.fullmatch(place) for place, _ in records):
        raise ValueError(f"{str(results)!r} holds runs of several results folders; pack each by itself")
    if not records:
        raise ValueError(f"{str(results)!r} holds no complete run, toy or evaluation; name a results folder")
    contents: list[dict[str, Any]] = []
    for place, files in records:
        contents += contents_of(place, files)
    contents += _unfinished(results, {place for place, _ in records})
    rows = tables.read_rows(stored)
    if digits is not None:
        rounded = {name: _rounded(rows.in_memory(name), digits) for name in rows.tables}
        rows = replace(rows, runs=_rounded(rows.runs, SINGLE_DIGITS, _QUANTITIES), tables=rounded)
    with atomic_folder(out) as aside:
        _copy_other_files(results, aside, ())
        for run in stored if weights else ():
            if (run.folder / WEIGHTS).is_file():
                (aside / WEIGHTS_FOLDER).mkdir(exist_ok=True)
                shutil.copyfile(run.folder / WEIGHTS, aside / WEIGHTS_FOLDER / f"{run.run_id}.safetensors")
        write_pack(aside, rows, contents, len(records))
    return _packed(out, len(records))


def contents_of(place: str, files: Files) -> Iterator[dict[str, Any]]:
    """The rows of a record in records.parquet: its marker and all files that are not stored apart."""
    yield {"place": place, "name": MARKER, "content": files.marker.content}
    stored_apart = {*_TABLE_FILES, WEIGHTS} if _is_run(place) else ()
    for name in files.marker.files:
        if name not in stored_apart:
            yield {"place": place, "name": name, "content": files.read(name)}


def _in_single_precision(files: Files) -> Files:
    """The files of a run with another summary.json and marker: its quantities in SINGLE_DIGITS digits."""
    content = json_text(rounded_summary(files)).encode()
    marker = new_marker(files.marker.run_id, {**files.marker.files, SUMMARY: checksum_of(content)})
    return replace(files, marker=marker, read=lambda name: content if name == SUMMARY else files.read(name))


def _rounded(rows: pa.Table, digits: int, names: Collection[str] | None = None) -> pa.Table:
    """Floats rounded to the bits that the decimal digits need; the other bits are 0, and compress."""
    scale = 2.0 ** math.ceil(digits * math.log2(10))
    for position, field in enumerate(rows.schema):
        if pa.types.is_floating(field.type) and (names is None or field.name in names):
            exact = rows[field.name]
            significand, exponent = np.frexp(exact.to_numpy())
            rounded = np.ldexp(np.round(significand * scale) / scale, exponent)
            nulls = pc.call_function("is_null", [exact]).to_numpy()
            rows = rows.set_column(position, field, pa.array(rounded, field.type, mask=nulls))
    return rows


def write_pack(folder: Path, rows: tables.Rows, contents: list[dict[str, Any]], n_records: int) -> None:
    """Write the tables of a pack: the rows of the views, and the other files of the records."""
    records = pa.Table.from_pylist(contents, RECORDS_SCHEMA)
    tables.write_tables(folder, rows, {"sparsedepth": __version__, "records": n_records}, LEVEL, {RECORDS: records})


def _unfinished(results: Path, places: Collection[str]) -> Iterator[dict[str, Any]]:
    """The files of runs without a result, which say why."""
    for path in sorted((results / WORK).glob("*/*.*")):
        if path.name in WORK_FILES and path.is_file() and f"{RUNS}/{path.parent.name}" not in places:
            yield {"place": f"{WORK}/{path.parent.name}", "name": path.name, "content": path.read_bytes()}


def unpack(packed: Pack, out: Path) -> Packed:
    """Write the packed results folder into the new folder `out`, atomically. Raises DamagedPack."""
    places = sorted(packed.contents)
    rewritten = 0
    with atomic_folder(out) as aside:
        _copy_other_files(packed.folder, aside, (tables.INDEX, *packed.index["files"]))
        for place in places:
            (aside / place).mkdir(parents=True)
            for name, content in packed.contents[place].items():
                (aside / place / name).write_bytes(content)
            if not place.startswith(f"{WORK}/"):
                rewritten += _complete(packed, place, aside / place)
    return _packed(out, sum(not place.startswith(f"{WORK}/") for place in places), rewritten)


def _complete(packed: Pack, place: str, folder: Path) -> bool:
    """Add tables and weights to a record, and verify it; returns whether the marker had to be rewritten."""
    files = run_files(packed.files(place)) if _is_run(place) else packed.files(place)
    listed = files.marker.files
    table_files = {name for name in listed if name != WEIGHTS and packed.content(place, name) is None}
    for name in table_files:
        (folder / name).write_bytes(files.read(name))
    weights = packed.folder / WEIGHTS_FOLDER / f"{files.marker.run_id}.safetensors"
    if WEIGHTS in listed and weights.is_file():
        shutil.copyfile(weights, folder / WEIGHTS)
    present = {path.name for path in folder.iterdir()} - {MARKER}
    differing = {name for name in present if name not in listed or sha256(folder / name) != listed[name][0]}
    if damaged := differing - table_files:
        raise DamagedPack(packed.folder, f"{place}/{min(damaged)}", "is not the file that was packed")
    if differing:
        (folder / MARKER).unlink()
        write_marker(folder, files.marker.run_id, listed)
    return bool(differing)


def _is_run(place: str) -> bool:
    return place.startswith((f"{RUNS}/", f"{MODELS}/"))


def _copy_other_files(source: Path, target: Path, excluded: Collection[str]) -> None:
    """Copy the files that are not records: a definition, a plan, figures; not the study, which can be rebuilt."""
    for path in sorted(source.iterdir()):
        is_copied = path.name not in excluded and not path.name.startswith((".", "study."))
        if is_copied and path.is_file() and not path.is_symlink():
            shutil.copyfile(path, target / path.name)


def _packed(out: Path, records: int, rewritten: int = 0) -> Packed:
    written = [path for path in out.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in written)
    return Packed(records=records, files=len(written), bytes=size, rewritten=rewritten)
