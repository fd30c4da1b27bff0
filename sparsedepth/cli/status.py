"""`sparsedepth status` and `logs`: a sweep's progress and its runs' logs, from any machine that can read DIR.

They write nothing except the cache of rows that `query` also uses."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from sparsedepth.cli import option
from sparsedepth.cli.option import TableOrJson
from sparsedepth.files import MARKER
from sparsedepth.words.plain_text import commas, counted, did_you_mean, in_shell, visible
from sparsedepth.words.status import remark_lines, status_lines, status_text, task_text

if TYPE_CHECKING:
    from sparsedepth.cluster.array import StartEnd, StuckTasks
    from sparsedepth.cluster.slurm import QueuedTask
    from sparsedepth.config.section import Fields
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.sweep.status import RunState, SweepSummary

FOLDER = Argument(metavar="DIR", help="results folder of a sweep")
Folder = Annotated[Path, FOLDER]


@dataclass(frozen=True, kw_only=True)
class ArrayStatus:
    """What Slurm says of the tasks of a folder."""

    name: str
    active: "list[QueuedTask]"
    problem: str
    """Why it did not answer."""
    stuck: "StuckTasks | None"
    """Tasks that repeatedly reach their time limit without progress, and the fix."""
    stopped: "list[tuple[RunState, StartEnd | None, QueuedTask | None]]"
    """Each stopped run, with why its last task ended."""


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    summary: "SweepSummary"
    trunks: "Mapping[str, str]"
    """run_id -> 'trunk 3f2a1b', or which branch of it."""
    array: ArrayStatus | None

    def as_json(self) -> "Fields":
        summary = self.summary
        running = [(state, state.progress) for state in summary.states if state.state == "running"]
        return {
            "name": summary.definition.name if summary.definition else None,
            "question": summary.definition.question if summary.definition else None,
            "runs": summary.expected,
            "counts": dict(summary.counts),
            "share_done": summary.share,
            "is_left": summary.is_left,
            "running": [
                {
                    "run_id": state.run_id,
                    "phase": progress.phase if progress else None,
                    "done": state.done,
                    "loss": progress.loss if progress else None,
                    "seconds_left": progress.left if progress else None,
                }
                for state, progress in running
            ],
            "ended": [
                {"state": state, "reason": reason, "runs": n} for (state, reason), n in summary.ended.most_common()
            ],
            "best": summary.best._asdict() if summary.best else None,
            "node_hours": summary.node_hours,
            "remarks": remark_lines(summary),
        }


@dataclass(frozen=True)
class StatusCommand:
    """How far a sweep is, now: `as_json()` tells it in plain values. Raises ValueError for a folder without runs."""

    folder: Annotated[option.Folder, FOLDER]

    def compute(self) -> SweepStatus:
        from sparsedepth.plan.budgets import trunk_names

        folder = Path(self.folder)
        summary = summary_of(folder)
        trunks = trunk_names([state.config for state in summary.states if state.config])
        return SweepStatus(summary=summary, trunks=trunks, array=_array_status(folder, summary))


@option.command
def status(
    given: StatusCommand,
    watch: Annotated[bool, Option("--watch", help="repeat until no run is left")] = False,
    every: Annotated[float, Option(min=0.1, help="seconds between updates with --watch")] = 2.0,
    format: TableOrJson = "table",
) -> None:
    """Show a sweep's progress: complete, running, failed (by cause) and planned runs, and the best so far."""
    if format == "json" and watch:
        raise ValueError("--watch repeats a text; for --format json call `status` again")
    found = given.compute()
    if not watch:
        print(status_text(found) if format == "table" else f"{json.dumps(found.as_json(), indent=1)}\n", end="")
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while found.summary.is_left:
            live.update("\n".join(status_lines(found)), refresh=True)
            time.sleep(every)
            found = given.compute()
    text = "\n".join(status_lines(found))
    if console.is_terminal:  # elsewhere Live prints its last state by itself
        live.update(text, refresh=True)
    print(text if not console.is_terminal else "no run is left")


def _check_exists(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not an existing folder; give the results folder of a sweep")


def summary_of(folder: Path) -> "SweepSummary":
    """Raises ValueError for a folder without runs of its own."""
    from sparsedepth.config.sweep import DEFINITION
    from sparsedepth.store.packs import INDEX, RUNS, WORK, no_run
    from sparsedepth.sweep.status import sweep_summary

    _check_exists(folder)
    summary = sweep_summary(folder)
    if summary.states or summary.definition:
        return summary
    names = [f"{level}/{name}" for level in ("*", "*/*") for name in (DEFINITION, INDEX, RUNS, WORK)]
    below = {path.parent for name in names for path in folder.glob(name)}
    if below:
        first = f"sparsedepth status {in_shell(min(below))}"
        raise ValueError(f"{folder} holds {counted(len(below), 'results folder')}; give one of them: {first}")
    raise no_run([folder])


def _array_status(folder: Path, summary: "SweepSummary") -> ArrayStatus | None:
    """None for a folder that was never submitted."""
    from sparsedepth.cluster.array import TaskArray

    array = TaskArray(sweep=summary.definition.name if summary.definition else "", results=folder)
    if not array.folder.is_dir():
        return None
    tasks = []
    problem = ""
    try:
        tasks = array.queued()
    except ValueError as error:
        problem = str(error)
    stopped = [state for state in summary.states if state.starts and state.state != "running"]
    ends = array.ended()
    queued = {task.task: task for task in tasks}
    last = [(state, state.starts[-1]) for state in stopped]
    return ArrayStatus(
        name=array.name,
        active=[task for task in tasks if task.is_active],
        problem=problem,
        stuck=array.stuck(),
        stopped=[(state, ends.get((start.task, start.restarts)), queued.get(start.task)) for state, start in last],
    )


def logs(
    folder: Folder,
    run: Annotated[str | None, Argument(metavar="RUN", help="start of a run_id; or a Slurm task: 12_3")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="keep printing new lines until the run ends")] = False,
    task: Annotated[bool, Option("--task", help="print the logs of the Slurm tasks that computed RUN")] = False,
) -> None:
    """Print a run's log. Without RUN, list the runs that have a log: failed first, then newest."""
    from sparsedepth.files import read_regular

    _check_exists(folder)
    if run is None and (follow or task):
        raise ValueError(f"--{'follow' if follow else 'task'} needs a RUN; give a run_id or its first characters")
    if run is None:
        for state, scratch in _runs_with_log(folder):
            reason = f"  {state.reason}" if state.reason else ""
            print(visible(f"{state.run_id}  {state.state:11}  {scratch.log}{task_text(scratch.allocations())}{reason}"))
        return
    task_log = folder / "slurm" / f"{run}.log"
    is_task = re.fullmatch(r"\d+_\d+", run) and task_log.exists()
    if follow and (task or is_task):
        raise ValueError("--follow is for the log of a run; leave it out of one that prints the logs of Slurm tasks")
    if not task and not is_task:
        scratches = [scratch for _, scratch in _runs_with_log(folder)]
        return _print_log(_matching(run, scratches, f"with a log in {folder}"), follow)
    for log in [task_log] if is_task else _task_logs(folder, run):
        if not is_task:
            print(visible(f"{log}:"))
        sys.stdout.write(visible(read_regular(log).decode(errors="replace"), keep="\n\r\t"))


def _runs_with_log(folder: Path) -> list[tuple["RunState", "Scratch"]]:
    """Failed first, then newest. Raises ValueError if there are none."""
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.store.checksums import RUN_ID
    from sparsedepth.sweep.results_folder import ResultsIndex
    from sparsedepth.sweep.status import state_of

    logs = [path for path in folder.glob("work/*/log.txt") if path.is_file()]
    scratches = [Scratch(folder, path.parent.name) for path in logs if re.fullmatch(RUN_ID, path.parent.name)]
    if not scratches:
        of_train = f": `train` prints to its terminal; see `status {folder}`" if any(folder.glob("work/*/lock")) else ""
        raise ValueError(
            f"{folder} holds no run logs{of_train or '; give the results folder of a sweep (a pack has no logs)'}"
        )
    index = ResultsIndex(folder, None)
    runs = [(state_of(index, scratch.run_id), scratch) for scratch in scratches]
    return sorted(runs, key=lambda run: (run[0].state != "failed", -run[1].log.stat().st_mtime))


def _task_logs(folder: Path, prefix: str) -> list[Path]:
    """Of the Slurm tasks that computed a run: by its scratch folder or, if that was deleted, its manifest."""
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.store.run_record import read_run, run_folder

    run_ids = {path.parent.name for path in (*folder.glob("work/*/config.yaml"), *folder.glob(f"runs/*/{MARKER}"))}
    scratch = _matching(prefix, [Scratch(folder, run_id) for run_id in run_ids], f"in {folder}")
    tasks = [start.task for start in scratch.allocations()]
    if not tasks and (record := run_folder(folder, scratch.run_id)).exists():
        tasks = [str(start["task"]) for start in read_run(record).manifest.get("allocations", ())]
    logs = [folder / "slurm" / f"{task}.log" for task in dict.fromkeys(tasks) if re.fullmatch(r"\d+(_\d+)?", task)]
    if not (logs := [log for log in logs if log.exists()]):
        raise ValueError(f"run {scratch.run_id} has no Slurm task with a log in {folder}/slurm; try without --task")
    return logs


def _matching(prefix: str, scratches: "Sequence[Scratch]", where: str) -> "Scratch":
    """The only one whose run_id has this prefix. Raises ValueError."""
    matches = {scratch.run_id: scratch for scratch in scratches if scratch.run_id.startswith(prefix)}
    if len(matches) != 1:
        near = did_you_mean(prefix, [scratch.run_id for scratch in scratches], "none")
        found = commas(sorted(matches)) or near
        raise ValueError(
            f"RUN {prefix!r} must match exactly one run_id {where}; matches: {found}; `sparsedepth logs DIR` lists them"
        )
    return next(iter(matches.values()))


def _print_log(scratch: "Scratch", follow: bool) -> None:
    """Of a stacked run its own log and then its leader's."""
    from sparsedepth.run.lease import is_held

    leader = scratch.leader()
    if leader and leader.log.is_file():
        sys.stdout.write(visible(scratch.log.read_text(encoding="utf-8", errors="replace"), keep="\n\r\t"))
    else:
        leader = scratch
    if not leader.log.stat().st_size and not follow:
        print(f"the log of {scratch.run_id} is empty: {leader.log}")
    with open(leader.log, encoding="utf-8", errors="replace") as file:
        is_running = True
        while is_running:
            is_running = follow and is_held(scratch.lock)  # before the read, so that no line is missed
            sys.stdout.write(visible(file.read(), keep="\n\r\t"))
            sys.stdout.flush()
            time.sleep(0.3 * is_running)
