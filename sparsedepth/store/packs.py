"""Complete records: found in the folders below a results folder, or in packs, which are written and read here.

A pack is a results folder as a few files (`sparsedepth pack`), read like the folder, as fast as a cache:

    PACK/runs.parquet, rows.parquet   the rows of the views (`store.stored_rows`)
    PACK/records.parquet    place, name, content: all other files of the records, unchanged
    PACK/pack.json          last: the checksums of the above
    PACK/...                the other files of the results folder: sweep.yaml, figures

The Parquet files of a run are made again from the rows when they are needed. Links and hidden folders are skipped."""

import functools
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from sparsedepth import __version__
from sparsedepth.files import MARKER, atomic_folder, read_regular
from sparsedepth.quantities.quantity import Named, Table
from sparsedepth.store import stored_rows
from sparsedepth.store.checksums import RUN_ID, DamagedRun, Files, collecting, files_in, is_complete, parse_marker
from sparsedepth.store.parquet import file_schema, table_bytes
from sparsedepth.store.run_record import EVALS, INDEX, MODELS, RUNS, TOYS, parse_object, problem, run_files, run_folder
from sparsedepth.store.schema import KEYS, TABLES
from sparsedepth.store.stored_rows import ROWS, Rows, StoredRun, StoredTable, stored_run
from sparsedepth.words.plain_text import did_you_mean, in_shell, one_line, utf8

T = TypeVar("T")
RECORDS = "records"
WORK = "work"
RECORDS_SCHEMA = pa.schema({"place": pa.string(), "name": pa.string(), "content": pa.binary()})
PLACE = re.compile(rf"({RUNS}|{MODELS}|{TOYS}|{EVALS}|{WORK})/[^./\0][^/\0]*")
_NAME = re.compile(r"[a-z][a-z_]*(\.[a-z]+)?")
DEPTH = 3
"""Levels below the named folder at which run folders and packs are found."""
WORK_FILES = ("config.yaml", "pruned.json", "failures.json", "memory.json")
"""Files of a run without a result, which say why it ended."""
LEVEL = 10
"""Level of brotli: a tenth smaller than the best of zstd, since a pack is written once and kept in repositories."""


# Packs, read


class DamagedPack(DamagedRun):
    """A pack whose files differ from those it was written with."""

    what, fix = "pack", "copy the pack again from where it was made"


class OldPack(DamagedPack):
    """A pack of a version whose tables this one cannot read."""

    state, fix = "is of another version", "pack its results folder again with this version, or read it with that one"


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
        self.index: Named = self._checked(INDEX, lambda: stored_rows.read_index(folder))
        runs = self._checked("runs.parquet", lambda: stored_rows.read_runs(folder, self.index))
        keys = [*zip(*(runs[name].to_pylist() for name in ("run_id", "summary_sha256")), strict=True)]
        first = {key: row for row, key in reversed([*enumerate(keys)])}
        self.runs = runs if len(first) == len(keys) else runs.take(sorted(first.values()))  # a run counts once

    @cached_property
    def stored_runs(self) -> list[StoredRun]:
        """The pack's runs and measured models."""
        runs = []
        for row in self.runs.select(["run_id", "folder", *stored_rows.MARKER_COLUMNS]).to_pylist():
            run_id, place = row["run_id"], row.pop("folder")
            if not re.fullmatch(RUN_ID, run_id or "") or not PLACE.fullmatch(place or ""):
                raise DamagedPack(self.folder, "runs.parquet", f"names {run_id!r} in {place!r}"[:100])
            files = functools.partial(self.files, place)
            runs.append(StoredRun(folder=self.folder / place, place=place, files=files, **row))
        return runs

    @cached_property
    def run_ids(self) -> frozenset[str]:
        return frozenset(run.run_id for run in self.stored_runs)

    def rows(self) -> Rows:
        """The rows of the views, with the columns of the version that wrote them."""
        views = self._checked(f"{ROWS}.parquet", lambda: stored_rows.open_views(self.folder, self.index))
        keyed = {
            view: replace(rows, keys=("run_id", *KEYS[view])) if isinstance(rows, StoredTable) else rows
            for view, rows in views.items()
        }
        return Rows(runs=self.runs, tables=keyed)

    def places(self, kind: str) -> list[str]:
        """The places of the records of a kind, such as EVALS."""
        return sorted(place for place in self._places if place.partition("/")[0] == kind)

    def files(self, place: str) -> Files:
        folder, content = self.folder / place, self.content(place, MARKER)
        if content is None:
            raise DamagedPack(self.folder, f"{RECORDS}.parquet", f"has no {place}/{MARKER}")
        marker = parse_marker(folder, content)
        return Files(folder=folder, marker=marker, read=lambda name: self._read(place, marker.run_id, name))

    def content(self, place: str, name: str) -> bytes | None:
        """A file in records.parquet; None where there is none."""
        return self.contents.get(place, {}).get(name)

    def _read(self, place: str, run_id: str, name: str) -> bytes:
        """A file of a record; a run's Parquet files are made from its rows."""
        content = self.content(place, name)
        if content is not None:
            return content
        table = name.removesuffix(".parquet")
        if table not in TABLES:
            raise DamagedPack(self.folder, f"{RECORDS}.parquet", f"has no {place}/{name}")
        import pyarrow.compute as pc  # slow to import, and rarely needed

        rows, schema = self._tables[table].filter(pc.field("run_id") == run_id), file_schema(table)
        return table_bytes(rows.select(schema.names).combine_chunks().cast(schema))

    @cached_property
    def _tables(self) -> dict[Table, pa.Table]:
        rows = self.rows()
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
        return self._checked(f"{name}.parquet", lambda: stored_rows.read_table(self.folder, self.index, name, schema))

    def _checked(self, name: str, read: Callable[[], T]) -> T:
        try:
            return read()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:  # ValueError: Arrow's, too
            kind = OldPack if isinstance(error, stored_rows.OtherColumns) else DamagedPack
            raise kind(self.folder, name, one_line(error)) from None


# Records, in folders and packs


@dataclass(frozen=True, kw_only=True)
class Part:
    """The runs of one results folder, or of one pack."""

    root: Path
    runs: list[StoredRun]
    pack: Pack | None = None


def find_runs(paths: Iterable[Path], damaged: list[DamagedRun] | None = None) -> list[Part]:
    """The complete runs in the paths and up to DEPTH levels below, in order of path; copies in one part count once.
    Raises ValueError for an unreadable folder, or two different runs of one id; DamagedRun, unless given a list."""
    parts: list[Part] = []
    for root in paths:
        runs: list[StoredRun] = []
        start = len(str(root / "x")) - 1  # of a path below it
        try:
            for folder, has_index in _complete_folders(root, DEPTH):
                if has_index:
                    pack = open_pack(folder)
                    parts.append(Part(root=folder, runs=pack.stored_runs, pack=pack))
                    continue
                with collecting(damaged):
                    runs.append(stored_run(run_files(files_in(folder)), utf8(str(folder)[start:] or ".")))
        except OSError as error:
            if not root.exists():
                there, within = (path.name for path in root.parent.glob("*")), str(root.parent / "x")[:-1]
                near = did_you_mean(root.name, there, "name a results folder, as given to sweep --out", within)
                told = f"the folder {str(root)!r} does not exist; {near}"
            elif root.is_file():
                told = (
                    f"{str(root)!r} is a file, and results are a folder; `judge` gives the verdict on a table of runs, "
                    "and `import` makes a results folder of one"
                )
            else:
                why = f"{error.strerror}: {error.filename!r}"
                told = f"{str(root)!r} cannot be read ({why}); name a folder that may be read"
            raise ValueError(told) from None
        parts.append(Part(root=root, runs=_without_copies(runs)))
    _without_copies(chain.from_iterable(part.runs for part in parts))
    return [part for part in parts if part.runs]


def _complete_folders(folder: Path, depth: int) -> Iterator[tuple[Path, bool]]:
    """Run folders and packs, and which it is; runs added to a pack's folder come after the pack."""
    if is_complete(folder):
        if folder.parent.name not in (TOYS, EVALS):
            yield folder, False
        return
    if is_pack(folder):
        yield folder, True
    if depth > 1 or (depth and folder.name in (RUNS, MODELS)):
        try:
            with os.scandir(folder) as entries:
                names = sorted(
                    entry.name for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            if depth == DEPTH:
                raise
            return  # deleted meanwhile
        for name in [name for name in names if name in (MODELS, RUNS)] if RUNS in names else names:
            yield from _complete_folders(folder / name, depth - 1)


def _without_copies(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """Each run once. Raises ValueError if two runs with the same run_id have different summaries."""
    by_id: dict[str, StoredRun] = {}
    for run in runs:
        first = by_id.setdefault(run.run_id, run)
        if run.summary_sha256 != first.summary_sha256:
            raise ValueError(
                f"run {run.run_id} is in {str(first.folder)!r} and in {str(run.folder)!r} with different results; "
                "leave one of the two out"
            )
    return list(by_id.values())


def find_groups(root: Path, kind: str, damaged: list[DamagedRun] | None = None) -> Iterator[Files]:
    """The complete toy groups or evaluations (`kind`: TOYS or EVALS) of a results folder or pack, or a single one.
    Raises DamagedRun, or adds it to the list if given."""
    folders = []
    if root.resolve().parent.name == kind and is_complete(root):
        folders = [root]
    elif (root / kind).is_dir():
        folders = sorted(path for path in (root / kind).iterdir() if is_complete(path) and path.name[0] != ".")
    for folder in folders:
        with collecting(damaged):
            yield files_in(folder)
    if is_pack(root):
        pack = open_pack(root)
        yield from map(pack.files, pack.places(kind))


def no_run(roots: Sequence[Path]) -> ValueError:
    """Says why there is no complete run, and what helps."""
    from sparsedepth.config.sweep import DEFINITION

    names, first = (in_shell(*some) for some in (roots, roots[:1]))
    told = f"no complete run under {', '.join(repr(str(root)) for root in roots)}; name a results folder"
    if all((root / DEFINITION).is_file() for root in roots):
        told = f"no complete run in {names} so far; see the state of its sweep: sparsedepth status {first}"
    elif any(any(find_groups(root, TOYS)) for root in roots):
        told = f"{names} holds toy networks and no runs; see their exponents: python analysis/toy.py {names}"
    elif all((root / MODELS).is_dir() for root in roots):
        told = f"{names} holds measured models and no runs; see them ranked: sparsedepth query {names} --ask models"
    return ValueError(told)


def is_complete_run(results: Path, run_id: str) -> bool:
    """Whether the results folder or pack has the complete run; its files are not checked."""
    return is_complete(run_folder(results, run_id)) or (is_pack(results) and run_id in open_pack(results).run_ids)


def is_whole(results: Path, run_id: str) -> bool:
    """Whether the run is complete and undamaged, and need not be run again."""
    target = run_folder(results, run_id)
    # opening a pack checks its files
    return not problem(target) if is_complete(target) else is_complete_run(results, run_id)


def read_summary(results: Path, run_id: str) -> Named:
    """A complete run's summary, unverified. Raises DamagedRun if it is not a JSON object, and OSError."""
    folder = run_folder(results, run_id)
    return parse_object(folder, "summary.json", read_file(folder, "summary.json"))


def read_file(folder: Path, name: str) -> bytes:
    """A file of a run's folder (as in the column `folder`) or scratch folder, or in its pack. Raises OSError."""
    try:
        return read_regular(folder / name)
    except FileNotFoundError:
        root = folder.parent.parent
        content = open_pack(root).content(f"{folder.parent.name}/{folder.name}", name) if is_pack(root) else None
        if content is None:
            raise
        return content


# Packs, written


def pack(results: Path, out: Path) -> int:
    """Write the complete records of a results folder into the new folder `out`, atomically; returns how many. Raises
    DamagedRun, and ValueError if there is no record, or one is elsewhere than in PLACE."""
    parts = find_runs([results])
    stored = _without_copies(run for part in parts for run in part.runs)  # in a pack, and in its folder
    records = [(run.place, run.files()) for run in stored]
    for kind in (TOYS, EVALS):
        records += [(f"{kind}/{files.folder.name}", files) for files in find_groups(results, kind)]
    if any(part.root != results for part in parts) or not all(PLACE.fullmatch(place) for place, _ in records):
        raise ValueError(f"{str(results)!r} is a run, or holds several results folders; pack one results folder")
    if not records:
        raise no_run([results])
    contents = [content for place, files in records for content in contents_of(place, files)]
    contents += _unfinished(results, {place for place, _ in records})
    rows = stored_rows.read_rows(stored)
    with atomic_folder(out) as aside:
        for path in sorted(results.iterdir()):  # a definition, a plan, figures; not the study, which can be rebuilt
            if path.is_file() and not path.is_symlink() and not path.name.startswith((".", "study.")):
                shutil.copyfile(path, aside / path.name)
        write_pack(aside, rows, contents, len(records))
    return len(records)


def contents_of(place: str, files: Files) -> Iterator[Named]:
    """The rows of a record in records.parquet: its marker and all files that are not stored apart."""
    yield {"place": place, "name": MARKER, "content": files.marker.content}
    stored_apart = (".parquet", ".safetensors") if place.startswith((f"{RUNS}/", f"{MODELS}/")) else ()
    for name in files.marker.files:
        if not name.endswith(stored_apart):
            yield {"place": place, "name": name, "content": files.read(name)}


def write_pack(folder: Path, rows: stored_rows.Rows, contents: list[Named], n_records: int) -> None:
    """Write the tables of a pack: the rows of the views, and the other files of the records."""
    records = pa.Table.from_pylist(contents, RECORDS_SCHEMA)
    stored_rows.write_tables(
        folder, rows, {"sparsedepth": __version__, "records": n_records}, LEVEL, {RECORDS: records}
    )


def _unfinished(results: Path, places: Collection[str]) -> Iterator[Named]:
    """The files of runs without a result, which say why; of a pack those that it has."""
    for place, files in (open_pack(results).contents if is_pack(results) else {}).items():
        if place.startswith(f"{WORK}/"):
            yield from ({"place": place, "name": name, "content": content} for name, content in files.items())
    for path in sorted((results / WORK).glob("*/*.*")):
        if path.name in WORK_FILES and path.is_file() and f"{RUNS}/{path.parent.name}" not in places:
            yield {"place": f"{WORK}/{path.parent.name}", "name": path.name, "content": path.read_bytes()}
