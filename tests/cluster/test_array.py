"""What runs have used by their own clocks, and why a task let go of a run."""

import json

import pytest

from sparsedepth.cluster import slurm
from sparsedepth.cluster.array import TaskArray
from sparsedepth.run.scratch import Scratch, allocation, node_hours


def test_a_refusal_is_one_line(tmp_path, monkeypatch):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2; echo more >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ValueError, match=r"^sbatch: invalid account; more$"):
        slurm.submit("")


def environment(task: int, node: str, nodes: int = 1, restarts: int = 0) -> dict[str, str]:
    """What Slurm tells a task of array 12."""
    numbers = {"ARRAY_TASK_ID": task, "JOB_NUM_NODES": nodes, "RESTART_COUNT": restarts}
    return {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURMD_NODENAME": node} | {
        f"SLURM_{name}": str(number) for name, number in numbers.items()
    }


def test_variables_of_others_are_not_slurms():
    """Of a user, or of another scheduler: their names are Slurm's without its prefix."""
    others = {"JOB_ID": "9", "ARRAY_JOB_ID": "8", "ARRAY_TASK_ID": "7", "CPUS_ON_NODE": "6"}
    assert allocation(1, environment(3, "n1") | others) == allocation(1, environment(3, "n1"))


def test_node_hours_of_a_run(tmp_path):
    """Half an hour on 2 nodes beside another run, then lost before it said anything, then a whole hour by itself:
    2 * 0.5 / 2 + 0 + 1 = 1.5 node hours."""
    scratch = Scratch(tmp_path, "0" * 12)
    scratch.folder.mkdir(parents=True)
    scratch.begin(None)
    assert scratch.allocations() == []
    scratch.begin(allocation(2, environment(3, "n1", nodes=2)))
    scratch.write_progress("training", 0.5, elapsed=1800)
    scratch.begin(allocation(1, environment(3, "n2", restarts=1)))
    scratch.begin(allocation(1, environment(4, "n3")))
    scratch.write_progress("writing", 1.0, elapsed=3600)
    starts = scratch.allocations()
    assert [(start.task, start.node, start.seconds) for start in starts] == [
        ("12_3", "n1", 1800), ("12_3", "n2", None), ("12_4", "n3", 3600)
    ]  # fmt: skip
    assert node_hours(starts) == 1.5
    (scratch.folder / "allocations.json").write_text('[{"task": "12_3", "seconds": "long"}]')
    assert scratch.allocations() == []


@pytest.fixture
def controller(tmp_path, monkeypatch):
    """Task 3 is queued again, 4 ran out of memory, 5 runs, of 6 nothing is known any more."""
    (tmp_path / "bin").mkdir()
    queue = "12_3|PENDING|BeginTime|1|\\n12_4|OUT_OF_MEMORY|OutOfMemory|0|\\n12_5|RUNNING|None|1|\\n"
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/bash\nprintf '{queue}'\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")


def test_status_says_why_a_task_let_go_of_a_run_and_logs_finds_what_it_said(tmp_path, controller, command):
    array = TaskArray(sweep="", results=tmp_path / "results")
    array.folder.mkdir(parents=True)
    end = {"restarts": 0, "seconds": 1800, "reason": "preemption"}
    (array.folder / "12_3.jsonl").write_text(f"{json.dumps(end)}\n{{cut sho")
    (array.folder / "12_3.log").write_text("what the task said\n")
    for number in (3, 4, 5, 6):
        scratch = Scratch(array.results, f"{number}" * 12)
        scratch.checkpoints.mkdir(parents=True)
        for name in ("config.yaml", "log.txt"):
            (scratch.folder / name).touch()
        scratch.begin(allocation(1, environment(number, f"n{number}")))
        scratch.write_progress("training", 0.5, elapsed=720)

    lines = command("status", array.results)[0].splitlines()
    for line in (
        "  interrupted 333333333333 (task 12_3 on n3): preemption; now pending (BeginTime)",
        "  interrupted 444444444444 (task 12_4 on n4): out of memory",
        "  interrupted 555555555555 (task 12_5 on n5): killed, or its node failed; now running",
        "  interrupted 666666666666 (task 12_6 on n6): killed, or its node failed",
        "  used: 0.8 node hours by the runs' own clocks",
    ):
        assert line in lines, lines
    said, _ = command("logs", array.results, "33", "--task")
    assert said == f"{array.folder}/12_3.log:\nwhat the task said\n"
    command("logs", array.results, "44", "--task", code=2)
