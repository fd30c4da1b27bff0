"""The batch script: what it asks for, what may stand in it, and what it does when Slurm asks the task to leave."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sparsedepth.cluster.array import SEAL, TaskArray
from sparsedepth.cluster.script import BODY, Request, array_script, check_folder, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:10", 1810), ("4:00:00", 14400), ("1-12", 129600), ("1-2:30", 95400), ("1-0:00:01", 86401)],
)
def test_times_are_read_as_slurm_writes_them(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("fields", [{"time": "4h"}, {"time": "1:2:3:4"}, {"gpus": "0-3"}, {"partition": "a b"},
    {"extra": ("array=3",)}, {"extra": ("qos=a\nb",)}, {"extra": ('comment=a"b',)}, {"extra": ("-p x",)}])  # fmt: skip
def test_what_cannot_stand_in_a_script_is_refused(fields):
    with pytest.raises(ValueError, match=r"--(time|gpus|partition|sbatch)"):
        Request(**fields)


def test_a_folder_that_slurm_would_read_as_a_pattern_is_refused(tmp_path):
    check_folder(tmp_path / "a b")
    with pytest.raises(ValueError, match="take no quotes"):
        check_folder(tmp_path / "100%")


def test_the_header_has_what_was_asked_for_and_bash_reads_the_rest(tmp_path):
    request = Request(
        partition="gpu", account="lab", gpus="h100:2", nodes=2, time="1:00:00", extra=("qos=low", "exclusive")
    )
    text = array_script(name="x", results=tmp_path / "a b", request=request, tasks=64, command="true")
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert lines[1:3] == ["array=0-63", f'output="{tmp_path}/a b/slurm/%A_%a.log"']
    for line in ("signal=B:USR1@120", "time=1:00:00", "partition=gpu", "account=lab", "gpus-per-node=h100:2", "nodes=2",
                 "ntasks-per-node=1", "qos=low", "exclusive", "requeue"):  # fmt: skip
        assert line in lines
    assert Request(time="1").warning_seconds == 15  # of a minute, most is left for work
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_script_that_was_edited_is_seen(tmp_path):
    array = TaskArray(sweep="x", results=tmp_path, storage_url="postgresql://me:secret@host/d")
    array.folder.mkdir()
    array.path.write_text(array.script(4))
    assert not array.is_edited() and "secret" not in array.path.read_text()
    array.path.write_text(array.path.read_text().replace("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --nice"))
    assert array.is_edited()
    array.path.write_text(array.path.read_text().partition(SEAL)[0])
    assert array.is_edited()


WORK = "trap 'trap : TERM; exit 143' TERM; echo ready; while :; do sleep 0.02; done"


@pytest.fixture
def task(tmp_path):
    """task(command, state): the script's body with Slurm's answers written down beside it."""
    for name, text in {"squeue": "cat state", "scontrol": 'echo "$@" >> asked'}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def started(command: str, state: str = "RUNNING:None", restarts: int = 0) -> subprocess.Popen:
        (tmp_path / "state").write_text(state)
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        body = BODY.format(command=f"bash -c {shlex.quote(command)}", folder=tmp_path, max_kills=20)
        process = subprocess.Popen(
            ["bash", "-c", body], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        if "ready" in command:
            process.stdout.readline()
        return process

    return started


def requeued(folder: Path) -> bool:
    return (folder / "asked").exists() and (folder / "asked").read_text() == "requeue 7_3\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("signals", "state", "again"),
    [
        (["USR1"], "RUNNING:None", True),  # the time limit is near
        (["USR2"], "COMPLETING:TimeLimit", True),  # it was reached while the checkpoint was written
        (["TERM"], "RUNNING:None", True),  # preempted, with a grace
        (["TERM"], "COMPLETING:None", False),  # requeued by Slurm, or cancelled by its user
        (["INT"], "RUNNING:None", False),  # sparsedepth stop
        (["INT", "TERM"], "RUNNING:None", False),
        (["USR1", "TERM"], "COMPLETING:None", False),  # cancelled after the warning
    ],
)
def test_a_task_that_is_asked_to_leave(task, tmp_path, signals, state, again):
    process = task(WORK, state)
    for name in signals:
        process.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.01)
    assert process.wait(60) == 143
    assert requeued(tmp_path) == again


@pytest.mark.parametrize(
    ("command", "restarts", "code", "again"),
    [("exit 0", 0, 0, False), ("exit 2", 0, 2, False), ("kill -9 $$", 0, 137, True), ("kill -9 $$", 20, 137, False)],
)
def test_a_task_that_ends_by_itself(task, tmp_path, command, restarts, code, again):
    assert task(command, restarts=restarts).wait(60) == code
    assert requeued(tmp_path) == again
