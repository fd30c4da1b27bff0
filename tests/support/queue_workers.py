"""Processes that open one storage at a moment, and take from its queue."""

import subprocess
import sys

from support.tiny_sweep import ENVIRONMENT

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
