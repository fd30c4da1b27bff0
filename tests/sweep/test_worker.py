"""Processes on one queue: each task goes to one of them, and any number may open a fresh one at a moment."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import optuna
import pytest
from tiny import ENVIRONMENT

from sparsedepth.sweep.storage import open_storage

TAKER = """
import sys
from pathlib import Path
import optuna
from sparsedepth.sweep.storage import open_storage
optuna.logging.set_verbosity(optuna.logging.ERROR)
print("ready", flush=True)
sys.stdin.readline()
storage = open_storage(sys.argv[2] if len(sys.argv) > 2 else None, Path(sys.argv[1]))
study = optuna.create_study(study_name="queue", storage=storage, load_if_exists=True)
while any(trial.state.name == "WAITING" for trial in study.get_trials(deepcopy=False)):
    trial = study.ask()
    if "task" in trial.user_attrs:
        print(trial.user_attrs["task"])
    study.tell(trial, 0.0)
"""


def take(processes: int, *arguments: object) -> list[str]:
    """What each of the processes says, which open the storage at one moment."""
    command = [sys.executable, "-W", "ignore", "-c", TAKER, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    takers = [subprocess.Popen(command, env=ENVIRONMENT, **pipes) for _ in range(processes)]
    for taker in takers:
        taker.stdout.readline()
    for taker in takers:
        taker.stdin.write("go\n")
        taker.stdin.flush()
    said = [taker.communicate(timeout=600) for taker in takers]
    assert all(taker.returncode == 0 for taker in takers), said
    return [out for out, _ in said]


@pytest.mark.parametrize(
    ("processes", "tasks"), [(4, 60), pytest.param(16, 400, marks=pytest.mark.chaos)], ids=["short", "long"]
)
def test_no_two_processes_take_one_task(tmp_path: Path, processes: int, tasks: int):
    study = optuna.create_study(study_name="queue", storage=open_storage(None, tmp_path))
    for task in range(tasks):
        study.enqueue_trial({}, user_attrs={"task": task})
    said = take(processes, tmp_path)
    assert Counter(int(task) for out in said for task in out.split()) == Counter(range(tasks))


@pytest.mark.parametrize("processes", [3, pytest.param(16, marks=pytest.mark.chaos)], ids=["short", "long"])
def test_many_open_a_fresh_folder_at_one_moment(tmp_path: Path, processes: int):
    take(processes, tmp_path)
    (study,) = optuna.study.get_all_study_summaries(open_storage(None, tmp_path))
    assert study.study_name == "queue"
