"""`sparsedepth plan`: what a sweep costs, and which effects it can detect."""

from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from sparsedepth.cli import option, preflight, pricing
from sparsedepth.cli.option import DefinitionOptions, Folder, Input, SlurmOptions
from sparsedepth.cli.start_sweep import definition_of, machine_for, runtime_config
from sparsedepth.words.plain_text import commas, wrapped
from sparsedepth.words.price import array_lines, forecast_lines
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.cli.on_slurm import ArrayPlan
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.effects.power import PilotNoise, Power
    from sparsedepth.plan.forecast import Forecast
    from sparsedepth.plan.price import PricingSetup
    from sparsedepth.plan.tasks import Plan


@dataclass(frozen=True)
class PlanCommand(SlurmOptions, DefinitionOptions):
    """What a sweep costs on this machine or another (`priced`), and with `pilot` or `seed_sd` the effects that it can
    detect (`power`). Raises ValueError for what cannot be priced."""

    file: Annotated[Input | None, Argument(help="definition of a sweep or a run (YAML); or use --vary")] = None
    _: KW_ONLY
    calibrated: Annotated[bool, Option("--calibrate", help="time real steps of each model shape")] = False
    pilot: Annotated[
        Folder | None,
        Option(help="earlier results, for the noise; of a ladder, or its table"),
    ] = None
    gpus: Annotated[str | None, Option(help="as of sweep; with --on h100: how many")] = None
    seed_sd: Annotated[float | None, Option(help="instead of --pilot: that noise, such as 0.05")] = None
    effect: Annotated[float | None, Option(help="with either: print the seeds needed to detect this")] = None
    on: Annotated[str | None, Option(help="another device: cpu, a100, h100, h200; or slurm")] = None
    out: Annotated[Folder | None, Option("-o", "--out", help="results folder: also price what remains")] = None

    @property
    def results(self) -> Path | None:
        return option.path_of_file(self.out)

    def compute(self) -> "SweepPlan":
        from sparsedepth.cli.on_slurm import plan_array, request_of
        from sparsedepth.plan.estimate import DEVICES
        from sparsedepth.plan.tasks import Plan

        if self.on not in (None, "slurm", *DEVICES):
            raise ValueError(f"--on {self.on!r} is not one of: {commas(DEVICES)}")
        definition = self._definition()
        preflight.warn_of_unlikely_values(preflight.field_values(definition))
        if self.on in (None, "slurm"):  # another machine may have the text
            preflight.check_corpora(preflight.field_values(definition), self.results)
        plan = Plan(definition)
        power = detectable_effects(plan, None if self.pilot is None else Path(self.pilot), self.seed_sd, self.effect)
        request = request_of("slurm" if self.on == "slurm" else None, self)
        array = plan_array(plan, request, self.results) if request else None
        if self.on is not None and self.calibrated:
            raise ValueError(f"--on {self.on} assumes another machine; --calibrate times steps on this one")
        if array:
            setup = array.price.setup
        elif self.on is not None:
            setup = _setup_on(self.on, plan, self)
        else:
            machine = machine_for(plan, self, self.results)
            setup = pricing.local_pricing_setup(plan, machine, self.results, self.calibrated)
        priced = pricing.priced_sweep(plan, setup, self.results)
        forecasts = [] if self.on else pricing.forecasts(plan)
        return SweepPlan(plan=plan, priced=priced, power=power, array=array, forecasts=forecasts)

    def _definition(self) -> "SweepDefinition":
        """The sweep, or the run as a sweep of one."""
        from sparsedepth.cli.input_file import content_of, kind_of, single_run_sweep
        from sparsedepth.sweep.results_folder import check_same_sweep

        file = self.file
        if not file or kind_of(content_of(file)) != "run":
            definition = definition_of(self)
            if self.results is not None:
                check_same_sweep(self.results, definition)
            return definition
        if (self.pilot, self.seed_sd, self.effect) != (None, None, None):
            raise ValueError(f"{file} is a run; --pilot, --seed-sd and --effect are for sweeps")
        if self.scale or self.vary or self.seeds or self.base:
            raise ValueError(f"{file} is a run; --scale, --vary, --seeds and --base are for sweeps")
        return single_run_sweep(file, self.set)


@dataclass(frozen=True, kw_only=True)
class DetectableEffects:
    """The smallest effect of each setting that a sweep can detect, at an assumed or measured noise."""

    powers: "list[Power]"
    """None of a ladder without a pilot."""
    noise: "PilotNoise | None" = None
    source: str = ""
    """'assumed', or the pilot."""
    objective: str
    unit: str
    is_ladder: bool = False
    """Powers are then ln of a multiplier, and the noise is of ln loss."""
    tuned: tuple[str, ...] = ()
    effect: float | None = None
    """The one for which seeds are wanted."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What `plan` tells."""

    plan: "Plan"
    priced: pricing.PricedSweep
    power: DetectableEffects | None
    array: "ArrayPlan | None"
    forecasts: "list[Forecast]"
    """Of the shortest run of each depth, where the text can be counted here."""


@option.command
def plan(
    given: PlanCommand,
    format: Annotated[Literal["table", "json"], Option(help="table or json")] = "table",
) -> None:
    """Estimate what a sweep costs: FLOPs, tokens, memory, disk and time. With --pilot or --seed-sd, also the smallest
    effect of each setting that it can detect."""
    from sparsedepth.effects.power import power_table
    from sparsedepth.words.power import power_text

    found = given.compute()
    power = found.power
    more = {"power": [asdict(row) for row in power.powers]} if power else {}
    more |= {"forecasts": [row._asdict() for row in found.forecasts]} if found.forecasts else {}
    pricing.print_price(found.plan, found.priced, format, **more)
    if format == "table":
        lines = forecast_lines(found.forecasts)
        lines += [power_text(power)] if power else []
        if power and power.powers:
            lines.append(fitted_table(power_table(power.powers, power.unit, power.effect)).text)
        lines += array_lines(found.array) if found.array else []
        print(wrapped(lines), end="")


def _setup_on(on: str, plan: "Plan", given: PlanCommand) -> "PricingSetup":
    """Another machine, with one run at a time on each GPU unless --workers or measurements say more."""
    from sparsedepth.plan.price import pricing_setup, with_finished, workers_per_gpu

    gpus = given.gpus
    per_run = given.gpus_per_run
    runtime = runtime_config(given, stack=given.stack)
    if given.device != "auto":
        raise ValueError(f"--on {on} and --device {given.device} both name a device; give one of them")
    n_gpus = int(gpus) if gpus and gpus.isdecimal() else 0 if gpus else per_run
    if n_gpus < per_run and on != "cpu":
        raise ValueError(f"--gpus {gpus!r} with --on {on} must be how many there are, at least {per_run}")
    groups = 0 if on == "cpu" else n_gpus // per_run

    def setup_of(workers: int) -> "PricingSetup":
        n_workers = workers * (groups or 1)
        setup = pricing_setup(runtime, device=on, workers=n_workers, processes=per_run, gpus=groups)
        return with_finished(setup, given.results, plan.expected_runs())

    return setup_of(given.workers or (workers_per_gpu(plan.expected_runs(), setup_of) if groups else 1))


def detectable_effects(
    plan: "Plan", pilot: Path | None, seed_sd: float | None, effect: float | None
) -> DetectableEffects | None:
    """The smallest effects that the sweep can detect, given a pilot's noise or an assumed one; None without either."""
    from sparsedepth.quantities import unit_of

    definition = plan.definition
    if (found := _of_ladder(plan, pilot)) is not None:
        if seed_sd is not None or effect is not None:
            raise ValueError("--seed-sd and --effect are for several seeds; for one run at each budget give --pilot")
        return found
    if pilot is None and seed_sd is None:
        if effect is not None:
            raise ValueError(f"--effect {effect:g} needs the noise between seeds: --pilot RESULTS or --seed-sd 0.05")
        return None
    if pilot is not None and seed_sd is not None:
        raise ValueError(f"--pilot {pilot} and --seed-sd {seed_sd:g} both set the noise between seeds; give one")
    if definition.sampler != "grid":
        raise ValueError(
            f"sampler {definition.sampler!r} changes several settings at once: no single effect; use 'grid'"
        )
    from sparsedepth.effects.power import PilotNoise, measure_power, pilot_noise
    from sparsedepth.store.connection import open_store

    objective = definition.objective
    tuned = tuple(definition.tune)
    if pilot is None:
        noise, source = PilotNoise(own=seed_sd or 0.0), "assumed"
    else:
        with open_store(pilot) as store:
            noise, source = pilot_noise(store.frame("select * from runs"), objective), f"of {pilot}"
    configs = [config for config in plan.expected_runs() if config.seed in definition.result_seeds]
    powers = measure_power(configs, objective, noise, tuned, effect)
    if not powers:
        raise ValueError(f"no two runs of sweep {definition.name!r} differ in one setting; vary a field in 'space'")
    return DetectableEffects(
        powers=powers, noise=noise, source=source, objective=objective, unit=unit_of(objective), tuned=tuned,
        effect=effect,
    )  # fmt: skip


def _of_ladder(plan: "Plan", pilot: Path | None) -> DetectableEffects | None:
    """Of a sweep of one run at each of several budgets, the multiplier that it would see; None of another."""
    definition = plan.definition
    if definition.sampler != "grid" or len(definition.result_seeds) > 1:
        return None
    configs = plan.expected_runs()
    if any(config.schedule == "wsd" for config in configs):  # budgets are branches of one training
        return None
    from sparsedepth.effects.power import planned_cells
    from sparsedepth.recipe.judge import judge
    from sparsedepth.recipe.judge_table import is_flops
    from sparsedepth.scaling.ladder_power import ladder_pilot, ladder_power, pilot_of_laws, planned_ladder
    from sparsedepth.store.connection import open_store

    ladder = planned_ladder(planned_cells(configs, definition.objective, tuple(definition.tune), every_budget=True))
    found = DetectableEffects(powers=[], objective=definition.objective, unit="ln ratio", is_ladder=True)
    if ladder is None or pilot is None:
        return found if ladder else None
    if pilot.is_file():
        judged = judge(pilot)
        if judged.ladder is None or not is_flops(judged.columns):
            told = f"--pilot {pilot} is no ladder: one run of each variant at three budgets or more, in FLOPs"
            raise ValueError(f"{told}; `judge {pilot}` says what it is")
        noise = pilot_of_laws([*judged.ladder.laws.values()])
    else:
        with open_store(pilot) as store:
            noise = ladder_pilot(store)
    return replace(found, powers=ladder_power(ladder, noise), noise=noise.of_run, source=f"of {pilot}")
