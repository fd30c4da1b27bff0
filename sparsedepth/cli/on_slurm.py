"""`sweep --on slurm` and `plan --on slurm`: run a sweep as a Slurm job array. Imported where they are asked for."""

import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import get_args

from sparsedepth.cli import preflight
from sparsedepth.cli.option import SlurmOptions, aside, stop
from sparsedepth.cli.progress import ProgressDisplay, print_failures, print_ranking
from sparsedepth.cli.start_sweep import runtime_config
from sparsedepth.cluster.array import StuckTasks, TaskArray, check
from sparsedepth.cluster.slurm import Request
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.price import Price, named_device, price_of, pricing_setup, with_finished
from sparsedepth.plan.tasks import Plan
from sparsedepth.sweep.results_folder import EndState, ResultsIndex, prepare
from sparsedepth.sweep.status import RunState, forget_failures, remaining_and_trunks, scan
from sparsedepth.sweep.storage import database_url, hide_url
from sparsedepth.words.price import array_lines, price_line
from sparsedepth.words.progress import header_text
from sparsedepth.words.status import stuck_text, tasks_text
from sparsedepth.words.sweep import plan_notes

POLL_SECONDS = 2.0
"""Interval between checks of the results folder and the queue."""

END_SECONDS = 20.0
"""How long the tasks of a complete sweep have to end, so that a longer sweep can be submitted."""

MAX_DEFAULT_TASKS = 64
"""Most tasks without --array."""


def request_of(
    on: str | None, given: SlurmOptions, max_attempts: int = 2, storage: str | None = None
) -> Request | None:
    """What --on slurm asks for, or None without it. Raises ValueError for an option that needs it."""
    if on is None:
        of_slurm = ("partition", given.partition), ("time", given.time), ("array", given.array)
        more = ("account", given.account), ("sbatch", given.sbatch), ("nodes", given.nodes > 1)
        if only := [name for name, value in (*of_slurm, *more) if value]:
            raise ValueError(f"--{only[0]} is only for clusters; add --on slurm")
        return None
    if on != "slurm":
        raise ValueError(f"--on {on!r} is not supported; use slurm, or start `sparsedepth work DIR` on other clusters")
    if storage:
        hide_url(storage)
        database_url(storage)
    return Request(
        partition=given.partition,
        account=given.account,
        gpus=given.gpus,
        nodes=given.nodes,
        time=given.time,
        sbatch=given.sbatch,
        array=given.array,
        runtime=runtime_config(given, stack=given.stack),
        workers=given.workers,
        gpus_per_run=given.gpus_per_run,
        max_attempts=max_attempts,
        storage=storage,
    )


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """The array that would be submitted."""

    request: Request
    tasks: int
    runs_per_task: int
    price: Price
    """Of the remaining runs; of all where none is left."""
    partition: str
    limit: float
    """Seconds of a task."""
    stuck: StuckTasks | None
    """What earlier tasks say of too short a limit."""

    @property
    def longest(self) -> float:
        """Seconds that one run may take."""
        return max(kind.seconds.high for kind in self.price.kinds)


def plan_array(plan: Plan, options: Request, results: Path | None) -> ArrayPlan:
    """The array for the remaining runs. Raises ValueError as `check`."""
    existing = results if results and results.exists() else None
    expected = plan.expected_runs()
    runs, done = remaining_and_trunks(plan, existing, options.max_attempts) if existing else (expected, [])
    with_work = min(MAX_DEFAULT_TASKS, -(-len(runs) // options.runs_in_parallel))
    tasks = max(1, min(options.array or with_work, len(runs)))
    partition = check(options, results, tasks)
    setup = pricing_setup(
        options.runtime,
        device=named_device(options.gpus or "") if options.groups else "cpu",  # h100 of --gpus h100:1
        workers=tasks * options.runs_in_parallel,
        processes=options.gpus_per_run * options.nodes,
        gpus=tasks * options.groups,
    )
    price = price_of(runs or expected, with_finished(setup, existing, expected), done=done)
    return ArrayPlan(
        request=options,
        tasks=tasks,
        runs_per_task=-(-len(runs) // tasks),
        price=price,
        partition=partition.name,
        limit=options.seconds or partition.default_seconds,
        stuck=TaskArray(sweep=plan.definition.name, results=existing).stuck() if existing else None,
    )


def sweep_on_slurm(
    definition: SweepDefinition, results: Path, options: Request, *, retry_failed: bool, dry_run: bool
) -> None:
    """Submit the remaining runs, unless the array is already queued, and follow it. Raises Exit as `sweep` does."""
    plan = Plan(definition)
    preflight.warn_of_unlikely_values(preflight.field_values(definition))
    planned = plan_array(plan, options, results)
    print(header_text(definition, plan_notes(plan)))
    print(f"cost: {price_line(planned.price)}", *array_lines(planned), sep="\n")
    array = TaskArray(sweep=definition.name, results=results, request=options)
    if dry_run:
        print(array.script(planned.tasks), end="")
        return

    def submit() -> None:
        prepare(results, definition, options.max_attempts)
        if retry_failed:
            forget_failures(results, definition, options.max_attempts)
        if is_settled(definition, scan(ResultsIndex(results, definition)), plan.expected):
            return
        if job := array.submit(planned.tasks):
            print(f"submitted {planned.tasks} tasks as job {job} ({array.name}); script: {array.path}", flush=True)
        else:
            print(f"following the array {array.name}, which is already queued", flush=True)

    preflight.with_cleanup(results, submit)
    try:
        states = _follow(plan, array)
    except KeyboardInterrupt:
        stop(
            f"\nthe array {array.name} keeps running; run the same command again to follow it, "
            f"or `sparsedepth stop {quote(str(results))}` to stop it",
            130,
        )
    _print_result(definition, states, array, plan.expected)


def is_settled(definition: SweepDefinition, states: list[RunState], expected: int) -> bool:
    """Whether no run is left, judging by the folder; a sampler's proposals may share runs."""
    if definition.tune and not definition.adaptive and len(states) < expected:
        return False
    settled = bool(states) and all(state.state in ("complete", *get_args(EndState)) for state in states)
    return settled and (not definition.adaptive or len(states) >= expected)


def _follow(plan: Plan, array: TaskArray) -> list[RunState]:
    """Show progress until no task is left or no run is missing; the final states."""
    definition = plan.definition
    expected = plan.expected
    index = ResultsIndex(array.results, definition)
    runs = None
    printed = None
    end = math.inf
    with ProgressDisplay(definition, expected, array.results) as display:
        while True:
            active = None  # while Slurm does not answer
            try:
                active = [task for task in array.queued() if task.is_active]
            except ValueError as error:
                aside(f"sparsedepth: warning: {error}; the tasks keep running")
            if active is not None and (line := tasks_text(active)) != printed:
                aside(f"tasks: {line}")
                printed = line
            if runs is None or definition.tune:  # finished tuning runs determine the next runs
                runs = plan.configs(index.loss_of)
            states = scan(index, runs)
            display(states)
            if active == [] or time.monotonic() > end:
                return states
            if is_settled(definition, states, expected):
                array.cancel_pending()
                end = min(end, time.monotonic() + END_SECONDS)
            time.sleep(POLL_SECONDS)


def _print_result(definition: SweepDefinition, states: list[RunState], array: TaskArray, expected: int) -> None:
    """Print the ranking, and why runs are missing. Raises Exit if runs are missing."""
    print_failures(states, array.results)
    counts = Counter(state.state for state in states)
    missing = len(states) - counts["complete"] - counts["pruned"]
    if counts["complete"]:
        print_ranking(definition, array.results)
    if missing:
        if stuck := array.stuck():
            aside(stuck_text(stuck))
        stop(
            f"no task is left and {missing} of {expected} runs are missing; see `sparsedepth status` and the logs in "
            f"{array.folder}/*.log, and run the same command again to resume",
            1,
        )
