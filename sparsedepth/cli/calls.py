"""The Python interface: `import sparsedepth as sd; sd.best("results/mine")`. The commands call these functions and
print what they return.

The command-line options are derived from these signatures (`cli.option`). Progress goes to stderr. User errors (exit
code 2) are ValueErrors with the same text. KEY=VALUE options may be a mapping, and so may the content of
a YAML file. Only the command line offers `plan`, --on slurm and `best --again`."""

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedepth.cli import option, preflight
from sparsedepth.files import check_not_empty
from sparsedepth.words.plain_text import did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.config.runtime import RuntimeConfig
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.price import PricingSetup
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.plots.draw import Figures
    from sparsedepth.recipe.card import Card
    from sparsedepth.run.measure_existing_model import MeasurementResult
    from sparsedepth.store.run_record import Record
    from sparsedepth.sweep.driver import Driver, SweepResult
    from sparsedepth.sweep.machine import Machine
    from sparsedepth.sweep.status import RunState


class StoppedAtCheckpoint(KeyboardInterrupt):
    """A signal stopped the call, or another process took over the run; the same call resumes."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def train(
    file: option.RunFile,
    out: option.Out,
    *,
    set: option.Override = None,
    runtime: option.Runtime = None,
    device: option.Device = "auto",
    threads: option.Threads = None,
    from_: option.From = None,
) -> "Record":
    """Train and measure one model; returns the complete run's `summary`, `config`, `tables` and `folder`. `from_` is a
    run or Hugging Face folder with the initial weights.

    The same call resumes a stopped run. Raises ValueError for user errors, StoppedAtCheckpoint."""
    given = locals()  # the keywords
    from sparsedepth.cli.input_file import run_config

    results, start = _path(out), None
    if from_ is not None:
        from sparsedepth.exchange.start import open_start

        start = open_start(str(from_))
    config = run_config(file, set, start)  # errors are reported before torch is imported
    preflight.warn_of_unlikely_values([{"lr": config.lr, "train_tokens": config.train_tokens}])
    preflight.check_tokenizers([{"tokenizer": config.tokenizer, "corpus": config.corpus}], results)
    runtime_settings = runtime_config(given)

    from sparsedepth.cli.run_progress import bar
    from sparsedepth.run.execute import execute
    from sparsedepth.run.process import Stop
    from sparsedepth.run.train_and_measure import Infeasible, Options
    from sparsedepth.store.run_record import read_run
    from sparsedepth.train.devices import LostError
    from sparsedepth.train.loop import Interrupted

    with bar(config.run_id) as report, _restored_signal_handlers():
        stop = Stop(is_announced=True).catch()
        options = Options(runtime=runtime_settings, stop=stop, report=report, start=start)
        try:
            folder = preflight.with_cleanup(results, lambda: execute(config, results, options))
        except Interrupted:
            text = "stopped at a checkpoint; run the same command again to resume"
            raise StoppedAtCheckpoint(text, stop.exit_code if stop() else 1) from None
        except (Infeasible, LostError) as failure:
            raise ValueError(str(failure)) from None
        report("complete", 1.0)
    return read_run(folder)


def _path(out: Path | str) -> Path:
    check_not_empty("out", out)
    return Path(out)


def sweep(
    file: option.SweepFile = None,
    *,
    out: option.Out,
    vary: option.Vary = None,
    seeds: option.Seeds = None,
    base: option.Base = None,
    scale: option.Scale = None,
    workers: option.Workers = None,
    gpus: option.Gpus = None,
    gpus_per_run: option.GpusPerRun = 1,
    storage: option.Storage = None,
    set: option.SweepOverride = None,
    runtime: option.Runtime = None,
    device: option.Device = "auto",
    stack: option.Stack = "auto",
    max_attempts: option.MaxAttempts = 2,
    retry_failed: option.RetryFailed = False,
) -> "list[RunState]":
    """Run every configuration and seed of a sweep into the folder `out`; returns the state of each run.

    The same call resumes. Raises ValueError for user errors, StoppedAtCheckpoint."""
    given = locals()  # the keywords
    driver = make_driver(given, definition_of(given))  # errors are reported before torch is imported
    result = run_driver(driver, retry_failed=retry_failed)
    if result.stop():
        raise StoppedAtCheckpoint("stopped at a checkpoint; the same call resumes", result.stop.exit_code)
    return result.states


def definition_of(given: option.Given) -> "SweepDefinition":
    """The sweep of --vary, --set, ... or of a file. Raises ValueError."""
    from sparsedepth.cli.input_file import sweep_definition

    return sweep_definition(*(given[name] for name in ("file", "scale", "set", "vary", "seeds", "base")))


def make_driver(given: option.Given, definition: "SweepDefinition") -> "Driver":
    """A sweep that is checked, but not started."""
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.driver import Driver
    from sparsedepth.sweep.storage import database_url, hide_url

    results, storage = _path(given["out"]), given["storage"]
    preflight.check_tokenizers(preflight.field_values(definition), results)
    plan = Plan(definition)
    machine = machine_for(plan, given, results)
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
    with display, _restored_signal_handlers():
        driver.on_progress, driver.on_note = display, lambda text: print(text, file=sys.stderr)
        return preflight.with_cleanup(driver.results, lambda: driver.run(retry_failed=retry_failed))


def measure(
    model: option.Model,
    *,
    data: option.Data = None,
    tokens: option.Tokens = None,
    targets: option.Targets = None,
    fit_tokens: option.FitTokens = None,
    seq_len: option.SeqLen = None,
    measures: option.Measures = None,
    set: option.MeasureOverride = None,
    out: option.RecordFolder = None,
    device: option.Device = "auto",
) -> "MeasurementResult":
    """Measure a run, a local Hugging Face folder or a hub model; the result's `measurements` have `summary`, `layers`
    and `pairs`.

    Raises ValueError for two sources of text, a missing or unsafe model, and incompatible settings."""
    from sparsedepth.cli.run_progress import bar
    from sparsedepth.config.load import parse_settings
    from sparsedepth.probe.load import load_model
    from sparsedepth.probe.text import read_token_arrays, tokens_to_measure
    from sparsedepth.run.measure_existing_model import measure_existing_model, measuring_config
    from sparsedepth.run.record import Stopwatch
    from sparsedepth.store.run_record import check_place
    from sparsedepth.train.runtime import find_device, measuring_device

    watch, written = Stopwatch(), None if out is None else _path(out)
    scored, fit, aims = (None if path is None else Path(path) for path in (tokens, fit_tokens, targets))
    if scored is not None and data is not None:
        raise ValueError("--data and --tokens are two sources; give one of them")
    if scored is None and (fit is not None or aims is not None):
        raise ValueError(f"--{'targets' if fit is None else 'fit-tokens'} needs --tokens; give both")
    changes = parse_settings(set or [])
    if seq_len is not None and "seq_len" in changes:
        raise ValueError("--seq-len and --set seq_len=... set the same field; give one of them")
    own = {} if seq_len is None else {"seq_len": seq_len}
    settings = {**own, **changes, **_measures(measures, changes)}
    given = None if scored is None else read_token_arrays(scored, fit, aims)
    if written is not None:
        check_place(written)
    with bar("loading the model") as report:
        loaded = load_model(str(model), device=measuring_device(find_device(device)))
        config = measuring_config(loaded, settings, given)
        begin, measured = partial(report, "reading the text", 0.0), partial(report, "measuring")
        with tokens_to_measure(loaded, config, data, given, begin) as source:
            return measure_existing_model(loaded, source, config, out=written, watch=watch, report=measured)


def best(
    *folders: option.EachFolder,
    by: option.By = None,
    depth: option.Depth = None,
    where: option.Where = None,
    top: option.Top = 5,
    skip_damaged: option.SkipDamaged = False,
) -> "pd.DataFrame":
    """Configurations ranked by their mean over seeds, with interval and baseline: the table of `store.best.Ranking`
    plus `setting`, the differences from the baseline. `attrs["heading"]` describes the table.

    Raises ValueError for an unknown quantity, a wrong SQL condition, or if no run matches."""
    import pandas as pd

    from sparsedepth.store.best import best as rank, heading
    from sparsedepth.store.connection import open_store

    with open_store(*folders, skip_damaged=skip_damaged) as store:
        ranking = rank(store, None if by == "loss" else by, depth, top, where)
    table = pd.DataFrame([*ranking.table.rows], columns=[*ranking.table.columns])
    table.insert(1, "setting", [*ranking.settings])
    table.attrs["heading"] = heading(ranking)
    return table


def recipe(
    *folders: option.EachFolder,
    out: option.RecipeFile = None,
    depth: option.RecipeDepth = None,
    objective: option.Objective = "loss",
    matched: option.Matched = "tokens",
    holdout_depth: option.HoldoutDepth = None,
    skip_damaged: option.SkipDamaged = False,
) -> "Card":
    """Recommend a configuration from the effects at one depth; returns its card. `out` also writes the RunConfig (YAML)
    and the card (.md, .json). Raises ValueError if there is neither a recommendation nor a baseline."""
    from sparsedepth.effects.cells import read_runs
    from sparsedepth.files import check_parent
    from sparsedepth.quantities import rankable
    from sparsedepth.recipe.build_card import derive_card
    from sparsedepth.recipe.card import card_path
    from sparsedepth.recipe.text import write_recipe
    from sparsedepth.scaling.speedup import worth
    from sparsedepth.store.comparable_loss import loss_in
    from sparsedepth.store.connection import open_store
    from sparsedepth.store.records import no_run_text
    from sparsedepth.store.search import search_of, search_text

    written = None if out is None else _path(out)
    if written is not None:
        check_parent(written)
        if written.suffix not in (".yaml", ".yml"):
            raise ValueError(f"-o {str(out)!r} must end in .yaml: a recipe is a run configuration in YAML")
        if written.exists() and not card_path(written).exists():
            raise ValueError(f"{out} already exists and is not a recipe (it has no card); give another file name")
    paths = [Path(folder) for folder in folders]
    with open_store(*paths, skip_damaged=skip_damaged) as store:
        search = search_of(store.roots)
        objective = loss_in(store) if objective == "loss" else rankable(objective).name
        runs = read_runs(store, objective)
        if runs.empty:
            raise ValueError(no_run_text(store.roots))
        compute = worth(store, objective)
    if search is not None:
        names = shlex.join(map(str, folders))
        shows = f"sparsedepth best {names} shows how to rerun the best points"
        raise ValueError(f"{names} holds {search_text(search)}; {shows}")
    card = derive_card(runs, depth, objective, matched, holdout_depth=holdout_depth, folders=paths, compute=compute)
    if card.recipe.config is None:
        at = f" at {card.recipe.depth} layers" if card.recipe.depth else ""
        raise ValueError(f"{' '.join(map(str, folders))}: no recipe{at}: {card.recipe.abstained}")
    if written is not None:
        write_recipe(written, card)
    return card


def plot(
    *folders: option.EachFolder,
    out: option.Images = None,
    figure: option.Figure = None,
    format: option.ImageFormat = None,
    style: option.FigureStyle = "screen",
    run: option.FigureRun = None,
    skip_damaged: option.SkipDamaged = False,
) -> "Figures":
    """Draw one figure (default: the chain) or 'all'; `out` is an image, or a folder of images in `format` (default
    png). `style` 'paper': one column, 9 pt, as PDF and PNG, its caption apart.

    Raises ValueError for an unknown figure, suffix or run, for an image in another format than its suffix names, or if
    there is nothing to draw."""
    from sparsedepth.cli.run_progress import bar
    from sparsedepth.plots.draw import draw
    from sparsedepth.plots.page import FORMATS
    from sparsedepth.store.connection import open_store

    written = None if out is None else _path(out)
    suffix = "" if written is None or written.is_dir() else written.suffix.lower()
    if format is not None and {suffix, f".{format}"} <= {*FORMATS} and suffix != f".{format}":
        raise ValueError(f"-o {str(written)!r} is for {suffix[1:]}, and --format is {format!r}; drop one of the two")
    with open_store(*folders, skip_damaged=skip_damaged) as store:
        if figure != "all":
            return draw(store, figure, written, run, format or "png", style)
        with bar("figures") as progress:
            return draw(store, figure, written, run, format or "png", style, progress)


def runtime_config(given: option.Given) -> "RuntimeConfig":
    """The runtime of --device, --threads and --stack, overridden by --runtime KEY=VALUE."""
    from sparsedepth.config.load import build, parse_settings, parse_yaml
    from sparsedepth.config.runtime import RuntimeConfig

    options = {name: given[name] for name in ("device", "threads", "stack") if name in given}
    if isinstance(options.get("stack"), str):
        options["stack"] = parse_yaml(options["stack"], "--stack")
    return build(RuntimeConfig, {**options, **parse_settings(given["runtime"] or [], "--runtime")}, "--runtime")


def machine_of(given: option.Given) -> "Machine":
    """The devices and workers of a command. Raises ValueError for GPUs that do not exist."""
    from sparsedepth.sweep.machine import machine, parse_gpus

    gpus = parse_gpus(given["gpus"]) if given.get("gpus") else None
    numbers = {name: given[name] for name in ("max_attempts", "gpus_per_run", "nodes") if name in given}
    return machine(given["workers"], runtime_config(given), gpus=gpus, **numbers)


def machine_for(plan: "Plan", given: option.Given, results: Path | None) -> "Machine":
    """As `machine_of`; without --workers a GPU is shared by as many runs as measurements show to be of use."""
    from sparsedepth.plan.price import workers_per_gpu

    machine = machine_of(given)
    if given["workers"] is not None or not machine.gpus:
        return machine

    def setup_of(workers: int) -> "PricingSetup":
        return preflight.setup_of_machine(plan, machine_of({**given, "workers": workers}), results)

    return machine_of({**given, "workers": workers_per_gpu(plan.expected_runs(), setup_of)})


def _restored_signal_handlers() -> ExitStack:
    from sparsedepth.run.process import CAUGHT

    at_end = ExitStack()
    for number in CAUGHT:
        at_end.callback(signal.signal, number, signal.getsignal(number))
    return at_end


def _measures(measures: str | Sequence[str] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    from sparsedepth.quantities.measured import MEASURES

    if measures is None:
        return {}
    if "measures" in settings:
        raise ValueError("--measures and --set measures=... set the same field; give one of them")
    known = [measure.name for measure in MEASURES]
    names = [name.strip() for name in measures.split(",")] if isinstance(measures, str) else measures
    names = known if measures == "all" else names
    unknown = [name for name in names if name not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known, f"it must be one of all, {', '.join(known)}")
        raise ValueError(f"--measures {unknown[0]!r} is unknown; {hint}")
    return {"measures": list(dict.fromkeys(names))}
