"""One owner at a time: a lock file that falls with its process, beats while it lives, and can be taken from the silent.

    lock   held by flock; its content names the kernel that the holder runs on, its time is the holder's last beat

On one machine the flock decides: it falls when its process ends, however it ends. A holder on another machine, where
the flock may not be seen, and a holder that is stopped or hangs, are judged by the beat: once it has been still for
GRACE_SECONDS the lock is taken, by renaming a new file over it. The old holder, should it wake, sees that the file at
the path is no longer the one that it holds.
"""

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from sparsedepth.files import is_locked

BEAT_SECONDS = 1.0
GRACE_SECONDS = 60.0
"""How long a holder may be silent before another takes its place."""

_LOOK_SECONDS = 0.05


class Stopped(Exception):
    """Asked to stop while waiting for a lock."""


def kernel() -> str:
    """Names the running kernel: processes with the same name see each other's flocks. It is no host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


class Lease:
    """A lock that is held, as long as `is_mine()`."""

    def __init__(self, path: Path, handle: int):
        self.path, self._handle = path, handle
        self.lost = False
        """whether another has taken the lock, as the last beat found"""
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="beat")

    def is_mine(self) -> bool:
        """Whether nobody has taken the lock since."""
        return _is_at(self.path, self._handle)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            if not self.is_mine():
                self.lost = True
                return
            os.utime(self._handle)

    def start(self) -> None:
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, kernel().encode(), 0)
        self._beating.start()

    def release(self) -> None:
        """Let go; the empty file says that nobody holds it, on any machine."""
        self._ended.set()
        self._beating.join()
        os.ftruncate(self._handle, 0)
        os.close(self._handle)


@contextmanager
def owned(path: Path, stop: Callable[[], bool] = lambda: False) -> Generator[Lease]:
    """Own `path`, after its present holder has let go, has died, or has been silent for GRACE_SECONDS.

    Raises Stopped once stop() is true and the lock is not held yet.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = Lease(path, _acquire(path, stop))
    mine.start()
    try:
        yield mine
    finally:
        mine.release()


def is_owned(path: Path) -> bool:
    """Whether a living process owns the lock. Reads only: works on a folder that cannot be written."""
    try:
        holder = path.read_text(errors="replace")
        if holder not in ("", kernel()):
            return time.time() - path.stat().st_mtime < GRACE_SECONDS
    except FileNotFoundError:
        return False
    return is_locked(path)


def _acquire(path: Path, stop: Callable[[], bool]) -> int:
    """A handle on the locked file at `path`."""
    beat, since = None, time.monotonic()
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = os.pread(handle, 64, 0).decode(errors="replace")
        if holder in ("", kernel()) and _try_lock(handle) and _is_at(path, handle):
            return handle
        # Judged by whether the beat moves while we look on, not by its value: two machines' clocks differ.
        if (seen := os.fstat(handle).st_mtime_ns) != beat:
            beat, since = seen, time.monotonic()
        os.close(handle)
        if time.monotonic() - since > GRACE_SECONDS:
            return _take(path)
        if stop():
            raise Stopped
        time.sleep(_LOOK_SECONDS)


def _take(path: Path) -> int:
    """Put a new, locked file in the place of a silent holder's."""
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    assert _try_lock(handle)
    os.rename(aside, path)
    return handle


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
