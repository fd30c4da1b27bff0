"""Start a process for each run in milliseconds, by forking one that has imported torch: multiprocessing's forkserver.

    driver --- socket ---> forkserver (`preload`: torch imported, nothing started) --- fork ---> run

Each run has its own memory, log, session, signal handlers and exit code, like a fresh process. The forkserver holds
nothing that cannot be forked: no CUDA context, no thread pool. For a run on several devices the child becomes torchrun
(exec). The kernel sends SIGTERM to the forkserver when the driver dies, and to each run when the forkserver dies. None
of them searches the current folder for modules, where a user's random.py would be taken for Python's."""

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Generator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

from sparsedepth.run.process import PARENT, end_with_parent, name_process, thread_environment
from sparsedepth.words.plain_text import last_line

EXECUTE = "sparsedepth.run.execute"

SERVER_DIED = 255
"""multiprocessing's exit code for a run whose forkserver has died; the run itself stops at a checkpoint."""

PACKAGE_ROOT = Path(__file__).parents[2]

START_SECONDS = 300.0
"""Time limit for the forkserver's imports, on a slow disk, after which it is considered hung."""


CHECKPOINT_SECONDS = "90"
"""After SIGTERM torchrun kills its processes, by default after 30 s: in the middle of a step, or of a large model's
checkpoint. Below the silence after which a worker kills it, and Slurm's warning."""


class ServerDied(Exception):
    """The forkserver died, or hung and was killed, before it started the run."""


def prepare_server(threads: int) -> None:
    """Start the forkserver, unless it lives. From the main thread: the kernel takes a thread's end for the parent's."""
    os.environ.update(thread_environment(threads))  # runs inherit the forkserver's environment
    os.environ["PYTHONSAFEPATH"] = "1"
    if PACKAGE_ROOT.name not in ("site-packages", "dist-packages"):
        # Before Python 3.12.8 the forkserver has not this program's path, and skips a module that it does not find.
        paths = [str(PACKAGE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["sparsedepth.sweep.preload"])
    _ensure_server()


@functools.cache
def _stderr() -> IO[bytes]:
    """Of the forkserver; a run has its log."""
    return tempfile.TemporaryFile()


def _ensure_server() -> None:
    """Start the forkserver, unless it lives."""
    if _is_alive():
        return
    own = os.dup(2)
    file = _stderr()
    file.seek(0)
    file.truncate()
    os.dup2(file.fileno(), 2)
    try:
        with for_children():
            multiprocessing.forkserver.ensure_running()
    finally:
        os.dup2(own, 2)
        os.close(own)


def deaths_error() -> ValueError:
    """The error of a sweep whose forkserver has died too often, with the last line that it wrote."""
    file = _stderr()
    file.seek(0)
    reason = last_line(file.read().decode(errors="replace"), "without a word; out of memory?")
    return ValueError(
        f"the process that starts the runs died repeatedly ({reason}); finished runs are kept; "
        "fix the cause and run the same command again"
    )


def start_run(
    arguments: Sequence[str],
    log: Path,
    *,
    threads: int = 1,
    processes: int = 1,
    nodes: int = 1,
    gpus: Sequence[str] = (),
) -> BaseProcess:
    """Start `run.execute.main` with `arguments` in a new process, or under torchrun in several `processes` on each of
    the `nodes` of a Slurm task. `gpus` sets CUDA_VISIBLE_DEVICES. Raises ServerDied."""
    context = multiprocessing.get_context("forkserver")
    try:
        with for_children(), _time_limit():
            prepare_server(threads)
            given = ([*arguments], str(log), processes, nodes, ",".join(gpus), server_pid())
            process = context.Process(target=_run, args=given)
            process.start()
    except (EOFError, OSError) as error:
        kill_server()
        raise ServerDied(f"the forkserver did not answer ({type(error).__name__})") from None
    return process


def kill(run: BaseProcess) -> None:
    """Kill a run that hangs, and the forkserver if it does not report the run's end."""
    run.kill()
    run.join(5)
    if run.exitcode is None:
        kill_server()
        run.join(5)


def server_pid() -> int | None:
    return multiprocessing.forkserver._forkserver._forkserver_pid  # ty: ignore[missing-attribute] - private


def _is_alive() -> bool:
    """Whether the forkserver lives; leaves its end to be found by multiprocessing."""
    try:
        pid = server_pid()
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        return False


def kill_server() -> None:
    """Kill the forkserver. Its runs get SIGTERM and stop at a checkpoint; the next run starts a new forkserver."""
    if (server := server_pid()) is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # multiprocessing then finds it dead


@contextlib.contextmanager
def for_children() -> Generator[None]:
    """Children that start meanwhile do not import the main program, and do not get the current folder, which a program
    of `python -c`, `-m` or a notebook has on its path, unless PYTHONPATH names it."""
    main = sys.modules["__main__"]
    path = sys.path
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    here = {os.getcwd()} - named
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path = [entry for entry in path if os.path.abspath(entry) not in here]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.path = main, path


@contextlib.contextmanager
def _time_limit() -> Generator[None]:
    """Raises TimeoutError after START_SECONDS in the main thread, which would wait for a stopped forkserver forever."""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def launcher(run_id: str, processes: int, nodes: int) -> list[str]:
    """The torchrun command; for several nodes started by srun on each, with the rendezvous on this one."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    if nodes == 1:
        return [*torchrun, "--standalone"]
    with socket.socket() as free_port:
        free_port.bind(("", 0))
        endpoint = f"{socket.gethostname()}:{free_port.getsockname()[1]}"
    srun = ["srun", "--nodes", str(nodes), "--ntasks", str(nodes), "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # srun does not inherit it from sbatch
        srun += ["--cpus-per-task", cpus]
    torchrun += ["--nnodes", str(nodes), "--rdzv-id", run_id, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return [*srun, *torchrun]


def _run(arguments: list[str], log: str, processes: int, nodes: int, gpus: str, server: int | None) -> None:
    """The forked child. `server`: the forkserver by the driver's word; once it is dead, another is its parent."""
    end_with_parent(server)
    os.setsid()  # Ctrl-C reaches only the driver, which then stops the runs
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    name_process(f"run {Path(log).parent.name}")
    if gpus and nodes == 1:  # on several nodes Slurm sets it
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if processes * nodes > 1:
        if nodes == 1:
            os.environ[PARENT] = str(os.getpid())
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", CHECKPOINT_SECONDS)
        command = [*launcher(Path(log).parent.name, processes, nodes), "-m", EXECUTE, *arguments]
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the forkserver's pipes, whose closing signals a death
        os.execvp(command[0], command)
    from sparsedepth.run import execute  # already imported in the parent by `preload`

    sys.argv = [EXECUTE, *arguments]
    sys.exit(execute.main(arguments))
