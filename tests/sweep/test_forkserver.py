"""The process that forks runs: each has its own fate."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from support.sweep_processes import OF, processes, until
from support.tiny_sweep import run_config

from sparsedepth.run.process import INTERRUPTED, USER_ERROR
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


def see_through(scratch: Scratch, arguments: list[str], look: Callable[[], bool] = lambda: False) -> int | None:
    """The exit code of a run; it is asked to stop once look() is true."""
    process = forkserver.start_run(arguments, scratch.log)
    while process.exitcode is None:
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
    assert "nowhere" in scratch.failures()[0] and "Traceback" in scratch.log.read_text()

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
    assert list(scratch.checkpoints.glob("step-*.json")) and not scratch.failures()


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


def test_the_forkserver_finds_what_this_program_has_by_its_path_alone(monkeypatch):
    """As in a notebook or a script that extends sys.path: Python before 3.12.8 skipped the import without a word."""
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "elsewhere"})
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    forkserver.prepare_server(1)
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(forkserver.PACKAGE_ROOT), "elsewhere"]
