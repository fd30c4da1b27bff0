"""Files that are either whole or absent: written aside, flushed to disk, renamed; named by checksum.

A reader never sees half a file: `write_bytes` writes `.NAME.tmp-TOKEN`, calls fsync, and renames (atomic on POSIX).
Locks are files too: `locked`.
"""

import errno
import fcntl
import glob
import hashlib
import io
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMPLETE = "complete"
"""The file that is written last into a folder, and says that it is whole."""
LEFT_SECONDS = 86_400.0
"""A folder that was being filled, and has not changed for so long, has lost its process."""
MAX_TEXT_BYTES = 10_000_000
"""A text of ours above this is not read: none comes near."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically and durably; a crash leaves the old file or the new one.

    Raises ValueError in a complete folder, which never changes.
    """
    refuse_complete(path.parent)
    aside = temporary_path(path)
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        if aside.is_file():
            aside.unlink()
        error.filename = str(path)  # the name that the caller gave, not ours
        raise
    sync_folder(path.parent)


def refuse_complete(folder: Path) -> None:
    """Raises ValueError for a folder that carries the marker: what it holds is a result."""
    if (folder / COMPLETE).is_file():
        raise ValueError(f"run folder {str(folder)!r} is complete and never changes; write to another place")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut (and what a file holds, given a file)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(path: Path) -> Path:
    """Where something is written before it gets its name: no other process does, on any machine (process ids recur, in
    containers always)."""
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")


@contextmanager
def atomic_folder(folder: Path) -> Generator[Path]:
    """A hidden folder to fill, which becomes `folder` (absent, or empty) at the end, flushed to disk.

    What is raised inside, or a crash, leaves no `folder`; readers pass over hidden ones, and the next that fills
    `folder` deletes what a killed process left a day ago.
    """
    whole = folder.resolve()
    refuse_complete(whole.parent)
    aside = temporary_path(whole)
    aside.mkdir(parents=True)
    for left in aside.parent.glob(f".{glob.escape(whole.name)}.tmp-*"):
        if left.is_dir() and time.time() - left.stat().st_mtime > LEFT_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    try:
        yield aside
        for path in sorted(aside.rglob("*")):
            sync_folder(path)
        sync_folder(aside)
        os.rename(aside, whole)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)  # a full disk has no name of its own
        raise
    sync_folder(whole.parent)


def write_text(path: Path, content: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; NaN and Inf are not JSON and are refused (store None for a missing value)."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Generator[None]:
    """Hold the exclusive lock `path`, after whoever holds it now; `waiting()` is called if there is one.

    An flock: the system lets go of it when the process ends, however it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock. Reads only: works on a folder that cannot be written."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class NotRegularError(OSError):
    """A pipe, a device, a folder or a link, where a file should be."""


def read_regular(path: Path | str, limit: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a file in a folder that may be a stranger's. Raises NotRegularError, without waiting for a pipe or
    following a link, and OSError for more than `limit` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotRegularError(error.errno, "is no regular file", str(path)) from None
        raise
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise NotRegularError(errno.EINVAL, "is no regular file", str(path))
        if facts.st_size > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
        content = os.read(handle, facts.st_size)
        return content if 0 < len(content) == facts.st_size else content + io.FileIO(handle, closefd=False).readall()
    finally:
        os.close(handle)


def parse_json(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, one that nests too deep too."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nests too deep") from None


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(content: Any) -> str:
    """12 hex digits that name a JSON-able value: SHA-256 of its canonical (sorted, compact) JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
