"""Find complete records in the folders below a results folder, or in packs. Links and hidden folders are skipped."""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sparsedepth.files import read_regular
from sparsedepth.store.checksums import DamagedRun, Files, collecting_damage, files_on_disk, is_complete
from sparsedepth.store.pack import Pack, is_pack, open_pack
from sparsedepth.store.run_record import EVALS, MODELS, RUNS, TOYS, parse_object, problem, run_files, run_folder
from sparsedepth.store.tables import StoredRun, stored_run, utf8

DEPTH = 3
"""Levels below the named folder at which run folders and packs are found."""


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
                with collecting_damage(damaged):
                    files = run_files(files_on_disk(folder))
                    runs.append(stored_run(files, utf8(str(folder)[start:] or ".")))
        except OSError as error:
            why = f"{error.strerror}: {error.filename!r}"
            raise ValueError(f"{str(root)!r} cannot be read ({why}); name a folder that may be read") from None
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
    if depth:
        with os.scandir(folder) as entries:
            folders = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            names = sorted(name for name in folders if not name.startswith("."))
        for name in [name for name in names if name in (MODELS, RUNS)] if RUNS in names else names:
            yield from _complete_folders(folder / name, depth - 1)


def _without_copies(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """Each run once. Raises ValueError if two runs with the same run_id have different summaries."""
    by_id: dict[str, StoredRun] = {}
    for run in runs:
        first = by_id.setdefault(run.run_id, run)
        if run.summary_sha256 != first.summary_sha256:
            places = f"in {str(first.folder)!r} and in {str(run.folder)!r}"
            raise ValueError(f"run {run.run_id} is {places} with different results; leave one of the two out")
    return list(by_id.values())


def find_groups(root: Path, kind: str) -> Iterator[Files]:
    """The complete toy groups or evaluations (`kind`: TOYS or EVALS) of a results folder or pack, or a single one."""
    if root.resolve().parent.name == kind and is_complete(root):
        yield files_on_disk(root)
    elif (root / kind).is_dir():
        folders = sorted(path for path in (root / kind).iterdir() if is_complete(path) and path.name[0] != ".")
        yield from map(files_on_disk, folders)
    if is_pack(root):
        pack = open_pack(root)
        yield from map(pack.files, pack.places(kind))


def no_run_text(roots: Sequence[Path]) -> str:
    """Why there is no complete run, and what helps."""
    from sparsedepth.config.sweep import DEFINITION

    names = shlex.join(map(str, roots))
    if all((root / DEFINITION).is_file() for root in roots):
        return f"no complete run in {names} so far; see the state of its sweep: sparsedepth status {names}"
    if any(any(find_groups(root, TOYS)) for root in roots):
        return f"{names} holds toy networks and no runs; see their exponents: python analysis/toy.py {names}"
    return f"no complete run under {', '.join(repr(str(root)) for root in roots)}; name a results folder"


def is_complete_run(results: Path, run_id: str) -> bool:
    """Whether the results folder or pack has the complete run; its files are not checked."""
    return is_complete(run_folder(results, run_id)) or (is_pack(results) and run_id in open_pack(results).run_ids)


def is_whole(results: Path, run_id: str) -> bool:
    """Whether the run is complete and undamaged, and need not be run again."""
    target = run_folder(results, run_id)
    if not is_complete(target):
        return is_complete_run(results, run_id)  # opening a pack checks its files
    return not problem(target)


def read_summary(results: Path, run_id: str) -> dict[str, Any]:
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
