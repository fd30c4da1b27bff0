"""A lease: a lock file with one holder at a time, which is released when its process dies and has a heartbeat.

    lock   held by flock; its content is the boot id of the holder's machine, its mtime the holder's last heartbeat

A lease is the only sign of life of a run's process, and of a sweep process for the trials that it has taken. On one
machine the flock decides: the kernel releases it when the process ends in any way. On another machine the flock may be
invisible, and a holder may also be stopped or hang. So a lease without a heartbeat for GRACE_SECONDS is taken over, by
renaming a new file over it; if the old holder wakes up, it sees that the file at the path is no longer its own. Taking
over compares no clocks. `is_held` checks only once, so it compares the heartbeat with this machine's clock, or with the
heartbeat of a lease that the caller holds itself."""

import contextlib
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from sparsedepth.files import NotRegularError, is_locked, read_regular

HEARTBEAT_SECONDS = 1.0
GRACE_SECONDS = 60.0
"""Time without a heartbeat after which a lease may be taken over."""

_POLL_SECONDS = 0.05
_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB


class Stopped(Exception):
    """Asked to stop while waiting for a lease."""


def boot_id() -> str:
    """Id of this boot of the machine (not a host name): processes with the same id see each other's flocks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


class HeartbeatMonitor:
    """Watches a lease's heartbeat: only whether it changes counts, not its value, since clocks differ."""

    def __init__(self, path: Path):
        self.path = path
        self.has_changed = False
        self._last = last_heartbeat(path)
        self._since = time.monotonic()

    def silent_seconds(self) -> float:
        heartbeat = last_heartbeat(self.path)
        if heartbeat != self._last:
            self._last = heartbeat
            self._since = time.monotonic()
            self.has_changed = True
        return time.monotonic() - self._since


class Lease:
    def __init__(self, path: Path, handle: int):
        """From now on it beats. `handle`: of the locked file at `path`."""
        self.path = path
        self._handle = handle
        self.lost = False
        """whether another process had taken it over at the last heartbeat"""
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        os.ftruncate(handle, 0)
        os.pwrite(handle, boot_id().encode(), 0)
        self._thread.start()

    def is_valid(self) -> bool:
        return _is_at(self.path, self._handle)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # of a shared disk that does not answer for a moment
                if not self.is_valid():
                    self.lost = True
                    return
                os.utime(self._handle)

    def release(self) -> None:
        """Release it; an empty file means that nobody holds it, on any machine."""
        self._released.set()
        self._thread.join()  # before closing: the thread could touch another file that gets the same handle
        os.ftruncate(self._handle, 0)
        os.close(self._handle)


@contextmanager
def hold(
    path: Path, stop: Callable[[], bool] = lambda: False, heartbeat: HeartbeatMonitor | None = None
) -> Generator[Lease]:
    """Hold the lease at `path`, once its holder has released it, has died, or has been silent for GRACE_SECONDS. The
    silence is counted from the creation of `heartbeat`, so that a caller can wait for several leases at once. Raises
    Stopped once stop() is true and the lease is not held yet."""
    path.parent.mkdir(exist_ok=True)  # without parents: a results folder that was moved away is not made again
    lease = Lease(path, _acquire(path, stop, heartbeat or HeartbeatMonitor(path)))
    try:
        yield lease
    finally:
        lease.release()


def is_held(path: Path, now: float | None = None) -> bool:
    """Whether a living process holds the lease. Works on a read-only folder. `now`: by the clock that writes the
    heartbeats, by default this machine's."""
    try:
        if read_regular(path).decode(errors="replace") not in ("", boot_id()):
            return (now or time.time()) - path.stat().st_mtime < GRACE_SECONDS
    except (FileNotFoundError, NotRegularError):
        return False
    return is_locked(path)


def stopped_holder(path: Path) -> int | None:
    """The process of this machine that holds the lease and is stopped, by Ctrl-Z say: it is never free (Linux)."""
    try:
        inode = f":{path.stat().st_ino} "
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if inode in line]
        holders = [int(words[4]) for words in locks if words[1] == "FLOCK"]
        states = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in holders}
    except (OSError, ValueError, IndexError):
        return None
    return next((pid for pid, state in states.items() if state in "Tt"), None)


def last_heartbeat(path: Path) -> float | None:
    """Unix time of a lease's last heartbeat, by the clock of the file system; None without a lease."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _acquire(path: Path, stop: Callable[[], bool], heartbeat: HeartbeatMonitor) -> int:
    """A handle on the locked file at `path`."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.pread(handle, 64, 0).decode(errors="replace") in ("", boot_id()):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, _LOCK)
                if _is_at(path, handle):  # else another process has taken the lease over since the open
                    return handle
        os.close(handle)
        if heartbeat.silent_seconds() > GRACE_SECONDS:
            return _take_over(path)
        if stop():
            raise Stopped
        time.sleep(_POLL_SECONDS)


def _take_over(path: Path) -> int:
    """Replace a silent holder's file with a new, locked one."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    fcntl.flock(handle, _LOCK)  # before the rename, so that the file at `path` is never unlocked
    os.rename(temporary, path)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
