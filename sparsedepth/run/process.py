"""A run's process: its exit codes, the signals that stop it at its next checkpoint, its threads, memory and compiler.

Each run is a separate process, so that a crash affects one run only. On Linux the kernel sends it SIGTERM when its
parent dies, so that no process outlives a killed driver; elsewhere it finishes its run, protected by its lease.
docs/architecture.md describes a Ctrl-C from end to end.

The compiler's cache is in the results folder: RESULTS/work/compiler-cache/HOST-0, HOST-1, ... A process that is killed
while it compiles can leave half a file there, with which every later run of that shape would fail. The run that finds
it marks the folder as damaged and takes the next; nothing is deleted, since other runs may be reading it. A cache that
the user has chosen (TORCHINDUCTOR_CACHE_DIR) is used until it fails."""

import ctypes
import itertools
import os
import re
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

INTERRUPTED = 75  # EX_TEMPFAIL: try again later
USER_ERROR = 2
INFEASIBLE = 76
NO_STORAGE = 74  # EX_IOERR: the results folder cannot be written, which is no fault of the run

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""SIGUSR1 and SIGUSR2 are Slurm's warnings."""

VARIABLE, DEPENDENT = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
DAMAGED = "damaged"
"""The file that marks a folder."""

PARENT = "SPARSEDEPTH_PARENT"
"""Names the process that started this one, where that may die before this one asks for its parent."""

COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def end_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGTERM when the process with id `parent` dies; exit at once if it already has: another is
    the parent by then. `parent` is the word of who started this process, which can be too late to ask the kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(INTERRUPTED)


@dataclass(kw_only=True)
class Stop:
    """True once a signal of CAUGHT has arrived since `catch`. A second Ctrl-C raises KeyboardInterrupt at once."""

    is_announced: bool = False
    """acknowledge a Ctrl-C on stderr at once, since a checkpoint may take a while"""
    signals: list[int] = field(default_factory=list)

    def catch(self) -> "Stop":
        for number in CAUGHT:
            signal.signal(number, self._handle)
        return self

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


def name_process(name: str) -> None:
    """Set the process name for `top` (15 characters, Linux): forked processes share their parent's command line."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def thread_environment(threads: int) -> dict[str, str]:
    """This process's environment with limited thread pools for a child: contending pools cost a factor of ten."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    limits["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)  # the default is one per core, in each run
    # Avoids fragmentation if runs share a GPU or shapes differ.
    limits["PYTORCH_ALLOC_CONF"] = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"}


def nvidia_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def has_gpu_driver() -> bool:
    """Whether there may be a GPU that torch calls CUDA: NVIDIA's, or AMD's."""
    return nvidia_driver() is not None or os.path.exists("/dev/kfd")


def has_used_cuda() -> bool:
    """Whether this process, or a library, has initialised NVIDIA's driver: a fork of it could not use the GPU."""
    driver = nvidia_driver()  # before cuInit the call is an error, 3
    return driver is not None and driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0


def oom_kills(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes of this control group the kernel has killed to free memory (Linux); 0 if unknown."""
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


def anonymous_bytes() -> tuple[int, int] | None:
    """Memory of this process now, and at its peak, without pages of files, which can be freed; None without Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    now, of_files, shared, peak = (
        1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM")
    )
    return now, peak - of_files - shared


def use_cache(results: Path) -> Path:
    """Choose the folder for what this process compiles: the first of this machine that is not damaged."""
    chosen = os.environ.get(VARIABLE)
    if chosen and Path(chosen).parent != _root(results):
        return Path(chosen)
    host = socket.gethostname().partition(".")[0] or "host"
    folders = (_root(results) / f"{host}-{number}" for number in itertools.count())
    folder = next(folder for folder in folders if not (folder / DAMAGED).exists())
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(folder)
    return folder


def abandon_cache(results: Path) -> None:
    """Never use the current folder again, and forget what this process has compiled."""
    chosen = os.environ.pop(VARIABLE, None)
    os.environ.pop(DEPENDENT, None)
    if chosen and Path(chosen).parent == _root(results):
        (Path(chosen) / DAMAGED).touch()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def _root(results: Path) -> Path:
    return results.resolve() / "work" / "compiler-cache"


def is_compiler_error(error: BaseException) -> bool:
    """Whether the compiler raised this, or what it came from."""
    chain = error
    while chain is not None:
        last_frames = traceback.extract_tb(chain.__traceback__)[-1:]
        places = [frame.filename.replace(os.sep, ".") for frame in last_frames]
        if type(chain).__module__.startswith(COMPILERS) or any(f".{part}." in p for part in COMPILERS for p in places):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
