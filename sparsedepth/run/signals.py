"""Signal handling: after Ctrl-C or SIGTERM a process stops at its next checkpoint.

Each run is a separate process, so that a crash affects one run only. On Linux the kernel sends it SIGTERM when its
parent dies, so that no process outlives a killed driver; elsewhere it finishes its run, protected by its lease.
docs/architecture.md describes a Ctrl-C from end to end.
"""

import ctypes
import os
import signal
import sys

INTERRUPTED = 75  # EX_TEMPFAIL: try again later
USER_ERROR = 2
INFEASIBLE = 76
NO_STORAGE = 74  # EX_IOERR: the results folder cannot be written, which is no fault of the run

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""SIGUSR1 and SIGUSR2 are Slurm's warnings."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the process with id `parent` dies; exit at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(INTERRUPTED)


class Stop:
    """True once a signal of CAUGHT has arrived since `catch`. A second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self, *, is_announced: bool = False) -> None:
        """`is_announced`: acknowledge a Ctrl-C on stderr at once, since a checkpoint may take a while."""
        self.signals: list[int] = []
        self.is_announced = is_announced

    def catch(self) -> None:
        for number in CAUGHT:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.signals.append(number)
        if self.is_announced and self.signals == [signal.SIGINT]:
            os.write(2, b"\nstopping at the next checkpoint; press Ctrl-C again to stop at once\n")
        if self.signals.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    def __call__(self) -> bool:
        return bool(self.signals)

    @property
    def exit_code(self) -> int:
        """128 + the first signal's number, as shells count."""
        return 128 + self.signals[0]


def stop_on_signals(*, is_announced: bool = False) -> Stop:
    """A Stop that catches signals from now on."""
    stop = Stop(is_announced=is_announced)
    stop.catch()
    return stop
