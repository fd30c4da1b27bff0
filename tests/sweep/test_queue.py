"""Processes on one queue: each task goes to one of them, and any number may open a fresh one at a moment."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from support.queue_workers import take

from sparsedepth.sweep.storage import JournalLock, open_storage


@pytest.mark.parametrize(
    ("processes", "tasks"), [(2, 60), pytest.param(16, 400, marks=pytest.mark.chaos)], ids=["short", "long"]
)
def test_no_two_processes_take_one_task(tmp_path: Path, processes: int, tasks: int):
    study = optuna.create_study(study_name="queue", storage=open_storage(None, tmp_path))
    for task in range(tasks):
        study.enqueue_trial({}, user_attrs={"task": task})
    said = take(processes, tmp_path)
    assert Counter(int(task) for out in said for task in out.split()) == Counter(range(tasks))


@pytest.mark.parametrize("processes", [2, pytest.param(16, marks=pytest.mark.chaos)], ids=["short", "long"])
def test_many_open_a_fresh_folder_at_one_moment(tmp_path: Path, processes: int):
    take(processes, tmp_path)
    (study,) = optuna.study.get_all_study_summaries(open_storage(None, tmp_path))
    assert study.study_name == "queue"


def test_the_lock_of_a_journal_has_one_holder(tmp_path: Path):
    (tmp_path / "journal").touch()
    first, second = (JournalLock(tmp_path / "journal") for _ in range(2))
    first.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.acquire)
        try:
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
        finally:
            first.release()
        assert waiting.result()
    second.release()
