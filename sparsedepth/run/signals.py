"""What happens at Ctrl-C and other signals: a process notes that it is asked to stop, and stops at a checkpoint; one
whose parent has died is asked, too.

A run is a process of its own: running out of memory or crashing is one run's fate. A child asks the kernel for SIGTERM
at its parent's death (Linux; elsewhere it finishes its run, and the run's lock keeps it the only writer), so that
`kill -9` of a driver or a worker leaves nothing behind. The whole way of a Ctrl-C: docs/architecture.md.
"""

import ctypes
import os
import signal
import sys

INTERRUPTED = 75  # EX_TEMPFAIL: try again later
USER_ERROR = 2
INFEASIBLE = 76

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""SIGUSR1 and SIGUSR2 are Slurm's warnings."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent (its process id given) dies; exit at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(INTERRUPTED)


class Stop:
    """Whether a signal of CAUGHT has come since `catch`.

    A second Ctrl-C does not wait for a checkpoint: it raises KeyboardInterrupt where the process stands.
    """

    def __init__(self, *, is_announced: bool = False) -> None:
        """`is_announced`: a Ctrl-C is acknowledged on stderr at once, for a checkpoint may take a while."""
        self.signals: list[int] = []
        self.is_announced = is_announced

    def catch(self) -> None:
        """Note the signals from now on."""
        for number in CAUGHT:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.signals.append(number)
        if self.is_announced and self.signals == [signal.SIGINT]:
            os.write(2, b"\nstopping at the next checkpoint; Ctrl-C again stops at once\n")
        if self.signals.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    def __call__(self) -> bool:
        return bool(self.signals)

    @property
    def exit_code(self) -> int:
        """128 + the first signal's number, as shells count."""
        return 128 + self.signals[0]


def stop_on_signals(*, is_announced: bool = False) -> Stop:
    """A Stop that catches the signals already."""
    stop = Stop(is_announced=is_announced)
    stop.catch()
    return stop
