"""A process that has imported everything a run needs, and forks a process for each run in milliseconds.

    worker --- JSON lines over pipes ---> nursery (torch imported; nothing started) --- fork ---> run

Each run has its own memory, log, signal handlers and exit status, as if it had been started afresh. What cannot be
forked is not there yet: no CUDA context, no thread pool. A run over several devices is the same child, which then
becomes torchrun (exec).
"""

import argparse
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparsedepth.run.process import end_with_parent, name_process, thread_environment

LAUNCHER = "torch.distributed.run"
EXECUTE = "sparsedepth.run.execute"


class NurseryDied(Exception):
    """The nursery has ended without an answer; its run, if any, has been asked to stop at a checkpoint."""


class Nursery:
    """The worker's side of the pipes."""

    def __init__(self, results: Path, *, threads: int, processes_per_run: int = 1, patience: float = 0.05):
        """`results` tells whoever lists processes what it works on; `patience`: seconds between two looks at stop."""
        self.patience = patience
        self.processes_per_run = processes_per_run
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sparsedepth.sweep.forkserver", str(results), "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Without it torch's mere question whether there is a GPU leaves a trace that forbids CUDA in a fork.
            env={**thread_environment(threads), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )

    def run(self, arguments: Sequence[str], log: Path, stop: Callable[[], bool]) -> int:
        """Run `execute.main(arguments)` in a process of its own: its exit code, negative for a signal.

        SIGTERM is sent to it once stop() is true. Raises NurseryDied.
        """
        request = {"arguments": [*arguments], "log": str(log), "processes": self.processes_per_run}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise NurseryDied(f"exit code {self._process.wait()}") from None
        child = self._answer()["pid"]
        asked = False
        while not select.select([self._process.stdout], [], [], self.patience)[0]:
            if stop() and not asked:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(child, signal.SIGTERM)
                asked = True
        return self._answer()["code"]

    def _answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise NurseryDied(f"exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Let it end: it does when nobody can ask it for anything any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


def serve(requests: int, answers: int) -> None:
    """Fork a run for each line that comes in on the file descriptor `requests`, until it is closed."""

    def answer(content: dict[str, int]) -> None:
        os.write(answers, json.dumps(content).encode() + b"\n")

    own = os.getpid()
    with open(requests, "rb") as lines:
        for line in lines:
            child = os.fork()
            if child == 0:
                lines.close()
                os.close(answers)
                _run(json.loads(line), own)
            answer({"pid": child})
            answer({"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def _run(request: dict[str, Any], parent: int) -> None:
    """The forked child: never returns."""
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        end_with_parent(parent)
        name_process(f"run {Path(request['log']).parent.name}")
        code = _execute(request["arguments"], request["processes"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the exit handlers are the nursery's


def _execute(arguments: list[str], processes: int) -> int:
    if processes > 1:
        launch = [sys.executable, "-m", LAUNCHER, "--standalone", "--nproc-per-node", str(processes), "-m", EXECUTE]
        os.execv(sys.executable, [*launch, *arguments])
    from sparsedepth.run import execute

    sys.argv = [EXECUTE, *arguments]
    return execute.main(arguments)


def main(arguments: Sequence[str]) -> None:
    """Import what a run needs, then serve standard input and output."""
    parser = argparse.ArgumentParser(prog="sparsedepth.sweep.forkserver")
    parser.add_argument("results", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    end_with_parent(parser.parse_args(arguments).parent)
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # a stray print goes to the worker's log, not into the answers
    # Imported here alone, since the worker's side needs none of it. pandas is what pyarrow imports at its first table,
    # _dynamo what torch imports at its first optimizer.
    import pandas  # noqa: F401
    import torch
    import torch._dynamo

    import sparsedepth.run.execute  # noqa: F401

    assert not torch.cuda.is_initialized(), "a CUDA context does not survive a fork"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it looks at
    serve(requests, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # at once: nothing is open, and frozen modules cannot be torn down
