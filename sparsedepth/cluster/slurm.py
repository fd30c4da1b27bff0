"""Calls of Slurm's commands. Their errors become one-line ValueErrors."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    reason: str
    restarts: int = 0
    """how often it was requeued"""

    @property
    def is_active(self) -> bool:
        return self.state not in ENDED

    @property
    def text(self) -> str:
        """'running'; with the reason if it is pending or failed."""
        state = self.state.lower().replace("_", " ")
        has_no_reason = self.reason in ("None", "") or self.reason.lower() == state.replace(" ", "")
        return state if has_no_reason or self.state == "RUNNING" else f"{state} ({self.reason})"


class Partition(NamedTuple):
    name: str
    seconds: float
    """longest time limit"""
    default_seconds: float
    """time limit of a job that requests none"""


def check_present() -> None:
    if missing := [name for name in ("sbatch", "squeue", "scontrol", "sinfo", "scancel") if not shutil.which(name)]:
        raise ValueError(f"--on slurm needs Slurm's {missing[0]} on the path; run this on a login node of the cluster")


def call(*command: str, script: str | None = None, environment: Mapping[str, str] | None = None) -> str:
    """The output of a command. Raises ValueError with the command's error."""
    env = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env=env)
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
    partitions: dict[str, Partition] = {}
    default = None
    for line in call("sinfo", "--noheader", "--format=%P|%l|%L").splitlines():
        marked_name, *limits = line.strip().split("|")
        own = marked_name.rstrip("*")
        default = own if marked_name.endswith("*") else default
        longest, usual = (math.inf if text in ("infinite", "n/a") else parse_time(text) for text in limits)
        partitions[own] = Partition(own, longest, min(longest, usual))
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
    fields = "--Format=JobArrayID:|,State:|,Reason:|,RestartCnt:|"
    lines = call("squeue", "--noheader", "--array", "--me", "--states=all", f"--name={name}", fields).splitlines()
    rows = [[part.strip() for part in line.split("|")[:4]] for line in lines]
    return [
        QueuedTask(task=task, state=state, reason=reason, restarts=int(restarts or 0))
        for task, state, reason, restarts in rows
    ]


def show_job(job: str) -> dict[str, str]:
    """The controller's facts about a job; empty once it has forgotten the job."""
    try:
        line = call("scontrol", "--oneliner", "show", "job", job)
    except ValueError:
        return {}
    return dict(pair.partition("=")[::2] for pair in line.split())
