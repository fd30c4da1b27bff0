"""A lease: one holder at a time, of a lock file that falls with its process and beats while that lives.

    lock   held by flock; its content names the kernel that the holder runs on, its time is the holder's last beat

It alone says who is alive: the holder of a run, and of the trials that a sweep's process has taken. On one machine the
flock decides: it falls when its process ends, however it ends. A holder on another machine, where the flock may not be
seen, and a holder that is stopped or hangs, are judged by the beat: once it has been still for GRACE_SECONDS the lease
is taken, by renaming a new file over it. The old holder, should it wake, sees that the file at the path is no longer
the one that it holds. To take a lease compares no clocks; `is_held` looks once, and so compares the time of the
beat with this machine's clock, or with the beat of a lease that the asker holds itself.
"""

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from sparsedepth.files import NotRegularError, is_locked, read_regular

BEAT_SECONDS = 1.0
GRACE_SECONDS = 60.0
"""How long a holder may be silent before another takes its place."""

_LOOK_SECONDS = 0.05
_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB


class Stopped(Exception):
    """Asked to stop while waiting for a lock."""


def kernel() -> str:
    """An id of this boot of the machine, no host name: processes with the same id see each other's flocks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


class Beat:
    """A lease's beat as an onlooker sees it: judged by whether it moves, not by its value, since clocks differ."""

    def __init__(self, path: Path):
        self.path = path
        self.has_moved = False
        self._last, self._since = last_beat(self.path), time.monotonic()

    def still_seconds(self) -> float:
        """Seconds since the beat was last seen to move."""
        now = last_beat(self.path)
        if now != self._last:
            self._last, self._since, self.has_moved = now, time.monotonic(), True
        return time.monotonic() - self._since


class Lease:
    """A lock file that is held, as long as `is_valid()`."""

    def __init__(self, path: Path, handle: int):
        self.path, self._handle = path, handle
        self.lost = False
        """whether another has taken it, as the last beat found"""
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="beat")

    def is_valid(self) -> bool:
        """Whether nobody has taken it since."""
        return _is_at(self.path, self._handle)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            if not self.is_valid():
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
        self._beating.join()  # before the handle is closed: the next beat could touch whatever file gets its number
        os.ftruncate(self._handle, 0)
        os.close(self._handle)


@contextmanager
def hold(path: Path, stop: Callable[[], bool] = lambda: False, beat: Beat | None = None) -> Generator[Lease]:
    """Hold the lease at `path`, once its present holder has let go, has died, or has been silent for GRACE_SECONDS,
    counted from when `beat` was first looked at, where the caller has done so: of several leases all at once.

    Raises Stopped once stop() is true and the lease is not held yet.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lease = Lease(path, _acquire(path, stop, beat or Beat(path)))
    lease.start()
    try:
        yield lease
    finally:
        lease.release()


def is_held(path: Path, now: float | None = None) -> bool:
    """Whether a living process holds the lease. Reads only: works on a folder that cannot be written.

    `now` is the time by the clock that the beats are written with; this machine's where it is not given.
    """
    try:
        holder = read_regular(path).decode(errors="replace")
        if holder not in ("", kernel()):
            return (now or time.time()) - path.stat().st_mtime < GRACE_SECONDS
    except (FileNotFoundError, NotRegularError):
        return False
    return is_locked(path)


def last_beat(path: Path) -> float | None:
    """The Unix time of a lease's last beat, by the clock that beats are written with; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _acquire(path: Path, stop: Callable[[], bool], beat: Beat) -> int:
    """A handle on the locked file at `path`."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        holder = os.pread(handle, 64, 0).decode(errors="replace")
        # Once it is locked, look again: another may have renamed its own file over this one since the open (`_take`).
        if holder in ("", kernel()) and _try_lock(handle) and _is_at(path, handle):
            return handle
        os.close(handle)
        if beat.still_seconds() > GRACE_SECONDS:
            return _take(path)
        if stop():
            raise Stopped
        time.sleep(_LOOK_SECONDS)


def _take(path: Path) -> int:
    """Put a new, locked file in the place of a silent holder's."""
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    fcntl.flock(handle, _LOCK)  # before the rename: at `path` nobody ever finds it free
    os.rename(aside, path)
    return handle


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, _LOCK)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
