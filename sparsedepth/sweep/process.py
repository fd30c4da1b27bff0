"""Processes that end with their parent, and that stop at a checkpoint when asked to.

A run is a process of its own: running out of memory or crashing is one run's fate. A child asks the kernel for SIGTERM
at its parent's death (Linux; elsewhere it finishes its run, and the run's lock keeps it the only writer), so that
`kill -9` of a driver or a worker leaves nothing behind.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

INTERRUPTED = 75  # EX_TEMPFAIL: try again later
USER_ERROR = 2


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent (its process id given) dies; exit at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # 1 = PR_SET_PDEATHSIG
        if os.getppid() != parent:
            sys.exit(INTERRUPTED)


def stop_on_signals() -> Callable[[], bool]:
    """Note SIGTERM, SIGINT and SIGUSR1 (SLURM's warning); the function returned says whether one has come.

    A second Ctrl-C does not wait for a checkpoint: it raises KeyboardInterrupt where the process stands.
    """
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        if asked.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note)
    return lambda: bool(asked)


def thread_environment(threads: int) -> dict[str, str]:
    """This process's environment with the thread pools of a child limited: contending pools cost a factor of ten."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"}
