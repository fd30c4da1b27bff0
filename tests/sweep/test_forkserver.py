"""The process that forks runs: each has its own fate."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from support import forked_commands, tiny_sweep
from support.sweep_processes import OF, processes, until
from support.tiny_sweep import run_config

from sparsedepth.run import execute, lease
from sparsedepth.run.process import INTERRUPTED, PARENT, USER_ERROR
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import run_record
from sparsedepth.sweep import forkserver


def prepared(folder, **fields) -> tuple[Scratch, list[str]]:
    """The scratch folder of a run, and the arguments of its process."""
    config = run_config(folder, **fields)
    scratch = Scratch(folder / "results", config.run_id)
    scratch.folder.mkdir(parents=True)
    run_record.write_config(scratch.folder, config)
    settings = '{"threads": 1, "device": "cpu"}'
    return scratch, [str(folder / "results"), str(scratch.folder / "config.yaml"), "--runtime", settings]


def see_through(
    scratch: Scratch, arguments: list[str], look: Callable[[], bool] = lambda: False, seconds: float = 300
) -> int | None:
    """The exit code of a run; it is asked to stop once look() is true."""
    process = forkserver.start_run(arguments, scratch.log)
    deadline = time.monotonic() + seconds
    while process.exitcode is None:
        assert time.monotonic() < deadline, f"it did not end in {seconds} s"
        if look():
            process.terminate()
        time.sleep(0.02)
    return process.exitcode


def is_training(scratch: Scratch) -> bool:
    progress = scratch.progress()
    return progress is not None and progress.phase == "training"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("forkserver")


@pytest.fixture(scope="module", autouse=True)
def server(folder):
    """A forkserver of this module's own, which `processes` can find."""
    os.environ[OF] = str(folder / "results")
    forkserver.prepare_server(threads=1)
    yield
    forkserver.kill_server()
    del os.environ[OF]


def test_runs_succeed_fail_and_are_killed_one_after_the_other(folder):
    scratch, arguments = prepared(folder, seed=0)
    assert see_through(scratch, arguments) == 0
    run = run_record.read_run(run_record.run_folder(folder / "results", scratch.run_id))
    assert run.manifest["command"][0] == forkserver.EXECUTE, "the command line of the sweep may hold a password"

    scratch, arguments = prepared(folder, corpus=str(folder / "nowhere"))
    assert see_through(scratch, arguments) == USER_ERROR
    assert "nowhere" in scratch.recorded().failures[0] and "Traceback" in scratch.log.read_text()

    long, arguments = prepared(folder, seed=2, train_tokens=128 * 100_000)
    killed: list[int] = []

    def kill() -> bool:
        if not killed and is_training(long):
            killed.extend(processes(folder / "results", "run"))
            os.kill(killed[0], signal.SIGKILL)
        return False

    assert see_through(long, arguments, kill) == -signal.SIGKILL
    (long.folder / "progress.json").unlink()
    assert see_through(long, arguments, lambda: is_training(long)) == INTERRUPTED
    assert list(long.checkpoints.glob("step-*.json"))


def test_runs_of_one_server_live_side_by_side(folder):
    """Each has its own log, and the death of one is not the other's."""
    pairs = [prepared(folder, seed=seed, train_tokens=128 * 100_000) for seed in (4, 5)]
    first, second = (forkserver.start_run(arguments, scratch.log) for scratch, arguments in pairs)
    until(lambda: all(is_training(scratch) for scratch, _ in pairs))
    first.kill()
    first.join(60)
    assert first.exitcode == -signal.SIGKILL and second.exitcode is None
    second.terminate()
    second.join(60)
    assert second.exitcode == INTERRUPTED


def test_a_killed_server_is_reported_its_run_stops_at_a_checkpoint_and_another_starts(folder):
    scratch, arguments = prepared(folder, seed=3, train_tokens=128 * 100_000)

    def kill() -> bool:
        if is_training(scratch):
            for process in processes(folder / "results", "forkserver"):
                os.kill(process, signal.SIGKILL)
        return False

    assert see_through(scratch, arguments, kill) == forkserver.SERVER_DIED
    until(lambda: not processes(folder / "results", "run"))
    assert list(scratch.checkpoints.glob("step-*.json")) and not scratch.recorded().failures


def test_a_stopped_server_is_replaced(folder, monkeypatch):
    """It would be waited for without end."""
    monkeypatch.setattr(forkserver, "START_SECONDS", 1.0)
    scratch, arguments = prepared(folder, seed=7)
    forkserver.prepare_server(threads=1)
    until(lambda: processes(folder / "results", "forkserver"))
    os.kill(processes(folder / "results", "forkserver")[0], signal.SIGSTOP)
    with pytest.raises(forkserver.ServerDied):
        forkserver.start_run(arguments, scratch.log)
    monkeypatch.undo()
    assert see_through(scratch, arguments) == 0


@pytest.mark.gpu
def test_each_fork_has_a_gpu_of_its_own(folder):
    for seed in (10, 11):
        scratch, arguments = prepared(folder, seed=seed)
        assert see_through(scratch, [*arguments[:-1], '{"device": "cuda"}']) == 0
        run = run_record.read_run(run_record.run_folder(folder / "results", scratch.run_id))
        assert run.manifest["device"].startswith(f"cuda ({torch.cuda.get_device_name(0)}")


def test_a_run_whose_parent_died_before_it_could_ask_ends_at_once(folder, monkeypatch):
    """Then another process is its parent, and would be taken for the forkserver: the run would train as an orphan."""
    scratch, arguments = prepared(folder, seed=20, train_tokens=128 * 100_000)
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setattr(forkserver, "server_pid", lambda: dead.pid)
    assert see_through(scratch, arguments, seconds=60) == INTERRUPTED
    assert scratch.progress() is None


def test_a_process_of_torchrun_whose_launcher_died_before_it_could_ask_ends_at_once(folder, tmp_path):
    scratch, arguments = prepared(folder, seed=21, train_tokens=128 * 100_000)
    dead = subprocess.Popen(["true"])
    dead.wait()
    program = tmp_path / "program.py"
    program.write_text("import sys\nfrom sparsedepth.run.execute import main\nsys.exit(main(sys.argv[1:]))\n")
    environment = {**tiny_sweep.ENVIRONMENT, PARENT: str(dead.pid)}
    assert forked_commands.call(arguments, environment, timeout=60, program=str(program))[0] == INTERRUPTED
    assert scratch.progress() is None


def test_torchrun_gives_its_processes_the_time_for_a_checkpoint(tmp_path, monkeypatch):
    """As a run that is told to stop: longer than torchrun's 30 s, shorter than until the worker kills it as silent."""
    told = []
    with monkeypatch.context() as patch:
        patch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
        patch.setattr(forkserver, "end_with_parent", lambda parent: None)
        patch.setattr(forkserver, "name_process", lambda name: None)
        for name in ("setsid", "dup2", "closerange"):
            patch.setattr(os, name, lambda *given: None)
        patch.setattr(os, "execvp", lambda program, command: told.append({**os.environ}))  # would not return
        patch.setattr(execute, "main", lambda arguments: 0)
        patch.setattr(os, "environ", {**os.environ})
        patch.setattr(sys, "argv", sys.argv)
        with pytest.raises(SystemExit):
            forkserver._run([], str(tmp_path / "log.txt"), 2, 1, "", None)
    assert 30 < int(told[0]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 2 * lease.GRACE_SECONDS


def test_the_last_line_of_a_forkserver_that_dies_is_the_reason(folder, monkeypatch):
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: os.write(2, b"Traceback\nno torch\n\n"))
    monkeypatch.setattr(forkserver, "_is_alive", lambda: False)
    forkserver._ensure_server()
    assert "died repeatedly (no torch); finished runs are kept" in str(forkserver.deaths_error())


def test_children_do_not_search_the_current_folder_unless_it_is_named(tmp_path, monkeypatch):
    """It is on the path of a notebook as '', of `python -m` as itself; PYTHONPATH still names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/installed"])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with forkserver.for_children():
        assert sys.path == ["/installed"]
    monkeypatch.setenv("PYTHONPATH", ".")
    with forkserver.for_children():
        assert str(tmp_path) in sys.path
    assert sys.path[0] == ""


SHADOWS = ("random.py", "token.py", "profile.py", "secrets.py", "numpy.py", "sparsedepth/__init__.py")


@pytest.mark.slow  # a command and its forkserver that start from nothing
@pytest.mark.parametrize("processes", [1, 2])
def test_modules_of_the_user_beside_the_definition_are_not_taken_for_others(tmp_path, processes):
    """By no forkserver, run or process of torchrun."""
    path = tiny_sweep.definition(tmp_path, base={"measures": ["loss"]}, space={"n_layers": [1]}, seeds=[0])
    for name in SHADOWS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('this is my own script')")
    program = "import sys; from sparsedepth.cli.main import run; sys.exit(run())"
    command = [sys.executable, "-P", "-c", program, "sweep", str(path), "--out", str(tmp_path / "results")]
    command += ["--workers", "1", "--gpus-per-run", str(processes), "--device", "cpu"]
    environment = {**tiny_sweep.ENVIRONMENT, "PYTHONPATH": str(forkserver.PACKAGE_ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(tiny_sweep.table(tmp_path / "results")) == 1


def test_the_forkserver_finds_what_this_program_has_by_its_path_alone(monkeypatch):
    """As in a notebook or a script that extends sys.path: Python before 3.12.8 skipped the import without a word."""
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "elsewhere"})
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    forkserver.prepare_server(1)
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(forkserver.PACKAGE_ROOT), "elsewhere"]
