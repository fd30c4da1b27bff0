"""`sparsedepth sweep`, `train`, `work`, `stop`: commands that train models, or stop them on Slurm."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from sparsedepth.cli import option, preflight, pricing
from sparsedepth.cli.option import (
    Folder,
    Input,
    Out,
    RuntimeOptions,
    Settings,
    SlurmOptions,
    StorageOptions,
    SweepOptions,
    WorkerOptions,
)
from sparsedepth.cli.start_sweep import (
    StoppedAtCheckpoint,
    definition_of,
    machine_of,
    make_driver,
    restored_signal_handlers,
    run_driver,
    runtime_config,
)
from sparsedepth.files import MARKER
from sparsedepth.words.degeneracy import notes_on_run
from sparsedepth.words.measure import notes_text, summary_text
from sparsedepth.words.plain_text import counted_are, visible
from sparsedepth.words.price import price_line
from sparsedepth.words.progress import header_text
from sparsedepth.words.status import other_runs_text
from sparsedepth.words.sweep import at_a_time_text, machine_text, plan_notes

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.store.run_record import Record
    from sparsedepth.sweep.driver import SweepResult
    from sparsedepth.sweep.status import RunState


@dataclass(frozen=True)
class TrainCommand(RuntimeOptions):
    """Train and measure one model; returns the complete run's `summary`, `config`, `tables` and `folder`. `from_` is a
    run or Hugging Face folder with the initial weights.

    The same call resumes a stopped run. Raises ValueError for user errors, StoppedAtCheckpoint."""

    file: Annotated[Input, Argument(help="run configuration (YAML)")]
    out: Out
    _: KW_ONLY
    set: Annotated[Settings | None, Option("--set", help="override a field: --set n_layers=24; repeatable")] = None
    threads: Annotated[int | None, Option(min=1, help="CPU threads; default all")] = None
    from_: Annotated[
        Folder | None,
        Option("--from", help="run or Hugging Face folder with the initial weights; default random"),
    ] = None

    def compute(self) -> "Record":
        """Refuses what it can before torch is imported, and restores the caller's signal handlers."""
        from sparsedepth.cli.input_file import run_config

        results = option.path(self.out)
        start = None
        if self.from_ is not None:
            from sparsedepth.exchange.start import open_start

            start = open_start(str(self.from_))
        config = run_config(self.file, self.set, start)  # errors are reported before torch is imported
        preflight.warn_of_unlikely_values([{"lr": config.lr, "train_tokens": config.train_tokens}])
        preflight.check_tokenizers([{"tokenizer": config.tokenizer, "corpus": config.corpus}], results)
        runtime = runtime_config(self, threads=self.threads)

        from sparsedepth.cli.run_progress import bar
        from sparsedepth.run.execute import execute
        from sparsedepth.run.process import Stop
        from sparsedepth.run.train_and_measure import Infeasible, Options
        from sparsedepth.store.run_record import read_run
        from sparsedepth.train.devices import LostError
        from sparsedepth.train.loop import Interrupted

        with bar(config.run_id) as report, restored_signal_handlers():
            stop = Stop(is_announced=True).catch()
            options = Options(runtime=runtime, stop=stop, report=report, start=start)
            try:
                folder = preflight.with_cleanup(results, lambda: execute(config, results, options))
            except Interrupted:
                text = "stopped at a checkpoint; run the same command again to resume"
                raise StoppedAtCheckpoint(text, stop.exit_code if stop() else 1) from None
            except (Infeasible, LostError) as failure:
                raise ValueError(str(failure)) from None
            report("complete", 1.0)
        return read_run(folder)


@dataclass(frozen=True, kw_only=True)
class SweepCommand(SweepOptions):
    """Run every configuration and seed of a sweep into the folder `out`; returns the state of each run.

    The same call resumes. Raises ValueError for user errors, StoppedAtCheckpoint."""

    def compute(self) -> "list[RunState]":
        driver = make_driver(self, definition_of(self))  # errors are reported before torch is imported
        result = run_driver(driver, retry_failed=self.retry_failed)
        if result.stop():
            raise StoppedAtCheckpoint("stopped at a checkpoint; the same call resumes", result.stop.exit_code)
        return result.states


@dataclass(frozen=True, kw_only=True)
class SweepAnywhereCommand(SlurmOptions, SweepOptions):
    """A sweep, here or on Slurm."""


@option.command
def sweep(
    given: SweepAnywhereCommand,
    dry_run: Annotated[bool, Option("--dry-run", help="print the cost, as `plan` does, and exit")] = False,
    on: Annotated[str | None, Option(help="slurm: submit a job array from this login node")] = None,
) -> None:
    """Run every configuration and seed of a sweep. Run the same command again to resume."""
    from sparsedepth.cli.on_slurm import request_of, sweep_on_slurm
    from sparsedepth.sweep.results_folder import check_same_sweep

    out = option.path(given.out)
    definition = definition_of(given)  # errors are reported before torch loads
    check_same_sweep(out, definition)
    if request := request_of(on, given, given.max_attempts, given.storage):
        sweep_on_slurm(definition, out, request, retry_failed=given.retry_failed, dry_run=dry_run)
        return

    from sparsedepth.plan.price import price

    driver = make_driver(given, definition)
    plan, machine = driver.plan, driver.machine
    expected = plan.expected
    setup = pricing.local_pricing_setup(plan, machine, out, calibrated=False)
    if dry_run:
        pricing.print_price(plan, pricing.priced_sweep(plan, setup, out if out.exists() else None))
        return
    at_least = " or more" if definition.tune else ""
    stacked = max(map(machine.stack_size, plan.expected_runs()), default=1)
    where = f"{expected} runs{at_least} into {out}, {at_a_time_text(machine.workers, stacked)} {machine_text(machine)}"
    print(header_text(definition, [where, *plan_notes(plan)]))
    total = price(plan, setup)
    print(f"cost: {price_line(total)}")
    remaining = pricing.remaining_price(plan, setup, out)
    if remaining and remaining.runs < total.runs:
        print(f"remaining: {price_line(remaining)}")
    _print_result(definition, out, run_driver(driver, retry_failed=given.retry_failed), expected)


def _print_result(definition: "SweepDefinition", out: Path, result: "SweepResult", expected: int) -> None:
    """Print how the sweep ended and the ranking. Raises Exit unless every run is complete."""
    from sparsedepth.cli.progress import print_failures, print_ranking
    from sparsedepth.sweep.results_folder import FAILED

    n_complete = sum(state.state == "complete" for state in result.states)
    print_failures(result.states, out)
    for reason, count in result.refused.items():
        print(f"{count} of {definition.n_trials or expected} proposals not run: {visible(reason)}")
    if result.stop():  # tuning may have added runs
        runs = f"{n_complete} of {max(expected, len(result.states))} runs"
        option.stop(f"stopped with {runs} complete; run the same command again to resume", result.stop.exit_code)
    others = {path.parent.name for path in out.glob(f"runs/*/{MARKER}")} - {state.run_id for state in result.states}
    if note := other_runs_text(len(others)):
        print(note)
    if n_complete:
        print_ranking(definition, out)
    if result.unfinished:
        failed = any(state.state in FAILED for state in result.states)
        again = "with --retry-failed to try them once more" if failed else "to resume"
        left = counted_are(result.unfinished, "run")
        option.stop(f"{left} unfinished; run the same command again {again}", 1)


@option.command
def train(given: TrainCommand) -> None:
    """Train and measure one model. Run the same command again to resume."""

    before = {marker: marker.stat().st_ino for marker in Path(given.out).glob(f"runs/*/{MARKER}")}
    try:
        run = given.compute()
    except StoppedAtCheckpoint as stopped:
        option.stop(stopped, stopped.exit_code)

    from sparsedepth.store.degeneracy import reasons_of_run
    from sparsedepth.train.devices import world

    if world()[0] == 0:  # the first of several processes
        marker = run.folder / MARKER
        was_complete = before.get(marker) == marker.stat().st_ino  # a damaged run is repeated, with a new marker
        print(f"run {run.run_id} in {run.folder}{', complete before: nothing was trained' if was_complete else ''}")
        print(summary_text(run.summary), end="")
        reasons = reasons_of_run({**run.config.model_dump(), **run.summary})
        print(notes_text(notes_on_run(reasons)), end="")


@dataclass(frozen=True, kw_only=True)
class WorkCommand(WorkerOptions, StorageOptions):
    """What a worker needs."""


@option.command
def work(
    given: WorkCommand,
    folder: Annotated[Path, Argument(metavar="DIR", help="results folder of a sweep started elsewhere")],
    nodes: Annotated[int, Option(min=1, help="nodes per run, out of this Slurm task's")] = 1,
    leave_when_idle: Annotated[bool, Option("--leave-when-idle", help="exit when the queue is empty")] = False,
    max_attempts: Annotated[int | None, Option(min=1, help="attempts per run; default the sweep's")] = None,
) -> None:
    """Add this machine's workers to a sweep started on another machine (same folder and --storage)."""
    from sparsedepth.cli.progress import ProgressDisplay, print_failures
    from sparsedepth.config.sweep import read_definition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.results_folder import FAILED, read_attempts
    from sparsedepth.sweep.status import remaining_and_trunks
    from sparsedepth.sweep.storage import hide_url

    if given.storage:
        hide_url(given.storage)
    definition = read_definition(folder)
    if definition is None:
        raise ValueError(f"{folder} holds no sweep; run `sparsedepth sweep FILE --out {folder}` first")
    may_leave = leave_when_idle and not definition.adaptive
    max_attempts = max_attempts or read_attempts(folder)
    if may_leave and not remaining_and_trunks(Plan(definition), folder, max_attempts)[0]:
        return  # before torch is imported: the last tasks of an array find nothing to do
    from sparsedepth.sweep.driver import Driver

    machine = machine_of(given, max_attempts, nodes)
    driver = Driver(Plan(definition), folder, machine, given.storage, leaves_when_idle=leave_when_idle)
    with ProgressDisplay(definition, driver.plan.expected, folder) as driver.on_progress:
        result = driver.join()
    print_failures(result.states, folder)
    if result.stop():
        option.stop("stopped at a checkpoint; another worker can resume the runs", result.stop.exit_code)
    if any(state.state in FAILED for state in result.states):
        raise Exit(1)


def stop(
    folder: Annotated[Path, Argument(metavar="DIR", help="results folder of a sweep that runs on Slurm")],
) -> None:
    """Stop a sweep on Slurm: cancel queued tasks, checkpoint running ones. `sweep --on slurm` resumes it."""
    from sparsedepth.cluster import slurm
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.config.sweep import read_definition

    if not folder.is_dir() or (definition := read_definition(folder)) is None:
        raise ValueError(f"{folder} holds no sweep; give the results folder of a sweep on Slurm")
    if not (folder / "slurm").is_dir():
        raise ValueError(f"{folder} is not on Slurm: press Ctrl-C where its sweep runs")
    slurm.check_present()
    array = TaskArray(sweep=definition.name, results=folder)
    if not (count := array.stop()):
        raise ValueError(f"{folder} has no Slurm task; to stop a sweep in a terminal, press Ctrl-C there")
    print(f"stopped {count} tasks of {array.name}; run the same `sparsedepth sweep ... --on slurm` to resume")
