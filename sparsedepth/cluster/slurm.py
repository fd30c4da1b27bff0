"""Slurm: the batch script of a sweep, an array whose tasks take runs from the queue until it is empty, and calls of
Slurm's commands, whose errors become one-line ValueErrors.

How a task reacts to signals:

    USR1, USR2   time limit near            checkpoint, release the lease, requeue the task; if Slurm warns early (by
                                            up to a minute), the task first keeps working for that long
    TERM         preempted or cancelled     the same, but without requeueing a job that Slurm ended or requeued itself
    INT          `sparsedepth stop`         the same, without requeueing
    killed (137)                            the task is requeued, at most MAX_KILLS times

After MAX_STARTS starts in a row that reached the limit without a checkpoint or a finished run, a task gives up.
`sbatch` passes on the submitter's environment, including SPARSEDEPTH_STORAGE, so that no script holds a password."""

import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from sparsedepth.config.runtime import DEFAULT, RuntimeConfig
from sparsedepth.quantities.quantity import without_none
from sparsedepth.words.status import time_advice

WARNING_SECONDS = 120
"""How long before its time limit a task is warned; at most a quarter of the limit."""

MAX_KILLS, MAX_STARTS = 20, 3
"""How often a killed task is requeued, and how often in a row a task may reach its time limit without progress."""

FOLDER = "slurm"
"""Subfolder of the results folder: the script, and for task 12_3 its log and 12_3.jsonl, a line per ended start."""

OWN_KEYS = {
    "account", "array", "chdir", "dependency", "error", "export", "gpus-per-node", "job-name", "no-requeue", "nodes",
    "open-mode", "output", "parsable", "partition", "requeue", "signal", "test-only", "time", "wait", "wrap",
}  # fmt: skip
"""Options that the script sets itself, or that have a command-line option."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a sweep asks for on Slurm: the resources of each task (None and empty: the cluster's default), and what
    each of its `work` processes does."""

    partition: str | None = None
    account: str | None = None
    gpus: str | None = None
    """GPUs per node: 1, or h100:2"""
    nodes: int = 1
    time: str | None = None
    """time limit in Slurm's format: 30, 4:00:00, 1-12"""
    sbatch: Sequence[str] | None = None
    """more sbatch options: key=value, or key"""
    array: int | None = None
    runtime: RuntimeConfig = DEFAULT
    workers: int | None = None
    gpus_per_run: int = 1
    max_attempts: int = 2
    storage: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid option."""
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,+-]+", value):
                raise ValueError(f"--{name} {value!r} must be a Slurm name: letters, digits, '_', '-', '.'")
        if self.gpus is not None and not re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,2}", self.gpus):
            raise ValueError(f"--gpus {self.gpus!r} with --on slurm must be the GPUs per task: 1, or h100:2")
        if self.time is not None and not parse_time(self.time):
            raise ValueError(f"--time {self.time!r} must be more than 0; leave it out for the partition's own limit")
        if self.gpus and int(self.gpus.rpartition(":")[2]) < self.gpus_per_run:
            raise ValueError(
                f"--gpus {self.gpus} per task are fewer than --gpus-per-run {self.gpus_per_run}; raise them"
            )
        if self.gpus and self.runtime.device == "cpu":
            raise ValueError(f"--gpus {self.gpus} with --device cpu: no run would use a GPU; leave one of them out")
        if self.nodes > 1 and (self.workers or 1) > 1:
            raise ValueError(f"--workers {self.workers}: a run on several nodes needs --workers 1")
        for option in self.sbatch or ():
            key, _, value = option.partition("=")
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or re.search(r"[\x00-\x1f\"\\]", value):
                raise ValueError(f"--sbatch {option!r} must be KEY=VALUE with a long option of sbatch, such as qos=low")
            if key in OWN_KEYS:
                raise ValueError(f"--sbatch {key} is set by the script; use the option of sweep")

    @property
    def seconds(self) -> int | None:
        return parse_time(self.time) if self.time else None

    @property
    def warning_seconds(self) -> int:
        return min(WARNING_SECONDS, self.seconds // 4) if self.seconds else WARNING_SECONDS

    def options(self) -> dict[str, str | None]:
        """The sbatch options for the resources of a task or a probe."""
        resources = {"partition": self.partition, "account": self.account, "gpus-per-node": self.gpus}
        options = without_none(resources)
        if self.nodes > 1:
            options |= {"nodes": str(self.nodes), "ntasks-per-node": "1"}
        given = (option.partition("=") for option in self.sbatch or ())
        return options | {key: value if equals else None for key, equals, value in given}

    @property
    def groups(self) -> int:
        """Groups of GPUs per task, each for the runs of its workers; 0 without GPUs."""
        return int(self.gpus.rpartition(":")[2]) // self.gpus_per_run if self.gpus else 0

    @property
    def runs_in_parallel(self) -> int:
        if self.nodes > 1:
            return 1
        if self.groups:
            return (self.workers or 1) * self.groups
        cores = self.options().get("cpus-per-task") or "1"
        return self.workers or max(1, (int(cores) if cores.isdigit() else 1) // self.gpus_per_run)

    def arguments(self) -> list[str]:
        """The options of `work`."""
        names = ("max_attempts", "workers", "gpus_per_run", "nodes")
        values = without_none({name: getattr(self, name) for name in names})
        arguments = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        for name, value in self.runtime.model_dump(mode="json", exclude_defaults=True).items():
            arguments += ["--runtime", f"{name}={value}".replace("=True", "=true").replace("=False", "=false")]
        return arguments


def parse_time(text: str) -> int:
    """Seconds of a time in Slurm's format: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError."""
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text)
    if match is None:
        raise ValueError(f"--time {text!r} must be minutes or in Slurm's format: 30, 4:00:00, 1-12:00:00")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def least_minutes(seconds: float) -> int:
    """The least --time that leaves a task this many seconds before Slurm warns it."""
    return math.ceil(min(seconds / 0.75, seconds + WARNING_SECONDS) / 60)


def script_body(results: Path, request: Request, command: str) -> str:
    """What each task of the array runs: the script task.sh, with its words in braces replaced."""
    available = request.seconds - request.warning_seconds if request.seconds else None
    values = {
        "command": command,
        "results": shlex.quote(str(results.resolve())),
        "folder": shlex.quote(str(results.resolve() / FOLDER)),
        "warning": request.warning_seconds,
        "max_kills": MAX_KILLS,
        "starts": MAX_STARTS,
        "others": MAX_STARTS - 1,
        "available": "" if available is None else available,
        "advice": "give a longer --time" if available is None else time_advice(least_minutes(2 * available)),
    }
    text = (files("sparsedepth.cluster") / "task.sh").read_text(encoding="utf-8")
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


def header(options: dict[str, str | None]) -> str:
    return "\n".join(f"#SBATCH --{key}" + (f"={value}" if value is not None else "") for key, value in options.items())


TIMEOUT_SECONDS = 60.0

ENDED = {
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED",
    "REVOKED",
}  # fmt: skip
"""States of a task that will not run again."""


class QueuedTask(NamedTuple):
    task: str
    """12_3: job id of the array and task number"""
    state: str
    reason: str
    restarts: int

    @property
    def is_active(self) -> bool:
        return self.state not in ENDED


class Partition(NamedTuple):
    name: str
    seconds: float
    default_seconds: float


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
    partitions = {}
    default = None
    for line in call("sinfo", "--noheader", "--format=%P|%l|%L").splitlines():
        marked_name, *limits = line.strip().split("|")
        own = marked_name.rstrip("*")
        default = own if marked_name.endswith("*") else default
        longest, usual = (math.inf if text in ("infinite", "n/a") else parse_time(text) for text in limits)
        partitions[own] = Partition(own, longest, min(longest, usual))
    first = (name or default or "").split(",")[0]
    if first not in partitions:
        problem = f"--partition {first!r} does not exist" if first else "Slurm has no default partition"
        raise ValueError(f"{problem}; choose one of: {', '.join(partitions) or 'none'}")
    return partitions[first]


def max_tasks() -> int:
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", call("scontrol", "show", "config"), re.MULTILINE)
    return int(match[1]) if match else 1000


def submit(script: str, *options: str, environment: Mapping[str, str] | None = None) -> str:
    """Submit a script; returns the job id. Raises ValueError if Slurm refuses it."""
    return call("sbatch", "--parsable", *options, script=script, environment=environment).strip().split(";")[0]


def queued(name: str) -> list[QueuedTask]:
    """The user's tasks of this name, including those that ended within minutes."""
    fields = "--Format=JobArrayID:|,State:|,Reason:|,RestartCnt:|"
    lines = call("squeue", "--noheader", "--array", "--me", "--states=all", f"--name={name}", fields).splitlines()
    rows = [[part.strip() for part in line.split("|")[:4]] for line in lines]
    return [QueuedTask(task, state, reason, int(restarts or 0)) for task, state, reason, restarts in rows]


def show_job(job: str) -> dict[str, str]:
    """The controller's facts about a job; empty once it has forgotten the job."""
    try:
        return dict(pair.partition("=")[::2] for pair in call("scontrol", "--oneliner", "show", "job", job).split())
    except ValueError:
        return {}
