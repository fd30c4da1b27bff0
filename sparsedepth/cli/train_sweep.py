"""`sparsedepth sweep`, `train` and `work`: commands that train models."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsedepth.cli import calls, option
from sparsedepth.cli.cost import local_pricing_setup, price_line, print_price, remaining_price
from sparsedepth.cli.on_slurm import array_options, sweep_on_slurm
from sparsedepth.config.plain_text import visible
from sparsedepth.files import MARKER

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.sweep.driver import SweepResult


@option.of_call(calls.sweep, option.slurm)
def sweep(
    given: option.Given,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the cost, as `plan` does, and exit")] = False,
    on: Annotated[str | None, typer.Option(help="slurm: submit a job array from this login node")] = None,
) -> None:
    """Run every configuration and seed of a sweep. Run the same command again to resume."""
    from sparsedepth.sweep.results_folder import check_same_sweep

    out = given["out"]
    definition = calls.definition_of(given)  # errors are reported before torch loads
    check_same_sweep(out, definition)
    if options := array_options(on, given):
        sweep_on_slurm(definition, out, options, retry_failed=given["retry_failed"], dry_run=dry_run)
        return

    from sparsedepth.cli.progress import print_header
    from sparsedepth.plan.price import price

    driver = calls.make_driver(given, definition)
    plan, machine, expected = driver.plan, driver.machine, driver.plan.expected
    setup = local_pricing_setup(plan, machine, out)
    if dry_run:
        print_price(plan, setup, results=out if out.exists() else None)
        return
    at_least = " or more" if definition.tune else ""
    where = f"{expected} runs{at_least} into {out}, {machine.workers} at a time on {machine.described}"
    print_header(definition, [where, *plan.notes()])
    total = price(plan, setup)
    print(f"cost: {price_line(total)}")
    remaining = remaining_price(plan, setup, out)
    if remaining and remaining.runs < total.runs:
        print(f"remaining: {price_line(remaining)}")
    _print_result(definition, out, calls.run_driver(driver, retry_failed=given["retry_failed"]), expected)


def _print_result(definition: "SweepDefinition", out: Path, result: "SweepResult", expected: int) -> None:
    """Print how the sweep ended and the ranking. Raises Exit unless every run is complete."""
    from sparsedepth.cli.progress import print_failures, print_ranking
    from sparsedepth.sweep.status import other_runs_note

    n_complete = sum(state.state == "complete" for state in result.states)
    print_failures(result.states, out)
    for reason, count in result.refused.items():
        print(f"{count} of {expected} proposals not run: {visible(reason)}")
    if result.stop():
        complete = f"{n_complete} of {expected} runs complete"
        print(f"stopped with {complete}; run the same command again to resume", file=sys.stderr)
        raise typer.Exit(result.stop.exit_code)
    if note := other_runs_note((path.parent.name for path in out.glob(f"runs/*/{MARKER}")), result.states):
        print(note)
    if n_complete:
        print_ranking(definition, out)
    if result.unfinished:
        failed = any(state.state == "failed" for state in result.states)
        again = "with --retry-failed to try them once more" if failed else "to resume"
        print(f"{result.unfinished} runs are unfinished; run the same command again {again}", file=sys.stderr)
        raise typer.Exit(1)


@option.of_call(calls.train)
def train(given: option.Given) -> None:
    """Train and measure one model. Run the same command again to resume."""
    from sparsedepth.cli.run_progress import print_summary

    before = {marker: marker.stat().st_ino for marker in given["out"].glob(f"runs/*/{MARKER}")}
    try:
        run = calls.train(**given)
    except calls.StoppedAtCheckpoint as stopped:
        print(stopped, file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None

    from sparsedepth.config.plain_text import wrapped
    from sparsedepth.store.degeneracy import notes_on_run
    from sparsedepth.train.devices import world

    if world()[0] == 0:  # the first of several processes
        marker = run.folder / MARKER
        was_complete = before.get(marker) == marker.stat().st_ino  # a damaged run is repeated, with a new marker
        print(f"run {run.run_id} in {run.folder}{', complete before: nothing was trained' if was_complete else ''}")
        print_summary(run.summary)
        print(wrapped(f"note: {note}" for note in notes_on_run({**run.config.model_dump(), **run.summary})), end="")


@option.of_call(
    calls.sweep,
    only=("storage", "workers", "gpus", "gpus_per_run", "runtime", "device", "stack", "max_attempts"),
)
def work(
    given: option.Given,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep started elsewhere")],
    nodes: Annotated[int, typer.Option(min=1, help="nodes per run, out of this Slurm task's")] = 1,
    leave_when_idle: Annotated[bool, typer.Option("--leave-when-idle", help="exit when the queue is empty")] = False,
) -> None:
    """Add this machine's workers to a sweep started on another machine (same folder and --storage)."""
    from sparsedepth.cli.progress import ProgressDisplay
    from sparsedepth.config.sweep import read_definition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.status import remaining_runs
    from sparsedepth.sweep.storage import hide_url

    if given["storage"]:
        hide_url(given["storage"])
    definition = read_definition(folder)
    if definition is None:
        raise ValueError(f"{folder} holds no sweep; run `sparsedepth sweep FILE --out {folder}` first")
    may_leave = leave_when_idle and not definition.adaptive
    if may_leave and not remaining_runs(Plan(definition), folder, given["max_attempts"]):
        return  # before torch is imported: the last tasks of an array find nothing to do
    from sparsedepth.sweep.driver import Driver

    machine = calls.machine_of({**given, "nodes": nodes})
    driver = Driver(Plan(definition), folder, machine, given["storage"], leaves_when_idle=leave_when_idle)
    with ProgressDisplay(definition, driver.plan.expected, folder) as driver.on_progress:
        stop = driver.join().stop
    if stop():
        print("stopped at a checkpoint; another worker can resume the runs", file=sys.stderr)
        raise typer.Exit(stop.exit_code)
