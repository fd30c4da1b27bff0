"""Whether a sweep fits a budget of time and memory, and which single changes would make it fit.

A fix changes one thing, as little as possible: smaller micro-batches or more workers (at no loss), fewer seeds,
proposals or tokens, or an axis without its most expensive values. If memory is too small, the micro-batch that fits is
set first, and the other fixes are combined with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile

from sparsedepth.config.load import build
from sparsedepth.config.space import Interval, Value
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.plan.price import Price, PricingSetup, expected_runs, price

MAX_WORKERS = 1024
SHARES = tuple(percent / 100 for percent in range(90, 0, -10))
"""Shares of the tokens or proposals that are tried."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper bounds; None: unlimited."""

    hours: float | None = None
    """wall-clock time of the sweep"""
    gigabytes: float | None = None
    """10^9 bytes of peak memory of the largest run, on one device"""

    def excess(self, cost: Price) -> list[str]:
        """The bounds that are exceeded, as text."""
        hours, gigabytes = cost.seconds.value / 3600, cost.memory_bytes / 1e9
        reasons = []
        if self.hours is not None and hours > self.hours:
            reasons.append(f"{hours:.3g} hours is more than {self.hours:g}")
        if self.gigabytes is not None and gigabytes > self.gigabytes:
            reasons.append(f"{gigabytes:.3g} GB of memory is more than {self.gigabytes:g}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class BudgetFix:
    change: str
    price: Price


def budget_fixes(definition: SweepDefinition, setup: PricingSetup, budget: Budget) -> list[BudgetFix]:
    """Up to three fixes that keep most of the training FLOPs, best first."""
    prefix = ""
    micro_batch = fitting_micro_batch(definition, setup, budget)
    if micro_batch is not None:
        setup = replace(setup, place=replace(setup.place, micro_batch=micro_batch))
        prefix = f"--runtime micro_batch={micro_batch}"
        if not budget.excess(cost := price(definition, setup)):
            return [BudgetFix(change=prefix, price=cost)]
        prefix += " and "
    fixes = [fix for changes in _changes(definition, setup) if (fix := _first_fit(changes, budget))]
    fixes = [replace(fix, change=prefix + fix.change) for fix in fixes]
    return sorted(fixes, key=lambda fix: -fix.price.train_flops)[:3]


def fitting_micro_batch(definition: SweepDefinition, setup: PricingSetup, budget: Budget) -> int | None:
    """The largest power of 2 of sequences per forward pass that fits into memory; None if not needed or none fits."""
    memory = Budget(gigabytes=budget.gigabytes)
    if not memory.excess(price(definition, setup)):
        return None
    runs = expected_runs(definition)[0]
    size = setup.place.micro_batch or max(run.batch_tokens // run.seq_len for run in runs)
    size = 1 << (size.bit_length() - 1)
    while size:
        smaller = replace(setup, place=replace(setup.place, micro_batch=size))
        if not memory.excess(price(definition, smaller)):
            return size
        size //= 2
    return None


Changes = Iterator[tuple[str, SweepDefinition, PricingSetup]]


def _first_fit(changes: Changes, budget: Budget) -> BudgetFix | None:
    for change, definition, setup in changes:
        try:
            cost = price(definition, setup)
        except ValueError:  # the change makes the sweep invalid: no whole number of steps, no match
            continue
        if not budget.excess(cost):
            return BudgetFix(change=change, price=cost)
    return None


def _changes(definition: SweepDefinition, setup: PricingSetup) -> Iterator[Changes]:
    """Kinds of change, each from the smallest change to the largest."""
    workers = takewhile(lambda n: n <= MAX_WORKERS, (setup.workers * 2**k for k in count(1)))
    yield ((f"{n} workers, each with its own device", definition, replace(setup, workers=n)) for n in workers)
    fewer_seeds = (definition.seeds[:n] for n in range(len(definition.seeds) - 1, 0, -1))
    yield ((f"seeds: {seeds}", _changed(definition, seeds=seeds), setup) for seeds in fewer_seeds)
    if definition.n_trials:
        numbers = [max(1, int(share * definition.n_trials)) for share in SHARES]
        yield ((f"n_trials: {n}", _changed(definition, n_trials=n), setup) for n in numbers)
    if "train_tokens" not in definition.varied:
        yield _fewer_tokens(definition, setup)
    for name, axis in definition.space.items():
        if not isinstance(axis, Interval) and len(axis) > 1:
            yield _without_values(definition, setup, name)


def _fewer_tokens(definition: SweepDefinition, setup: PricingSetup) -> Changes:
    runs = expected_runs(definition)[0]
    tokens, batch = runs[0].train_tokens, max(run.batch_tokens for run in runs)
    for share in SHARES:
        if fewer := int(share * tokens) // batch * batch:
            yield f"--set train_tokens={fewer}", definition.with_changes({"train_tokens": fewer}), setup


def _without_values(definition: SweepDefinition, setup: PricingSetup, name: str) -> Changes:
    """An axis without its most expensive value, without its two most expensive ones, ..."""
    axis, space = definition.space[name], definition.model_dump(mode="json")["space"]
    assert not isinstance(axis, Interval)

    def train_flops(value: Value) -> float:
        try:
            return price(_changed(definition, space={**space, name: [value]}), setup).train_flops
        except ValueError:  # this value alone leaves no cell
            return 0.0

    flops = {repr(value): train_flops(value) for value in axis}
    values = list(axis)
    while len(values) > 1:
        values.remove(max(values, key=lambda value: flops[repr(value)]))
        yield f"{name}: {values}", _changed(definition, space={**space, name: list(values)}), setup


def _changed(definition: SweepDefinition, **changes: object) -> SweepDefinition:
    values = definition.model_dump(mode="json", exclude_unset=True)
    return build(SweepDefinition, {**values, **changes}, "a smaller sweep")
