"""`sweep --on slurm`, `plan --on slurm` and `stop`: the sweep as an array of tasks on a cluster."""

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.cluster.script import Request
    from sparsedepth.cluster.slurm import QueuedTask
    from sparsedepth.config.runtime import RuntimeConfig
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.price import Price, PricingSetup
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.status import RunState

On = Annotated[
    str | None, typer.Option("--on", help="slurm: as an array of tasks on the cluster of this login node; default here")
]
Partition = Annotated[str | None, typer.Option(help="--on slurm: partition (queue)")]
TimeLimit = Annotated[
    str | None, typer.Option("--time", help="--on slurm: limit of a task, such as 4:00:00; default the partition's")
]
Array = Annotated[int | None, typer.Option(min=1, help="--on slurm: tasks; default one for each run, at most 64")]
Account = Annotated[str | None, typer.Option(help="--on slurm: account")]
Nodes = Annotated[int, typer.Option(min=1, help="--on slurm: nodes of one run, with --gpus-per-run on each")]
Sbatch = Annotated[
    list[str] | None, typer.Option(help="--on slurm: further option of sbatch, --sbatch qos=low; repeatable")
]

LOOK_SECONDS = 2.0
"""Between two looks at the results folder, and at the queue."""

END_SECONDS = 20.0
"""How long the tasks of a sweep that is complete are waited for, to count what they have used."""


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """What the command line asks for."""

    request: "Request"
    array: int | None
    runtime: "RuntimeConfig"
    workers: int | None
    gpus_per_run: int
    max_attempts: int
    storage: str | None

    @property
    def at_a_time(self) -> int:
        """Runs that a task computes beside each other."""
        from sparsedepth.cluster.script import cpus_of

        places = self.request.gpu_count or cpus_of(self.request)
        return self.workers or max(1, places // self.gpus_per_run)

    def arguments(self) -> list[str]:
        """Of `work`."""
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
        """The array as places for runs; the GPU's kind is taken from --gpus h100:1, and else assumed."""
        from sparsedepth.plan.price import named_device, pricing_setup

        device = named_device(self.request.gpus or "") if self.request.gpu_count else "cpu"
        processes = self.gpus_per_run * self.request.nodes
        return pricing_setup(self.runtime, device=device, workers=tasks * self.at_a_time, processes=processes)


def array_options(
    on: str | None,
    *,
    partition: str | None,
    time: str | None,
    array: int | None,
    account: str | None,
    nodes: int,
    sbatch: list[str] | None,
    gpus: str | None,
    runtime: "RuntimeConfig",
    workers: int | None,
    gpus_per_run: int,
    max_attempts: int = 2,
    storage: str | None = None,
) -> ArrayOptions | None:
    """The options of --on slurm; None where it is not given. Raises ValueError for those that go without it."""
    from sparsedepth.cluster.script import Request
    from sparsedepth.sweep.storage import database_url, hide

    if on is None:
        given = {"partition": partition, "time": time, "array": array, "account": account, "sbatch": sbatch}
        if wrong := next((name for name, value in given.items() if value), "nodes" if nodes > 1 else None):
            raise ValueError(f"--{wrong} asks a cluster for something; add --on slurm")
        return None
    if on != "slurm":
        raise ValueError(f"--on {on!r} is not known; slurm is, other engines start `sparsedepth work DIR`")
    if storage:
        hide(storage)
        database_url(storage)
    request = Request(
        partition=partition, account=account, gpus=gpus, nodes=nodes, time=time, extra=tuple(sbatch or ())
    )
    return ArrayOptions(
        request=request,
        array=array,
        runtime=runtime,
        workers=workers,
        gpus_per_run=gpus_per_run,
        max_attempts=max_attempts,
        storage=storage,
    )


@dataclass(frozen=True, kw_only=True)
class ArrayPlan:
    """An array before it is submitted."""

    tasks: int
    price: "Price"
    """of what the folder lacks"""
    lines: list[str]
    """what should be known of it"""


def planned(definition: "SweepDefinition", options: ArrayOptions, results: Path | None) -> ArrayPlan:
    """The size of the array, and the time of a task beside the queue's limits. Raises ValueError as `array.check`."""
    from sparsedepth.cli.run_progress import duration
    from sparsedepth.cluster import array
    from sparsedepth.plan.price import expected_runs, price_of
    from sparsedepth.sweep.runs_left import runs_left

    exists = results is not None and results.exists()
    runs = runs_left(definition, results) if results and exists else expected_runs(definition)[0]
    tasks = min(options.array or array.default_tasks(len(runs), options.at_a_time), max(1, len(runs)))
    queue = array.check(options.request, results, tasks, options.runtime.checkpoint_seconds)
    setup = options.pricing_setup(tasks)
    cost = price_of(runs or expected_runs(definition)[0], setup)
    each = -(-len(runs) // tasks)
    low, high = (cost.seconds.value * factor for factor in (1 / cost.seconds.factor, cost.seconds.factor))
    limit = options.request.seconds or (queue.default_seconds if queue.default_seconds < float("inf") else None)
    shown = duration(limit) if limit else "none"
    lines = [
        f"array: {tasks} tasks, {options.at_a_time} runs at a time in each, {each} runs a task; "
        f"{duration(cost.seconds.value)} a task ({duration(low)} to {duration(high)}, assumed of {setup.device})",
        f"queue: partition {queue.name}, {queue.nodes} nodes{f' with {queue.gpus}' if queue.gpus else ''}, "
        f"time limit {shown}" + ("" if options.request.seconds else " (the partition's; --time sets a task's)"),
    ]
    longest = max(kind.seconds.value * kind.seconds.factor for kind in cost.kinds)
    if limit and longest > limit:
        lines.append(
            f"note: one run may take {duration(longest)}, longer than the limit: its task is told to leave "
            f"{options.request.warning_seconds} s before, writes a checkpoint, and goes on when it is queued again"
        )
    if results and exists and (stuck := array.TaskArray(sweep=definition.name, results=results).without_progress()):
        lines.append(f"note: {stuck}")
    return ArrayPlan(tasks=tasks, price=cost, lines=lines)


def sweep_on_slurm(
    definition: "SweepDefinition", results: Path, options: ArrayOptions, *, retry_failed: bool, dry_run: bool
) -> None:
    """Submit what the folder lacks, unless its array is queued already, and follow it. Raises Exit as `sweep` does."""
    from sparsedepth.cli.cost import one_line
    from sparsedepth.cli.progress import print_head
    from sparsedepth.cli.start import leaving_nothing, values_of, warn_of_slips
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.plan.tasks import Plan

    plan = Plan(definition)
    warn_of_slips(values_of(definition))
    array_plan = planned(definition, options, results)
    print_head(definition, plan.notes())
    print(f"price: {one_line(array_plan.price)}", *array_plan.lines, sep="\n")
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
    job = leaving_nothing(results, lambda: _submit(definition, plan, array, array_plan, retry_failed))
    try:
        if job:
            print(f"submitted {array_plan.tasks} tasks as job {job} ({array.name}); script: {array.path}", flush=True)
        states = _follow(definition, plan.expected, array)
    except KeyboardInterrupt:
        print(
            f"\nthe array {array.name} goes on without this command; the same command attaches again, "
            f"`sparsedepth stop {quote(str(results))}` ends it",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    _print_end(definition, states, array, plan.expected)


def _submit(
    definition: "SweepDefinition", plan: "Plan", array: "TaskArray", array_plan: ArrayPlan, retry_failed: bool
) -> str | None:
    """Make the folder the sweep's, and submit the array if anything is missing: its number."""
    from sparsedepth.plan.planned_vs_actual import write_plan
    from sparsedepth.run.scratch import Scratch
    from sparsedepth.sweep.results_folder import claim
    from sparsedepth.sweep.status import known_runs, scan

    results = array.results
    claim(results, definition)
    runs = known_runs(definition, results)
    write_plan(results, array_plan.price, runs)
    states = scan(results, definition, runs)
    if retry_failed:
        for state in states:
            Scratch(results, state.run_id).forget_failures()
    if is_settled(definition, states, plan.expected):
        return None
    job = array.submit(array_plan.tasks)
    if job is None:
        print(f"attached to the array {array.name}, which is queued already", flush=True)
    return job


def is_settled(definition: "SweepDefinition", states: "list[RunState]", expected: int) -> bool:
    """Whether nothing is left to run, as far as the folder tells: of a sampler's proposals several may share a run."""
    if definition.tune and not definition.adaptive and len(states) < expected:
        return False
    settled = bool(states) and all(state.state in ("complete", "pruned", "infeasible") for state in states)
    return settled and (not definition.adaptive or len(states) >= expected)


def _follow(definition: "SweepDefinition", expected: int, array: "TaskArray") -> "list[RunState]":
    """Show the runs until no task is left, or none is needed; how they then stand."""
    from sparsedepth.cli.progress import Watcher
    from sparsedepth.cluster.array import counted
    from sparsedepth.sweep.status import known_runs, scan

    out = array.results
    runs = known_runs(definition, out)
    said = None
    with Watcher(definition, expected, out) as watcher:
        while True:
            active = _active(array)
            if active is not None and (line := counted(active)) != said:
                print(f"tasks: {line}", file=sys.stderr, flush=True)
                said = line
            if definition.tune:  # what is finished says what comes next
                runs = known_runs(definition, out)
            states = scan(out, definition, runs)
            watcher(states)
            if active == []:
                return states
            if is_settled(definition, states, expected):
                array.cancel_waiting()
                until = time.monotonic() + END_SECONDS
                while _active(array) and time.monotonic() < until:
                    time.sleep(LOOK_SECONDS)
                return states
            time.sleep(LOOK_SECONDS)


def _active(array: "TaskArray") -> "list[QueuedTask] | None":
    """The tasks that have not ended; None while the controller gives no answer."""
    try:
        return [task for task in array.queued() if task.is_active]
    except ValueError as error:
        print(f"sparsedepth: warning: {error}; the tasks go on", file=sys.stderr)
        return None


def _print_end(definition: "SweepDefinition", states: "list[RunState]", array: "TaskArray", expected: int) -> None:
    """The ranking, or why runs are missing. Raises Exit unless all that can be is complete."""
    from sparsedepth.cli.progress import print_ended, print_results

    print_ended(states, array.results)
    counts = Counter(state.state for state in states)
    missing = sum(counts[state] for state in ("failed", "interrupted", "planned", "running", "damaged"))
    ended = Counter(task.state.lower() for task in array.queued() if task.state != "COMPLETED")
    if used := array.account():
        print(used)
    if counts["complete"]:
        print_results(definition, array.results)
    if missing:
        if stuck := array.without_progress():
            print(stuck, file=sys.stderr)
        elif any(task.state == "TIMEOUT" for task in array.queued()):
            print(f"a task was cut off by its time limit; {array.request.longer}", file=sys.stderr)
        why = f" ({', '.join(f'{count} tasks {state}' for state, count in ended.items())})" if ended else ""
        print(
            f"no task is left, and {missing} of {expected} runs are missing{why}; the tasks' logs are "
            f"{array.folder}/*.log; the same command continues",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def stop(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep that runs on Slurm")],
) -> None:
    """End a sweep on Slurm in order: what waits is cancelled, what runs writes a checkpoint. `sweep` continues it."""
    from sparsedepth.cluster import slurm
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.config.sweep import read_definition

    definition = read_definition(folder) if folder.is_dir() else None
    if definition is None:
        raise ValueError(f"{folder} is no folder of a sweep; name the results folder of one that runs on Slurm")
    slurm.check_present()
    array = TaskArray(sweep=definition.name, results=folder)
    count = array.stop()
    if not count:
        raise ValueError(f"{folder} has no task on Slurm; a sweep in a terminal ends with Ctrl-C")
    print(f"ended: {count} tasks of {array.name}; the same `sparsedepth sweep ... --on slurm` continues")
