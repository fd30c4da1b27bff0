"""`sparsedepth sweep`, `train` and `work`: commands that train models."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsedepth.cli.on_slurm import (
    Account,
    Array,
    Nodes,
    On,
    Partition,
    Sbatch,
    TimeLimit,
    array_options,
    sweep_on_slurm,
)

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.sweep.driver import SweepResult

Out = Annotated[Path, typer.Option("-o", "--out", help="results folder; created if missing")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="override a field or a sweep key: --set n_layers=24; repeatable")
]
Vary = Annotated[
    list[str] | None,
    typer.Option(help="sweep without a file: --vary n_kv_heads=1,2,4; repeatable, all combinations run"),
]
Seeds = Annotated[int | None, typer.Option(min=1, help="with --vary: number of seeds per configuration")]
Base = Annotated[Path | None, typer.Option(help="with --vary: run configuration (YAML) shared by all runs")]
Scale = Annotated[str | None, typer.Option(help="size preset from the definition's `scales`, such as micro")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0")]
Compile = Annotated[bool, typer.Option("--compile", help="compile each block with torch.compile")]
Runtime = Annotated[
    list[str] | None,
    typer.Option(
        help="setting that changes results by rounding at most: --runtime micro_batch=4 --runtime checkpoint_seconds=60"
    ),
]
Workers = Annotated[int | None, typer.Option(help="runs in parallel; default one per GPU or core")]
Gpus = Annotated[
    str | None,
    typer.Option(help="GPUs to use, such as 0-7 or 0,2; default all. With --on slurm: GPUs per task, 1 or h100:2"),
]
GpusPerRun = Annotated[int, typer.Option(min=1, help="GPUs (on a CPU: processes) per run, with torchrun")]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="SPARSEDEPTH_STORAGE",
        help="postgresql://USER@HOST/DATABASE for the queue of several machines; default a journal file in DIR",
    ),
]
Stack = Annotated[
    str,
    typer.Option(help="train up to N runs of equal shape in one process as one model; auto: where faster; 1: never"),
]
MaxAttempts = Annotated[int, typer.Option(min=1, help="attempts per run before it counts as failed")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the estimated cost, as `plan` does, and exit")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="try failed runs again")]


def sweep(
    out: Out,
    file: Annotated[Path | None, typer.Argument(help="sweep definition (YAML); or use --vary")] = None,
    vary: Vary = None,
    seeds: Seeds = None,
    base: Base = None,
    scale: Scale = None,
    workers: Workers = None,
    gpus: Gpus = None,
    gpus_per_run: GpusPerRun = 1,
    storage: Storage = None,
    settings: Settings = None,
    runtime: Runtime = None,
    device: Device = "auto",
    compiled: Compile = False,
    stack: Stack = "auto",
    max_attempts: MaxAttempts = 2,
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    on: On = None,
    partition: Partition = None,
    time: TimeLimit = None,
    array: Array = None,
    account: Account = None,
    nodes: Nodes = 1,
    sbatch: Sbatch = None,
) -> None:
    """Run every configuration and seed of a sweep. Run the same command again to resume."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.sweep_args import sweep_definition
    from sparsedepth.config.load import parse_yaml

    definition = sweep_definition(file, scale, settings, vary, seeds, base)  # errors are reported before torch loads
    runtime_config = calls.runtime_config(runtime, device=device, compile=compiled, stack=parse_yaml(stack, "--stack"))
    options = array_options(
        on,
        partition=partition,
        time=time,
        array=array,
        account=account,
        nodes=nodes,
        sbatch=sbatch,
        gpus=gpus,
        runtime=runtime_config,
        workers=workers,
        gpus_per_run=gpus_per_run,
        max_attempts=max_attempts,
        storage=storage,
    )
    if options:
        sweep_on_slurm(definition, out, options, retry_failed=retry_failed, dry_run=dry_run)
        return

    from sparsedepth.cli.cost import price_line, print_price, remaining_price
    from sparsedepth.cli.progress import print_header
    from sparsedepth.cli.start import check_tokenizers, field_values
    from sparsedepth.plan.budget import Budget

    check_tokenizers(field_values(definition), out)
    machine = calls.machine_of(runtime_config, workers, gpus, gpus_per_run, max_attempts)
    driver = calls.make_driver(definition, out, machine, storage)
    price, expected = driver.price, driver.plan.expected
    assert price is not None
    at_least = " or more" if definition.tune else ""
    where = f"{expected} runs{at_least} into {out}, {machine.workers} at a time on {machine.described}"
    print_header(definition, driver.plan.notes(), where)
    if dry_run:
        print_price(definition, price.setup, Budget(), results=out if out.exists() else None)
        return
    print(f"cost: {price_line(price)}")
    remaining = remaining_price(definition, price.setup, out)
    if remaining and remaining.runs < price.runs:
        print(f"remaining: {price_line(remaining)}")
    _print_result(definition, out, calls.run_driver(driver, retry_failed=retry_failed), expected)


def _print_result(definition: "SweepDefinition", out: Path, result: "SweepResult", expected: int) -> None:
    """Print how the sweep ended and the ranking. Raises Exit unless every run is complete."""
    from sparsedepth.cli.progress import print_failures, print_ranking
    from sparsedepth.config.plain_text import visible
    from sparsedepth.store.checksums import MARKER
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
        print(f"{result.unfinished} runs are unfinished; run the same command again to resume", file=sys.stderr)
        raise typer.Exit(1)


def train(
    file: Annotated[Path, typer.Argument(help="run configuration (YAML)")],
    out: Out,
    settings: Settings = None,
    runtime: Runtime = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default all")] = None,
    compiled: Compile = False,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="run or Hugging Face folder with the initial weights; default random weights"),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train and measure one model. Run the same command again to resume."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.run_progress import print_summary

    if dry_run:
        from sparsedepth.cli.cost import local_pricing_setup, print_price
        from sparsedepth.cli.sweep_args import single_run_sweep
        from sparsedepth.plan.budget import Budget

        definition = single_run_sweep(file, settings, calls.start_of(start))
        runtime_config = calls.runtime_config(runtime, device=device, threads=threads, compile=compiled)
        setup = local_pricing_setup(definition, calls.machine_of(runtime_config, 1))
        print_price(definition, setup, Budget())
        return
    try:
        run = calls.train(
            file, out, set=settings, from_=start, runtime=runtime, device=device, threads=threads, compile=compiled
        )
    except calls.StoppedAtCheckpoint as stopped:
        print(stopped, file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None

    from sparsedepth.train.devices import world

    if world()[0] == 0:  # the first of several processes
        print(f"run {run.run_id} in {run.folder}")
        print_summary(run.summary)


def work(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep started elsewhere")],
    storage: Storage = None,
    workers: Workers = None,
    gpus: Gpus = None,
    gpus_per_run: GpusPerRun = 1,
    runtime: Runtime = None,
    device: Device = "auto",
    stack: Stack = "auto",
    max_attempts: MaxAttempts = 2,
    nodes: Annotated[int, typer.Option(min=1, help="nodes per run, out of this Slurm task's")] = 1,
    leave_when_idle: Annotated[
        bool,
        typer.Option("--leave-when-idle", help="exit when the queue is empty, even if other workers' runs may return"),
    ] = False,
) -> None:
    """Add this machine's workers to a sweep started on another machine (same folder and --storage)."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.progress import ProgressDisplay
    from sparsedepth.config.load import parse_yaml
    from sparsedepth.config.sweep import read_definition
    from sparsedepth.sweep.status import remaining_runs
    from sparsedepth.sweep.storage import hide_url

    if storage:
        hide_url(storage)
    definition = read_definition(folder)
    if definition is None:
        raise ValueError(f"{folder} holds no sweep; run `sparsedepth sweep FILE --out {folder}` first")
    if leave_when_idle and not definition.adaptive and not remaining_runs(definition, folder):
        return  # before torch is imported: the last tasks of an array find nothing to do
    from sparsedepth.sweep.driver import Driver

    runtime_config = calls.runtime_config(runtime, device=device, stack=parse_yaml(stack, "--stack"))
    machine = calls.machine_of(runtime_config, workers, gpus, gpus_per_run, max_attempts, nodes)
    driver = Driver(definition, folder, machine, storage, leaves_when_idle=leave_when_idle)
    with ProgressDisplay(definition, driver.plan.expected, folder) as driver.on_progress:
        stop = driver.join().stop
    if stop():
        print("stopped at a checkpoint; another worker can resume the runs", file=sys.stderr)
        raise typer.Exit(stop.exit_code)
