"""The batch script: what it asks for, what may stand in it, and what it does when Slurm asks the task to leave."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sparsedepth.cli.on_slurm import request_of
from sparsedepth.cli.option import SlurmOptions
from sparsedepth.cluster import slurm
from sparsedepth.cluster.array import TaskArray, check
from sparsedepth.cluster.slurm import Request, least_minutes, parse_time, script_body
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.words.status import stuck_text, time_advice

SWEEP = "{name: x, question: q, hypothesis: h, base: {n_layers: 2, d_model: 16}, seeds: [0, 1]}"


def install(folder: Path, **programs: str) -> None:
    """Programs of Slurm, each with its text in bash."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:10", 1810), ("4:00:00", 14400), ("1-12", 129600), ("1-2:30", 95400), ("1-0:00:01", 86401)],
)
def test_times_are_read_as_slurm_writes_them(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("fields", [{"time": "4h"}, {"time": "1:2:3:4"}, {"gpus": "0-3"}, {"partition": "a b"},
    {"sbatch": ("array=3",)}, {"sbatch": ("qos=a\nb",)}, {"sbatch": ('comment=a"b',)},
    {"sbatch": ("-p x",)}, {"gpus": "4", "gpus_per_run": 8}, {"nodes": 2, "workers": 3},
    {"gpus": "1", "runtime": RuntimeConfig(device="cpu")}])  # fmt: skip
def test_what_cannot_stand_in_a_script_is_refused(fields):
    with pytest.raises(ValueError, match=r"--(time|gpus|partition|sbatch|workers)"):
        Request(**fields)


def test_the_header_has_what_was_asked_for_and_bash_reads_the_rest(tmp_path):
    asked = {"partition": "gpu", "account": "lab", "gpus": "h100:2", "nodes": 2, "time": "1:00:00"}
    request = Request(**asked, sbatch=("qos=low", "exclusive"))
    text = TaskArray(sweep="x", results=tmp_path / "a b", request=request).script(64)
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert lines[1:3] == ["array=0-63", f'output="{tmp_path}/a b/slurm/%A_%a.log"']
    for line in ("signal=B:USR1@120", "time=1:00:00", "partition=gpu", "account=lab", "gpus-per-node=h100:2", "nodes=2",
                 "ntasks-per-node=1", "qos=low", "exclusive", "requeue"):  # fmt: skip
        assert line in lines
    assert Request(time="1").warning_seconds == 15  # of a minute, most is left for work
    with pytest.raises(ValueError, match="--time '0:00' must be more than 0; leave it out for the partition's own"):
        Request(time="0:00")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("given", "runs_in_parallel", "arguments"),
    [
        ({"gpus": "h100:1", "workers": 3}, 3, "--workers 3 --gpus-per-run 1 --nodes 1"),
        ({"gpus": "4", "workers": 2}, 8, "--workers 2 --gpus-per-run 1 --nodes 1"),
        ({"gpus": "4", "gpus_per_run": 2}, 2, "--gpus-per-run 2 --nodes 1"),
        ({"gpus": "8", "gpus_per_run": 8, "nodes": 2}, 1, "--gpus-per-run 8 --nodes 2"),
        ({"sbatch": ["cpus-per-task=6"]}, 6, "--gpus-per-run 1 --nodes 1"),
    ],
)
def test_a_task_shares_its_gpus_out_or_spreads_a_run_over_them(given, runs_in_parallel, arguments):
    request = request_of("slurm", SlurmOptions(**given))
    assert request and request.runs_in_parallel == runs_in_parallel
    assert request.arguments() == ["--max-attempts", "2", *arguments.split()]


def test_a_probe_that_has_started_is_waited_for(tmp_path, monkeypatch):
    """Python may take long to start from a busy file system; a controller that does not answer says nothing of it."""
    array = TaskArray(sweep="x", results=tmp_path)
    array.folder.mkdir()
    looks = []

    def show_job(job):
        looks.append(job)
        if len(looks) == 30:
            (token,) = array.folder.glob("probe-*")
            token.with_name(f"{token.name}.answer").touch()
        return {"JobState": "RUNNING"}

    monkeypatch.setattr("sparsedepth.cluster.array.PROBE_SECONDS", -1.0)
    monkeypatch.setattr(slurm, "submit", lambda script: "7")
    monkeypatch.setattr(slurm, "show_job", show_job)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert array._probe() is None and len(looks) == 30 and not list(array.folder.iterdir())
    monkeypatch.setattr(slurm, "show_job", lambda job: {})
    assert array._probe() == "7"
    monkeypatch.setattr(slurm, "show_job", lambda job: {"JobState": "COMPLETED", "NodeList": "n1"})
    with pytest.raises(ValueError, match="a file written by the probe task on n1 is not visible here"):
        array._probe()


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_probe_that_never_ends_is_cancelled_and_told_in_one_line(tmp_path, monkeypatch, command, state):
    """As where its node waits for a file server that is gone; whatever its time limit."""
    answers = {"sinfo": "p*|7-00:00:00|7-00:00:00", "squeue": "", "sbatch": "7"}
    answers["scontrol"] = f"MaxArraySize = 1001\nJobState={state} NodeList=n1 ExitCode=0:0"
    for name, answer in {**answers, "scancel": ""}.items():
        install(tmp_path, **{name: f"echo {name} $* >> {tmp_path}/calls\nprintf '{answer}'"})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("sparsedepth.cluster.array.PROBE_LIMIT_SECONDS", 1.0)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(SWEEP)
    _, error = command("sweep", sweep, "--out", tmp_path / "out", "--on", "slurm", code=2)
    assert error.count("\n") == 1 and "the probe task on n1 has not ended in 1 s" in error
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scancel --quiet 7"
    assert not (tmp_path / "out").exists()


def test_a_sweep_is_submitted_once_and_followed_to_its_end(tmp_path, monkeypatch, command):
    """The fake sbatch runs the probe at once; the queue is empty, then holds a task, then is empty again."""
    sbatch = f'echo "$@" >> {tmp_path}/calls; script=$(cat); case $script in *-probe*) bash -c "$script";; esac; echo 7'
    squeue = f"""n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n
[ $n -ne ${{ACTIVE:-1}} ] || echo "7_0|PENDING|Resources|0|"
"""
    answers = {"sinfo": "echo 'p*|infinite|infinite'", "scontrol": "echo MaxArraySize = 1001"}
    install(tmp_path, sbatch=sbatch, squeue=squeue, scancel="", **answers)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("sparsedepth.cli.on_slurm.POLL_SECONDS", 0.01)
    sweep, out = tmp_path / "sweep.yaml", tmp_path / "out"
    sweep.write_text(SWEEP)

    words = ("sweep", sweep, "--out", out, "--on", "slurm", "--sbatch", "qos=low")
    said, error = command(*words, code=1)
    assert "array: 2 tasks, 1 runs per task" in said and "submitted 2 tasks as job 7 (x-" in said
    assert "tasks: 1 pending (Resources)" in error and "no task is left and 2 of 2 runs are missing" in error
    assert (tmp_path / "calls").read_text().splitlines() == ["--test-only", "--parsable", "--parsable"]
    script = (out / "slurm" / "sweep.sbatch").read_text()
    assert "#SBATCH --qos=low" in script and "--leave-when-idle --max-attempts 2" in script
    monkeypatch.setenv("ACTIVE", "0")  # another command's array is in the queue
    (tmp_path / "n").unlink()
    said, _ = command(*words, code=1)
    assert "following the array x-" in said and "submitted" not in said
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_no_script_holds_a_password(tmp_path):
    array = TaskArray(sweep="x", results=tmp_path, request=Request(storage="postgresql://me:secret@host/d"))
    assert "#SBATCH --array=0-3" in array.script(4) and "secret" not in array.script(4)


WORK = "trap 'trap : TERM; exit 143' TERM; sleep 0.1; echo ready; while :; do sleep 0.02; done"
"""Ready a moment later: bash may lose a SIGINT that comes while it starts a job, for which `stop` asks again."""


@pytest.fixture
def task(tmp_path):
    """task(command, state): the script's body with Slurm's answers written down beside it."""
    (tmp_path / "runs").mkdir()
    answers = "case $2 in *%L) cat left ;; *) cat state ;; esac"
    install(tmp_path, squeue=answers, scontrol='echo "$@" >> asked')

    def started(command: str, state: str = "RUNNING:None", restarts: int = 0, left: str = "0:15") -> subprocess.Popen:
        (tmp_path / "state").write_text(state)
        (tmp_path / "left").write_text(left)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": str(restarts)}
        environment |= {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
        (tmp_path / "slurm").mkdir(exist_ok=True)
        body = script_body(tmp_path, Request(time="1"), f"bash -c {shlex.quote(command)}")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(["bash", "-c", body], cwd=tmp_path, env=environment, **pipes)
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


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_warning_that_comes_early_is_waited_out(task, tmp_path):
    """Slurm warns up to a minute before it should: 22 s before the limit where 15 were asked for, the task goes on for
    7 more; a second warning ends it at once."""
    process = task(WORK, left="0:22")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert process.poll() is None and not requeued(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 143 and requeued(tmp_path)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_limit_that_is_too_short_to_start_is_not_tried_for_ever(task, tmp_path):
    """Three starts in a row that reach the limit with nothing made; where one wrote a checkpoint, the count is anew.
    A file system's clock ticks every few milliseconds: a checkpoint of the start's own tick is not newer than it."""
    array = TaskArray(sweep="x", results=tmp_path)
    checkpoint = tmp_path / "work" / "0" / "checkpoints" / "step-1.json"
    checkpoint.parent.mkdir(parents=True)
    for restarts, makes in enumerate(["", "", f"sleep 0.1; touch {checkpoint}; ", "", "", ""]):
        (tmp_path / "asked").unlink(missing_ok=True)
        process = task(makes + WORK, restarts=restarts)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143
        assert requeued(tmp_path) == (restarts < 5), f"start {restarts}"
        time.sleep(0.01)  # the checkpoint is older than the next start
    assert "without progress; give --time at least 2" in err  # 45 s did not suffice, 90 s may: 0.75 of 2 minutes
    assert [restarts for restarts in range(6) if array.ended()["7_3", restarts].progress] == [2]
    stuck = stuck_text(array.stuck())
    assert "1 tasks of job 7 reached their time limit 3 times in a row" in stuck and "1 of them gave up" in stuck
    assert "45 s is too short" in stuck and "; give --time at least 2" in stuck, "the log's figure, whatever the clock"


def test_a_default_limit_that_is_too_short_to_start_is_refused_before_anything_is_submitted(tmp_path, monkeypatch):
    """A partition that allows a week gives a job two minutes where it asks for none: all of it is the warning's."""
    install(tmp_path, sinfo="echo 'p*|7-00:00:00|2:00'", scontrol="echo MaxArraySize = 1001")
    install(tmp_path, sbatch="", squeue="", scancel="")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ValueError, match=r"the default limit of partition p leaves a task 0 s .* at least 2$"):
        check(Request(), tmp_path, 1)
    assert check(Request(time="2"), tmp_path, 1).default_seconds == 120
    with pytest.raises(ValueError, match="no quotes"):
        check(Request(time="2"), tmp_path / "100%", 1)


@pytest.mark.parametrize(("seconds", "time"), [(45, "1"), (46, "2"), (360, "8"), (361, "9"), (3481, "1:01:00")])
def test_the_least_limit_leaves_the_seconds_that_are_needed(seconds, time):
    assert time_advice(least_minutes(seconds)) == f"give --time at least {time}"
    assert parse_time(time) - Request(time=time).warning_seconds >= seconds
