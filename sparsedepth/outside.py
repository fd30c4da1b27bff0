"""Foreign formats are parsed in a child process with limits: whatever a file or a library does, the command goes on.

    memory    MEMORY bytes more than at its start (resident, of Linux), and 4 GB of address space
    disk      a private temporary folder with DISK bytes, which goes with the child
    time      it is ended when nothing comes from it for some seconds

The child is a fork of this process, so that it starts in milliseconds; what it reads comes back as bytes."""

import ctypes
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparsedepth.words.plain_text import one_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SECONDS = 60.0
MEMORY = 800_000_000
ADDRESSES = 4 * 2**30
DISK = 2_000_000_000
ANSWER = 1_000_000_000
"""Bytes that may come back."""
_PART, _END, _ERROR = b"p", b".", b"e"
_WATCH = 0.02
"""Seconds between looks at the child."""


def in_child(work: Callable[[], Iterable[bytes]], source: str, seconds: float = SECONDS) -> list[bytes]:
    """What `work` yields, in a child process in its own folder. Raises ValueError, one line, for whatever it raises,
    and where it goes over a limit."""
    import multiprocessing  # slow, and a query starts without it

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="sparsedepth-") as folder:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(work, source, theirs, folder))
        child.start()
        theirs.close()
        try:
            return [*_answers(ours, child.pid or 0, Path(folder), source, seconds)]
        finally:
            child.kill()  # and what it has started
            child.join()
            ours.close()


def _answers(ours: "Connection", pid: int, folder: Path, source: str, seconds: float) -> Iterator[bytes]:
    """The parts that a child sends until its end. Raises ValueError where it dies, or goes beyond a limit."""
    start, heard, n_bytes = _resident(pid), time.monotonic(), 0
    while True:
        if ours.poll(_WATCH):
            try:
                message = ours.recv_bytes()
            except EOFError:
                raise ValueError(f"{source} cannot be read: its reader was ended by the system") from None
            heard, kind, content = time.monotonic(), message[:1], message[1:]
            n_bytes += len(content)
            if kind == _ERROR:
                raise ValueError(content.decode())
            if kind == _END:
                return
            yield content
        if time.monotonic() - heard > seconds:
            raise ValueError(f"{source} cannot be read: nothing of it came for {seconds:g} s; --deadline gives it more")
        for told, n, most in (
            ("needs more than {:,.0f} MB of memory", _resident(pid) - start, MEMORY),
            ("fills the disk with more than {:,.0f} MB", _size(folder), DISK),
            ("has more than {:,.0f} MB", n_bytes, ANSWER),
        ):
            if n > most:
                raise ValueError(f"{source} cannot be read: it {told.format(most / 1e6)}")


def _resident(pid: int) -> int:
    """Bytes in memory; 0 where the system does not tell, or after the end."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _size(folder: Path) -> int:
    return sum(os.lstat(Path(place, name)).st_size for place, _, names in os.walk(folder) for name in names)


def _work(work: Callable[[], Iterable[bytes]], source: str, theirs: "Connection", folder: str) -> None:
    """The child's life."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent
        limit_addresses(ADDRESSES)
    _limit(resource.RLIMIT_FSIZE, DISK)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.environ |= {"TMPDIR": folder, "SQLITE_TMPDIR": folder}
    tempfile.tempdir = folder
    try:
        for part in work():
            theirs.send_bytes(_PART + part)
        theirs.send_bytes(_END)
    except BaseException as error:  # whatever a library raises, also SystemExit
        told = f"{source} cannot be read: {type(error).__name__}: {one_line(error)}"
        theirs.send_bytes(_ERROR + (str(error) if isinstance(error, ValueError) else told).encode(errors="replace"))


def limit_addresses(more: int) -> None:
    """At most so many bytes of address space beyond what this process has now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def _limit(kind: int, most: int) -> None:
    limits = resource.getrlimit(kind)  # -1: none
    resource.setrlimit(kind, (min([most, *(limit for limit in limits if limit >= 0)]), limits[1]))
