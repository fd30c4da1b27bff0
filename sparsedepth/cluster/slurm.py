"""Calls of Slurm's commands. Their errors become one-line ValueErrors."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sparsedepth.cluster.script import parse_time

TIMEOUT_SECONDS = 60.0
"""of one command"""

ENDED = {
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED",
    "REVOKED",
}  # fmt: skip
"""States of a task that will not run again."""


@dataclass(frozen=True, kw_only=True)
class QueuedTask:
    """A task of an array, as squeue shows it."""

    task: str
    """12_3: job id of the array and task number"""
    state: str
    nodes: str
    reason: str
    restarts: int = 0
    """how often it was requeued"""

    @property
    def is_active(self) -> bool:
        return self.state not in ENDED


def describe(task: QueuedTask) -> str:
    """A task's state, with the reason if it is pending or failed."""
    state = task.state.lower().replace("_", " ")
    has_no_reason = task.reason in ("None", "") or task.reason.lower() == state.replace(" ", "")
    return state if has_no_reason or task.state == "RUNNING" else f"{state} ({task.reason})"


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    seconds: float
    """longest time limit"""
    default_seconds: float
    """time limit of a job that requests none"""
    nodes: int
    gpus: str
    """GPUs of its nodes, in Slurm's format"""


def check_present() -> None:
    if missing := [name for name in ("sbatch", "squeue", "scontrol", "sinfo", "scancel") if not shutil.which(name)]:
        raise ValueError(f"--on slurm needs Slurm's {missing[0]} on the path; run this on a login node of the cluster")


def call(*command: str, script: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises ValueError with the command's error."""
    try:
        done = subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, **(environment or {})},
            check=False,
        )
    except FileNotFoundError:
        raise ValueError(f"Slurm's {command[0]} is not on the path") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command[0]} did not answer in {TIMEOUT_SECONDS:.0f} s; is Slurm's controller up?") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons = [re.sub(rf"^{command[0]}: (error: )?", "", line) for line in lines]
        raise ValueError(f"{command[0]}: {'; '.join(reasons) or f'exit code {done.returncode}'}")
    return done.stdout


def partition(name: str | None) -> Partition:
    """The partition of this name, or the default one. Raises ValueError if there is none."""
    lines = call("sinfo", "--noheader", "--format=%P|%l|%L|%D|%G").splitlines()
    partitions: dict[str, Partition] = {}
    default = None
    for line in lines:
        marked_name, limit, default_limit, nodes, gpus = line.strip().split("|")
        own = marked_name.rstrip("*")
        default = own if marked_name.endswith("*") else default
        seconds, default_seconds = (
            math.inf if text in ("infinite", "n/a") else parse_time(text) for text in (limit, default_limit)
        )
        other_nodes = partitions[own].nodes if own in partitions else 0
        partitions[own] = Partition(
            name=own,
            seconds=seconds,
            default_seconds=min(seconds, default_seconds),
            nodes=other_nodes + int(nodes),
            gpus="" if gpus == "(null)" else gpus,
        )
    names = ", ".join(partitions) or "none"
    if name is None and default is None:
        raise ValueError(f"Slurm has no default partition; give --partition, one of: {names}")
    first = (name or default or "").split(",")[0]
    if first not in partitions:
        raise ValueError(f"--partition {first!r} does not exist; choose one of: {names}")
    return partitions[first]


def max_tasks() -> int:
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", call("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else 1000


def submit(script: str, *options: str, environment: Mapping[str, str] | None = None) -> str:
    """Submit a script; returns the job id. Raises ValueError if Slurm refuses it."""
    output = call("sbatch", "--parsable", *options, script=script, environment=environment)
    return output.strip().split(";")[0]


def queued(name: str) -> list[QueuedTask]:
    """The user's tasks of this name, including those that ended within minutes."""
    fields = "--Format=JobArrayID:|,State:|,NodeList:|,Reason:|,RestartCnt:|"
    lines = call("squeue", "--noheader", "--array", "--me", "--states=all", f"--name={name}", fields).splitlines()
    tasks = []
    for line in lines:
        task, state, nodes, reason, restarts = (part.strip() for part in line.split("|")[:5])
        tasks.append(QueuedTask(task=task, state=state, nodes=nodes, reason=reason, restarts=int(restarts or 0)))
    return tasks


def node_states() -> dict[str, str]:
    """State of each node: idle, mixed, down*, ..."""
    return dict(line.split("|") for line in call("sinfo", "--noheader", "--Node", "--format=%N|%T").split())


def show_job(job: str) -> dict[str, str]:
    """The controller's facts about a job; empty once it has forgotten the job."""
    try:
        line = call("scontrol", "--oneliner", "show", "job", job)
    except ValueError:
        return {}
    return dict(pair.partition("=")[::2] for pair in line.split())


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Resources used by the tasks of one name, summed over all their starts."""

    source: str
    """sacct, or the tasks' own clocks, which miss a start that ended with its node"""
    starts: int
    node_hours: float
    core_hours: float

    @classmethod
    def total(cls, source: str, rows: Iterable[tuple[int, int, int]]) -> "Accounting":
        """Sum over starts of (seconds, nodes, cores on all nodes)."""
        starts = [row for row in rows if row[0] > 0]
        return cls(
            source=source,
            starts=len(starts),
            node_hours=sum(seconds * nodes for seconds, nodes, _ in starts) / 3600,
            core_hours=sum(seconds * cores for seconds, _, cores in starts) / 3600,
        )


def accounting(name: str) -> Accounting | None:
    """The user's tasks of this name in the last year, from sacct; None if accounting is off."""
    fields = "--format=ElapsedRaw,AllocNodes,AllocCPUS"
    since = ("--starttime=now-365days", "--endtime=now")
    try:
        text = call(
            "sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--name={name}", *since, fields
        )
    except ValueError:
        return None
    rows = [[int(number or 0) for number in line.split("|")] for line in text.split()]
    return Accounting.total("sacct", ((seconds, nodes, cores) for seconds, nodes, cores in rows))
