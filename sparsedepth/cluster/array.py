"""A sweep as a Slurm job array: submit once, follow from any machine, stop.

Slurm's controller is the only source for which tasks run, found by the array's name, which is unique to the results
folder. The run that a task computes is in the run's scratch folder (`run.scratch`). The controller forgets why a
task ended, so the task itself records it (in task.sh)."""

import re
import shlex
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from sparsedepth import files
from sparsedepth.cluster import slurm
from sparsedepth.cluster.slurm import (
    FOLDER,
    MAX_STARTS,
    QueuedTask,
    Request,
    header,
    least_minutes,
    script_body,
)
from sparsedepth.words.status import time_advice
from sparsedepth.words.sweep import probe_text

START_SECONDS = 20
"""Assumed time from the start of a task to the first training step."""

PROBE_SECONDS, PROBE_LIMIT_SECONDS = 4.0, 300.0
"""How long to wait for the probe task to start (then the array is submitted with a dependency on it), and to end."""

STOP_SECONDS = 600.0
"""How long `stop` waits for running tasks to write their checkpoints."""

PROBE = """\
#!/bin/bash
{header}
[ -e {token} ] || exit 3
cd / && {python} -c 'import sparsedepth' || exit 4
touch {token}.answer
"""


class StartEnd(BaseModel):
    """How one start of a task ended, as its script recorded it."""

    restarts: int
    seconds: int
    """that it took; without progress those that --time left it, if that was given"""
    reason: str
    progress: bool = True
    """false if it reached its time limit without writing a checkpoint"""


class Probe(NamedTuple):
    """A task that checked a node, and failed."""

    node: str
    state: str
    code: str
    has_ended: bool
    limit: float
    """seconds that it may take"""


class StuckTasks(NamedTuple):
    job: int
    tasks: int
    times: int
    """of the task that was stuck most often, in a row"""
    given_up: int
    seconds: int
    """that did not suffice"""

    @property
    def advised_minutes(self) -> int:
        return least_minutes(2 * self.seconds)


@dataclass(frozen=True, kw_only=True)
class TaskArray:
    sweep: str
    results: Path
    request: Request = field(default_factory=Request)

    @property
    def name(self) -> str:
        """Job name: the sweep's, and a checksum of the folder's path."""
        named = re.sub(r"[^A-Za-z0-9._-]", "-", self.sweep)[:40]
        return f"{named}-{files.digest(str(self.results.resolve()))[:8]}"

    @property
    def folder(self) -> Path:
        return self.results / FOLDER

    @property
    def path(self) -> Path:
        return self.folder / "sweep.sbatch"

    def script(self, tasks: int) -> str:
        """A Slurm script for an array of `tasks` jobs, each of which runs `work` and asks to be requeued in time."""
        own = {
            "job-name": self.name,
            "array": f"0-{tasks - 1}",
            "output": f'"{self.results.resolve() / FOLDER}/%A_%a.log"',  # job id of the array, task number
            "open-mode": "append",
            "export": "ALL",
            "requeue": None,
            "signal": f"B:USR1@{self.request.warning_seconds}",
            **({"time": self.request.time} if self.request.time else {}),
        }
        work = (
            sys.executable,
            "-P",
            "-m",
            "sparsedepth.cli.main",
            "work",
            str(self.results.resolve()),
            "--leave-when-idle",
        )
        body = script_body(self.results, self.request, shlex.join([*work, *self.request.arguments()]))
        return f"#!/bin/bash\n{header({**own, **self.request.options()})}\n\n{body}"

    def queued(self) -> list[QueuedTask]:
        return slurm.queued(self.name)

    def submit(self, tasks: int) -> str | None:
        """Submit the array; returns the job id, or None if this folder's array is already queued or running. Raises
        ValueError, leaving nothing in the queue, if Slurm refuses the script or the probe task fails."""
        self.folder.mkdir(exist_ok=True)
        with files.locked(self.folder / ".lock"):
            if any(task.is_active for task in self.queued()):
                return None
            script = self.script(tasks)
            options = []
            files.write_text(self.path, script)
            environment = {"SPARSEDEPTH_STORAGE": storage} if (storage := self.request.storage) else {}
            slurm.call("sbatch", "--test-only", script=script, environment=environment)
            if probe := self._probe():
                options = [f"--dependency=afterok:{probe}", "--kill-on-invalid-dep=yes"]
                print(f"the array waits for job {probe}, which checks that the nodes can access {self.results}")
            try:
                return slurm.submit(script, *options, environment=environment)
            except ValueError:
                if probe:
                    slurm.call("scancel", probe)
                raise

    def _probe(self) -> str | None:
        """Submit a task that checks that a node has the folder and this Python. Returns its job id if it has not
        started in time. Raises ValueError if a check fails."""
        token = self.folder.resolve() / f"probe-{uuid.uuid4().hex}"
        answer = token.with_name(f"{token.name}.answer")
        token.touch()
        options = {key: value for key, value in self.request.options().items() if key not in ("begin", "hold")}
        options |= {"job-name": f"{self.name}-probe", "time": "2", "output": "/dev/null", "no-requeue": None}
        job = slurm.submit(
            PROBE.format(header=header(options), token=shlex.quote(str(token)), python=shlex.quote(sys.executable))
        )
        submitted = time.monotonic()
        while not answer.exists():
            facts = slurm.show_job(job)
            state = facts.get("JobState")
            waited = time.monotonic() - submitted
            is_late = waited > PROBE_SECONDS
            has_started = state in ("RUNNING", "COMPLETING")
            if is_hung := has_started and waited > PROBE_LIMIT_SECONDS:
                slurm.call("scancel", "--quiet", job)
            if is_hung or state in slurm.ENDED - {"COMPLETED"} or (is_late and state == "COMPLETED"):
                token.unlink()
                code = facts.get("ExitCode", "").partition(":")[0]
                has_ended = state in slurm.ENDED
                probe = Probe(facts.get("NodeList", "a node"), str(state), code, has_ended, PROBE_LIMIT_SECONDS)
                raise ValueError(f"{probe_text(probe, self.results, sys.executable)}. Nothing was submitted")
            if is_late and not has_started:  # pending, or unknown to the controller
                return job
            time.sleep(0.2)
        answer.unlink()
        token.unlink()
        return None

    def ended(self) -> dict[tuple[str, int], StartEnd]:
        """How starts of tasks ended, by task and number of restarts; a start that was killed is missing."""
        ends = {}
        for path in sorted(self.folder.glob("*_*.jsonl")):
            for line in files.read_regular(path).decode(errors="replace").splitlines():
                try:
                    end = StartEnd.model_validate_json(line)
                except ValidationError:  # a full disk cut the line short
                    continue
                ends[path.stem, end.restarts] = end
        return ends

    def stuck(self) -> "StuckTasks | None":
        """Tasks of the last array that repeatedly reach their time limit without progress."""
        counts = {}
        seconds = 0
        ends = self.ended()
        last_job = max((int(task.partition("_")[0]) for task, _ in ends), default=0)
        for (task, _), end in sorted(ends.items()):
            if task.startswith(f"{last_job}_"):
                counts[task] = 0 if end.progress else counts.get(task, 0) + 1
                seconds = seconds if end.progress else max(seconds, end.seconds)
        stuck = [count for count in counts.values() if count > 1]
        given_up = sum(count >= MAX_STARTS for count in stuck)
        return StuckTasks(last_job, len(stuck), max(stuck), given_up, seconds) if stuck else None

    def cancel_pending(self) -> None:
        if pending := [task.task for task in self.queued() if task.state == "PENDING"]:
            slurm.call("scancel", "--quiet", *pending)

    def stop(self) -> int:
        """Cancel pending tasks, have running ones checkpoint and end, until none is left. Returns their number."""
        stopped = set()
        deadline = time.monotonic() + STOP_SECONDS
        while active := [task for task in self.queued() if task.is_active]:
            stopped |= {task.task for task in active}
            pending = [task.task for task in active if task.state not in ("RUNNING", "COMPLETING")]
            running = [task.task for task in active if task.state == "RUNNING"]
            if pending:
                slurm.call("scancel", "--quiet", *pending)
            if running:
                slurm.call("scancel", "--quiet", "--signal=INT", "--batch", *running)
            if time.monotonic() > deadline:
                raise ValueError(f"{len(active)} tasks still run; kill them with `scancel --name={self.name}`")
            time.sleep(2.0)
        return len(stopped)


def check(request: Request, results: Path | None, tasks: int) -> slurm.Partition:
    """The partition. Raises ValueError for requests that Slurm would refuse, or that leave no time for progress."""
    slurm.check_present()
    if results and re.search(r"[\x00-\x1f\"'\\%]", str(results.resolve())):
        raise ValueError(f"--out {str(results)!r}: Slurm allows no quotes, '%' or '\\' in file names; choose another")
    partition = slurm.partition(request.partition)
    if request.seconds is not None and request.seconds > partition.seconds:
        raise ValueError(
            f"--time {request.time} exceeds the limit of partition {partition.name}, {partition.seconds / 3600:g} h"
        )
    limit = request.seconds or partition.default_seconds
    saving = request.runtime.checkpoint_seconds
    available = max(0.0, limit - request.warning_seconds)
    needed = START_SECONDS + saving
    if available <= needed:
        source = f"--time {request.time}" if request.time else f"the default limit of partition {partition.name}"
        raise ValueError(
            f"{source} leaves a task {available:.0f} s before Slurm warns it, "
            f"too short to start (about {START_SECONDS} s) and write a checkpoint (checkpoint_seconds={saving:g}); "
            f"{time_advice(least_minutes(needed + 1))}"
        )
    max_tasks = slurm.max_tasks()
    if not 1 <= tasks < max_tasks:
        raise ValueError(f"--array {tasks} must be between 1 and {max_tasks - 1}, the limit of this Slurm")
    return partition
