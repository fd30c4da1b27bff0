"""`sparsedepth plan`: what a sweep costs, and which effects it can detect."""

from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsedepth.cli import option, preflight
from sparsedepth.cli.start_sweep import definition_of, machine_for, runtime_config
from sparsedepth.words.plain_text import wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.plan.price import PricingSetup
    from sparsedepth.plan.tasks import Plan


@dataclass(frozen=True)
class PlanCommand(option.SlurmOptions, option.DefinitionOptions):
    """What is priced, and what it is assumed to run on."""

    file: Annotated[
        option.Input | None, typer.Argument(help="definition of a sweep or a run (YAML); or use --vary")
    ] = None
    _: KW_ONLY
    calibrated: Annotated[bool, typer.Option("--calibrate", help="time real steps of each model shape")] = False
    pilot: Annotated[Path | None, typer.Option(help="earlier results, for the noise between seeds")] = None
    seed_sd: Annotated[float | None, typer.Option(help="instead of --pilot: that noise, such as 0.05")] = None
    effect: Annotated[float | None, typer.Option(help="with either: print the seeds needed to detect this")] = None
    on: Annotated[str | None, typer.Option(help="another device: cpu, a100, h100, h200; or slurm")] = None
    out: Annotated[Path | None, typer.Option("-o", "--out", help="results folder: also price what remains")] = None


@option.command
def plan(
    given: PlanCommand,
    format: Annotated[Literal["table", "json"], typer.Option(help="table or json")] = "table",
) -> None:
    """Estimate what a sweep costs: FLOPs, tokens, memory, disk and time. With --pilot or --seed-sd, also the smallest
    effect of each setting that it can detect."""
    from sparsedepth.cli.input_file import content_of, kind_of, single_run_sweep
    from sparsedepth.cli.on_slurm import plan_array, request_of
    from sparsedepth.plan.estimate import DEVICES
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.results_folder import check_same_sweep

    file, on, out = given.file, given.on, given.out
    kind = kind_of(content_of(file)) if file else None
    if kind == "run" and (given.pilot, given.seed_sd, given.effect) != (None, None, None):
        raise ValueError(f"{file} is a run; --pilot, --seed-sd and --effect are for sweeps")
    if on not in (None, "slurm", *DEVICES):
        raise ValueError(f"--on {on!r} is not one of: {', '.join(DEVICES)}")
    if kind == "run" and file:
        if given.scale or given.vary or given.seeds or given.base:
            raise ValueError(f"{file} is a run; --scale, --vary, --seeds and --base are for sweeps")
        definition = single_run_sweep(file, given.set)
    else:
        definition = definition_of(given)
        if out is not None:
            check_same_sweep(out, definition)
    preflight.warn_of_unlikely_values(preflight.field_values(definition))
    if on in (None, "slurm"):  # another machine may have the text
        preflight.check_corpora(preflight.field_values(definition), out)
    plan = Plan(definition)
    power_lines, power_json = detectable_effects(plan, given.pilot, given.seed_sd, given.effect)
    request = request_of("slurm" if on == "slurm" else None, given)
    array_lines: list[str] = []
    if on is not None and given.calibrated:
        raise ValueError(f"--on {on} assumes another machine; --calibrate times steps on this one")
    if request:
        _, price, array_lines = plan_array(plan, request, out)
        setup = price.setup
    elif on is not None:
        setup = _setup_on(on, plan, given)
    else:
        setup = preflight.local_pricing_setup(plan, machine_for(plan, given, out), out, given.calibrated)
    preflight.print_price(plan, setup, format, out, power_json)
    if format == "table" and (lines := [*power_lines, *array_lines]):
        print(wrapped(lines), end="")


def _setup_on(on: str, plan: "Plan", given: PlanCommand) -> "PricingSetup":
    """Another machine, with one run at a time on each GPU unless --workers or measurements say more."""
    from sparsedepth.plan.price import pricing_setup, with_finished, workers_per_gpu

    gpus, per_run, runtime = given.gpus, given.gpus_per_run, runtime_config(given, stack=given.stack)
    if given.device != "auto":
        raise ValueError(f"--on {on} and --device {given.device} both name a device; give one of them")
    n_gpus = int(gpus) if gpus and gpus.isdecimal() else 0 if gpus else per_run
    if n_gpus < per_run and on != "cpu":
        raise ValueError(f"--gpus {gpus!r} with --on {on} must be how many there are, at least {per_run}")
    groups = 0 if on == "cpu" else n_gpus // per_run

    def setup_of(workers: int) -> "PricingSetup":
        n_workers = workers * (groups or 1)
        setup = pricing_setup(runtime, device=on, workers=n_workers, processes=per_run, gpus=groups)
        return with_finished(setup, given.out, plan.expected_runs())

    return setup_of(given.workers or (workers_per_gpu(plan.expected_runs(), setup_of) if groups else 1))


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
    from sparsedepth.effects.power import PilotNoise, measure_power, pilot_noise, power_table, power_text
    from sparsedepth.store.connection import open_store

    objective, tuned = definition.objective, tuple(definition.tune)
    if pilot is None:
        noise, source = PilotNoise(own=seed_sd or 0.0), "assumed"
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
