"""The process that forks runs: each has its own fate."""

import os
import signal
import time

import pytest
import torch
from processes import processes, until
from tiny import BASE, corpus

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.run.process import INTERRUPTED, USER_ERROR
from sparsedepth.run.scratch import Scratch
from sparsedepth.store import folder as record
from sparsedepth.sweep.forkserver import Nursery, NurseryDied


def prepared(folder, **fields) -> tuple[Scratch, list[str]]:
    """The scratch folder of a run, and the arguments of its process."""
    config = build(RunConfig, {**BASE, "n_layers": 2, "corpus": str(corpus(folder)), **fields}, "test")
    work = Scratch(folder / "results", config.run_id)
    work.folder.mkdir(parents=True)
    record.write_config(work.folder, config)
    settings = '{"threads": 1, "device": "cpu"}'
    return work, [str(folder / "results"), str(work.folder / "config.yaml"), "--runtime", settings]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nursery")


@pytest.fixture
def nursery(folder):
    made = Nursery(folder / "results", threads=1)
    yield made
    made.close()


def test_runs_succeed_fail_and_are_killed_one_after_the_other(folder, nursery):
    work, arguments = prepared(folder, seed=0)
    assert nursery.run(arguments, work.log, lambda: False) == 0
    assert record.is_complete(record.run_folder(folder / "results", work.run_id))

    work, arguments = prepared(folder, corpus=str(folder / "nowhere"))
    assert nursery.run(arguments, work.log, lambda: False) == USER_ERROR
    assert "nowhere" in work.failures()[0] and "Traceback" in work.log.read_text()

    long, arguments = prepared(folder, seed=2, train_tokens=128 * 100_000)
    killed: list[int] = []

    def kill() -> bool:
        if not killed and (running := long.progress()) and running.phase == "training":
            killed.extend(processes(folder / "results", "run"))
            os.kill(killed[0], signal.SIGKILL)
        return False

    assert nursery.run(arguments, long.log, kill) == -signal.SIGKILL
    asked_at = time.monotonic()
    assert nursery.run(arguments, long.log, lambda: time.monotonic() > asked_at + 1.5) == INTERRUPTED
    assert list(long.checkpoints.glob("step-*.json"))


def test_a_killed_nursery_is_reported_and_its_run_stops_at_a_checkpoint(folder):
    nursery = Nursery(folder / "results", threads=1)
    work, arguments = prepared(folder, seed=3, train_tokens=128 * 100_000)

    def kill() -> bool:
        if (running := work.progress()) and running.phase == "training":
            os.kill(processes(folder / "results", "nursery")[0], signal.SIGKILL)
        return False

    with pytest.raises(NurseryDied):
        nursery.run(arguments, work.log, kill)
    until(lambda: not processes(folder / "results"), 30)
    assert list(work.checkpoints.glob("step-*.json")) and not work.failures()
    nursery.close()


@pytest.mark.gpu
def test_each_fork_has_a_gpu_of_its_own(folder, nursery):
    for seed in (10, 11):
        work, arguments = prepared(folder, seed=seed)
        assert nursery.run([*arguments[:-1], '{"device": "cuda"}'], work.log, lambda: False) == 0
        run = record.read_run(record.run_folder(folder / "results", work.run_id))
        assert run.manifest["device"].startswith(f"cuda ({torch.cuda.get_device_name(0)}")
