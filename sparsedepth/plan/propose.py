"""Distributions for Optuna's samplers, and the cells of the samplers that use no results.

Random search and quasi-Monte Carlo use no results, so their cells are drawn before anything runs, from the definition's
name and axes: the same for any number of workers, and a larger n_trials only appends."""

import json
import math
import random
import warnings
from collections.abc import Iterable, Set
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from sparsedepth.config.space import Cell, Interval, cell_digest, grid_points
from sparsedepth.config.sweep import WIDTH, SweepDefinition
from sparsedepth.files import digest
from sparsedepth.quantities.quantity import Named
from sparsedepth.store.tuning_roles import extended

LARGEST_SIZE = 2**53
"""Bound for Optuna's records of a size that is solved for."""

MAX_POINTS = 10_000
"""A space with at most this many points is searched completely for an untried point."""


def axis_distributions(definition: SweepDefinition) -> dict[str, BaseDistribution]:
    return {
        name: _interval(axis) if isinstance(axis, Interval) else CategoricalDistribution([plain(v) for v in axis])
        for name, axis in definition.axes.items()
    }


def distributions(definition: SweepDefinition) -> dict[str, BaseDistribution]:
    """The distribution of each field that a trial has: of a sampler its axes, and of a grid each field that a cell
    sets. There numbers become ranges, since an extended definition may add values and Optuna cannot change a
    parameter's choices."""
    if definition.adaptive:
        return axis_distributions(definition)
    axes = {name: axis for part in (*definition.zip, definition.space) for name, axis in part.items()}
    values: dict[str, list[Any]] = {n: axis.bounds if isinstance(axis, Interval) else axis for n, axis in axes.items()}
    for cell in (*definition.variants_and_cells, definition.tune_at):
        for name, value in cell.items():
            values[name] = [*values.get(name, []), value]
    for name, grid in definition.tune.items():
        lower = higher = list(grid)
        for _ in range(definition.tune_extensions):
            lower = extended(lower, lower[0])
            higher = extended(higher, higher[-1])
        values[name] = sorted({*lower, *higher})
    found = {name: _choices(field_values) for name, field_values in values.items()}
    solved = {definition.free, "d_expert"} - {*values} if definition.free else set()
    solved |= {*WIDTH} - {*values} if definition.same_params_blocks else set()
    for name in (*solved, *["train_tokens"] * bool(definition.branch_at)):
        found[name] = IntDistribution(1, LARGEST_SIZE)
    return found


def _choices(values: list[Any]) -> BaseDistribution:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return CategoricalDistribution(list(dict.fromkeys(plain(value) for value in values)))
    kind = IntDistribution if all(isinstance(value, int) for value in numbers) else FloatDistribution
    return kind(min(numbers), max(numbers))


def _interval(axis: Interval) -> BaseDistribution:
    if axis.whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def plain(value: Any) -> Any:
    """A value as Optuna takes it: a list (of thresholds, say) as JSON."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def suggest(trial: optuna.Trial, name: str, axis: BaseDistribution) -> Any:
    if isinstance(axis, FloatDistribution):
        return trial.suggest_float(name, axis.low, axis.high, log=axis.log)
    if isinstance(axis, IntDistribution):
        return trial.suggest_int(name, axis.low, axis.high, log=axis.log)
    assert isinstance(axis, CategoricalDistribution)
    return trial.suggest_categorical(name, axis.choices)


def proposals(definition: SweepDefinition) -> list[Cell]:
    """The cells of random or qmc in order, without repeats and excluded cells: n_trials at most."""
    assert definition.n_trials is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    axes = axis_distributions(definition)
    seed = int(digest(definition.name)[:8], 16)
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        sampler = optuna.samplers.RandomSampler(seed=seed)
        if definition.sampler == "qmc":
            sampler = optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
        study = optuna.create_study(sampler=sampler)
    cells = {}
    for _ in range(definition.n_trials):
        trial = study.ask(axes)
        study.tell(trial, 0.0)
        cell = definition.cell(trial.params)
        if not definition.is_excluded(cell):
            cells.setdefault(cell_digest(cell), cell)
    return list(cells.values())


def untried(definition: SweepDefinition, tried: Set[str], seed: Any) -> Named | None:
    """A random point whose `cell_digest` is not in `tried`; None if there is none, or 1,000 draws found none."""
    axes = axis_distributions(definition)
    rng = random.Random(digest(seed))
    choices = {name: _values(axis) for name, axis in axes.items()}
    points: Iterable[Named]
    if all(choices.values()) and math.prod(map(len, choices.values())) <= MAX_POINTS:
        all_points = list(grid_points(choices))
        points = rng.sample(all_points, len(all_points))
    else:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=rng.randrange(2**32)))
        points = (study.ask(axes).params for _ in range(1000))
    return next((point for point in points if cell_digest(definition.cell(point)) not in tried), None)


def _values(axis: BaseDistribution) -> list[Any]:
    """All values of an axis; empty for a continuous axis, or one with too many."""
    if isinstance(axis, CategoricalDistribution):
        return list(axis.choices)
    if isinstance(axis, IntDistribution) and axis.high - axis.low < MAX_POINTS:
        return list(range(axis.low, axis.high + 1))
    return []
