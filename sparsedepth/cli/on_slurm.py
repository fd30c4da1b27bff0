"""`sweep --on slurm`, `plan --on slurm` and `stop`: run a sweep as a Slurm job array."""

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_args

import typer

from sparsedepth.cli.cost import as_finished_runs_took, price_line
from sparsedepth.cli.start import field_values, warn_of_unlikely_values, with_cleanup
from sparsedepth.cluster.script import Request, cpus_of
from sparsedepth.store.terminal import duration

if TYPE_CHECKING:
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.cluster.slurm import QueuedTask
    from sparsedepth.config.runtime import RuntimeConfig
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.price import Price, PricingSetup
    from sparsedepth.sweep.status import RunState

POLL_SECONDS = 2.0
"""Interval between checks of the results folder and the queue."""

END_SECONDS = 20.0
"""How long to wait for the tasks of a complete sweep to end, so that their usage is counted."""


class SlurmFlags(NamedTuple):
    """The options that only --on slurm has."""

    partition: str | None
    time: str | None
    array: int | None
    account: str | None
    sbatch: list[str] | None
    nodes: int


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    request: Request
    n_tasks: int | None
    """of --array"""
    runtime: "RuntimeConfig"
    workers: int | None
    gpus_per_run: int
    max_attempts: int
    storage: str | None

    @property
    def runs_in_parallel(self) -> int:
        """Runs that one task computes in parallel."""
        if self.request.nodes > 1:
            return 1
        if groups := self.request.gpu_count // self.gpus_per_run:
            return (self.workers or 1) * groups
        return self.workers or max(1, cpus_of(self.request) // self.gpus_per_run)

    def arguments(self) -> list[str]:
        arguments = ["--max-attempts", str(self.max_attempts)]
        if self.workers:
            arguments += ["--workers", str(self.workers)]
        if self.gpus_per_run > 1:
            arguments += ["--gpus-per-run", str(self.gpus_per_run)]
        if self.request.nodes > 1:
            arguments += ["--nodes", str(self.request.nodes)]
        for name, value in self.runtime.model_dump(mode="json", exclude_defaults=True).items():
            arguments += ["--runtime", f"{name}={value}".replace("=True", "=true").replace("=False", "=false")]
        return arguments

    def pricing_setup(self, tasks: int) -> "PricingSetup":
        """The setup for pricing; the GPU model is that of --gpus h100:1, else assumed."""
        from sparsedepth.plan.price import named_device, pricing_setup

        device = named_device(self.request.gpus or "") if self.request.gpu_count else "cpu"
        return pricing_setup(
            self.runtime,
            device=device,
            workers=tasks * self.runs_in_parallel,
            processes=self.gpus_per_run * self.request.nodes,
            gpus=tasks * max(1, self.request.gpu_count // self.gpus_per_run) if self.request.gpu_count else 0,
        )


def array_options(
    on: str | None,
    flags: SlurmFlags,
    gpus: str | None,
    runtime: "RuntimeConfig",
    workers: int | None,
    gpus_per_run: int,
    max_attempts: int = 2,
    storage: str | None = None,
) -> ArrayOptions | None:
    """The options of --on slurm, or None without it. Raises ValueError for a Slurm option without --on slurm."""
    from sparsedepth.sweep.storage import database_url, hide_url

    if on is None:
        given = flags._replace(nodes=flags.nodes if flags.nodes > 1 else 0)._asdict()
        if option := next((name for name, value in given.items() if value), None):
            raise ValueError(f"--{option} is only for clusters; add --on slurm")
        return None
    if on != "slurm":
        raise ValueError(f"--on {on!r} is not supported; use slurm, or start `sparsedepth work DIR` on other clusters")
    if storage:
        hide_url(storage)
        database_url(storage)
    partition, time, n_tasks, account, sbatch, nodes = flags
    request = Request(
        partition=partition, account=account, gpus=gpus, nodes=nodes, time=time, extra=tuple(sbatch or ())
    )
    return ArrayOptions(
        request=request,
        n_tasks=n_tasks,
        runtime=runtime,
        workers=workers,
        gpus_per_run=gpus_per_run,
        max_attempts=max_attempts,
        storage=storage,
    )


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    tasks: int
    price: "Price"
    """of the remaining runs"""
    lines: list[str]
    """printed description and warnings"""


def plan_array(definition: "SweepDefinition", options: ArrayOptions, results: Path | None) -> ArrayPlan:
    """The size of the array, and the time per task against the queue's limits. Raises ValueError as `check`."""
    from sparsedepth.cluster.array import MAX_DEFAULT_TASKS, TaskArray, check
    from sparsedepth.plan.price import expected_runs, price_of
    from sparsedepth.sweep.status import remaining_runs

    existing = results if results and results.exists() else None
    runs = remaining_runs(definition, existing, options.max_attempts) if existing else expected_runs(definition)[0]
    with_work = min(MAX_DEFAULT_TASKS, -(-len(runs) // options.runs_in_parallel))
    tasks = max(1, min(options.n_tasks or with_work, len(runs)))
    partition = check(options.request, results, tasks, options.runtime.checkpoint_seconds)
    setup = as_finished_runs_took(options.pricing_setup(tasks), definition, existing)
    price = price_of(runs or expected_runs(definition)[0], setup)
    runs_per_task = -(-len(runs) // tasks)
    low, high = (price.seconds.value * factor for factor in (1 / price.seconds.factor, price.seconds.factor))
    limit = options.request.seconds
    if limit is None and partition.default_seconds < float("inf"):
        limit = partition.default_seconds
    limit_text = duration(limit) if limit else "none"
    lines = [
        f"array: {tasks} tasks, {runs_per_task} runs per task, {options.runs_in_parallel} in parallel; "
        f"{duration(price.seconds.value)} per task ({duration(low)} to {duration(high)}, assuming {setup.device})",
        f"queue: partition {partition.name}, {partition.nodes} nodes"
        f"{f' with {partition.gpus}' if partition.gpus else ''}, time limit {limit_text}"
        + ("" if options.request.seconds else " (the partition's default; set with --time)"),
    ]
    longest = max(kind.seconds.value * kind.seconds.factor for kind in price.kinds)
    if limit and longest > limit:
        lines.append(
            f"note: one run may take {duration(longest)}, longer than the limit: its task writes a checkpoint "
            f"{options.request.warning_seconds} s before the limit, and resumes when it is requeued"
        )
    if existing and (warning := TaskArray(sweep=definition.name, results=existing).stuck_tasks_text()):
        lines.append(f"note: {warning}")
    return ArrayPlan(tasks=tasks, price=price, lines=lines)


def sweep_on_slurm(
    definition: "SweepDefinition", results: Path, options: ArrayOptions, *, retry_failed: bool, dry_run: bool
) -> None:
    """Submit the remaining runs, unless the array is already queued, and follow it. Raises Exit as `sweep` does."""
    from sparsedepth.cli.progress import print_header
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.plan.tasks import Plan

    plan = Plan(definition)
    warn_of_unlikely_values(field_values(definition))
    array_plan = plan_array(definition, options, results)
    print_header(definition, plan.notes())
    print(f"cost: {price_line(array_plan.price)}", *array_plan.lines, sep="\n")
    array = TaskArray(
        sweep=definition.name,
        results=results,
        request=options.request,
        arguments=options.arguments(),
        storage_url=options.storage,
    )
    if dry_run:
        print(array.script(array_plan.tasks), end="")
        return
    job = with_cleanup(
        results,
        lambda: _submit(definition, plan.expected, array, array_plan, options.max_attempts, retry_failed=retry_failed),
    )
    try:
        if job:
            print(f"submitted {array_plan.tasks} tasks as job {job} ({array.name}); script: {array.path}", flush=True)
        states = _follow(definition, plan.expected, array)
    except KeyboardInterrupt:
        print(
            f"\nthe array {array.name} keeps running; run the same command again to follow it, "
            f"or `sparsedepth stop {quote(str(results))}` to stop it",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    _print_result(definition, states, array, plan.expected)


def _submit(
    definition: "SweepDefinition",
    expected: int,
    array: "TaskArray",
    array_plan: ArrayPlan,
    max_attempts: int,
    *,
    retry_failed: bool,
) -> str | None:
    """Claim the folder and submit the array if runs are missing; returns the job id."""
    from sparsedepth.sweep.results_folder import prepare
    from sparsedepth.sweep.status import scan

    results = array.results
    prepare(results, definition, max_attempts, retry_failed=retry_failed)
    if is_settled(definition, scan(results, definition), expected):
        return None
    job = array.submit(array_plan.tasks)
    if job is None:
        print(f"following the array {array.name}, which is already queued", flush=True)
    return job


def is_settled(definition: "SweepDefinition", states: "list[RunState]", expected: int) -> bool:
    """Whether no run is left, judging by the folder; a sampler's proposals may share runs."""
    from sparsedepth.sweep.run_end import EndState

    if definition.tune and not definition.adaptive and len(states) < expected:
        return False
    settled = bool(states) and all(state.state in ("complete", *get_args(EndState)) for state in states)
    return settled and (not definition.adaptive or len(states) >= expected)


def _follow(definition: "SweepDefinition", expected: int, array: "TaskArray") -> "list[RunState]":
    """Show progress until no task is left or no run is missing; returns the final states."""
    from sparsedepth.cli.progress import ProgressDisplay
    from sparsedepth.cluster.array import task_counts
    from sparsedepth.sweep.status import known_runs, scan

    out = array.results
    runs = known_runs(definition, out)
    printed = None
    with ProgressDisplay(definition, expected, out) as display:
        while True:
            active = _active_tasks(array)
            if active is not None and (line := task_counts(active)) != printed:
                print(f"tasks: {line}", file=sys.stderr, flush=True)
                printed = line
            if definition.tune:  # finished tuning runs determine the next runs
                runs = known_runs(definition, out)
            states = scan(out, definition, runs)
            display(states)
            if active == []:
                return states
            if is_settled(definition, states, expected):
                array.cancel_pending()
                deadline = time.monotonic() + END_SECONDS
                while _active_tasks(array) and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                return states
            time.sleep(POLL_SECONDS)


def _active_tasks(array: "TaskArray") -> "list[QueuedTask] | None":
    """The tasks that have not ended; None while Slurm does not answer."""
    try:
        return [task for task in array.queued() if task.is_active]
    except ValueError as error:
        print(f"sparsedepth: warning: {error}; the tasks keep running", file=sys.stderr)
        return None


def _print_result(definition: "SweepDefinition", states: "list[RunState]", array: "TaskArray", expected: int) -> None:
    """Print the ranking, and why runs are missing. Raises Exit if runs are missing."""
    from sparsedepth.cli.progress import print_failures, print_ranking

    print_failures(states, array.results)
    counts = Counter(state.state for state in states)
    missing = sum(counts[state] for state in ("failed", "interrupted", "planned", "running", "damaged"))
    ended = Counter(task.state.lower() for task in array.queued() if task.state != "COMPLETED")
    if usage := array.record_usage():
        print(usage)
    if counts["complete"]:
        print_ranking(definition, array.results)
    if missing:
        if warning := array.stuck_tasks_text():
            print(warning, file=sys.stderr)
        elif any(task.state == "TIMEOUT" for task in array.queued()):
            print(f"a task reached its time limit; {array.request.longer_time_advice}", file=sys.stderr)
        reasons = f" ({', '.join(f'{count} tasks {state}' for state, count in ended.items())})" if ended else ""
        print(
            f"no task is left and {missing} of {expected} runs are missing{reasons}; see the logs in "
            f"{array.folder}/*.log, and run the same command again to resume",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def stop(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep that runs on Slurm")],
) -> None:
    """Stop a sweep on Slurm: cancel queued tasks, checkpoint running ones. `sweep --on slurm` resumes it."""
    from sparsedepth.cluster import slurm
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.config.sweep import read_definition

    definition = read_definition(folder) if folder.is_dir() else None
    if definition is None:
        raise ValueError(f"{folder} holds no sweep; give the results folder of a sweep on Slurm")
    slurm.check_present()
    array = TaskArray(sweep=definition.name, results=folder)
    count = array.stop()
    if not count:
        raise ValueError(f"{folder} has no Slurm task; to stop a sweep in a terminal, press Ctrl-C there")
    print(f"stopped {count} tasks of {array.name}; run the same `sparsedepth sweep ... --on slurm` to resume")
