"""Which task of a cluster's array computes a run, as Slurm tells it to the task's processes; and what that has used.

    node hours = sum over the starts of the run's process: nodes * seconds / (3600 * runs)

with `seconds` by the process's own clock and `runs` computed beside each other in the task. Each start is kept in the
run's scratch folder, with the node's name, and in its manifest without.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A task and what it was given."""

    task: str
    """12_3: the array's number and the task's own; 12 outside of an array"""
    node: str
    partition: str
    nodes: int
    cpus: int
    """of a node"""
    gpus: int
    """of all nodes"""
    restarts: int
    """how often the task had been queued again by then"""
    runs: int = 1
    """that the task computed beside each other, this one included"""
    seconds: float | None = None
    """that it had the run in hand, as far as that has told"""


def node_hours(starts: Iterable[Allocation]) -> float:
    """Node hours that a run has used, over all its starts."""
    return sum(start.nodes * (start.seconds or 0.0) / (3600 * start.runs) for start in starts)


def allocation(runs: int = 1, environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The task that this process belongs to, and how many `runs` it computes at a time; None outside of Slurm."""
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
