"""A process for each run, forked in milliseconds from one that has imported torch: multiprocessing's forkserver.

    driver --- socket ---> forkserver (`preload`: torch imported, nothing started) --- fork ---> run

Each run has its own memory, log, session, signal handlers and exit code, as if it had been started afresh. What cannot
be forked is not there yet: no CUDA context, no thread pool. A run over several devices is the same child, which then
becomes torchrun (exec). Death is passed on by the kernel: the forkserver gets SIGTERM when the driver dies, however it
dies, and each run when the forkserver does.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import types
from collections.abc import Generator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from sparsedepth.run.process import name_process, thread_environment
from sparsedepth.run.signals import end_with_parent

LAUNCHER = "torch.distributed.run"
EXECUTE = "sparsedepth.run.execute"

SERVER_DIED = 255
"""The exit code that multiprocessing gives to a run whose forkserver has died: the run itself stops at a checkpoint."""

START_SECONDS = 300.0
"""How long the forkserver may need for its imports, on a slow disk, before it is taken to hang."""


class ServerDied(Exception):
    """The forkserver ended, or hung and was killed, before it had started the run."""


def prepare_server(threads: int) -> None:
    """Start the forkserver, or another where it has died. From the main thread: the kernel counts a thread's end as
    its parent's death."""
    os.environ.update(thread_environment(threads))  # runs have the environment that the forkserver was started in
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sparsedepth.sweep.preload"])
    with nameless_main():
        multiprocessing.forkserver.ensure_running()


def start_run(
    arguments: Sequence[str], log: Path, *, processes: int = 1, nodes: int = 1, gpus: Sequence[str] = ()
) -> BaseProcess:
    """`run.execute.main` with `arguments` in a process of its own, or in several `processes` under torchrun, on each
    of several `nodes` of a Slurm task.

    It sees `gpus` alone, where given, in the terms of CUDA_VISIBLE_DEVICES. Raises ServerDied.
    """
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=([*arguments], str(log), processes, nodes, ",".join(gpus)))
    try:
        with nameless_main(), _time_limit(START_SECONDS):
            process.start()
    except (EOFError, OSError) as error:
        kill_server()
        raise ServerDied(f"the forkserver gave no answer ({type(error).__name__})") from None
    return process


def kill(run: BaseProcess) -> None:
    """End a run that has stopped answering; with the forkserver, where that does not report its end either."""
    run.kill()
    run.join(5)
    if run.exitcode is None:
        kill_server()
        run.join(5)


def kill_server() -> None:
    """End the forkserver; its runs are asked to stop at a checkpoint, and the next run starts another."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # ty: ignore[missing-attribute] - has no other name
    if server is not None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # multiprocessing asks next whether it is dead


@contextlib.contextmanager
def nameless_main() -> Generator[None]:
    """Keeps a child from importing the program that starts it, which it does not need."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _time_limit(seconds: float) -> Generator[None]:
    """Raises TimeoutError in the main thread; the forkserver may be stopped, and would be waited for without end."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def launcher(run_id: str, processes: int, nodes: int) -> list[str]:
    """torchrun; for several nodes of a Slurm task under srun, which starts one on each. They meet on this node."""
    torchrun = [sys.executable, "-m", LAUNCHER, "--nproc-per-node", str(processes)]
    if nodes == 1:
        return [*torchrun, "--standalone"]
    with socket.socket() as free:
        free.bind(("", 0))
        meeting = f"{socket.gethostname()}:{free.getsockname()[1]}"
    srun = ["srun", "--nodes", str(nodes), "--ntasks", str(nodes), "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # which srun does not take over from sbatch
        srun += ["--cpus-per-task", cpus]
    return [*srun, *torchrun, "--nnodes", str(nodes), "--rdzv-id", run_id, "--rdzv-backend", "c10d", "--rdzv-endpoint",
            meeting]  # fmt: skip


def _run(arguments: list[str], log: str, processes: int, nodes: int, gpus: str) -> None:
    """The forked child."""
    end_with_parent(os.getppid())
    os.setsid()  # Ctrl-C reaches the driver alone, which then asks the runs in order
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    name_process(f"run {Path(log).parent.name}")
    if gpus and nodes == 1:  # on several nodes Slurm says it to each
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if processes * nodes > 1:
        command = [*launcher(Path(log).parent.name, processes, nodes), "-m", EXECUTE, *arguments]
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the forkserver's pipes, which tell of a death when they close
        os.execvp(command[0], command)
    from sparsedepth.run import execute  # what `preload` has imported in the parent

    sys.argv = [EXECUTE, *arguments]
    sys.exit(execute.main(arguments))
