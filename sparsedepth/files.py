"""Atomic files and folders, file locks, bounded reading, checksums.

A reader never sees half a file: `atomic_file` writes `.NAME.tmp-TOKEN`, calls fsync, and renames (atomic on POSIX)."""

import errno
import fcntl
import glob
import hashlib
import io
import itertools
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsedepth.words.plain_text import one_line

MARKER = "complete"
"""The marker file, written last into a folder."""
ABANDONED_SECONDS = 86_400.0
"""Temporary folders unchanged for so long are of a killed process."""
MAX_TEXT_BYTES = 10_000_000
"""Larger text files are rejected; ours are far smaller."""
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EIO}
"""No space, a quota, a read-only file system, a mount that went away."""


class WrittenMeanwhile(OSError):
    """A folder that another process has filled since this one looked."""


class NotRegularError(OSError):
    """A pipe, a device, a folder or a link in place of a file."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write atomically and durably: a crash leaves the old file or the new one. Raises as `refuse_complete`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_file(path: Path) -> Generator[Path]:
    """A temporary name to write to, which is flushed and renamed to `path` at the end. Raises as `write_bytes`."""
    refuse_complete(path.parent)
    temporary = temporary_path(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:  # Ctrl-C, too
        if temporary.is_file():
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name
        raise
    sync(path.parent)


def check_parent(path: Path) -> None:
    """Before work whose result goes there: ValueError unless the folder exists, OSError unless it can be written."""
    import tempfile  # 2 ms, for the commands that write

    if not path.parent.is_dir():
        raise ValueError(f"-o {str(path)!r}: folder {str(path.parent)!r} does not exist; create it")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()  # os.access would not tell why
    except OSError as error:
        error.filename = str(path)
        raise


def check_not_empty(option: str, out: object) -> None:
    """Raises ValueError for an empty output, such as -o "$UNSET": as a path it is the current folder."""
    if not str(out).strip():
        raise ValueError(f"{option} is empty; name a file or folder, or . for the current folder")


def refuse_complete(folder: Path) -> None:
    """Raises ValueError for a complete folder."""
    if (folder / MARKER).is_file():
        raise ValueError(f"run folder {str(folder)!r} is complete and never changes; write to another folder")


def refuse_links(root: Path, *folders: Path) -> None:
    """Raises ValueError for a link as or above one of these folders in `root`: its files would lie elsewhere."""
    for folder in folders:
        for place in itertools.takewhile(lambda place: place != root, (folder, *folder.parents)):
            if place.is_symlink():
                raise ValueError(f"{str(place)!r} is a link, and files are deleted in it; put a folder in its place")


def refuse_current(folder: Path) -> None:
    """Raises ValueError for the current folder: `atomic_folder` would replace it, and the user's shell see nothing."""
    if folder.resolve() == Path.cwd():
        raise ValueError(f"{str(folder)!r} is the current folder, and cannot be replaced; name a new one with -o")


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's renames, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_path(path: Path) -> Path:
    """A temporary name, unique across processes and machines (process ids recur, in containers always)."""
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")


@contextmanager
def atomic_folder(folder: Path) -> Generator[Path]:
    """A hidden folder to fill, which is flushed to disk and renamed to `folder` (absent, or empty) at the end; an
    exception or a crash leaves no `folder`. Raises WrittenMeanwhile if another process has filled it with something
    else. Readers skip hidden folders; those of killed processes are deleted after a day, when `folder` is written
    again."""
    target = folder.resolve()
    refuse_complete(target.parent)
    temporary = temporary_path(target)
    temporary.mkdir(parents=True)
    for abandoned in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        if abandoned.is_dir() and time.time() - abandoned.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(abandoned, ignore_errors=True)
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        _take_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)  # a full disk is reported without a name
        raise
    sync(target.parent)


def _take_place(temporary: Path, target: Path) -> None:
    """Rename a folder. One that holds the same files is as good."""

    def contents(folder: Path) -> dict[str, str]:
        return {str(path.relative_to(folder)): sha256(path) for path in folder.rglob("*") if path.is_file()}

    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if contents(temporary) != contents(target):
            raise WrittenMeanwhile(
                error.errno, "another process has written it meanwhile; nothing of it was changed", str(target)
            ) from None
        shutil.rmtree(temporary)


def write_text(path: Path, content: str) -> None:
    """Write UTF-8 text atomically."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically. Raises ValueError for NaN and Inf (missing values are None)."""
    write_text(path, json_text(content))


def json_text(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold the exclusive lock file `path`, an flock: the system releases it when the process ends, in whatever way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock. Works on read-only folders."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def storage_problem(error: BaseException | None) -> str | None:
    """Why the storage could not be written, if that is what an error, or one that it follows from, is about."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            return error.strerror or os.strerror(error.errno)
        error = error.__cause__ or error.__context__
    return None


def open_regular(path: Path | str, limit: int, inside: Path | None = None) -> io.FileIO:
    """The door for every file that comes from outside: exactly this path, a regular file, opened without waiting for a
    pipe. A link is followed where its file lies in the folder `inside`. Raises NotRegularError for other links, pipes,
    devices and folders, and OSError for more than `limit` bytes."""
    real = Path(os.path.realpath(path)) if inside else path
    if inside and not Path(real).is_relative_to(inside.resolve()):
        raise NotRegularError(errno.ELOOP, f"is a link to {str(real)!r}; name that file, or copy it there", str(path))
    try:
        file = io.FileIO(real, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError as error:
        error.filename = str(path)
        kind = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ENXIO: "a socket"}.get(error.errno or 0)
        if kind is None:
            raise
        raise NotRegularError(error.errno, f"is {kind}; name a file", str(path)) from None
    status = os.fstat(file.fileno())
    is_file = stat.S_ISREG(status.st_mode)
    if is_file and status.st_size <= limit:
        return file
    file.close()
    if is_file:
        raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes", str(path))
    kind = "a pipe" if stat.S_ISFIFO(status.st_mode) else "a device"
    raise NotRegularError(errno.EINVAL, f"is {kind}; name a file", str(path))


def read_regular(path: Path | str, limit: int = MAX_TEXT_BYTES, inside: Path | None = None) -> bytes:
    """The bytes of an untrusted file. Raises as `open_regular`."""
    with open_regular(path, limit, inside) as file:
        return file.readall()


def repository_of(folder: Path) -> Path:
    """The folder that links may point into: itself, or at and below a snapshot in a cache of the hub its repository,
    which has the files that the snapshot's links name."""
    whole = folder.absolute()
    for place in (whole, *whole.parents):
        if place.parent.name == "snapshots" and place.parents[1].name.startswith(("models--", "datasets--")):
            return place.parents[1]
    return folder


def parse_json(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for too deep nesting."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_path(name: str | Path) -> Path:
    """The path, with its '~' expanded. Raises ValueError for the home of a user that does not exist."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"{str(name)!r}: no user of this name has a home folder; write the whole path") from None


def digest(content: Any) -> str:
    """12 hex digits that identify a JSON value: SHA-256 of its canonical (sorted, compact) form."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def unreadable(file: Path, error: Exception) -> ValueError:
    """The error for a file that cannot be read, with the fix."""
    if isinstance(error, UnicodeError):
        return ValueError(f"{file} is not UTF-8 text ({one_line(error)}); save it as UTF-8")
    if isinstance(error, NotRegularError) or (isinstance(error, OSError) and error.errno == errno.EFBIG):
        return ValueError(f"{file} {error.strerror}")
    return ValueError(f"{file} cannot be read ({one_line(error)}); check that it is whole and readable")


def refuse_empty(file: Path) -> None:
    """Raises ValueError for a file of 0 bytes."""
    if file.is_file() and file.stat().st_size == 0:
        raise ValueError(f"{file} is empty (0 bytes); was it written completely?")
