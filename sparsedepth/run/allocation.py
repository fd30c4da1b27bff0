"""Which Slurm task computes a run, from Slurm's environment variables; and the node hours that it used.

    node hours = sum over the starts of the run's process: nodes * seconds / (3600 * runs)

`seconds` are by the process's own clock; `runs` are computed in parallel in the task. Each start is recorded in the
run's scratch folder, with the node's name, and in its manifest, without.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


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


def manifest_facts(starts: Sequence[Allocation]) -> dict[str, Any]:
    """For a run's manifest: its starts, without node names, and their node hours; empty if there are none."""
    tasks = [{key: value for key, value in asdict(start).items() if key != "node"} for start in starts]
    return {"node_hours": node_hours(starts), "allocations": tasks} if tasks else {}


def task_text(starts: Sequence[Allocation]) -> str:
    """' (task 12_3 on n1)': the Slurm task that computes, or last computed, a run."""
    return f" (task {starts[-1].task} on {starts[-1].node})" if starts else ""


def allocation(runs: int = 1, environment: Mapping[str, str] = os.environ) -> Allocation | None:
    """The Slurm task of this process, which computes `runs` in parallel; None outside of Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None

    def fact(name: str) -> str:
        return environment.get(f"SLURM_{name}", "")

    def count(name: str, default: int) -> int:
        return int(fact(name)) if fact(name).isdigit() else default

    array, number, nodes = fact("ARRAY_JOB_ID"), fact("ARRAY_TASK_ID"), count("JOB_NUM_NODES", 1)
    return Allocation(
        task=f"{array}_{number}" if array and number else fact("JOB_ID"),
        node=environment.get("SLURMD_NODENAME", ""),
        partition=fact("JOB_PARTITION"),
        nodes=nodes,
        cpus=count("CPUS_ON_NODE", 1),
        gpus=count("GPUS_ON_NODE", len(list(filter(None, fact("JOB_GPUS").split(","))))) * nodes,
        restarts=count("RESTART_COUNT", 0),
        runs=runs,
    )
