"""Commands in processes that are forked from one which has imported what they need.

A process of its own for each, as a user has it: arguments, environment, folder, exit code, what it prints, a session.
Only the imports are not repeated, which take most of the seconds of most commands; nor are those of the forkserver of a
sweep, which is forked from its driver. What a command imports, and how it and a forkserver start, is tested with
processes that start from nothing (`test_structure`, `test_readme`, `tiny_sweep.start`, `test_forkserver`).
"""

import atexit
import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

HEAVY = ("torch._dynamo", "pandas", "pyarrow.parquet", "duckdb", "optuna", "seaborn", "scipy.stats", "scipy.optimize",
         "datasets", "transformers", "rich.live")  # fmt: skip
NOT_HERE = ("sparsedepth.sweep.preload", "sparsedepth.trackers")
"""A process that forks in its own way, and packages that need not be there."""
SPAWN = multiprocessing.util.spawnv_passfds


def call(arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 300) -> tuple[int, str, str]:
    """The exit code of `sparsedepth ARGUMENTS...`, its output and its errors."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        process = {"environment": dict(environment), "folder": os.getcwd(), "streams": [str(path) for path in streams]}
        requests, answers = cast(IO[str], server.stdin), cast(IO[str], server.stdout)
        requests.write(json.dumps({"arguments": arguments, **process}) + "\n")
        requests.flush()
        if not select.select([answers], [], [], timeout)[0]:
            server.kill()
            _server.cache_clear()
            raise TimeoutError(f"sparsedepth {' '.join(arguments)} took more than {timeout} s")
        code = int(answers.readline())
        out, err = (path.read_text() for path in streams)
        return code, out, err


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # read at import
    server = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    """Fork for each line of the standard input; answer with the exit code."""
    for module in pkgutil.walk_packages(importlib.import_module("sparsedepth").__path__, "sparsedepth."):
        if not module.name.startswith(NOT_HERE):
            importlib.import_module(module.name)
    for name in HEAVY:
        importlib.import_module(name)
    assert threading.active_count() == 1, "threads do not live on in a fork"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        command = multiprocessing.get_context("fork").Process(target=_run, kwargs=json.loads(line))
        command.start()
        command.join()
        print(command.exitcode, flush=True)


def _fork_forkserver(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`: a fork that is as if it had begun anew, but for imports."""
    import torch

    if "multiprocessing.forkserver" not in arguments[-1] or torch.cuda.is_available():  # CUDA does not survive a fork
        return SPAWN(path, arguments, descriptors)
    if child := os.fork():
        return child
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        kept = sorted({0, 1, 2, *descriptors})
        for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)  # locks, which would outlive the driver, among them
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _run(arguments: list[str], environment: dict[str, str], folder: str, streams: list[str]) -> None:
    from sparsedepth.cli import main

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    multiprocessing.util.spawnv_passfds = _fork_forkserver
    sys.path[0], sys.argv = folder, [main.__file__, *arguments]
    main.run()


if __name__ == "__main__":
    _serve()
