"""A price, as it is printed: by `plan`, by `sweep --dry-run`, and in one line before a sweep starts."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.budget import Budget
    from sparsedepth.plan.price import Price, PricingSetup
    from sparsedepth.sweep.machine import Machine
    from sparsedepth.toy.config import ToyDefinition

TOY_SHARE = 0.25
"""Of a device's fp32 rate, that the small products of a toy reach."""


def pricing_setup_here(
    definition: "SweepDefinition", machine: "Machine", *, calibrated: bool = False
) -> "PricingSetup":
    """This machine with what was timed on it; with `calibrated` every shape of the sweep is timed now if it was not.
    Raises ValueError for a kernel or a number of threads that a CPU does not have."""
    from sparsedepth.plan import price as pricing
    from sparsedepth.sweep.calibrate import calibrate, device_name_of, known_timings
    from sparsedepth.train.runtime import resolve

    if not machine.gpus:  # a GPU is asked by the run's own process, since asking takes of its memory
        for config in pricing.expected_runs(definition)[0]:
            resolve(config, machine.runtime)
    name = "cpu" if not machine.gpus else pricing.named_device(device_name_of(machine))
    setup = pricing.pricing_setup(
        machine.runtime,
        device=name,
        workers=machine.workers,
        processes=machine.processes_per_run,
        gpus=len(machine.gpus),
    )
    setup = pricing.with_timings(setup, known_timings(machine))
    missing = pricing.uncalibrated(definition, setup) if calibrated else []
    if not missing:
        return setup

    def progress(made: int) -> None:
        print(f"\rtimed {made} of {len(missing) * machine.workers}", end="", file=sys.stderr, flush=True)

    timings = calibrate(missing, machine, progress)
    print(file=sys.stderr)
    return pricing.with_timings(setup, timings)


def show(
    definition: "SweepDefinition",
    setup: "PricingSetup",
    budget: "Budget",
    format: str = "table",
    results: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print the price; with `results` that of what they lack; `more` goes into the JSON. Raises ValueError, with the
    ways to fit, where it is beyond the budget."""
    from sparsedepth.plan.budget import budget_fixes
    from sparsedepth.plan.gpu_shapes import slow_shapes
    from sparsedepth.plan.price import as_json, expected_runs, price
    from sparsedepth.store.render import wrapped

    total = price(definition, setup)
    for line in slow_shapes(expected_runs(definition)[0]) if setup.place.device == "cuda" else ():
        print(f"note: {line}", file=sys.stderr)
    shortage = _shortage(definition, total)
    left = price_left(definition, setup, results) if results else None
    if format == "json":
        of_left = {} if left is None else {"left": as_json(left)}
        parts = {"sweep": definition.name, **as_json(total), "shortage": shortage, **of_left, **(more or {})}
        print(json.dumps(parts, indent=1))
    else:
        print(*_table(definition, total), *([shortage] if shortage else []), sep="\n")
        if left is not None:
            print(wrapped([f"left: {one_line(left)}"]), end="")
        elif results:
            print(f"left: nothing, every run is in {results} or ended without a result")
    excess = budget.excess(total)
    if not excess:
        return
    fits = budget_fixes(definition, setup, budget)
    for number, way in enumerate(fits, start=1):
        print(f"to fit, {number}: {way.change}: {one_line(way.price)}", file=sys.stderr)
    raise ValueError(
        f"sweep {definition.name!r} is beyond the budget: {' and '.join(excess)}; "
        + ("change it as above, or raise the budget" if fits else "no single change makes it fit")
    )


def price_left(definition: "SweepDefinition", setup: "PricingSetup", results: Path) -> "Price | None":
    """The price of the runs that the folder lacks and that did not end without a result; None where there are none."""
    from sparsedepth.plan.price import price_of
    from sparsedepth.sweep.runs_left import runs_left

    left = runs_left(definition, results)
    return price_of(left, setup) if left else None


def _shortage(definition: "SweepDefinition", price: "Price") -> str | None:
    """Where the largest run is beyond its share of the device's memory: that, and the micro-batch that fits."""
    from sparsedepth.plan.budget import Budget, fitting_micro_batch

    whole = price.setup.assumed.memory
    if whole is None or price.memory_bytes <= (memory := whole / price.setup.place.sharing):
        return None
    fitting = fitting_micro_batch(definition, price.setup, Budget(gigabytes=memory / 1e9))
    fix = f"micro_batch={fitting} does (--runtime micro_batch={fitting})"
    if fitting is None:
        fix = "nor does micro_batch=1; take more devices a run (--gpus-per-run, --runtime parallel=fsdp)"
    return f"{_bytes(price.memory_bytes)} does not fit {_bytes(memory)}: {fix}"


def show_toy(definition: "ToyDefinition", device: str, format: str = "table") -> None:
    """Print what a toy costs."""
    from sparsedepth.cli.run_progress import duration
    from sparsedepth.plan.duration import DEVICES, FACTOR

    groups = definition.groups()
    students, flops = sum(group.n_students for group in groups), sum(group.flops for group in groups)
    seconds = flops / (TOY_SHARE * DEVICES[device].fp32_rate)
    if format == "json":
        amounts = {"groups": len(groups), "students": students, "train_flops": flops, "device": device}
        print(
            json.dumps({"toy": definition.name, **amounts, "seconds": {"value": seconds, "factor": FACTOR}}, indent=1)
        )
        return
    print(f"{definition.name}: {definition.question}")
    print(
        f"{students} students in {len(groups)} groups, {flops:.2g} FLOP, {duration(seconds)} on 1 x {device} ", end=""
    )
    print(f"(uncalibrated: within a factor of {FACTOR:.3g})")


def one_line(price: "Price") -> str:
    """A price in one line."""
    from sparsedepth.cli.run_progress import duration

    bound = f"{price.bound} " if price.bound else ""
    parts = [
        f"{bound}{price.runs} runs",
        f"{price.train_flops:.2g} FLOP",
        f"{_bytes(price.memory_bytes)} at the peak of a run",
        f"{_bytes(price.disk_bytes)} on disk",
        f"{duration(price.seconds.value)} with {price.setup.workers} at a time ({_trust(price)})",
    ]
    return ", ".join(parts)


def _trust(price: "Price") -> str:
    state = "calibrated" if price.is_calibrated else "uncalibrated"
    return f"{state}: within a factor of {price.seconds.factor:.3g}"


def _table(definition: "SweepDefinition", price: "Price") -> Iterator[str]:
    from sparsedepth.cli.run_progress import duration
    from sparsedepth.store.query_result import QueryResult
    from sparsedepth.store.render import compact, wrapped
    from sparsedepth.store.setting import assignment

    yield wrapped([f"{definition.name}: {definition.question}"]).rstrip()
    telling = [name for name in price.kinds[0].varied if name != "n_layers" and _tells(name, price)]
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
            ", ".join(assignment(name, kind.varied[name]) for name in telling if kind.varied[name] is not None) or None,
        )
        for kind in price.kinds
    ]
    amounts = ("runs", "params_total", "params_active", "tokens", "train_flops", "memory", "disk", "time per run")
    yield compact(QueryResult(("n_layers", *amounts, "setting"), tuple(rows)), ("tokens", "disk", "params_total"))
    yield wrapped([f"in all {one_line(price)}", *_remarks(definition, price)]).rstrip()


def _tells(name: str, price: "Price") -> bool:
    """Whether a field's value is more than whether it has one: with experts, top_k may be 2 everywhere."""
    return len({kind.varied[name] for kind in price.kinds} - {None}) > 1


def _remarks(definition: "SweepDefinition", price: "Price") -> Iterator[str]:
    """What the numbers rest on."""
    from sparsedepth.cli.run_progress import duration

    low, high = price.seconds.value / price.seconds.factor, price.seconds.value * price.seconds.factor
    place = price.setup.place
    where = (
        f"{price.setup.device}, {place.threads} thread{'s' * (place.threads != 1)} a run"
        if place.device == "cpu"
        else price.setup.device
    )
    each = f", {place.processes} devices a run" if place.processes > 1 else ""
    yield f"time: {duration(low)} to {duration(high)} on {price.setup.workers} x {where}{each}"
    if not price.is_calibrated:
        yield f"      assumed {price.setup.assumed.rate:.2g} FLOP/s each; --calibrate times real steps instead"
    if price.data_bytes is None:
        yield "disk: without the tokenised text, whose length is not known before it is read"
    if definition.tune:
        seeds = ", ".join(map(str, definition.tuning_seeds))
        apart = "some of them results too" if definition.reuse_tuning_seeds else "which are no results"
        yield f"runs: tuned with seeds {seeds}, {apart}; a best value on the edge of its grid adds runs"
    elif definition.adaptive:
        yield "runs: proposals as if spread evenly over the space; equal ones share their runs, pruned ones end early"


def _bytes(number: float) -> str:
    for unit in ("kB", "MB"):
        number /= 1000
        if number < 1000:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} GB"
