"""From the options of a command to a sweep that may start: its definition, the machine, the driver."""

import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparsedepth.cli import option, preflight, pricing
from sparsedepth.cli.option import DefinitionOptions, Number, RuntimeOptions, SweepOptions, WorkerOptions

if TYPE_CHECKING:
    from sparsedepth.config.runtime import RuntimeConfig
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.price import PricingSetup
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.driver import Driver, SweepResult
    from sparsedepth.sweep.machine import Machine


class StoppedAtCheckpoint(KeyboardInterrupt):
    """A signal stopped the call, or another process took over the run; the same call resumes."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def definition_of(given: DefinitionOptions) -> "SweepDefinition":
    """The sweep of --vary, --set, ... or of a file. Raises ValueError."""
    from sparsedepth.cli.input_file import sweep_definition

    return sweep_definition(given.file, given.scale, given.set, given.vary, given.seeds, given.base)


def runtime_config(given: RuntimeOptions, *, threads: int | None = None, stack: "Number" = "auto") -> "RuntimeConfig":
    """The runtime of --device, --threads and --stack, overridden by --runtime KEY=VALUE."""
    from sparsedepth.config.load import build, parse_settings, parse_yaml
    from sparsedepth.config.runtime import RuntimeConfig

    return build(
        RuntimeConfig,
        {
            "device": given.device,
            "threads": threads,
            "stack": parse_yaml(str(stack), "--stack"),
            **parse_settings(given.runtime or [], "--runtime"),
        },
        "--runtime",
    )


def machine_of(given: WorkerOptions, max_attempts: int = 2, nodes: int = 1) -> "Machine":
    """The devices and workers of a command. Raises ValueError for GPUs that do not exist."""
    from sparsedepth.sweep.machine import machine, parse_gpus

    gpus = parse_gpus(given.gpus) if given.gpus else None
    runtime = runtime_config(given, stack=given.stack)
    return machine(given.workers, runtime, max_attempts, gpus, given.gpus_per_run, nodes)


def machine_for(plan: "Plan", given: WorkerOptions, results: Path | None, max_attempts: int = 2) -> "Machine":
    """As `machine_of`; without --workers a GPU is shared by as many runs as measurements show to be of use."""
    from sparsedepth.plan.price import workers_per_gpu

    machine = machine_of(given, max_attempts)
    if given.workers is not None or not machine.gpus:
        return machine

    def shared_by(workers: int) -> "Machine":
        return machine_of(replace(given, workers=workers), max_attempts)

    def setup_of(workers: int) -> "PricingSetup":
        return pricing.setup_of_machine(plan, shared_by(workers), results)

    return shared_by(workers_per_gpu(plan.expected_runs(), setup_of))


def make_driver(given: SweepOptions, definition: "SweepDefinition") -> "Driver":
    """A sweep that is checked, but not started."""
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.driver import Driver
    from sparsedepth.sweep.storage import database_url, hide_url

    results = option.path(given.out)
    storage = given.storage
    preflight.check_tokenizers(preflight.field_values(definition), results)
    plan = Plan(definition)
    machine = machine_for(plan, given, results, given.max_attempts)
    if storage:
        hide_url(storage)
        database_url(storage)
    preflight.warn_of_unlikely_values(preflight.field_values(definition))
    preflight.check_machine(plan, machine)
    return Driver(plan, results, machine, storage)


def run_driver(driver: "Driver", *, retry_failed: bool = False) -> "SweepResult":
    """Run the missing runs and show progress. Also returns after a stop."""
    from sparsedepth.cli.progress import ProgressDisplay

    display = ProgressDisplay(driver.definition, driver.plan.expected, driver.results)
    with display, restored_signal_handlers():
        driver.on_progress = display
        driver.on_note = option.aside
        return preflight.with_cleanup(driver.results, lambda: driver.run(retry_failed=retry_failed))


def restored_signal_handlers() -> ExitStack:
    """A context at whose end signals are handled as before."""
    from sparsedepth.run.process import CAUGHT

    at_end = ExitStack()
    for number in CAUGHT:
        at_end.callback(signal.signal, number, signal.getsignal(number))
    return at_end
