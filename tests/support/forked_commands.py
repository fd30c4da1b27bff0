"""Commands in processes that are forked from one which has imported what they need; all workers of a test run share it.

A process of its own for each, as a user has it: arguments, environment, folder, exit code, what it prints, a session.
Only the imports are not repeated, which take most of the seconds of most commands; nor are those of the forkserver of a
sweep, which is forked from its driver. What a command imports, and how it and a forkserver start, is tested with
processes that start from nothing (`test_structure`, `tiny_sweep.start`, `test_forkserver`). The faults of
`chaos/faults/sitecustomize.py` are imported too; they act where their variables are set.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HEAVY = ("torch._dynamo", "pandas", "pyarrow.parquet", "duckdb", "optuna", "seaborn", "scipy.stats", "scipy.optimize",
         "datasets", "transformers", "rich.live")  # fmt: skip
NOT_HERE = ("sparsedepth.sweep.preload", "sparsedepth.trackers", "sparsedepth.watch.lightning")
"""A process that forks in its own way, and packages that need not be there."""
SPAWN = multiprocessing.util.spawnv_passfds
FAULTS = Path(__file__).parents[1] / "chaos" / "faults"
FORKSERVER = "forkserver"
"""The name that a forked forkserver gives itself."""

started: dict[str, list[str]] = {}
"""Folder -> arguments: a command that `start` began works in a folder of its own, by which its processes are known."""


class Command:
    """A forked command that is under way, with the methods of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, program: str) -> None:
        self._place = Path(tempfile.mkdtemp())
        self.folder = folder or str(self._place)
        self.streams = [str(self._place / name) for name in ("out", "err")]
        request = {"arguments": [*arguments], "environment": dict(environment), "folder": self.folder,
                   "streams": self.streams, "program": program}  # fmt: skip
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_address())
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(0) if select.select([self._connection], [], [], 0)[0] else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("sparsedepth", timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (Path(path).read_text() for path in self.streams)
        return out, err

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def forget(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)


def call(
    arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 300, program: str = "", folder: str = ""
) -> tuple[int, str, str]:
    """The exit code of `sparsedepth ARGUMENTS...`, or of the script `program`; its output and its errors."""
    command = Command(arguments, environment, folder or os.getcwd(), program)
    try:
        out, err = command.communicate(timeout)
    except subprocess.TimeoutExpired:
        command.kill()
        raise TimeoutError(f"{program or 'sparsedepth'} {' '.join(arguments)} took more than {timeout} s") from None
    command.forget()
    assert command.returncode is not None
    return command.returncode, out, err


def start(arguments: Sequence[str], environment: Mapping[str, str], program: str = "") -> Command:
    """The same, under way; `sweep_processes.processes` finds its processes by their folder."""
    command = Command(arguments, environment, "", program)
    started[command.folder] = [*arguments]
    atexit.register(command.forget)
    return command


@functools.cache
def _address() -> str:
    """Where the server of this test run listens. It ends once none of the workers is connected to it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = Path(tempfile.gettempdir(), f"sparsedepth-{run[:12]}")
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        presence = socket.socket(socket.AF_UNIX)
        if presence.connect_ex(str(path)):
            path.unlink(missing_ok=True)
            settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SPARSEDEPTH_FAULTS": os.devnull}
            python_path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH")]))
            server = subprocess.Popen(
                [sys.executable, __file__, str(path)], env={**os.environ, **settings, "PYTHONPATH": python_path}
            )
            while presence.connect_ex(str(path)):
                assert server.poll() is None, "the server of forked commands could not import what commands need"
                time.sleep(0.05)
        atexit.register(presence.close)
    return str(path)


def _serve(path: str) -> None:
    """Fork for each request; end with the last connection."""
    for module in pkgutil.walk_packages(importlib.import_module("sparsedepth").__path__, "sparsedepth."):
        if not module.name.startswith(NOT_HERE):
            importlib.import_module(module.name)
    for name in HEAVY:
        importlib.import_module(name)
    assert threading.active_count() == 1, "threads do not live on in a fork"
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    connections, is_begun, parent = [listener], False, os.getppid()
    while len(connections) > 1 or (not is_begun and os.getppid() == parent):
        for ready in select.select(connections, [], [], 1.0)[0]:
            if ready is listener:
                connections.append(listener.accept()[0])
                is_begun = True
                continue
            request = ready.makefile().readline()
            if request and not os.fork():
                try:
                    _answer(json.loads(request), ready, [each for each in connections if each is not ready])
                finally:
                    os._exit(0)
            connections.remove(ready)
            ready.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    Path(path).unlink()
    Path(f"{path}.lock").unlink(missing_ok=True)


def _answer(request: dict, connection: socket.socket, others: Sequence[socket.socket]) -> None:
    """Fork the command; tell its process, and at its end the exit code."""
    for each in others:
        each.close()
    command = multiprocessing.get_context("fork").Process(target=_run, args=(connection,), kwargs=request)
    command.start()
    connection.sendall(f"{command.pid}\n".encode())
    command.join()
    connection.sendall(f"{command.exitcode}\n".encode())


def _fork_forkserver(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`: a fork that is as if it had begun anew, but for imports."""
    import torch

    if "multiprocessing.forkserver" not in arguments[-1] or torch.cuda.is_available():  # CUDA does not survive a fork
        return SPAWN(path, arguments, descriptors)
    if child := os.fork():
        return child
    try:
        Path("/proc/self/comm").write_text(FORKSERVER)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *descriptors})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)  # locks, which would outlive the driver, among them
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _run(
    connection: socket.socket,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[str],
    program: str,
) -> None:
    from sparsedepth.cli import main

    connection.close()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    multiprocessing.util.spawnv_passfds = _fork_forkserver
    sys.path[0], sys.argv = str(Path(program).parent) if program else folder, [program or main.__file__, *arguments]
    if program:
        runpy.run_path(program, run_name="__main__")
    else:
        main.run()


if __name__ == "__main__":
    _serve(sys.argv[1])
