"""`sparsedepth plan`: what a sweep costs, before anything runs."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsedepth.cli import calls
from sparsedepth.cli.cost import pricing_setup_here, show, show_toy
from sparsedepth.cli.on_slurm import Account, Array, Nodes, Partition, Sbatch, TimeLimit, array_options, planned
from sparsedepth.cli.train_sweep import Compile, Device, Gpus, GpusPerRun, Runtime, Scale, Settings, Workers

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition


def plan(
    file: Annotated[
        Path | None, typer.Argument(help="definition of a sweep, a run or a toy (YAML); or give --vary")
    ] = None,
    scale: Scale = None,
    settings: Settings = None,
    vary: Annotated[list[str] | None, typer.Option(help="a sweep without a file: --vary n_kv_heads=1,2,4")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="with --vary: replicates")] = None,
    base: Annotated[Path | None, typer.Option(help="with --vary: run configuration (YAML)")] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrate", help="time a few real steps of each shape; kept for this machine")
    ] = False,
    budget_hours: Annotated[float | None, typer.Option(min=0, help="refuse a sweep that takes longer")] = None,
    budget_gpu_gb: Annotated[float | None, typer.Option(min=0, help="refuse a run that needs more memory")] = None,
    pilot: Annotated[
        Path | None, typer.Option(help="results whose noise tells which effects the design can detect")
    ] = None,
    seed_sd: Annotated[
        float | None, typer.Option(help="in its place, an assumed standard deviation between seeds, such as 0.05")
    ] = None,
    effect: Annotated[
        float | None, typer.Option(help="with either, the effect that is wanted: how many seeds does it need?")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="assume another machine's devices: cpu, a100, h100, h200, or slurm: a cluster")
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
    """Say what a sweep costs before anything runs: runs, parameters, FLOPs, tokens, memory, disk and time; and with
    --pilot or --seed-sd what it will tell: the effect of each setting that it can detect."""
    from sparsedepth.cli.input_file import kind_of
    from sparsedepth.cli.start import check_corpora, values_of, warn_of_slips
    from sparsedepth.cli.sweep_args import define, define_run, define_toy
    from sparsedepth.config.load import read_extended
    from sparsedepth.config.plain_text import visible
    from sparsedepth.plan import price as pricing
    from sparsedepth.plan.budget import Budget
    from sparsedepth.plan.tasks import Plan

    kind = kind_of(read_extended(file)) if file else None
    if kind in ("toy", "run") and (pilot, seed_sd, effect) != (None, None, None):
        raise ValueError(f"{file} is a {kind}; --pilot, --seed-sd and --effect ask what a sweep can detect")
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
    if on in (None, "slurm"):  # another machine may have the text
        check_corpora(values_of(definition), out)
    lines, more = power_of(definition, pilot, seed_sd, effect)
    on_cluster = "slurm" if on == "slurm" else None
    wanted = calls.runtime_of(runtime, device=device, compile=compiled)
    options = array_options(
        on_cluster,
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
    )
    if options:
        array_plan = planned(definition, options, out)
        setup, lines = options.pricing_setup(array_plan.tasks), [*lines, *array_plan.lines]
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
    for note in Plan(definition).notes():
        print(f"note: {visible(note)}", file=sys.stderr)
    show(definition, setup, Budget(hours=budget_hours, gigabytes=budget_gpu_gb), format, out, more)
    if format == "table" and lines:
        from sparsedepth.store.render import wrapped

        print(wrapped(lines), end="")


def power_of(
    definition: "SweepDefinition", pilot: Path | None, seed_sd: float | None, effect: float | None
) -> tuple[list[str], dict[str, Any]]:
    """What the sweep can detect at the noise of a pilot, or at one that is assumed, as lines and for JSON; nothing
    where neither is given."""
    if pilot is None and seed_sd is None:
        if effect is not None:
            raise ValueError(f"--effect {effect:g} needs the noise of a run: --pilot RESULTS, or --seed-sd 0.05")
        return [], {}
    if pilot is not None and seed_sd is not None:
        raise ValueError(f"--pilot {pilot} and --seed-sd {seed_sd:g} both tell the noise of a run; give one")
    if definition.sampler != "grid":
        raise ValueError(
            f"sampler {definition.sampler!r} proposes points of which no two differ in one choice alone: such a sweep "
            "has no effects to detect; use sampler 'grid'"
        )
    from sparsedepth.effects.power import Noise, choice_text, measure_power, pilot_noise, power_table, power_text
    from sparsedepth.plan.price import expected_runs
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.render import compact

    objective, tuned = definition.objective, tuple(definition.tune)
    if pilot is None:
        noise, source = Noise(own=seed_sd or 0.0), "assumed"
    else:
        with open_store(pilot) as store:
            noise, source = pilot_noise(store.frame("select * from runs"), objective), f"of {pilot}"
    configs = [config for config in expected_runs(definition)[0] if config.seed in definition.result_seeds]
    powers = measure_power(configs, objective, noise, tuned, effect)
    if not powers:
        raise ValueError(f"no two runs of sweep {definition.name!r} differ in one choice alone: no effect to detect")
    table = compact(power_table(powers, objective, effect), ("baseline",))
    values = {name: len(grid) for name, grid in definition.tune.items()}
    n_seeds = len(definition.tuning_seeds), len(definition.seeds)
    choice = [choice_text(noise, objective, values, *n_seeds)] if tuned else []
    return [power_text(noise, source, objective, tuned, effect), *choice, table], {
        "power": [asdict(one) for one in powers]
    }
