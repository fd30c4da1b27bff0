"""`sparsedepth plan`, `sweep`, `train`, `work`, `stop`: commands that price runs, train models, or stop them on Slurm.
`plan` says what a sweep costs, and which effects it can detect."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsedepth.cli import calls, option, preflight
from sparsedepth.files import MARKER
from sparsedepth.words.plain_text import visible, wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.price import PricingSetup
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.driver import SweepResult


@option.of_call(calls.sweep, option.slurm, without=("out", "storage", "stack", "max_attempts", "retry_failed"))
def plan(
    given: option.Given,
    file: Annotated[Path | None, typer.Argument(help="definition of a sweep or a run (YAML); or use --vary")] = None,
    calibrated: Annotated[bool, typer.Option("--calibrate", help="time real steps of each model shape")] = False,
    pilot: Annotated[Path | None, typer.Option(help="earlier results, for the noise between seeds")] = None,
    seed_sd: Annotated[float | None, typer.Option(help="instead of --pilot: that noise, such as 0.05")] = None,
    effect: Annotated[float | None, typer.Option(help="with either: print the seeds needed to detect this")] = None,
    on: Annotated[str | None, typer.Option(help="another device: cpu, a100, h100, h200; or slurm")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="results folder: also price what remains")] = None,
    format: Annotated[Literal["table", "json"], typer.Option(help="table or json")] = "table",
) -> None:
    """Estimate what a sweep costs: FLOPs, tokens, memory, disk and time. With --pilot or --seed-sd, also the smallest
    effect of each setting that it can detect."""
    from sparsedepth.cli.input_file import kind_of, single_run_sweep
    from sparsedepth.cli.on_slurm import array_options, plan_array
    from sparsedepth.config.load import read_extended
    from sparsedepth.plan.estimate import DEVICES
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.results_folder import check_same_sweep

    kind = kind_of(read_extended(file)) if file else None
    if kind == "run" and (pilot, seed_sd, effect) != (None, None, None):
        raise ValueError(f"{file} is a run; --pilot, --seed-sd and --effect are for sweeps")
    if on not in (None, "slurm", *DEVICES):
        raise ValueError(f"--on {on!r} is not one of: {', '.join(DEVICES)}")
    if kind == "run" and file:
        if any(given[name] for name in ("scale", "vary", "seeds", "base")):
            raise ValueError(f"{file} is a run; --scale, --vary, --seeds and --base are for sweeps")
        definition = single_run_sweep(file, given["set"])
    else:
        definition = calls.definition_of(given)
        if out is not None:
            check_same_sweep(out, definition)
    preflight.warn_of_unlikely_values(preflight.field_values(definition))
    if on in (None, "slurm"):  # another machine may have the text
        preflight.check_corpora(preflight.field_values(definition), out)
    plan = Plan(definition)
    power_lines, power_json = detectable_effects(plan, pilot, seed_sd, effect)
    options = array_options("slurm" if on == "slurm" else None, given)
    array_lines: list[str] = []
    if on is not None and calibrated:
        raise ValueError(f"--on {on} assumes another machine; --calibrate times steps on this one")
    if options:
        _, price, array_lines = plan_array(plan, options, out)
        setup = price.setup
    elif on is not None:
        setup = _setup_on(on, plan, given, out)
    else:
        setup = preflight.local_pricing_setup(plan, calls.machine_for(plan, given, out), out, calibrated)
    preflight.print_price(plan, setup, format, out, power_json)
    if format == "table" and (lines := [*power_lines, *array_lines]):
        print(wrapped(lines), end="")


def _setup_on(on: str, plan: "Plan", given: option.Given, out: Path | None) -> "PricingSetup":
    """Another machine, with one run at a time on each GPU unless --workers or measurements say more."""
    from sparsedepth.plan.price import pricing_setup, with_finished, workers_per_gpu

    gpus, per_run, runtime = given["gpus"], given["gpus_per_run"], calls.runtime_config(given)
    if given["device"] != "auto":
        raise ValueError(f"--on {on} and --device {given['device']} both name a device; give one of them")
    n_gpus = int(gpus) if gpus and gpus.isdecimal() else 0 if gpus else per_run
    if n_gpus < per_run and on != "cpu":
        raise ValueError(f"--gpus {gpus!r} with --on {on} must be how many there are, at least {per_run}")
    groups = 0 if on == "cpu" else n_gpus // per_run

    def setup_of(workers: int) -> "PricingSetup":
        n_workers = workers * (groups or 1)
        setup = pricing_setup(runtime, device=on, workers=n_workers, processes=per_run, gpus=groups)
        return with_finished(setup, out, plan.expected_runs())

    return setup_of(given["workers"] or (workers_per_gpu(plan.expected_runs(), setup_of) if groups else 1))


def detectable_effects(
    plan: "Plan", pilot: Path | None, seed_sd: float | None, effect: float | None
) -> tuple[list[str], dict[str, Any]]:
    """The smallest effects that the sweep can detect, given a pilot's noise or an assumed one: lines, and JSON. Empty
    without either."""
    definition = plan.definition
    if pilot is None and seed_sd is None:
        if effect is not None:
            raise ValueError(f"--effect {effect:g} needs the noise between seeds: --pilot RESULTS or --seed-sd 0.05")
        return [], {}
    if pilot is not None and seed_sd is not None:
        raise ValueError(f"--pilot {pilot} and --seed-sd {seed_sd:g} both set the noise between seeds; give one")
    if definition.sampler != "grid":
        told = f"sampler {definition.sampler!r} changes several settings at once"
        raise ValueError(f"{told}: no single effect; use 'grid'")
    from sparsedepth.effects.power import Noise, measure_power, pilot_noise, power_table, power_text
    from sparsedepth.store.connection import open_store

    objective, tuned = definition.objective, tuple(definition.tune)
    if pilot is None:
        noise, source = Noise(own=seed_sd or 0.0), "assumed"
    else:
        with open_store(pilot) as store:
            noise, source = pilot_noise(store.frame("select * from runs"), objective), f"of {pilot}"
    configs = [config for config in plan.expected_runs() if config.seed in definition.result_seeds]
    powers = measure_power(configs, objective, noise, tuned, effect)
    if not powers:
        raise ValueError(f"no two runs of sweep {definition.name!r} differ in one setting; vary a field in 'space'")
    table = fitted_table(power_table(powers, objective, effect)).text
    lines = [power_text(noise, source, objective, tuned, effect), table]
    return lines, {"power": [asdict(power) for power in powers]}


@option.of_call(calls.sweep, option.slurm)
def sweep(
    given: option.Given,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the cost, as `plan` does, and exit")] = False,
    on: Annotated[str | None, typer.Option(help="slurm: submit a job array from this login node")] = None,
) -> None:
    """Run every configuration and seed of a sweep. Run the same command again to resume."""
    from sparsedepth.cli.on_slurm import array_options, sweep_on_slurm
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
    setup = preflight.local_pricing_setup(plan, machine, out, calibrated=False)
    if dry_run:
        preflight.print_price(plan, setup, results=out if out.exists() else None)
        return
    at_least = " or more" if definition.tune else ""
    where = f"{expected} runs{at_least} into {out}, {machine.workers} at a time on {machine.described}"
    print_header(definition, [where, *plan.notes()])
    total = price(plan, setup)
    print(f"cost: {preflight.price_line(total)}")
    remaining = preflight.remaining_price(plan, setup, out)
    if remaining and remaining.runs < total.runs:
        print(f"remaining: {preflight.price_line(remaining)}")
    _print_result(definition, out, calls.run_driver(driver, retry_failed=given["retry_failed"]), expected)


def _print_result(definition: "SweepDefinition", out: Path, result: "SweepResult", expected: int) -> None:
    """Print how the sweep ended and the ranking. Raises Exit unless every run is complete."""
    from sparsedepth.cli.progress import print_failures, print_ranking
    from sparsedepth.sweep.results_folder import FAILED
    from sparsedepth.sweep.status import other_runs_note

    n_complete = sum(state.state == "complete" for state in result.states)
    print_failures(result.states, out)
    for reason, count in result.refused.items():
        print(f"{count} of {definition.n_trials or expected} proposals not run: {visible(reason)}")
    if result.stop():
        complete = f"{n_complete} of {max(expected, len(result.states))} runs complete"  # tuning may have added some
        print(f"stopped with {complete}; run the same command again to resume", file=sys.stderr)
        raise typer.Exit(result.stop.exit_code)
    if note := other_runs_note((path.parent.name for path in out.glob(f"runs/*/{MARKER}")), result.states):
        print(note)
    if n_complete:
        print_ranking(definition, out)
    if result.unfinished:
        failed = any(state.state in FAILED for state in result.states)
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

    from sparsedepth.store.degeneracy import notes_on_run
    from sparsedepth.train.devices import world
    from sparsedepth.words.plain_text import wrapped

    if world()[0] == 0:  # the first of several processes
        marker = run.folder / MARKER
        was_complete = before.get(marker) == marker.stat().st_ino  # a damaged run is repeated, with a new marker
        print(f"run {run.run_id} in {run.folder}{', complete before: nothing was trained' if was_complete else ''}")
        print_summary(run.summary)
        print(wrapped(f"note: {note}" for note in notes_on_run({**run.config.model_dump(), **run.summary})), end="")


@option.of_call(calls.sweep, only=("storage", "workers", "gpus", "gpus_per_run", "runtime", "device", "stack"))
def work(
    given: option.Given,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep started elsewhere")],
    nodes: Annotated[int, typer.Option(min=1, help="nodes per run, out of this Slurm task's")] = 1,
    leave_when_idle: Annotated[bool, typer.Option("--leave-when-idle", help="exit when the queue is empty")] = False,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="attempts per run; default the sweep's")] = None,
) -> None:
    """Add this machine's workers to a sweep started on another machine (same folder and --storage)."""
    from sparsedepth.cli.progress import ProgressDisplay, print_failures
    from sparsedepth.config.sweep import read_definition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.results_folder import FAILED, read_attempts
    from sparsedepth.sweep.status import remaining_runs
    from sparsedepth.sweep.storage import hide_url

    if given["storage"]:
        hide_url(given["storage"])
    definition = read_definition(folder)
    if definition is None:
        raise ValueError(f"{folder} holds no sweep; run `sparsedepth sweep FILE --out {folder}` first")
    may_leave = leave_when_idle and not definition.adaptive
    max_attempts = max_attempts or read_attempts(folder)
    if may_leave and not remaining_runs(Plan(definition), folder, max_attempts):
        return  # before torch is imported: the last tasks of an array find nothing to do
    from sparsedepth.sweep.driver import Driver

    machine = calls.machine_of({**given, "nodes": nodes, "max_attempts": max_attempts})
    driver = Driver(Plan(definition), folder, machine, given["storage"], leaves_when_idle=leave_when_idle)
    with ProgressDisplay(definition, driver.plan.expected, folder) as driver.on_progress:
        result = driver.join()
    print_failures(result.states, folder)
    if result.stop():
        print("stopped at a checkpoint; another worker can resume the runs", file=sys.stderr)
        raise typer.Exit(result.stop.exit_code)
    if any(state.state in FAILED for state in result.states):
        raise typer.Exit(1)


def stop(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep that runs on Slurm")],
) -> None:
    """Stop a sweep on Slurm: cancel queued tasks, checkpoint running ones. `sweep --on slurm` resumes it."""
    from sparsedepth.cluster import slurm
    from sparsedepth.cluster.array import TaskArray
    from sparsedepth.config.sweep import read_definition

    if not folder.is_dir() or (definition := read_definition(folder)) is None:
        raise ValueError(f"{folder} holds no sweep; give the results folder of a sweep on Slurm")
    slurm.check_present()
    array = TaskArray(sweep=definition.name, results=folder)
    if not (count := array.stop()):
        raise ValueError(f"{folder} has no Slurm task; to stop a sweep in a terminal, press Ctrl-C there")
    print(f"stopped {count} tasks of {array.name}; run the same `sparsedepth sweep ... --on slurm` to resume")
