"""A process that is stopped (SIGSTOP), replaced, and then goes on: there is one result, and it is the right one."""

import os
import signal
import time
from pathlib import Path

import pytest
from support import forked_commands, tiny_sweep
from support.forked_commands import Command
from support.interrupted_sweep import Pace, Sweep, at_the_end, record_of
from support.sweep_processes import markers, phases, processes, until

from sparsedepth.run.scratch import Scratch
from sparsedepth.store.run_record import write_config

IMPATIENT = """
import sys
import sparsedepth.run.lease as lease
lease.GRACE_SECONDS = {grace}
import {module}
sys.exit({module}.{call}(sys.argv[1:]))
"""
"""A program of ours with another grace period, in seconds."""


def impatient(folder: Path, module: str, call: str, grace: float, *arguments: object) -> Command:
    program = folder / f"{call}-{grace}.py"
    program.write_text(IMPATIENT.format(module=module, call=call, grace=grace))
    return forked_commands.start([*map(str, arguments)], tiny_sweep.ENVIRONMENT, str(program))


def one_run(folder: Path, results: Path) -> tuple[Scratch, list[object]]:
    """A run made ready as a worker makes it, and the arguments of its process."""
    (config,) = Sweep(folder, 1).configs()
    scratch = Scratch(results, config.run_id)
    scratch.folder.mkdir(parents=True)
    write_config(scratch.folder, config)
    return scratch, [results, scratch.folder / "config.yaml", "--runtime", '{"threads": 1, "device": "cpu"}']


def until_it_runs(results: Path, process: Command) -> None:
    """Wait for a run of this process, which `Pace` holds before its end: small as it is, its training may be over
    between two looks. What the process said, should it end before."""
    until(lambda: phases(results) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]


def test_a_stopped_run_that_was_replaced_cannot_write(folder, undisturbed, tmp_path, monkeypatch):
    expected = undisturbed(1)
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    scratch, arguments = one_run(folder, results)
    first = impatient(tmp_path, "sparsedepth.run.execute", "main", 60, *arguments)
    until_it_runs(results, first)
    os.kill(first.pid, signal.SIGSTOP)
    pace.open()
    second = impatient(tmp_path, "sparsedepth.run.execute", "main", 2, *arguments)
    assert second.wait(300) == 0
    before = markers(results)
    assert record_of(results) == expected
    os.kill(first.pid, signal.SIGCONT)
    _, err = first.communicate(timeout=300)
    assert first.returncode == 75, f"it should have been interrupted: {err}"
    assert markers(results) == before and record_of(results) == expected
    assert not scratch.recorded().failures
    second.communicate(timeout=300)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["run", "forkserver"])
def test_the_driver_replaces_what_is_stopped(folder, undisturbed, tmp_path, monkeypatch, kind):
    """A run, or the forkserver, under which a run then ends unheard."""
    runs = 4
    expected = undisturbed(runs)
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    driver = impatient(tmp_path, "sparsedepth.cli.main", "run", 5, *Sweep(folder, runs).arguments(results, 1))
    until_it_runs(results, driver)
    stopped = processes(results, kind)
    assert stopped
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    pace.open()
    stopped_at = time.monotonic()
    until(lambda: not set(stopped) & set(processes(results)))  # a stack of four goes on to its end
    print(f"\nreplaced {time.monotonic() - stopped_at:.1f} s after it was stopped; the grace period was 5 s")
    _, err = at_the_end(driver, results)
    assert driver.returncode == 0, err
    assert record_of(results) == expected


@pytest.mark.chaos
def test_a_second_sweep_behind_a_stopped_driver_names_it_and_ends_where_all_is_done(
    folder, undisturbed, tmp_path, monkeypatch
):
    """As after Ctrl-Z in a terminal: the runs of the first go on without it, and the second needs nothing more."""
    runs = 4
    expected, sweep = undisturbed(runs), Sweep(folder, runs)
    results, pace = tmp_path / "results", Pace(tmp_path, monkeypatch)
    first = sweep.start(results, 1)
    until_it_runs(results, first)
    os.kill(first.pid, signal.SIGSTOP)
    second = sweep.start(results, 1)
    until(lambda: f"process {first.pid} of this sweep is stopped" in stderr_of(second))
    pace.open()
    _, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert record_of(results) == expected
    os.kill(first.pid, signal.SIGCONT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0 and record_of(results) == expected, err


def stderr_of(command: Command) -> str:
    path = Path(command.streams[1])
    return path.read_text() if path.exists() else ""
