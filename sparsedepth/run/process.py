"""Processes that end with their parent, and that stop at a checkpoint when asked to.

A run is a process of its own: running out of memory or crashing is one run's fate. A child asks the kernel for SIGTERM
at its parent's death (Linux; elsewhere it finishes its run, and the run's lock keeps it the only writer), so that
`kill -9` of a driver or a worker leaves nothing behind.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

INTERRUPTED = 75  # EX_TEMPFAIL: try again later
USER_ERROR = 2
INFEASIBLE = 76

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""SIGUSR1 and SIGUSR2 are Slurm's warnings."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent (its process id given) dies; exit at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(INTERRUPTED)


def name_process(name: str) -> None:
    """What `top` shows of this process (15 characters, Linux): forked processes share their parent's command line."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


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


def thread_environment(threads: int) -> dict[str, str]:
    """This process's environment with the thread pools of a child limited: contending pools cost a factor of ten."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    limits["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)  # by default one for each core, in each run
    # Runs that share a GPU, and shapes that differ, leave no holes; the compiler's cache is one folder of the machine.
    limits["PYTORCH_ALLOC_CONF"] = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"}


def oom_kills(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes of this control group the kernel has killed so far to free memory (Linux); 0 if not known."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return 0
    for _, controllers, group in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.oom_control" if controllers else "memory.events"
        base = root / "memory" if controllers else root
        for path in (base / group.strip("/") / name, base / name):  # a container may see its own group as the root
            try:
                count = re.search(r"^oom_kill (\d+)", path.read_text(), re.MULTILINE)
            except OSError:
                continue
            if count:
                return int(count[1])
    return 0
