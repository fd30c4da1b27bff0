"""Complete folders: a marker, written last, lists the checksums of all files.

    complete: {"run_id": ..., "files": {name: {"sha256": ..., "bytes": ...}}}

Files are checked against the marker when they are read; links are never followed."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparsedepth.files import MARKER, MAX_TEXT_BYTES, json_text, parse_json, read_regular, sha256, sync, write_bytes

RUN_ID = r"[0-9a-f]{12}"


class DamagedRun(ValueError):
    """A complete folder whose files differ from those it was completed with."""

    what, state = "run folder", "is damaged"
    fix = (
        "copy the folder again from where it was made, or delete it and run it again (--skip-damaged reads the others)"
    )

    def __init__(self, folder: Path, name: str, problem: str, message: str = "") -> None:
        super().__init__(message or f"{self.what} {str(folder)!r} {self.state}: {name} {problem}; {self.fix}")
        self.folder = folder
        self.name = name
        self.problem = problem


class OtherVersion(DamagedRun):
    """A complete folder that this version of the package cannot read."""

    state, fix = "is of another version", "read it with that version, or make it again with this one"


@contextmanager
def collecting(damaged: list[DamagedRun] | None) -> Generator[None]:
    """Given a list, add DamagedRun to it instead of raising."""
    try:
        yield
    except DamagedRun as damage:
        if damaged is None:
            raise
        damaged.append(damage)


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The content of `complete`."""

    run_id: str
    files: dict[str, tuple[str, int]]
    """name -> SHA-256 and size in bytes"""
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the marker, which identifies the content of the whole folder."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a complete folder, on disk or in a pack."""

    folder: Path
    marker: Marker
    read: Callable[[str], bytes]
    """File name -> its bytes. Raises DamagedRun."""


def new_marker(run_id: str, files: dict[str, tuple[str, int]]) -> Marker:
    listed = {name: {"sha256": checksum, "bytes": size} for name, (checksum, size) in files.items()}
    return Marker(run_id=run_id, files=files, content=json_text({"run_id": run_id, "files": listed}).encode())


def checksum_of(content: bytes) -> tuple[str, int]:
    """SHA-256 and size in bytes."""
    return hashlib.sha256(content).hexdigest(), len(content)


def write_marker(folder: Path, run_id: str, names: Iterable[str]) -> None:
    """Flush and checksum the files in `names` that exist, then write the marker. Raises ValueError for a link."""
    files = {}
    for name in names:
        path = folder / name
        if path.is_symlink():
            raise ValueError(f"{str(path)!r} is a link; a run folder must hold its own files")
        if path.exists():
            sync(path)
            files[name] = sha256(path), path.stat().st_size
    sync(folder)
    write_bytes(folder / MARKER, new_marker(run_id, files).content)


def is_complete(folder: Path) -> bool:
    """Whether the folder has a marker; nothing else is checked."""
    try:
        return stat.S_ISREG(os.lstat(os.path.join(folder, MARKER)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def parse_marker(folder: Path, content: bytes) -> Marker:
    """The marker with this content. Raises DamagedRun if it is invalid."""
    try:
        values = parse_json(content)
        files = {name: (str(entry["sha256"]), int(entry["bytes"])) for name, entry in values["files"].items()}
        run_id = str(values["run_id"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise DamagedRun(folder, MARKER, "is not a list of checksums") from None
    if not re.fullmatch(RUN_ID, run_id):
        raise DamagedRun(folder, MARKER, "has no valid run_id")
    return Marker(run_id=run_id, files=files, content=content)


def files_in(folder: Path) -> Files:
    """The files of a complete folder, each verified when it is read, by a marker that is valid. Raises DamagedRun."""
    marker = parse_marker(folder, _read_bytes(folder, MARKER, MAX_TEXT_BYTES))

    def read(name: str) -> bytes:
        content = _read_bytes(folder, name, marker.files[name][1])
        if checksum_of(content) != marker.files[name]:
            raise DamagedRun(folder, name, "is not the file that was written (its checksum differs)")
        return content

    return Files(folder=folder, marker=marker, read=read)


def _read_bytes(folder: Path, name: str, limit: int) -> bytes:
    """The file's bytes. Links are not followed, so an untrusted folder cannot point outside itself."""
    try:
        return read_regular(f"{folder}/{name}", limit)
    except FileNotFoundError:
        raise DamagedRun(folder, name, "is missing") from None
    except OSError as error:
        raise DamagedRun(folder, name, f"cannot be read ({error.strerror})") from None
