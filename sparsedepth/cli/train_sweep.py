"""Commands that make runs."""

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

Out = Annotated[Path, typer.Option("-o", "--out", help="results folder; made if missing")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="override a field, or a key of a sweep: --set n_layers=24; repeatable")
]
Scale = Annotated[str | None, typer.Option(help="a size that the definition offers, such as micro")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0")]
Compile = Annotated[bool, typer.Option("--compile", help="compile each block with torch.compile")]
Runtime = Annotated[
    list[str] | None,
    typer.Option(help="how to compute, not what: --runtime micro_batch=4, checkpoint_seconds=60, ...; repeatable"),
]
Workers = Annotated[int | None, typer.Option(help="runs at a time; default one for each GPU, or core")]
Gpus = Annotated[
    str | None,
    typer.Option(help="GPUs to use, such as 0-7 or 0,2; default all; --on slurm: how many a task has, 1 or h100:2"),
]
GpusPerRun = Annotated[int, typer.Option(min=1, help="GPUs (on a CPU: processes) of one run, under torchrun")]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="SPARSEDEPTH_STORAGE",
        help="postgresql://USER@HOST/DATABASE that holds the queue, for many machines; default a journal in DIR",
    ),
]
Stack = Annotated[
    str, typer.Option(help="runs of one shape that a process trains as one model, at most: auto (where it pays), or 1")
]
MaxAttempts = Annotated[int, typer.Option(min=1, help="how often a failing run is tried")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what it costs, as `plan` does, and end")]
RetryFailed = Annotated[bool, typer.Option("--retry-failed", help="forget earlier failures")]


def sweep(
    out: Out,
    file: Annotated[Path | None, typer.Argument(help="sweep definition (YAML); or give --vary")] = None,
    vary: Annotated[
        list[str] | None, typer.Option(help="a sweep without a file: --vary n_kv_heads=1,2,4; repeatable, crossed")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="with --vary: replicates, seeds 0, 1, ...")] = None,
    base: Annotated[Path | None, typer.Option(help="with --vary: run configuration (YAML) that the runs share")] = None,
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
    """Run a sweep: every configuration and seed of a definition. The same command continues where it stopped."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.sweep_args import define
    from sparsedepth.config.load import parse_yaml

    definition = define(file, scale, settings, vary, seeds, base)  # a mistake is told before torch is imported
    wanted = calls.runtime_of(runtime, device=device, compile=compiled, stack=parse_yaml(stack, "--stack"))
    options = array_options(
        on,
        partition=partition,
        time=time,
        array=array,
        account=account,
        nodes=nodes,
        sbatch=sbatch,
        gpus=gpus,
        runtime=wanted,
        workers=workers,
        gpus_per_run=gpus_per_run,
        max_attempts=max_attempts,
        storage=storage,
    )
    if options:
        sweep_on_slurm(definition, out, options, retry_failed=retry_failed, dry_run=dry_run)
        return

    from sparsedepth.cli.cost import one_line, price_left, show
    from sparsedepth.cli.progress import print_head
    from sparsedepth.cli.start import check_tokenizers, values_of
    from sparsedepth.plan.budget import Budget

    check_tokenizers(values_of(definition), out)
    machine = calls.machine_of(wanted, workers, gpus, gpus_per_run, max_attempts)
    driver = calls.make_driver(definition, out, machine, storage)
    cost, expected = driver.price, driver.plan.expected
    assert cost is not None
    at_least = " or more" if definition.tune else ""
    where = f"{expected} runs{at_least} into {out}, {machine.workers} at a time on {machine.described}"
    print_head(definition, driver.plan.notes(), where)
    if dry_run:
        show(definition, cost.setup, Budget(), results=out if out.exists() else None)
        return
    print(f"price: {one_line(cost)}")
    left = price_left(definition, cost.setup, out)
    if left and left.runs < cost.runs:
        print(f"left: {one_line(left)}")
    _print_end(definition, out, calls.run_driver(driver, retry_failed=retry_failed), expected)


def _print_end(definition: "SweepDefinition", out: Path, result: "SweepResult", expected: int) -> None:
    """How a sweep ended, the ranking, and what to do next. Raises Exit unless every run is complete."""
    from sparsedepth.cli.progress import print_ended, print_results
    from sparsedepth.config.plain_text import visible
    from sparsedepth.store.checksums import MARKER
    from sparsedepth.sweep.status import of_earlier

    counts = Counter(state.state for state in result.states)
    print_ended(result.states, out)
    for reason, count in result.refused.items():
        print(f"{count} of {expected} proposals not run: {visible(reason)}")
    if result.stop():
        complete = f"{counts['complete']} of {expected} runs complete"
        print(f"stopped with {complete}; the same command continues", file=sys.stderr)
        raise typer.Exit(result.stop.exit_code)
    if earlier := of_earlier((path.parent.name for path in out.glob(f"runs/*/{MARKER}")), result.states):
        print(earlier)
    if counts["complete"]:
        print_results(definition, out)
    if result.unfinished:
        print(f"{result.unfinished} of what was asked for is not there; the same command continues", file=sys.stderr)
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
        typer.Option("--from", help="run or Hugging Face folder whose weights it starts from; default initial weights"),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train and measure one model. The same command continues a run that was stopped."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.run_progress import print_summary

    if dry_run:
        from sparsedepth.cli.cost import pricing_setup_here, show
        from sparsedepth.cli.sweep_args import define_run
        from sparsedepth.plan.budget import Budget

        definition = define_run(file, settings, calls.start_of(start))
        wanted = calls.runtime_of(runtime, device=device, threads=threads, compile=compiled)
        show(definition, pricing_setup_here(definition, calls.machine_of(wanted, 1)), Budget())
        return
    how: dict[str, Any] = {"runtime": runtime, "device": device, "threads": threads, "compile": compiled}
    try:
        run = calls.train(file, out, set=settings, from_=start, **how)
    except calls.StoppedAtCheckpoint as stopped:
        print(stopped, file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None

    from sparsedepth.train.devices import world

    if world()[0] == 0:  # of several processes the first speaks
        print(f"run {run.run_id} in {run.folder}")
        print_summary(run.summary)


def work(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="results folder of a sweep that runs elsewhere")],
    storage: Storage = None,
    workers: Workers = None,
    gpus: Gpus = None,
    gpus_per_run: GpusPerRun = 1,
    runtime: Runtime = None,
    device: Device = "auto",
    stack: Stack = "auto",
    max_attempts: MaxAttempts = 2,
    nodes: Annotated[int, typer.Option(min=1, help="nodes of this Slurm task that one run computes on")] = 1,
    leave_when_idle: Annotated[
        bool, typer.Option("--leave-when-idle", help="end once nothing waits, though a run of others may yet come back")
    ] = False,
) -> None:
    """Add this machine's workers to a sweep that was started on another one, with the same folder and --storage."""
    from sparsedepth.cli import calls
    from sparsedepth.cli.progress import Watcher
    from sparsedepth.config.load import parse_yaml
    from sparsedepth.config.sweep import read_definition
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.runs_left import runs_left
    from sparsedepth.sweep.storage import hide

    if storage:
        hide(storage)
    definition = read_definition(folder)
    if definition is None:
        raise ValueError(f"{folder} is no folder of a sweep; start `sparsedepth sweep FILE --out {folder}` first")
    if leave_when_idle and not definition.adaptive and not runs_left(definition, folder):
        return  # before torch is imported: the last tasks of an array find nothing to do
    from sparsedepth.sweep import driver

    wanted = calls.runtime_of(runtime, device=device, stack=parse_yaml(stack, "--stack"))
    used = calls.machine_of(wanted, workers, gpus, gpus_per_run, max_attempts, nodes)
    with Watcher(definition, Plan(definition).expected, folder) as watcher:
        stop = driver.work(folder, used, watcher, storage, leaves_when_idle=leave_when_idle).stop
    if stop():
        print("stopped at a checkpoint; the runs continue when they are taken again", file=sys.stderr)
        raise typer.Exit(stop.exit_code)
