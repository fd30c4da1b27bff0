"""A worker and the process of a run: what it records of an end, whom it blames, and how long a silence may last."""

from types import SimpleNamespace

import pytest
from support.instant_sweep import sweep
from support.tiny_sweep import run_config

from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.run import lease
from sparsedepth.run.process import INTERRUPTED
from sparsedepth.run.scratch import Scratch
from sparsedepth.sweep import forkserver
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.worker import START_SECONDS, Worker


class EndsWith:
    """A process that runs for a few looks and then has an exit code."""

    def __init__(self, code, looks=2):
        self.codes = iter([*[None] * looks, code])

    @property
    def exitcode(self):
        return next(self.codes)

    def close(self):
        pass


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Run the process of some runs once, which ends with a code; the worker, and the scratch folders of the runs."""

    def once(process, n_runs=1):
        configs = [run_config(tmp_path, seed=seed) for seed in range(n_runs)]
        results = tmp_path / "results"
        results.mkdir(exist_ok=True)
        machine = Machine(workers=1, runtime=RuntimeConfig(device="cpu", threads=1), gpus=[])
        worker = Worker(machine, SimpleNamespace(results=results, definition=sweep()), lambda: False)
        monkeypatch.setattr(forkserver, "start_run", lambda *arguments, **options: process)
        assert list(worker._try_once(configs)) is not None
        return worker, [Scratch(results, config.run_id) for config in configs]

    return once


@pytest.mark.parametrize(
    ("code", "reason"), [(1, "exit code 1"), (-11, "killed by signal 11"), (-9, "killed by signal 9")]
)
def test_an_end_that_the_run_could_not_record_is_recorded_for_it(tried, code, reason):
    """Else its attempts would never be used up, and a run that dies at its start would be tried for ever."""
    _, (scratch,) = tried(EndsWith(code))
    (failure,) = scratch.recorded().failures
    assert failure.startswith(reason)


@pytest.mark.parametrize("code", [0, INTERRUPTED])
def test_an_end_in_order_is_no_failure(tried, code):
    _, (scratch,) = tried(EndsWith(code))
    assert scratch.recorded().failures == ()


def test_a_stack_that_failed_is_no_failure_of_any_of_its_runs(tried):
    """Which of them failed is not known: each is tried alone."""
    worker, scratches = tried(EndsWith(1), n_runs=3)
    assert not any(scratch.recorded().failures for scratch in scratches)
    assert worker._unstacked == {scratch.run_id for scratch in scratches}
    worker, (scratch,) = tried(EndsWith(1), n_runs=1)
    assert len(scratch.recorded().failures) == 1 and not worker._unstacked


@pytest.mark.parametrize(
    ("has_started", "silence", "is_ended"),
    [
        (True, 1.9 * lease.GRACE_SECONDS, False),  # its own wait for a silent holder may take one grace
        (True, 2.1 * lease.GRACE_SECONDS, True),
        (False, 2.1 * lease.GRACE_SECONDS, False),  # torch is imported
        (False, 1.1 * START_SECONDS, True),
    ],
)
def test_a_silent_run_is_ended_after_twice_the_grace(tried, monkeypatch, has_started, silence, is_ended):
    ended = []
    monitor = SimpleNamespace(silent_seconds=lambda: silence, has_changed=has_started)
    monkeypatch.setattr(lease, "HeartbeatMonitor", lambda path: monitor)
    monkeypatch.setattr(forkserver, "kill", ended.append)
    tried(EndsWith(0, looks=1 + is_ended))
    assert bool(ended) == is_ended
