"""How far the runs of a folder are: the lines of `status`, and what other commands say of runs and Slurm tasks."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sparsedepth import quantities
from sparsedepth.words.plain_text import commas, counted, counted_are, duration, visible, wrapped

if TYPE_CHECKING:
    from sparsedepth.cli.status import ArrayStatus, SweepStatus
    from sparsedepth.cluster.array import StartEnd, StuckTasks
    from sparsedepth.cluster.slurm import QueuedTask
    from sparsedepth.run.scratch import Allocation
    from sparsedepth.sweep.status import BestRun, RunState, State, SweepSummary

STATES: "Sequence[State]" = "complete", "running", "interrupted", "failed", "infeasible", "pruned", "damaged"
"""Of runs that are not planned; the first four are always told."""
RUN_LINE = re.compile(r"  \w+ [0-9a-f]{12}\b")
"""A line about one run: '  interrupted 333333333333 (task 12_3 on n3): preemption'."""


def status_text(status: "SweepStatus") -> str:
    """The lines as they are printed: wrapped, but for those about one run, which `grep` finds."""
    lines = status_lines(status)
    return "".join(f"{line}\n" if RUN_LINE.match(line) else wrapped([line]) for line in lines)


def status_lines(status: "SweepStatus") -> list[str]:
    """The question, counts, each running run, what Slurm says, causes of failures, the best run and remarks."""
    return [*map(visible, _lines(status))]


def _lines(status: "SweepStatus") -> Iterator[str]:
    summary = status.summary
    names = status.trunks
    definition = summary.definition
    states = summary.states
    if definition:
        yield f"{definition.name}: {definition.question}"
    yield counts_text(summary)
    if names:
        yield trunks_text(names, {state.run_id for state in states if state.state == "complete"})
    for state in states:
        if state.state == "running":
            trunk = f" ({names[state.run_id]})" if state.run_id in names else ""
            yield f"  running {running_text(state, state.run_id)}{task_text(state.starts)}{trunk}"
    for state in states if definition is None else ():
        if state.state == "interrupted":
            yield f"  interrupted {state.run_id}: run the same command again to resume"
    if status.array:
        yield from array_status_lines(status.array)
    if summary.node_hours is not None:
        n_complete = summary.counts["complete"]
        per_run = f", {summary.node_hours / n_complete:.3g} per complete run" if n_complete else ""
        yield f"  used: {summary.node_hours:.3g} node hours by the runs' own clocks{per_run}"
    yield from (f"  {state} {count}x: {reason}" for (state, reason), count in summary.ended.most_common())
    if summary.best:
        advice = "see `best`" if definition and definition.is_search else "what to train: `recipe`"
        advice = "no result is complete yet" if summary.best.is_of_tuning else advice
        yield f"  {best_text(summary.best)}; {advice}"
    yield from (f"  {remark}" for remark in remark_lines(summary))


def array_status_lines(array: "ArrayStatus") -> Iterator[str]:
    """Slurm tasks by state, and for each stopped run its last task and why that task ended."""
    tasks = f"unknown ({array.problem})" if array.problem else tasks_text(array.active)
    yield f"  tasks of {array.name}: {tasks}"
    if array.stuck:
        yield f"  {stuck_text(array.stuck)}"
    for state, end, task in array.stopped:
        reason = end_text(end, state.starts[-1], task)
        why = reason if state.state == "interrupted" else state.reason or reason  # not why an earlier attempt failed
        yield f"  {state.state} {state.run_id}{task_text(state.starts)}: {why}"


def counts_text(summary: "SweepSummary") -> str:
    """'3 complete, 1 running, 0 interrupted, 0 failed, 5 planned'; of an adaptive sampler, whose proposals are
    unknown, without 'planned', but at most how many there will be."""
    shown: list[State] = [state for state in STATES if summary.counts[state] or state in STATES[:4]]
    shown += ["planned"] * summary.is_grid
    at_most = "" if summary.is_grid else f" (at most {summary.expected} in total; equal proposals share their runs)"
    return commas(f"{summary.counts[state]} {state}" for state in shown) + at_most


def best_text(best: "BestRun") -> str:
    """'lowest single run: val_loss 0.1351 (n_layers=24, baseline, seed 0; mean of its 3 seeds 0.2832)'."""
    lowest = "lowest" if quantities.IN_RUNS[best.objective].better == "low" else "highest"
    others = f"mean of its {best.n_seeds} seeds {best.mean:.4g}" if best.n_seeds > 1 else "its only seed"
    run = ("tuning run" if best.is_of_tuning else "single run") + " of this definition" * best.is_beaten
    return f"{lowest} {run}: {best.objective} {best.value:.4g} ({best.label}; {others})"


def running_text(state: "RunState", name: str) -> str:
    """A running run's phase, share done, loss and estimated time left."""
    progress = state.progress
    if progress is None:
        return f"{name}: starting"
    loss = "" if progress.loss is None else f", loss {progress.loss:.3f}"
    left = "" if progress.left is None else f", about {duration(progress.left)} left"
    silent = " (no output for minutes)" * progress.is_silent
    return f"{name}: {progress.phase}, {progress.done:.0%}{loss}{left}{silent}"


def trunks_text(names: Mapping[str, str], complete: Collection[str]) -> str:
    """'4 trunks (3 complete) with 12 branches (9 complete)', by what each run is called."""
    trunks = {run_id for run_id, name in names.items() if name.startswith("trunk")}
    branches = names.keys() - trunks
    n_done, n_branches_done = (len(runs & {*complete}) for runs in (trunks, branches))
    with_branches = f"{len(branches)} branch{'es' * (len(branches) != 1)} ({n_branches_done} complete)"
    return f"{counted(len(trunks), 'trunk')} ({n_done} complete) with {with_branches}"


def task_text(starts: "Sequence[Allocation]") -> str:
    """' (task 12_3 on n1)': the Slurm task that computes, or last computed, a run."""
    return f" (task {starts[-1].task} on {starts[-1].node})" if starts else ""


def tasks_text(tasks: "Sequence[QueuedTask]") -> str:
    """How many tasks are in each state: '2 running, 1 pending (Resources)'."""
    states = Counter(task_state_text(task) for task in tasks)
    return commas(f"{count} {state}" for state, count in states.most_common()) or "none in the queue"


def task_state_text(task: "QueuedTask") -> str:
    """'running'; with the reason if it is pending or failed."""
    state = task.state.lower().replace("_", " ")
    has_no_reason = task.reason in ("None", "") or task.reason.lower() == state.replace(" ", "")
    return state if has_no_reason or task.state == "RUNNING" else f"{state} ({task.reason})"


def remark_lines(summary: "SweepSummary") -> list[str]:
    """Diverged runs, degenerate objectives, differing packages, other complete runs."""
    diverged = f"{summary.n_diverged} of the complete runs diverged: `query --ask diverged` lists them"
    others = other_runs_text(summary.n_others)
    return [*[diverged] * bool(summary.n_diverged), *summary.judgements, *[others] * bool(others)]


def other_runs_text(n: int) -> str:
    """A line about complete runs of the folder that are not in its definition; '' if there are none."""
    them = "it" if n == 1 else "them"
    return (
        f"{counted_are(n, 'other complete run')} in the folder (from an earlier version of the definition, or "
        f"`train`); query, best, plot, effects and recipe include {them}; to exclude {them}, move {them} out of runs/"
        if n
        else ""
    )


def stuck_text(stuck: "StuckTasks") -> str:
    """Which tasks of the last array repeatedly reach their time limit without progress, and the fix."""
    return (
        f"{stuck.tasks} tasks of job {stuck.job} reached their time limit {stuck.times} times in a row without "
        f"progress, and {stuck.given_up} of them gave up: {stuck.seconds} s is too short to start and write a "
        f"checkpoint; {time_advice(stuck.advised_minutes)}"
    )


def time_advice(minutes: int) -> str:
    """'give --time at least 10'."""
    return f"give --time at least {minutes if minutes < 60 else f'{minutes // 60}:{minutes % 60:02}:00'}"


def end_text(end: "StartEnd | None", start: "Allocation", task: "QueuedTask | None") -> str:
    """Why a start of a task ended, and the task's state now: 'preempted; now pending (Resources)'."""
    if end is None and task and (task.restarts == start.restarts or task.state == "COMPLETING"):
        return task_state_text(task)
    reason = end.reason if end else "killed, or its node failed"
    return reason + (f"; now {task_state_text(task)}" if task and task.is_active else "")
