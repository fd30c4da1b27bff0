"""A price, as it is printed: by `plan`, by `sweep --dry-run`, and in one line before a sweep starts."""

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.plan.budget import Budget
    from sparsedepth.plan.price import Price, Setting
    from sparsedepth.sweep.machine import Machine


def setting_here(definition: "SweepDefinition", machine: "Machine", *, calibrated: bool = False) -> "Setting":
    """This machine with what was timed on it; with `calibrated` every shape of the sweep is timed now if it was not."""
    from sparsedepth.plan import price as pricing
    from sparsedepth.sweep.calibrate import calibrate, device_name_of, known_timings

    name = "cpu" if not machine.gpus else pricing.named_device(device_name_of(machine))
    setting = pricing.setting(
        machine.runtime, device=name, workers=machine.workers, processes=machine.processes_per_run
    )
    setting = pricing.with_timings(setting, known_timings(machine))
    missing = pricing.uncalibrated(definition, setting) if calibrated else []
    if not missing:
        return setting

    def progress(made: int) -> None:
        print(f"\rtimed {made} of {len(missing) * machine.workers}", end="", file=sys.stderr, flush=True)

    timings = calibrate(missing, machine, progress)
    print(file=sys.stderr)
    return pricing.with_timings(setting, timings)


def show(definition: "SweepDefinition", setting: "Setting", budget: "Budget", format: str = "table") -> None:
    """Print the price. Raises ValueError, with the ways to fit, where it is beyond the budget."""
    from sparsedepth.plan.budget import ways
    from sparsedepth.plan.price import as_json, price

    total = price(definition, setting)
    if format == "json":
        print(json.dumps({"sweep": definition.name, **as_json(total)}, indent=1))
    else:
        print(*_table(definition, total), sep="\n")
    excess = budget.excess(total)
    if not excess:
        return
    fits = ways(definition, setting, budget)
    for number, way in enumerate(fits, start=1):
        print(f"to fit, {number}: {way.change}: {one_line(way.price)}", file=sys.stderr)
    raise ValueError(
        f"sweep {definition.name!r} is beyond the budget: {' and '.join(excess)}; "
        + ("change it as above, or raise the budget" if fits else "no single change makes it fit")
    )


def one_line(price: "Price") -> str:
    """A price in one line."""
    from sparsedepth.cli.progress import duration

    bound = f"{price.bound} " if price.bound else ""
    parts = [
        f"{bound}{price.runs} runs",
        f"{price.train_flops:.2g} FLOP",
        f"{_bytes(price.memory_bytes)} at the peak of a run",
        f"{_bytes(price.disk_bytes)} on disk",
        f"{duration(price.seconds.value)} with {price.setting.workers} at a time ({_trust(price)})",
    ]
    return ", ".join(parts)


def _trust(price: "Price") -> str:
    state = "calibrated" if price.is_calibrated else "uncalibrated"
    return f"{state}: within a factor of {price.seconds.factor:.3g}"


def _table(definition: "SweepDefinition", price: "Price") -> Iterator[str]:
    from sparsedepth.cli.progress import duration
    from sparsedepth.store.query_result import QueryResult
    from sparsedepth.store.render import render

    yield f"{definition.name}: {definition.question}"
    varied = tuple(price.kinds[0].varied)
    rows: list[tuple[Any, ...]] = [
        (
            *kind.varied.values(),
            kind.runs,
            kind.params_total,
            kind.params_active,
            kind.tokens,
            f"{kind.train_flops:.3g}",
            _bytes(kind.memory_bytes),
            _bytes(kind.disk_bytes),
            duration(kind.seconds.value),
        )
        for kind in price.kinds
    ]
    amounts = ("runs", "params_total", "params_active", "tokens", "train_flops", "memory", "disk", "time per run")
    yield render(QueryResult((*varied, *amounts), tuple(rows)))
    yield f"in all {one_line(price)}"
    yield from _remarks(definition, price)


def _remarks(definition: "SweepDefinition", price: "Price") -> Iterator[str]:
    """What the numbers rest on."""
    from sparsedepth.cli.progress import duration

    low, high = price.seconds.value / price.seconds.factor, price.seconds.value * price.seconds.factor
    place = price.setting.place
    where = f"{price.setting.device}, {place.threads} threads a run" if place.device == "cpu" else price.setting.device
    each = f", {place.processes} devices a run" if place.processes > 1 else ""
    yield f"time: {duration(low)} to {duration(high)} on {price.setting.workers} x {where}{each}"
    if not price.is_calibrated:
        yield f"      assumed {price.setting.assumed.rate:.2g} FLOP/s each; --calibrate times real steps instead"
    if price.data_bytes is None:
        yield "disk: without the tokenised text, whose length is not known before it is read"
    if definition.tune:
        yield "runs: a tuning grid whose best value is on its edge is extended, which adds runs"
    elif definition.adaptive:
        yield "runs: proposals as if spread evenly over the space; equal ones share their runs, pruned ones end early"


def _bytes(number: float) -> str:
    for unit in ("kB", "MB"):
        number /= 1000
        if number < 1000:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} GB"
