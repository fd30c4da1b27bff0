"""`sparsedepth plan`: what a sweep costs, before anything runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from sparsedepth.cli import calls
from sparsedepth.cli.cost import pricing_setup_here, show, show_toy
from sparsedepth.cli.on_slurm import Account, Array, Nodes, Partition, Sbatch, TimeLimit, array_options, planned
from sparsedepth.cli.train_sweep import Compile, Device, Gpus, GpusPerRun, Runtime, Settings, Workers


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    file: Annotated[
        Path | None, typer.Argument(help="definition of a sweep, a run or a toy (YAML); or give --vary")
    ] = None,
    scale: Annotated[str | None, typer.Option(help="a size that the definition offers, such as micro")] = None,
    settings: Settings = None,
    vary: Annotated[list[str] | None, typer.Option(help="a sweep without a file: --vary n_kv_heads=1,2,4")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="with --vary: replicates")] = None,
    base: Annotated[Path | None, typer.Option(help="with --vary: run configuration (YAML)")] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrate", help="time a few real steps of each shape; kept for this machine")
    ] = False,
    budget_hours: Annotated[float | None, typer.Option(min=0, help="refuse a sweep that takes longer")] = None,
    budget_gpu_gb: Annotated[float | None, typer.Option(min=0, help="refuse a run that needs more memory")] = None,
    on: Annotated[
        str | None,
        typer.Option(help="assume another machine's devices: cpu, a100, h100, h200, or slurm: a cluster"),
    ] = None,
    workers: Workers = None,
    gpus: Gpus = None,
    gpus_per_run: GpusPerRun = 1,
    runtime: Runtime = None,
    device: Device = "auto",
    compiled: Compile = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="results folder of the sweep: what it lacks is priced too")
    ] = None,
    format: Annotated[Literal["table", "json"], typer.Option(help="table or json")] = "table",
    partition: Partition = None,
    time: TimeLimit = None,
    array: Array = None,
    account: Account = None,
    nodes: Nodes = 1,
    sbatch: Sbatch = None,
) -> None:
    """Say what a sweep costs before anything runs: runs, parameters, FLOPs, tokens, memory, disk and time."""
    from sparsedepth.cli.input_file import kind_of
    from sparsedepth.cli.start import values_of, warn_of_slips
    from sparsedepth.cli.sweep_args import define, define_run, define_toy
    from sparsedepth.config.load import read_extended
    from sparsedepth.plan import price as pricing
    from sparsedepth.plan.budget import Budget

    kind = kind_of(read_extended(file)) if file else None
    if kind == "toy" and file:
        if on is not None and on not in pricing.DEVICES:
            raise ValueError(f"--on {on!r} is not known; choose of: {', '.join(pricing.DEVICES)}")
        show_toy(define_toy(file, scale, settings), on or "cpu", format)
        return
    if kind == "run" and file:
        if scale or vary or seeds or base:
            raise ValueError(f"{file} is a run; --scale, --vary, --seeds and --base belong to sweeps")
        definition = define_run(file, settings)
    else:
        definition = define(file, scale, settings, vary, seeds, base)
    warn_of_slips(values_of(definition))
    lines: list[str] = []
    on_cluster = "slurm" if on == "slurm" else None
    wanted = calls.runtime_of(runtime, device=device, compile=compiled)
    options = array_options(
        on_cluster, partition, time, array, account, nodes, sbatch, gpus, wanted, workers, gpus_per_run
    )
    if options:
        array_plan = planned(definition, options, out)
        setup, lines = options.pricing_setup(array_plan.tasks), array_plan.lines
    elif on is not None:
        if calibrated or gpus:
            raise ValueError(f"--on {on} assumes another machine; --calibrate and --gpus are about this one")
        if on not in pricing.DEVICES:
            raise ValueError(f"--on {on!r} is not known; choose of: {', '.join(pricing.DEVICES)}")
        setup = pricing.pricing_setup(
            calls.runtime_of(runtime, compile=compiled), device=on, workers=workers or 1, processes=gpus_per_run
        )
    else:
        machine = calls.machine_of(wanted, workers, gpus, gpus_per_run)
        setup = pricing_setup_here(definition, machine, calibrated=calibrated)
    show(definition, setup, Budget(hours=budget_hours, gigabytes=budget_gpu_gb), format, out)
    if format == "table" and lines:
        print(*lines, sep="\n")
