"""Sentences on a sweep, by hand."""

from collections import Counter
from pathlib import Path

import pytest

from sparsedepth.cluster.array import Probe, StartEnd, StuckTasks
from sparsedepth.cluster.slurm import QueuedTask
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.run.scratch import Allocation, Progress
from sparsedepth.sweep.machine import Machine
from sparsedepth.sweep.status import BestRun, RunState, SweepSummary
from sparsedepth.words import status, sweep


def allocation(restarts: int) -> Allocation:
    return Allocation(task="12_3", node="n1", partition="p", nodes=1, cpus=1, gpus=0, restarts=restarts)


def test_a_machine_is_its_devices_threads_and_processes():
    cpu = Machine(workers=2, runtime=RuntimeConfig(threads=1), gpus=[])
    assert sweep.machine_text(cpu) == "cpu with 1 thread each"
    pairs = Machine(workers=2, runtime=RuntimeConfig(threads=4), gpus=[["0", "1"], ["2", "3"]], processes_per_run=2)
    assert sweep.machine_text(pairs) == "GPU 0+1, 2+3 with 4 threads each and 2 processes per run"


def test_runs_that_are_stacked_are_counted_beside_the_processes():
    assert sweep.at_a_time_text(2, 1) == "2 at a time on"
    assert sweep.at_a_time_text(2, 8) == "2 stacks of up to 8 equal shapes at a time on"


def test_a_running_run_says_what_is_known_of_it():
    def line(progress: Progress | None) -> str:
        return status.running_text(RunState(run_id="a", state="running", progress=progress, config=None), "run a")

    assert line(None) == "run a: starting"
    assert line(Progress(phase="training", done=0.5, loss=2.0, at=9e9, left=65.0)) == (
        "run a: training, 50%, loss 2.000, about 1m05s left"
    )
    assert line(Progress(phase="measuring", done=0.9, loss=None, at=0.0)).endswith("90% (no output for minutes)")
    assert sweep.run_text({"n_layers": 4, "lr": 0.0012345678, "norm": "pre\n"}) == "n_layers=4 lr=0.001235 norm=pre\\n"


def test_the_best_run_is_told_with_its_configuration():
    best = BestRun("val_loss", 0.13512, "a", "n_layers=24, baseline, seed 0", 0.2832, 3, False, False)
    said = "(n_layers=24, baseline, seed 0; mean of its 3 seeds 0.2832)"
    assert status.best_text(best) == f"lowest single run: val_loss 0.1351 {said}"
    alone = best._replace(n_seeds=1, is_of_tuning=True, is_beaten=True)
    assert status.best_text(alone).startswith("lowest tuning run of this definition: val_loss 0.1351")
    assert status.best_text(alone).endswith("; its only seed)")


def test_counts_and_remarks_of_a_folder():
    states = [RunState(run_id=name, state=state, config=None) for name, state in (("a", "complete"), ("b", "pruned"))]
    summary = SweepSummary(
        definition=None, states=states, expected=2, best=None, node_hours=None, is_swept=False,
        n_diverged=1, judgements=("packages differ",), n_others=2,
    )  # fmt: skip
    assert status.counts_text(summary) == "1 complete, 0 running, 0 interrupted, 0 failed, 1 pruned, 0 planned"
    diverged, packages, others = status.remark_lines(summary)
    assert diverged.startswith("1 of the complete runs diverged") and packages == "packages differ"
    assert others.startswith("2 other complete runs are in the folder") and status.other_runs_text(0) == ""
    assert status.other_runs_text(1).startswith("1 other complete run is in the folder")


def test_tasks_of_slurm_are_told_by_state_and_end():
    running, pending = QueuedTask("12_3", "RUNNING", "None", 1), QueuedTask("12_4", "PENDING", "Resources", 0)
    assert status.tasks_text([running, pending, pending]) == "2 pending (Resources), 1 running"
    assert status.tasks_text([]) == "none in the queue"
    assert status.task_text([allocation(0)]) == " (task 12_3 on n1)" and status.task_text([]) == ""
    end = StartEnd(restarts=0, seconds=9, reason="preempted")
    assert status.end_text(end, allocation(0), pending) == "preempted; now pending (Resources)"
    assert status.end_text(None, allocation(1), running) == "running"
    assert status.end_text(None, allocation(0), None) == "killed, or its node failed"


def test_a_limit_that_is_too_short_is_told_with_one_that_is_not():
    stuck = StuckTasks(job=7, tasks=2, times=3, given_up=1, seconds=45)
    assert status.stuck_text(stuck) == (
        "2 tasks of job 7 reached their time limit 3 times in a row without progress, and 1 of them gave up: "
        "45 s is too short to start and write a checkpoint; give --time at least 2"
    )
    assert (
        status.time_advice(59) == "give --time at least 59" and status.time_advice(61) == "give --time at least 1:01:00"
    )


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ("COMPLETED", "0", "a file written by the probe task on n1 is not visible here; "
                           "give an --out on shared storage"),
        ("FAILED", "3", "out is not visible on n1; give an --out on storage shared by all nodes"),
        ("FAILED", "4", "n1 cannot run py with sparsedepth; install it on storage that nodes share"),
        ("TIMEOUT", "0", "the probe task on n1 ended timeout (exit code 0)"),
        ("RUNNING", "", "the probe task on n1 has not ended in 300 s and was cancelled; "
                        "check that n1 can read out and start py"),
    ],
)  # fmt: skip
def test_why_a_node_cannot_be_used(state, code, said):
    probe = Probe(node="n1", state=state, code=code, has_ended=state != "RUNNING", limit=300.0)
    assert sweep.probe_text(probe, Path("out"), "py") == said


def test_constraints_that_are_broken_are_told_with_their_bounds():
    excess, bounds = Counter({"params_total": 0.2, "train_flops": -0.5}), {"params_total": 15400, "train_flops": 1.0}
    assert sweep.excess_text(excess, bounds) == "params_total is 20.0% above 15400"
    assert sweep.storage_text(None, Path("r/study.journal")) == "r/study.journal"
