"""Which Slurm task computes a run, from Slurm's environment variables; and the node hours that it used.

    node hours = sum over the starts of the run's process: nodes * seconds / (3600 * runs)

`seconds` are by the process's own clock; `runs` are computed in parallel in the task. Each start is recorded in the
run's scratch folder, with the node's name, and in its manifest, without.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Allocation:
    task: str
    """12_3: job id of the array and task number; 12 outside of an array"""
    node: str
    partition: str
    nodes: int
    cpus: int
    """per node"""
    gpus: int
    """of all nodes"""
    restarts: int
    """how often the task had been requeued"""
    runs: int = 1
    """computed in parallel by the task, including this one"""
    seconds: float | None = None
    """time spent on the run so far"""


def node_hours(starts: Iterable[Allocation]) -> float:
    return sum(start.nodes * (start.seconds or 0.0) / (3600 * start.runs) for start in starts)


def task_text(starts: Sequence[Allocation]) -> str:
    """' (task 12_3 on n1)': the Slurm task that computes, or last computed, a run."""
    return f" (task {starts[-1].task} on {starts[-1].node})" if starts else ""


def allocation(runs: int = 1, environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The Slurm task of this process, which computes `runs` in parallel; None outside of Slurm."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    array, number = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")

    def count(name: str, default: int) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdigit() else default

    gpus = environment.get("SLURM_JOB_GPUS", "")
    nodes = count("SLURM_JOB_NUM_NODES", 1)
    return Allocation(
        task=f"{array}_{number}" if array and number else job,
        node=environment.get("SLURMD_NODENAME", ""),
        partition=environment.get("SLURM_JOB_PARTITION", ""),
        nodes=nodes,
        cpus=count("SLURM_CPUS_ON_NODE", 1),
        gpus=count("SLURM_GPUS_ON_NODE", len(gpus.split(",")) if gpus else 0) * nodes,
        restarts=count("SLURM_RESTART_COUNT", 0),
        runs=runs,
    )
