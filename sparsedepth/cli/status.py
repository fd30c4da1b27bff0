"""Commands that say how a sweep stands and what its runs said, from any machine that sees DIR.

They write nothing but the cache of rows that `query` keeps, too.
"""

import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.sweep.status import RunState

OF_A_RUN = re.compile(r"  \w+ [0-9a-f]{12}\b")
"""'  interrupted 333333333333 (task 12_3 on n3): preemption': one run of a sweep."""

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep")]


def status(
    folder: Folder,
    watch: Annotated[bool, typer.Option("--watch", help="again and again, until nothing is left to run")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two looks of --watch")] = 2.0,
) -> None:
    """Say how a sweep stands: runs complete, running, failed by cause, still to come, and the best so far."""
    from rich.console import Console
    from rich.live import Live

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder that exists; name the results folder of a sweep")
    lines, left = _report(folder)
    if not watch:
        from sparsedepth.store.render import wrapped

        for line in lines:  # one of a run stays whole, for `grep`
            print(line if OF_A_RUN.match(line) else wrapped([line]).rstrip("\n"))
        return
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while left:
            live.update("\n".join(lines), refresh=True)
            time.sleep(every)
            lines, left = _report(folder)
    if console.is_terminal:  # elsewhere Live prints its last state by itself
        live.update("\n".join(lines), refresh=True)
    print("\n".join(lines) if not console.is_terminal else "nothing is left to run")


def _report(folder: Path) -> tuple[list[str], bool]:
    """The lines of `status`, and whether something is running or to come."""
    from sparsedepth.cli.progress import counted, on_task, running_line
    from sparsedepth.config.plain_text import visible
    from sparsedepth.sweep.summary import sweep_summary

    now = sweep_summary(folder)
    definition, states, is_grid = now.definition, now.states, now.is_grid
    if not states:
        toys = f"; it holds toy networks: sparsedepth plot {quote(str(folder))} --figure toy draws them"
        raise ValueError(
            f"{folder} holds no runs{toys if _holds_toys(folder) else '; name the results folder of a sweep (--out)'}"
        )
    lines = [f"{definition.name}: {definition.question}"] if definition else []
    at_most = "" if is_grid else f" (of {now.expected} at most: equal proposals share their runs)"
    lines.append(counted(states, is_grid=is_grid) + at_most)
    lines += [
        f"  running {running_line(state, state.run_id)}{on_task(state.starts)}"
        for state in states
        if state.state == "running"
    ]
    lines += _of_tasks(folder, definition, states)
    if now.node_hours is not None:
        each = f", {now.node_hours / done:.3g} for each complete run" if (done := now.counts["complete"]) else ""
        lines.append(f"  used: {now.node_hours:.3g} node hours by the runs' own clocks{each}")
    lines += [f"  {state} {count}x: {reason}" for (state, reason), count in now.ended.most_common()]
    if now.best:
        advice = "see `best`" if definition and definition.adaptive else "what to train: `recipe`"
        lines.append(f"  {now.best.text}; {advice}")
    lines += [f"  {remark}" for remark in now.remarks]
    return [visible(line) for line in lines], now.is_left


def _holds_toys(folder: Path) -> bool:
    from sparsedepth.store.connection import open_store

    try:
        with open_store(folder) as store:
            return bool(store.sql("SELECT 1 FROM toys LIMIT 1").rows)
    except ValueError:
        return False


def _of_tasks(folder: Path, definition: "SweepDefinition | None", states: "list[RunState]") -> list[str]:
    """The tasks of the folder's array on Slurm: how many in each state; and of each run that has stopped, its last task
    and why that let go of it."""
    from sparsedepth.cli.progress import on_task
    from sparsedepth.cluster.array import TaskArray, counted

    array = TaskArray(sweep=definition.name if definition else "", results=folder)
    if not array.folder.is_dir():
        return []
    tasks = []
    try:
        tasks = array.queued()
        lines = [f"  tasks of {array.name}: {counted([task for task in tasks if task.is_active])}"]
    except ValueError as error:
        lines = [f"  tasks of {array.name}: not known here ({error})"]
    if stuck := array.without_progress():
        lines.append(f"  {stuck}")
    stopped = [state for state in states if state.starts and state.state != "running"]
    reasons = array.reasons([state.starts[-1] for state in stopped], tasks)
    for state, reason in zip(stopped, reasons, strict=True):
        lines.append(f"  {state.state} {state.run_id}{on_task(state.starts)}: {state.reason or reason}")
    return lines


def logs(
    folder: Folder,
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="run_id, or how it begins; or a task of Slurm, such as 12_3")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what the run says until it ends")] = False,
    task: Annotated[bool, typer.Option("--task", help="what the tasks of Slurm said that had RUN in hand")] = False,
) -> None:
    """Print what a run said; without RUN, list the runs that have a log, the failed first, then the newest."""
    from sparsedepth.cli.progress import on_task
    from sparsedepth.config.plain_text import visible
    from sparsedepth.files import read_regular

    if task and run is None:
        raise ValueError("--task needs a RUN; give the run_id, or how it begins")
    named = run is not None and re.fullmatch(r"\d+_\d+", run) and (folder / "slurm" / f"{run}.log").exists()
    if run is not None and (task or named):
        for name in [run] if named else _tasks_of(folder, run):
            log = folder / "slurm" / f"{name}.log"
            if not named:
                print(visible(f"{log}:"))
            sys.stdout.write(visible(read_regular(log).decode(errors="replace"), keep="\n\r\t"))
        return
    if run is not None:
        for text in _read(_find(folder, run), follow):
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    if follow:
        raise ValueError("--follow needs a RUN; give the run_id, or how it begins")
    for state, work in _logged(folder):
        reason = f"  {state.reason}" if state.reason else ""
        print(visible(f"{state.run_id}  {state.state:11}  {work.log}{on_task(work.allocations())}{reason}"))


def _logged(folder: Path) -> list[tuple["RunState", "Scratch"]]:
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.store.checksums import RUN_ID
    from sparsedepth.sweep.status import state_of

    logs = [path for path in folder.glob("work/*/log.txt") if path.is_file()]
    works = [Scratch(folder, path.parent.name) for path in logs if re.fullmatch(RUN_ID, path.parent.name)]
    if not works:
        raise ValueError(f"{folder} holds no logs of runs; name the results folder of a sweep (--out)")
    states = [(state_of(folder, work.run_id), work) for work in works]
    return sorted(states, key=lambda pair: (pair[0].state != "failed", -pair[1].log.stat().st_mtime))


def _tasks_of(folder: Path, beginning: str) -> list[str]:
    """The tasks that have had a run in hand, whose scratch folder may be deleted by now."""
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.store.run_record import read_run, run_folder

    known = {path.parent.name for path in (*folder.glob("work/*/config.yaml"), *folder.glob("runs/*/complete"))}
    run_id = _begun_by(beginning, known, f"of {folder}")
    tasks = [start.task for start in Scratch(folder, run_id).allocations()]
    if not tasks and (place := run_folder(folder, run_id)).exists():
        tasks = [str(start["task"]) for start in read_run(place).manifest.get("allocations", ())]
    named = [name for name in dict.fromkeys(tasks) if re.fullmatch(r"\d+(_\d+)?", name)]
    kept = [name for name in named if (folder / "slurm" / f"{name}.log").exists()]
    if not kept:
        raise ValueError(f"run {run_id} has had no task of Slurm whose log is in {folder}/slurm")
    return kept


def _find(folder: Path, beginning: str) -> "Scratch":
    works = {work.run_id: work for _, work in _logged(folder)}
    return works[_begun_by(beginning, works, f"of {folder} that has a log")]


def _begun_by(beginning: str, run_ids: Iterable[str], place: str) -> str:
    """The one run_id that begins so. Raises ValueError."""
    begun = sorted(run_id for run_id in run_ids if run_id.startswith(beginning))
    if len(begun) != 1:
        raise ValueError(f"RUN {beginning!r} must begin one run_id {place}; it begins: {', '.join(begun) or 'none'}")
    return begun[0]


def _read(work: "Scratch", follow: bool) -> Iterator[str]:
    from sparsedepth.config.plain_text import visible
    from sparsedepth.run.lease import is_held

    leader = work.leader()
    if leader and leader.log.is_file():
        yield visible(work.log.read_text(encoding="utf-8", errors="replace"), keep="\n\r\t")
    else:
        leader = work
    with open(leader.log, encoding="utf-8", errors="replace") as file:
        while True:
            lives = follow and is_held(work.lock)  # asked before the read: nothing said until then is missed
            yield visible(file.read(), keep="\n\r\t")
            if not lives:
                return
            time.sleep(0.3)
