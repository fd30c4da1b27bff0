"""A sweep as an array of tasks on Slurm: planned, submitted once, followed from anywhere, ended in order.

The controller is asked what runs, by the array's name, which belongs to the results folder: no file of ours says it,
and so none can be wrong. Which run a task has in hand stands in the run's scratch folder (`run.allocation`); why a
start of a task ended, which the controller forgets, is noted by the task (`cluster.script`).
"""

import contextlib
import math
import re
import shlex
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sparsedepth import files
from sparsedepth.cluster import slurm
from sparsedepth.cluster.script import (
    FOLDER,
    MAX_STARTS,
    START_SECONDS,
    Request,
    advice,
    array_script,
    check_folder,
    header,
    work_command,
)
from sparsedepth.cluster.slurm import Accounting, QueuedTask
from sparsedepth.run.allocation import Allocation

MOST_TASKS = 64
"""Tasks of an array where --array does not say."""

PROBE_SECONDS = 4.0
"""How long the probe task may wait for its start; after that the array waits for it in the queue."""

STOP_SECONDS = 600.0
"""How long running tasks may take to write their checkpoints before `stop` gives the prompt back."""

NOT_SHARED, NO_PYTHON = 3, 4
"""How the probe task ends."""

PROBE = """\
#!/bin/bash
{header}
[ -e {token} ] || exit {not_shared}
cd / && {python} -c 'import sparsedepth' || exit {no_python}
touch {token}.answer
"""

SEAL = "# unedited: "
"""Begins the last line of a script that is as it was made; the rest is a checksum of the lines before."""


@dataclass(frozen=True, kw_only=True)
class StartEnd:
    """The end of a start of a task, as its script noted it."""

    restarts: int
    nodes: int
    cpus: int
    """of a node"""
    seconds: int
    reason: str
    progress: bool = True
    """whether it has written a checkpoint, or more, as far as its time limit ended it"""


_END = TypeAdapter(StartEnd)


@dataclass(frozen=True, kw_only=True)
class TaskArray:
    """The array of one results folder."""

    sweep: str
    results: Path
    request: Request = field(default_factory=Request)
    arguments: Sequence[str] = ()
    """of `work`"""
    storage_url: str | None = None

    @property
    def name(self) -> str:
        """Of the jobs: the sweep's, and a checksum of the folder's path."""
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', self.sweep)[:40]}-{files.digest(str(self.results.resolve()))[:8]}"

    @property
    def folder(self) -> Path:
        return self.results / FOLDER

    @property
    def path(self) -> Path:
        """Of the script."""
        return self.folder / "sweep.sbatch"

    def script(self, tasks: int) -> str:
        """The script as it is made, with its seal."""
        text = array_script(
            name=self.name,
            results=self.results,
            request=self.request,
            tasks=tasks,
            command=work_command(sys.executable, self.results, self.arguments),
        )
        return f"{text}{SEAL}{files.digest(text)}\n"

    def is_edited(self) -> bool:
        """Whether the script that is there was changed by hand."""
        text, _, seal = self.path.read_text().rpartition(SEAL)
        return seal.strip() != files.digest(text)

    def queued(self) -> list[QueuedTask]:
        """Its tasks, ended ones included as long as the controller remembers them."""
        return slurm.queued(self.name)

    def submit(self, tasks: int) -> str | None:
        """Submit the array, unless one of this folder is queued or running already: then None. Returns its number.

        Raises ValueError, with nothing left in the queue, where Slurm refuses the script or the probe task fails.
        """
        self.folder.mkdir(exist_ok=True)
        with files.locked(self.folder / ".lock"):
            if any(task.is_active for task in self.queued()):
                return None
            options = []
            if self.path.exists() and self.is_edited():
                print(f"{self.path} was edited, and is submitted as it is")
            else:
                files.write_text(self.path, self.script(tasks))
                options = [f"--array=0-{tasks - 1}"]
            script = self.path.read_text()
            slurm.call("sbatch", "--test-only", *options, script=script, environment=self._environment)
            if probe := self._probe():
                options += [f"--dependency=afterok:{probe}", "--kill-on-invalid-dep=yes"]
                print(f"the array waits for job {probe}, which sees whether the nodes share {self.results}")
            try:
                return slurm.submit(script, *options, environment=self._environment)
            except ValueError:
                if probe:
                    slurm.call("scancel", probe)
                raise

    @property
    def _environment(self) -> dict[str, str]:
        return {"SPARSEDEPTH_STORAGE": self.storage_url} if self.storage_url else {}

    def _probe(self) -> str | None:
        """Have a task see whether a node has the folder and this Python. Its number where it has not started yet.

        Raises ValueError for what it does not find.
        """
        token = self.folder.resolve() / f"probe-{uuid.uuid4().hex}"
        answer = token.with_name(f"{token.name}.answer")
        token.touch()
        given = {key: value for key, value in self.request.options().items() if key not in ("begin", "hold")}
        options = given | {
            "job-name": f"{self.name}-probe", "time": "2", "output": "/dev/null", "no-requeue": None
        }  # fmt: skip
        text = PROBE.format(
            header="\n".join(header(options)),
            token=shlex.quote(str(token)),
            python=shlex.quote(sys.executable),
            not_shared=NOT_SHARED,
            no_python=NO_PYTHON,
        )
        job = slurm.submit(text)
        deadline = time.monotonic() + PROBE_SECONDS
        while not answer.exists():
            facts = slurm.show_job(job)
            state, is_late = facts.get("JobState"), time.monotonic() > deadline
            if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"):
                token.unlink()
                raise ValueError(self._why_probe_failed(facts))
            if is_late and state == "COMPLETED":
                raise ValueError(
                    f"{self.results} is not shared by the nodes: what the probe task wrote on {facts.get('NodeList')} "
                    f"is not seen here; give an --out on storage that all see"
                )
            if is_late and state not in ("RUNNING", "COMPLETING"):  # it waits, or the controller does not say
                return job
            time.sleep(0.2)
        answer.unlink()
        token.unlink()
        return None

    def _why_probe_failed(self, facts: dict[str, str]) -> str:
        node = facts.get("NodeList", "a node")
        code = facts.get("ExitCode", "").partition(":")[0]
        if code == str(NOT_SHARED):
            return (
                f"{self.results} is not shared by the nodes: {node} does not see it; give an --out on storage that all "
                f"see. Nothing was submitted"
            )
        if code == str(NO_PYTHON):
            return (
                f"{node} cannot run {sys.executable} with sparsedepth; install it where the nodes see it. Nothing was "
                f"submitted"
            )
        state = facts.get("JobState", "").lower()
        return f"the probe task on {node} ended {state} (exit code {code}). Nothing was submitted"

    def ended(self) -> dict[tuple[str, int], StartEnd]:
        """How the starts of tasks ended that lived to say it, by task and number of restarts."""
        ends = {}
        for path in sorted(self.folder.glob("*_*.jsonl")):
            for line in files.read_regular(path).decode(errors="replace").splitlines():
                try:
                    end = _END.validate_json(line)
                except ValidationError:  # cut short by a full disk
                    continue
                ends[path.stem, end.restarts] = end
        return ends

    def without_progress(self) -> str | None:
        """Which tasks of the last array reach their time limit before they get anywhere, and what to ask for."""
        rows: dict[str, int] = {}
        seconds: list[int] = []
        ends = self.ended()
        last = max((int(task.partition("_")[0]) for task, _ in ends), default=0)
        for (task, _), end in sorted(ends.items()):
            if task.startswith(f"{last}_"):
                rows[task] = 0 if end.progress else rows.get(task, 0) + 1
                seconds += [] if end.progress else [end.seconds]
        stuck = {task: count for task, count in rows.items() if count > 1}
        if not stuck:
            return None
        given_up = sum(count >= MAX_STARTS for count in stuck.values())
        return (
            f"{len(stuck)} tasks of job {last} reached their time limit {max(stuck.values())} times in a row before "
            f"any progress, {given_up} of them gave up: {max(seconds)} s do not suffice to start and write a "
            f"checkpoint; {advice(2 * max(seconds))}"
        )

    def used_by_tasks(self) -> Accounting:
        """What the tasks have used by their own clocks."""
        ends = self.ended().values()
        return slurm.sum_of("the tasks' own clocks", ((end.seconds, end.nodes, end.nodes * end.cpus) for end in ends))

    def account(self) -> str | None:
        """Keep what the tasks have used in DIR/slurm/accounting.json, and say it."""
        used = slurm.accounting(self.name) or self.used_by_tasks()
        if not used.starts:
            return None
        files.write_json(self.folder / "accounting.json", asdict(used))
        return (
            f"used: {used.node_hours:.3g} node hours, {used.core_hours:.3g} core hours, in {used.starts} starts "
            f"of tasks ({used.source})"
        )

    def reasons(self, starts: Iterable[Allocation], queued: Iterable[QueuedTask]) -> Iterator[str]:
        """Why each start of a task has ended, and how the task stands now: 'preempted; now pending (Resources)'."""
        ends, tasks = self.ended(), {task.task: task for task in queued}
        nodes: dict[str, str] = {}
        for start in starts:
            end, task = ends.get((start.task, start.restarts)), tasks.get(start.task)
            if end is None and task and (task.restarts == start.restarts or task.state == "COMPLETING"):
                yield slurm.describe(task)
                continue
            if end is None and not nodes:
                with contextlib.suppress(ValueError):
                    nodes = slurm.node_states()
            state = nodes.get(start.node, "")
            lost = f"its node is {state}" if state.startswith("down") else "killed, or its node failed"
            yield (end.reason if end else lost) + (f"; now {slurm.describe(task)}" if task and task.is_active else "")

    def cancel_waiting(self) -> None:
        """Cancel the tasks that have not started: every run is there."""
        if waiting := [task.task for task in self.queued() if task.state == "PENDING"]:
            slurm.call("scancel", "--quiet", *waiting)

    def stop(self) -> int:
        """Cancel what waits, have what runs write its checkpoint and end. Returns how many tasks were asked.

        Asked again and again: a task may just be on its way back to the queue, or out of it.
        """
        asked: set[str] = set()
        deadline = time.monotonic() + STOP_SECONDS
        while active := [task for task in self.queued() if task.is_active]:
            asked |= {task.task for task in active}
            waiting = [task.task for task in active if task.state not in ("RUNNING", "COMPLETING")]
            running = [task.task for task in active if task.state == "RUNNING"]
            if waiting:
                slurm.call("scancel", "--quiet", *waiting)
            if running:
                slurm.call("scancel", "--quiet", "--signal=INT", "--batch", *running)
            if time.monotonic() > deadline:
                raise ValueError(f"{len(active)} tasks still run; `scancel --name={self.name}` ends them at once")
            time.sleep(2.0)
        return len(asked)


def counted(tasks: Sequence[QueuedTask]) -> str:
    """How many tasks are in each state, with the reason of those that wait."""
    words = Counter(slurm.describe(task) for task in tasks)
    return ", ".join(f"{count} {state}" for state, count in words.most_common()) or "none in the queue"


def default_tasks(runs: int, at_a_time: int) -> int:
    """As many tasks as have work, at most MOST_TASKS."""
    return max(1, min(MOST_TASKS, math.ceil(runs / at_a_time)))


def check(request: Request, results: Path | None, tasks: int, checkpoint_seconds: float) -> slurm.Partition:
    """The partition. Raises ValueError for what Slurm would refuse, or what would never get anywhere."""
    slurm.check_present()
    if results:
        check_folder(results)
    partition = slurm.partition(request.partition)
    if request.seconds is not None and request.seconds > partition.seconds:
        hours = partition.seconds / 3600
        raise ValueError(f"--time {request.time} is beyond the limit of partition {partition.name}, {hours:g} h")
    limit = request.seconds or partition.default_seconds
    left, needed = max(0.0, limit - request.warning_seconds), START_SECONDS + checkpoint_seconds
    if left <= needed:
        asked = f"--time {request.time}" if request.time else f"the default limit of partition {partition.name}"
        raise ValueError(
            f"{asked} leaves a task {left:.0f} s before it is told to leave, no more than it needs to start (about "
            f"{START_SECONDS} s) and write a checkpoint (checkpoint_seconds={checkpoint_seconds:g}); "
            f"{advice(needed + 1)}"
        )
    most = slurm.max_tasks()
    if not 1 <= tasks < most:
        raise ValueError(f"--array {tasks} must be between 1 and {most - 1}, the most that this Slurm takes")
    return partition
