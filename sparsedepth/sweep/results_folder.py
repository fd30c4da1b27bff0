"""The results folder of a sweep: whose it is, what names it for good, and what dead processes left in it. No torch."""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator
from pathlib import Path

from sparsedepth import files
from sparsedepth.config.load import yaml_text
from sparsedepth.config.sweep import DEFINITION, SweepDefinition, read_definition
from sparsedepth.run.lease import is_held
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.store.pack import refuse_pack

ASIDE = re.compile(r"^\.(room-\d+|progress-\d+|[a-z0-9.-]*lock-[0-9a-f]{32}|folder-id-[0-9a-f]{32}|.+\.tmp-[0-9a-f]+)$")
"""Files that are written aside and renamed at once; one that is older than ASIDE_SECONDS has lost its process."""

ASIDE_SECONDS = 600.0


def claim(results: Path, definition: SweepDefinition) -> None:
    """Make `results` the folder of this sweep. Raises ValueError where it is another's, or cannot be written."""
    refuse_pack(results)
    try:
        results.mkdir(parents=True, exist_ok=True)
        with _alone(results):
            _refuse_another(results, definition)
            content = definition.model_dump(mode="json", exclude_unset=True, exclude={"scales"})
            files.write_text(results / DEFINITION, yaml_text(content, allow_unicode=True))
    except OSError as error:
        raise ValueError(f"{results} cannot be written ({error.strerror}); choose another --out") from None


@contextlib.contextmanager
def _alone(results: Path) -> Generator[None]:
    """Of two sweeps that claim a fresh folder at one moment, one comes after the other. The folder itself is locked;
    a file system that knows no locks of folders goes without."""
    handle = os.open(results, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _refuse_another(results: Path, definition: SweepDefinition) -> None:
    """Raises ValueError where the folder is another sweep's."""
    try:
        before = read_definition(results)
    except ValueError as error:
        raise ValueError(
            f"{error}; if {results / DEFINITION} is damaged, delete it: the same command writes it anew"
        ) from None
    if before and (before.name, before.base) != (definition.name, definition.base):
        differing = sorted(
            key for key in {*before.base, *definition.base} if before.base.get(key) != definition.base.get(key)
        )
        what = f"base differs in {', '.join(differing)}" if before.name == definition.name else repr(before.name)
        raise ValueError(f"{results} holds another sweep ({what}), not {definition.name!r}; choose another --out")


def drop_leftovers(results: Path) -> None:
    """Delete what dead processes left: leases, files that were being written, and of finished runs the checkpoints."""
    now = _clock(results)
    for path in results.glob("work/sweep-*.lock"):
        if not is_held(path, now):
            path.unlink(missing_ok=True)
    for path in (*results.glob(".*"), *results.glob("work/.*"), *results.glob("work/*/.*")):
        with contextlib.suppress(OSError):
            if ASIDE.search(path.name) and path.is_file() and now - path.stat().st_mtime > ASIDE_SECONDS:
                path.unlink()
    for marker in results.glob(f"runs/*/{run_record.MARKER}"):
        scratch = Scratch(results, marker.parent.name)
        for path in (scratch.checkpoints, *scratch.folder.glob("record-*")):
            if path.exists() and not is_held(scratch.lock, now):
                shutil.rmtree(path, ignore_errors=True)


def _clock(results: Path) -> float:
    """The time by which the folder's files are dated: of a shared folder not this machine's, which may be off."""
    try:
        with tempfile.TemporaryFile(dir=results) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # nothing can be written any more
        return time.time()


def folder_id_path(results: Path) -> Path:
    """The file that holds the folder's permanent id."""
    return results / "work" / "folder-id"


def folder_id(results: Path) -> str:
    """Names the folder for good, so that folders which share a database never share a study; made once."""
    path = folder_id_path(results)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".folder-id-{uuid.uuid4().hex}")
        aside.write_text(uuid.uuid4().hex)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(aside, path)
        aside.unlink()
    return path.read_text()
