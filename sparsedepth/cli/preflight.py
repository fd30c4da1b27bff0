"""Before a command trains: refuse what is missing, warn of what is unlikely, and print the estimated cost of a sweep:
a table for `plan` and --dry-run, one line before a sweep starts."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.plain_text import counted, duration, visible, wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.price import Price, PricingSetup
    from sparsedepth.plan.tasks import Plan
    from sparsedepth.sweep.machine import Machine

Result = TypeVar("Result")

MAX_LR = 1.0
MAX_TOKENS = 10**14
"""More than any corpus of text holds."""


def warn_of_unlikely_values(values: Iterable[Mapping[str, Any]]) -> None:
    """Warn of a learning rate above 1, and of more tokens than any corpus has."""
    values = list(values)
    rates = [fields["lr"] for fields in values if fields.get("lr", 0) > MAX_LR]
    tokens = [fields["train_tokens"] for fields in values if fields.get("train_tokens", 0) > MAX_TOKENS]
    if rates:
        warnings.warn(f"lr={max(rates):g} is above 1, where AdamW diverges; is a minus missing in 1e-3?", stacklevel=2)
    if tokens:
        warnings.warn(f"train_tokens={max(tokens):,} is more than any text corpus holds", stacklevel=2)


def check_tokenizers(values: Iterable[Mapping[str, Any]], results: Path) -> None:
    """Raises ValueError for an unavailable tokenizer, before torch is imported. Skipped for an existing results folder,
    which may hold the tokens."""
    from sparsedepth.config.corpus import kind_of
    from sparsedepth.data.tokenizer import check_reachable

    if not results.exists():
        text_runs = [run for run in values if "tokenizer" in run and kind_of(run.get("corpus")).is_tokenised]
        for name in {str(run["tokenizer"]) for run in text_runs}:
            check_reachable(name)


def check_corpora(values: Iterable[Mapping[str, Any]], results: Path | None) -> None:
    """Raises ValueError for a missing local text folder. Skipped for an existing results folder, which may
    hold the tokens."""
    from sparsedepth.data.sequences import check_files

    if results is None or not results.exists():
        for corpus in sorted({str(run["corpus"]) for run in values if "corpus" in run}):
            check_files(corpus)


def field_values(definition: "SweepDefinition") -> Iterable[Mapping[str, Any]]:
    """The values that a sweep gives to run fields; for a range its upper end."""
    from sparsedepth.config.space import Interval

    yield from (values for _, values in definition.parts())
    for name, axis in definition.space.items():
        if isinstance(axis, Interval):
            yield {name: axis.high}


def with_cleanup(results: Path, start: Callable[[], Result]) -> Result:
    """`start()`; if it raises ValueError before any run began, the results folder that it created is removed."""
    existed = results.exists()
    try:
        return start()
    except ValueError:
        if not existed and results.is_dir():
            _remove_if_no_runs(results)
        raise


def _remove_if_no_runs(results: Path) -> None:
    """Remove the files written before the first run; tokenised text and unknown files stay."""
    from sparsedepth.config.sweep import DEFINITION

    records = [*results.glob("runs/*"), *results.glob("toys/*"), *results.glob("study*")]
    logs = [*results.glob("work/*/log.txt"), *results.glob("work/*/failures*"), *results.glob("work/*/checkpoints/*")]
    if records or logs:
        return
    (results / DEFINITION).unlink(missing_ok=True)
    for name in ("work", "slurm"):
        shutil.rmtree(results / name, ignore_errors=True)
    for lock in results.glob("data/.*.lock"):
        if not (lock.parent / lock.name[1:].removesuffix(".lock")).exists():
            lock.unlink()
    for folder in (*sorted(results.rglob("*"), reverse=True), results):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def local_pricing_setup(plan: "Plan", machine: "Machine", results: Path | None, calibrated: bool) -> "PricingSetup":
    """This machine, its cached timings, and the finished runs of `results`; `calibrated` times the shapes of the sweep
    that are not cached. Raises ValueError as `check_machine`."""
    from sparsedepth.plan.price import uncalibrated
    from sparsedepth.sweep.calibrate import calibrate

    check_machine(plan, machine)
    setup = setup_of_machine(plan, machine, results)
    missing = uncalibrated(plan.expected_runs(), setup) if calibrated else []
    if not missing:
        return setup

    def progress(done: int) -> None:
        print(f"\rtimed {done} of {len(missing) * machine.workers}", end="", file=sys.stderr, flush=True)

    timings = calibrate(missing, machine, progress)
    print(file=sys.stderr)
    return replace(setup, timings=timings)


def setup_of_machine(plan: "Plan", machine: "Machine", results: Path | None) -> "PricingSetup":
    """This machine, with the timings that are cached for its number of workers, and the finished runs of `results`."""
    from sparsedepth.plan.price import named_device, pricing_setup, with_finished
    from sparsedepth.sweep.calibrate import device_name_of, known_timings

    device = named_device(device_name_of(machine)) if machine.gpus else "cpu"
    shared = {"workers": machine.workers, "processes": machine.processes_per_run, "gpus": len(machine.gpus)}
    priced = pricing_setup(machine.runtime, device=device, **shared)
    return with_finished(replace(priced, timings=known_timings(machine)), results, plan.expected_runs())


def check_machine(plan: "Plan", machine: "Machine") -> None:
    """Raises ValueError for a kernel or a number of threads that a CPU does not have. On a GPU the run's process
    checks, since the check allocates GPU memory."""
    from sparsedepth.train.runtime import resolve

    if not machine.gpus:
        for config in plan.expected_runs():
            resolve(config, machine.runtime)


def print_price(
    plan: "Plan",
    setup: "PricingSetup",
    format: str = "table",
    results: Path | None = None,
    extra_json: Mapping[str, Any] | None = None,
) -> None:
    """Print the price of a sweep and, with `results`, of its remaining runs."""
    from sparsedepth.plan.price import as_json, price

    for note in plan.notes():
        print(f"note: {visible(note)}", file=sys.stderr)
    total = price(plan, setup)
    shortage = _memory_shortage(plan, total)
    remaining = remaining_price(plan, setup, results) if results else None
    if format == "json":
        remaining_json = {} if remaining is None else {"left": as_json(remaining)}
        content = {"sweep": plan.definition.name, **as_json(total), "shortage": shortage, **remaining_json}
        print(json.dumps({**content, **(extra_json or {})}, indent=1))
    else:
        print(*_table(plan, total), *([shortage] if shortage else []), sep="\n")
        if remaining is not None:
            print(wrapped([f"remaining: {price_line(remaining)}"]), end="")
        elif results:
            print(f"remaining: nothing; every run in {results} is complete or ended without a result")


def remaining_price(plan: "Plan", setup: "PricingSetup", results: Path) -> "Price | None":
    """The price of the runs that have not ended; None if there are none."""
    from sparsedepth.plan.price import price_of
    from sparsedepth.sweep.status import remaining_and_complete

    runs, done = remaining_and_complete(plan, results)
    return price_of(runs, setup, done=done) if runs else None


def _memory_shortage(plan: "Plan", price: "Price") -> str | None:
    """If the largest run exceeds its share of the device's memory: by how much, and the micro-batch that fits."""
    from sparsedepth.plan.price import fitting_micro_batch

    device_memory = price.setup.assumed.memory
    if device_memory is None or price.memory_bytes <= (memory := device_memory / price.setup.place.sharing):
        return None
    micro_batch = fitting_micro_batch(plan.expected_runs(), price.setup, memory)
    fewer = "fewer --workers, or " if price.setup.place.sharing > 1 else ""
    more = "more devices per run (--gpus-per-run, --runtime parallel=fsdp)"
    none_fits = f"even micro_batch=1 does not fit; use {fewer}{more}"
    fix = f"use --runtime micro_batch={micro_batch}" if micro_batch else none_fits
    return f"memory: {_bytes(price.memory_bytes)} does not fit into {_bytes(memory)}: {fix}"


def price_line(price: "Price") -> str:
    """'27 runs, 1.4e+13 FLOP, 1 GB peak memory per run, 3 MB on disk, 5m with 2 workers (..)'."""
    bound = f"{price.bound} " if price.bound else ""
    accuracy = "calibrated" if price.is_calibrated else "uncalibrated"
    seconds = f"{duration(price.seconds.value)} with {counted(price.setup.workers, 'worker')}"
    return (
        f"{bound}{counted(price.runs, 'run')}, {price.train_flops:.2g} FLOP, "
        f"{_bytes(price.memory_bytes)} peak memory per run, {_bytes(price.disk_bytes)} on disk, "
        f"{seconds} ({accuracy}: within a factor of {price.seconds.factor:.3g})"
    )


def _table(plan: "Plan", price: "Price") -> Iterator[str]:
    from sparsedepth.words.values import assignment

    definition = plan.definition
    yield wrapped([f"{definition.name}: {definition.question}"]).rstrip()
    values = {name: {kind.varied[name] for kind in price.kinds} - {None} for name in price.kinds[0].varied}
    shown = [name for name in values if name != "n_layers" and len(values[name]) > 1]  # top_k, say, may be 2 or None
    rows: list[tuple[Any, ...]] = [
        (
            kind.varied.get("n_layers"),
            kind.runs,
            kind.params_total,
            kind.params_active,
            kind.tokens,
            f"{kind.train_flops:.3g}",
            _bytes(kind.memory_bytes),
            _bytes(kind.disk_bytes),
            duration(kind.seconds.value),
            ", ".join(assignment(name, kind.varied[name]) for name in shown if kind.varied[name] is not None) or None,
        )
        for kind in price.kinds
    ]
    amounts = ("runs", "params_total", "params_active", "tokens", "train_flops", "memory", "disk", "time per run")
    table = QueryResult(("n_layers", *amounts, "setting"), tuple(rows))
    yield fitted_table(table, ("tokens", "disk", "params_total")).text
    alike = [f"runs of a row may differ in {', '.join(price.alike)}"] if price.alike else []
    yield wrapped([*alike, f"total: {price_line(price)}", *_assumptions(plan, price)]).rstrip()


def _assumptions(plan: "Plan", price: "Price") -> Iterator[str]:
    from sparsedepth.plan.estimate import shape_id

    definition = plan.definition
    low, high = price.seconds.value / price.seconds.factor, price.seconds.value * price.seconds.factor
    place = price.setup.place
    threads = f", {counted(place.threads, 'thread')} per run" if place.device == "cpu" else ""
    processes = f", {place.processes} devices per run" if place.processes > 1 else ""
    shared = f", {place.sharing} runs at a time on each" if place.sharing > 1 else ""
    devices = f"{price.setup.devices} x {price.setup.device}{threads}{processes}{shared}"
    yield f"time: {duration(low)} to {duration(high)} on {devices}"
    if price.setup.time_ratios:
        yield f"      corrected by finished runs of {counted(len(price.setup.time_ratios), 'shape')}"
    elif not price.is_calibrated:
        yield f"      assumes the speed of a typical {price.setup.device}; --calibrate times real steps instead"
    first = {config.n_layers: config for config in reversed(plan.expected_runs())}
    timed = {depth: (price.setup.timings or {}).get(shape_id(first[depth], step_only=True)) for depth in sorted(first)}
    texts = [f"{depth}: {timing.step:.4g}" for depth, timing in timed.items() if timing]
    if len(texts) == len(timed) > 1:
        yield f"step_seconds: {{{', '.join(texts)}}}"  # what `matched: time` takes
    if price.data_bytes is None:
        yield "disk: excludes the tokenised text, whose length is unknown until it is read"
    if definition.tune:
        seeds = ", ".join(map(str, definition.tuning_seeds))
        use = "some also used as results" if definition.reuse_tuning_seeds else "not used as results"
        yield f"runs: tuning uses seeds {seeds} ({use}); a best value at the edge of its grid adds runs"
    elif definition.adaptive:
        yield "runs: assumes proposals drawn at random; equal proposals share runs, pruned runs end early"


def _bytes(number: float) -> str:
    for unit in ("kB", "MB"):
        number /= 1000
        if number < 1000:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} GB"
